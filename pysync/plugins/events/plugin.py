"""The plugin that stores the events pushed to a collection."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Final

from pysync.config import Config, EventsConfig
from pysync.config.plugin_validation import events_errors, path_errors
from pysync.errors import Unavailable
from pysync.extras import require
from pysync.plugins import HOOK_TIMEOUT_S, FileBackedCollection, PluginContext, PluginPush, PushResponse
from pysync.plugins.events.batch_ids import (
    SUFFIX,
    BatchSequencer,
    CommitTimeSequencer,
    RandomTokens,
    ReservingSequencer,
)
from pysync.plugins.events.compaction import Compaction, compact_periodically
from pysync.plugins.events.ingest import Encoder, EventIngestor
from pysync.store import Store

MAX_IN_FLIGHT: Final = 1_024
"""Maximum number of batches being stored at once; more are rejected."""


class Events:
    """Stores each batch of events that is pushed to `collection` as one Parquet file, at the key that
    `storage_path` gives with the id of the batch, and nothing else of it (docs/reference/protocol.md#events).

    It is a plugin: `create_app(..., plugins=[Events(...)])`. A `store` that is given must be the service's.
    Every `compact_every_ms`, unless that is None, files older than `compact_older_than_ms` are merged into
    such of about `compact_to_bytes`.

    A push is answered `503` where its batch is not stored after `timeout_s`, which is less than plugins are
    given.

    Raises ValueError for a `storage_path` that is no template or ends in no path parameter; the service
    does not start where the collection does not fit.
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
        """Take pushes while the service runs. Raises ValueError where it cannot."""
        require(self.name, "pyarrow")
        for fault in self._errors(services):
            raise ValueError(fault)
        places = ReservingSequencer if services.store.transactional is None else CommitTimeSequencer
        encoder = Encoder()
        try:
            await encoder.open()
            self._sequencer = places(services)
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
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Unavailable from None

    def compaction(
        self, config: Config, store: Store, now_ms: Callable[[], int], older_than_ms: int | None = None
    ) -> Compaction:
        """That of this plugin's files in its store; `older_than_ms` where it is not the plugin's own."""
        ttls = [
            each.ttl_ms
            for each in config.collections_by_name().get(self.collection, ())
            if each.ttl_ms is not None
        ]
        least_ms = self._compact_older_than_ms if older_than_ms is None else older_than_ms
        return Compaction(
            store, self.storage_path, least_ms, self._compact_to_bytes, now_ms, min(ttls, default=None)
        )

    @asynccontextmanager
    async def _compacting(self, services: PluginContext) -> AsyncIterator[None]:
        """Merge small files now and then, in one process of all that serve."""
        if self._compact_every_ms is None or not services.sweeps:
            yield
            return
        compaction = self.compaction(services.config, services.store, services.now_ms)
        digest = sha256(self.name.encode()).hexdigest()[:32]
        leads = partial(services.coordinator.acquire_lease, f"compaction-{digest}")
        task = asyncio.create_task(compact_periodically(compaction, self._compact_every_ms, leads))
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
    """`Events`, by the name that the specification gives its maker."""
    return Events(collection, storage_path, store=store)
