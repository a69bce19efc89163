"""What becomes of a push of events: it is claimed where it may be repeated, encoded, and stored.

The thread that makes Parquet files of batches.
"""

import asyncio
import hashlib
import os
import sys
import threading
from queue import SimpleQueue
from typing import Final, NamedTuple, Self

import orjson

from pysync.changelog import DocumentRef
from pysync.clock import HybridTimestamp
from pysync.config.key_templates import MAX_KEY_BYTES, KeyTemplate
from pysync.coordinator import IDEMPOTENCY_TTL_MS, release_claim
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
"""Batches that may wait for the thread, in bytes of JSON: a second's work. One batch may, however long."""


NICENESS: Final = 5
"""Of the thread, beyond that of the process: where a core is busy the event loop goes first. Otherwise it is
kept waiting, for 20 ms at times (32 clients, one core)."""


class _Job(NamedTuple):
    future: asyncio.Future[bytes]
    data: bytes
    received_at: str
    repeatable_until_ms: int | None


class Encoder:
    """Makes one file after another while the event loop goes on."""

    def __init__(self, max_waiting_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="event-encoder", daemon=True)

    async def open(self) -> None:
        """Begin. What is needed is imported first: no push has to wait for that. Raises ImportError."""
        self._thread.start()
        await self._ready

    async def encode(self, data: bytes, received_at: str, repeatable_until_ms: int | None) -> bytes:
        """`pysync.parquet.events.encode`. Raises as that does, and Unavailable where too much waits."""
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Unavailable
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting_bytes += len(data)
        self._jobs.put(_Job(future, data, received_at, repeatable_until_ms))
        return await future

    async def close(self) -> None:
        """End, after what waits."""
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
"""How long a push is gone on with: what it stores is there when `INTENT_TIMEOUT_MS` have passed, or never
will be. Who repeats it then begins anew."""


class IdempotencyRecord(NamedTuple):
    """What the first attempt at a push says for all of them: of which data, and what makes its batch."""

    hash: str
    token: str
    received_ms: int
    tick: HybridTimestamp

    def encode(self) -> bytes:
        return orjson.dumps([self.hash, self.token, self.received_ms, list(self.tick)])

    @classmethod
    def decode(cls, text: bytes) -> Self:
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
        """Store the events of a push, or find them stored where it is repeated. Raises InvalidEvents,
        InvalidPathParameter where nobody could pull them, IdempotencyKeyReused, Unavailable."""
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
        """The claim of the first attempt at a push, `own` where this is the first, and its name."""
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
    """Raise InvalidPathParameter for a batch whose file no store need take, or that nobody could pull: the
    id that is given is longer than the one that the client wrote there."""
    request = push.request
    pulled_at = len(request.key) - len(request.params[batch.id_name]) + len(batch.id(batch.tick))
    if max(pulled_at, len(batch.key(batch.tick))) > MAX_KEY_BYTES:
        raise InvalidPathParameter
