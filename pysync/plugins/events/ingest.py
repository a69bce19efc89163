"""Pushes of events: each batch is claimed if it may be repeated, encoded as Parquet in a thread, and
stored."""

import asyncio
import hashlib
import os
import sys
import threading
from queue import SimpleQueue
from typing import Final, NamedTuple, Self

import orjson

from pysync.clock import HybridTimestamp
from pysync.config.key_templates import MAX_KEY_BYTES, KeyTemplate
from pysync.coordinator import IDEMPOTENCY_TTL_MS, release_claim
from pysync.engine.outbox import DocumentRef
from pysync.errors import (
    IdempotencyKeyReused,
    InvalidEvents,
    InvalidPathParameter,
    StoreUnavailable,
    Unavailable,
)
from pysync.model import WriteResult
from pysync.plugins import PluginContext, PluginPush, PushResponse
from pysync.plugins.events.batch_ids import (
    BATCH_ID,
    LEEWAY_MS,
    BatchSequencer,
    PendingBatch,
    RandomTokens,
    received_at,
)

MAX_QUEUED_BYTES: Final = 33_554_432
"""Bytes of JSON that may wait for the thread, about one second of work. A single batch may be larger."""


NICENESS: Final = 5
"""Niceness of the thread, added to that of the process, so that the event loop goes first on a busy core.
Otherwise the loop waits for up to 20 ms (32 clients, one core)."""


class _Job(NamedTuple):
    future: asyncio.Future[bytes]
    data: bytes
    received_at: str
    repeatable_until_ms: int | None


class Encoder:
    """Encodes one file after another in a thread."""

    def __init__(self, max_waiting_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="event-encoder", daemon=True)

    async def open(self) -> None:
        """Start the thread. Imports are done first, so that no push waits for them. Raises ImportError."""
        self._thread.start()
        await self._ready

    async def encode(self, data: bytes, received_at: str, repeatable_until_ms: int | None) -> bytes:
        """Encode a batch as `pysync.parquet.event_files.encode`. Raises its errors, and Unavailable if too
        much waits."""
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Unavailable
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting_bytes += len(data)
        self._jobs.put(_Job(future, data, received_at, repeatable_until_ms))
        return await future

    async def close(self) -> None:
        """Stop after the waiting batches."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if sys.platform == "linux":
            os.nice(NICENESS)  # of this thread alone, there
        try:
            from pysync.parquet.event_files import encode
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._ready.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._ready.set_result, None)
        while (job := self._jobs.get()) is not None:
            made: bytes | BaseException
            try:
                made = b"" if job.future.cancelled() else encode(*job[1:])
            except BaseException as error:  # a panic of the core is no Exception
                made = error
            self._loop.call_soon_threadsafe(self._resolve, job, made)

    def _resolve(self, job: _Job, made: bytes | BaseException) -> None:
        self._waiting_bytes -= len(job.data)
        if job.future.done():
            return  # nobody waits for it any more
        if isinstance(made, BaseException):
            job.future.set_exception(made)
        else:
            job.future.set_result(made)


INGEST_TIMEOUT_S: Final = 25.0
"""Time limit of a push. What it stores exists once `INTENT_TIMEOUT_MS` have passed, or never will; a
repetition after that starts anew."""


class IdempotencyRecord(NamedTuple):
    """The record that the first attempt at a push leaves for all of them: the hash of the data, and the parts
    of the batch."""

    hash: str
    token: str
    received_ms: int
    tick: HybridTimestamp

    def encode(self) -> bytes:
        """Return the record as bytes."""
        return orjson.dumps([self.hash, self.token, self.received_ms, list(self.tick)])

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Return the record in `text`."""
        hash_, token, received_ms, tick = orjson.loads(text)
        return cls(hash_, token, received_ms, HybridTimestamp(*tick))


class EventIngestor:
    """Stores the batches of one template."""

    def __init__(
        self,
        services: PluginContext,
        sequencer: BatchSequencer,
        encoder: Encoder,
        storage_path: str,
        tokens: RandomTokens,
    ) -> None:
        self._now_ms = services.now_ms
        self._coordinator = services.coordinator
        self._sequencer = sequencer
        self._encoder = encoder
        folder, _, last = storage_path.rpartition("/")
        self._folder = KeyTemplate(folder)
        self._id_name = last[1:-1]
        self._tokens = tokens

    async def ingest(self, push: PluginPush) -> PushResponse:
        """Store the events of a push, or return the stored batch of a repeated one. Raises InvalidEvents,
        InvalidPathParameter if the batch could not be pulled, IdempotencyKeyReused and Unavailable."""
        try:
            async with asyncio.timeout(INGEST_TIMEOUT_S):
                return await self._ingest(push)
        except TimeoutError:
            raise StoreUnavailable from None

    async def _ingest(self, push: PluginPush) -> PushResponse:
        received_ms = self._now_ms()
        async with self._sequencer.reserve(received_ms) as tick:
            claim = own = IdempotencyRecord(push.hash, self._tokens.next(), received_ms, tick)
            _check_keys(push, self._batch(push, own))
            claimed = ""
            if push.request_key is not None:
                claimed, claim = await self._first_attempt(push, push.request_key, own)
            if claim.hash != own.hash:
                raise IdempotencyKeyReused
            once = push.request_key is not None
            batch = self._batch(push, claim)
            until_ms = batch.received_ms + IDEMPOTENCY_TTL_MS + LEEWAY_MS if once else None
            try:
                id_, sha256 = await self._sequencer.store(
                    batch,
                    lambda: self._encoder.encode(push.data, received_at(batch.received_ms), until_ms),
                    once=once,
                )
            except InvalidEvents:
                if once:  # whoever claimed it, nobody can have stored these events
                    await release_claim(self._coordinator, claimed, claim.encode())
                raise
        written = WriteResult(sha256, batch.received_ms)
        return PushResponse(written, {BATCH_ID: id_}, batch.params(id_), announced=True)

    async def _first_attempt(
        self, push: PluginPush, request_key: str, own: IdempotencyRecord
    ) -> tuple[str, IdempotencyRecord]:
        """Return the record of the first attempt at a push, `own` if this is the first, and its name."""
        name = hashlib.sha256(f"events {request_key}".encode()).hexdigest()
        attempt = 0
        while True:
            key = f"{name}{attempt}"
            first = IdempotencyRecord.decode(
                await self._coordinator.put_if_absent(key, own.encode(), IDEMPOTENCY_TTL_MS)
            )
            if not await self._sequencer.is_abandoned(self._batch(push, first), own.received_ms):
                return key, first
            attempt += 1

    def _batch(self, push: PluginPush, claim: IdempotencyRecord) -> PendingBatch:
        request = push.request
        subject = DocumentRef(request.collection, request.params, request.namespace, request.caller.identity)
        folder = self._folder.fill(request.params)
        return PendingBatch(folder, subject, claim.token, claim.received_ms, claim.tick, self._id_name)


def _check_keys(push: PluginPush, batch: PendingBatch) -> None:
    """Raise InvalidPathParameter for a batch whose key may be too long for a store, or that could not be
    pulled: the assigned id is longer than the one that the client wrote there."""
    request = push.request
    pulled_at = len(request.key) - len(request.params[batch.id_name]) + len(batch.id(batch.tick))
    if max(pulled_at, len(batch.key(batch.tick))) > MAX_KEY_BYTES:
        raise InvalidPathParameter
