"""The plugin that stores pushed events: each batch is claimed if it may be repeated, encoded as Parquet and
stored."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import orjson

from pysync import _core
from pysync.clock import HybridTimestamp
from pysync.concurrency import CORE_IN_THREAD_ABOVE, lower_priority
from pysync.config import Config, EventsConfig
from pysync.config.key_templates import MAX_KEY_BYTES, KeyTemplate
from pysync.config.plugin_validation import events_errors, path_errors
from pysync.engine.changes import DocumentRef
from pysync.engine.idempotency import IdempotentRequest, result_of
from pysync.errors import (
    InvalidPathParameter,
    StoreUnavailable,
    Unavailable,
)
from pysync.extras import require
from pysync.plugins import (
    HOOK_TIMEOUT_S,
    FileBackedCollection,
    PluginContext,
    PluginPush,
    PluginRequest,
    PushResponse,
)
from pysync.plugins.events.batch_ids import (
    BATCH_ID,
    SUFFIX,
    BatchSequencer,
    CommitTimeSequencer,
    PendingBatch,
    RandomTokens,
    ReservingSequencer,
    received_at,
)
from pysync.plugins.events.compaction import Compaction, compact_periodically
from pysync.store import CarriedOut, Store

MAX_QUEUED_BYTES: Final = 33_554_432
"""Bytes of JSON that may wait for the thread, about 0.1 s of work. A single batch may be larger."""


class Encoder:
    """Encodes short batches at once, and long ones one after another in a thread."""

    def __init__(
        self, max_waiting_bytes: int = MAX_QUEUED_BYTES, in_thread_above: int = CORE_IN_THREAD_ABOVE
    ) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._in_thread_above = in_thread_above
        self._waiting_bytes = 0
        self._thread = ThreadPoolExecutor(1, "event-encoder", lower_priority)

    async def encode(self, data: bytes, received_at: str) -> bytes:
        """Encode a batch as `_core.encode_events`. Raises its errors, and Unavailable if too much waits."""
        if len(data) <= self._in_thread_above:
            return _core.encode_events(data, received_at)
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Unavailable
        self._waiting_bytes += len(data)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _core.encode_events, data, received_at)
        finally:
            self._waiting_bytes -= len(data)

    async def close(self) -> None:
        """Stop after the waiting batches."""
        await asyncio.to_thread(self._thread.shutdown)


INGEST_TIMEOUT_S: Final = 25.0
"""Time limit of a push. What it stores exists once `SETTLED_MS` have passed, or never will."""


@dataclass(frozen=True, slots=True)
class EventIngestor:
    """Stores the batches whose files are at `storage_path`."""

    services: PluginContext
    sequencer: BatchSequencer
    encoder: Encoder
    storage_path: str
    tokens: RandomTokens

    async def ingest(self, push: PluginPush) -> PushResponse:
        """Store the events of a push, or return the stored batch of a repeated one. Raises InvalidEvents,
        InvalidPathParameter if the batch could not be pulled, and as `CommitTimeSequencer.store`."""
        try:
            async with asyncio.timeout(INGEST_TIMEOUT_S):
                return await self._ingest(push)
        except TimeoutError:
            raise StoreUnavailable from None

    async def _ingest(self, push: PluginPush) -> PushResponse:
        batch = self._batch(push)
        _check_keys(push, batch)
        body = await self.encoder.encode(push.data, received_at(batch.received_ms))
        request = None if push.request_key is None else IdempotentRequest(push.request_key, push.hash)
        try:
            written, id_ = await self.sequencer.store(batch, body, request)
        except CarriedOut as earlier:
            written, id_ = result_of(earlier.outcome), orjson.loads(earlier.outcome)[2]
        return PushResponse(written, {BATCH_ID: id_}, batch.params(id_), announced=True)

    def _batch(self, push: PluginPush) -> PendingBatch:
        request = push.request
        ref = DocumentRef(request.collection, request.params, request.namespace)
        folder, _, last = self.storage_path.rpartition("/")
        filled = KeyTemplate.of(folder).fill(request.params)
        return PendingBatch(
            filled, ref, request.caller.identity, self.tokens.next(), self.services.now_ms(), last[1:-1]
        )


def _check_keys(push: PluginPush, batch: PendingBatch) -> None:
    """Raise InvalidPathParameter for a batch whose key may be too long for a store, or that could not be
    pulled: the assigned id is longer than the one that the client wrote there."""
    request = push.request
    id_ = batch.id(HybridTimestamp(batch.received_ms, 0))
    pulled_at = len(request.key) - len(request.params[batch.id_name]) + len(id_)
    if max(pulled_at, len(batch.key(id_))) > MAX_KEY_BYTES:
        raise InvalidPathParameter


MAX_IN_FLIGHT: Final = 1_024
"""Maximum number of batches being stored at once; more are rejected."""


class Events:
    """The plugin that stores each batch of events pushed to `collection` as one Parquet file
    (docs/reference/protocol.md#events). The id of the batch is the last parameter of `storage_path`.

    A given `store` must be that of the service. Every `compact_every_ms`, unless that is None, files older
    than `compact_older_than_ms` are merged into files of about `compact_to_bytes`. A push whose batch is not
    stored after `timeout_s` is answered 503. Raises ValueError for an invalid `storage_path`; the service
    does not start if the collection does not fit.
    """

    def __init__(
        self,
        collection: str,
        storage_path: str,
        *,
        store: Store | None = None,
        compact_every_ms: int | None = None,
        compact_older_than_ms: int = 600_000,
        compact_to_bytes: int = 134_217_728,
        random_bytes: Callable[[int], bytes] = os.urandom,
        timeout_s: float = HOOK_TIMEOUT_S - 0.5,
    ) -> None:
        self.name: Final = f"events {collection}"
        self.collection = collection
        self.storage_path = storage_path
        self.stored_files: Mapping[str, FileBackedCollection] = {
            collection: FileBackedCollection(storage_path, SUFFIX, self._visible_before)
        }
        self._compact_every_ms = compact_every_ms
        self._compact_older_than_ms = compact_older_than_ms
        self._compact_to_bytes = compact_to_bytes
        self._store = store
        self._random_bytes = random_bytes
        self._timeout_s = timeout_s
        self._in_flight: set[asyncio.Task[PushResponse]] = set()
        self._sequencer: BatchSequencer | None = None
        self._ingestor: EventIngestor | None = None
        for fault in path_errors(storage_path):
            raise ValueError(f"{self.name}: storagePath {fault}")

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        """Accept pushes while the service runs. Raises ValueError if the plugin does not fit the service."""
        if self._compact_every_ms is not None:
            require(f"{self.name}: compaction", "pyarrow")
        for fault in self._errors(services):
            raise ValueError(fault)
        transactional = services.store.transactional
        encoder = Encoder()
        try:
            self._sequencer = (
                ReservingSequencer(services) if transactional is None else CommitTimeSequencer(transactional)
            )
            tokens = RandomTokens(self._random_bytes)
            self._ingestor = EventIngestor(services, self._sequencer, encoder, self.storage_path, tokens)
            async with self._compacting(services):
                yield
        finally:
            if self._in_flight:
                await asyncio.wait(self._in_flight)
            await encoder.close()

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        """Store the batch; return None for other collections. Raises InvalidEvents and Unavailable.

        Work that exceeds the time limit continues, so that a repeated push learns its outcome.
        """
        if push.request.collection != self.collection:
            return None
        assert self._ingestor is not None
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise Unavailable
        task = asyncio.create_task(self._ingestor.ingest(push))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await asyncio.shield(task)
        except (TimeoutError, asyncio.CancelledError):
            if not limit.expired():
                raise
            # Cancelled as well: on a busy event loop the limit of the hook may pass in the same step.
            raise Unavailable from None

    async def before_delete(self, request: PluginRequest) -> None:
        """Allow deletes: a batch is a file, which the store removes."""

    def compaction(
        self, config: Config, store: Store, now_ms: Callable[[], int], older_than_ms: int | None = None
    ) -> Compaction:
        """Return the compaction of this plugin's files; None for `older_than_ms` is that of the plugin."""
        collections = config.collections_by_name().get(self.collection, ())
        ttls = [each.ttl_ms for each in collections if each.ttl_ms is not None]
        least_ms = self._compact_older_than_ms if older_than_ms is None else older_than_ms
        return Compaction(
            store, self.storage_path, least_ms, self._compact_to_bytes, now_ms, min(ttls, default=None)
        )

    @asynccontextmanager
    async def _compacting(self, services: PluginContext) -> AsyncIterator[None]:
        """Merge small files periodically, in one process of the service."""
        if self._compact_every_ms is None or not services.sweeps:
            yield
            return

        def make() -> Compaction:
            return self.compaction(services.config, services.store, services.now_ms)

        digest = hashlib.sha256(self.name.encode()).hexdigest()[:32]
        acquire_lease = partial(services.coordinator.acquire_lease, f"compaction-{digest}")
        task = asyncio.create_task(compact_periodically(make, self._compact_every_ms, acquire_lease))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _visible_before(self) -> str | None:
        return None if self._sequencer is None else self._sequencer.low_watermark()

    def _errors(self, services: PluginContext) -> Iterator[str]:
        """Yield the reasons why the plugin cannot work for this service."""
        if self._store is not None and self._store is not services.store:
            yield "its store is not that of the service"
        section = EventsConfig(collection=self.collection, storage_path=self.storage_path)
        for member, fault in events_errors(section, services.config.collections_by_name()):
            yield f"{member}: {fault}"


def create_events_plugin(collection: str, storage_path: str, *, store: Store | None = None) -> Events:
    """Return the plugin, under the name of this function in the specification."""
    return Events(collection, storage_path, store=store)
