"""Heads of logs: from the store, or as this node knows them.

What a collection says of its logs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pysync._core import LogHead
from pysync.cache import BoundedCache
from pysync.config import Collection
from pysync.corruption import CorruptionReporter
from pysync.errors import CheckpointTooOld, DocumentCorrupt, PysyncError, StoreUnavailable
from pysync.store import NotModified, Store


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The members of `appendOnly`, their defaults filled in, and of its collection `ttlMs` and
    `forceFullFetch`."""

    field: str = "items"
    persist: bool = True
    max_items: int | None = None
    chunk_size: int | None = None
    require_author_signature: bool = True
    allow_full: bool = True
    max_pull_limit: int | None = None
    max_checkpoint_age_ms: int | None = None
    ttl_ms: int | None = None
    force_full: bool = False

    @classmethod
    def from_collection(cls, collection: Collection) -> "LogSettings":
        """The rules of `collection`, which is append-only."""
        said = collection.append_only
        assert said is not None, "only an append-only collection has them"
        return cls(
            field="items" if said.field is None else said.field,
            persist=said.persist is not False,
            max_items=said.max_items,
            chunk_size=said.chunk_size,
            require_author_signature=said.require_author_signature is not False,
            allow_full=said.allow_full is not False,
            max_pull_limit=said.max_pull_limit,
            max_checkpoint_age_ms=said.max_checkpoint_age_ms,
            ttl_ms=collection.ttl_ms,
            force_full=collection.force_full_fetch,
        )

    def is_expired(self, head: LogHead, now_ms: int) -> bool:
        """Whether the log reads as missing."""
        return self.ttl_ms is not None and head.written_ms + self.ttl_ms < now_ms

    def check_checkpoint_age(self, since: int | None, now_ms: int) -> None:
        """Raise CheckpointTooOld where `since` lies further back than the log allows."""
        age_ms = self.max_checkpoint_age_ms
        if since is not None and age_ms is not None and since < now_ms - age_ms:
            raise CheckpointTooOld


CACHE_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all heads that are kept, roughly."""
_MAX_HEAD_BYTES: Final = CACHE_BYTES // 16
_OVERHEAD_BYTES: Final = 1024
FRESH_MS: Final = 2_000
"""For how long a head passes for recent: little enough is appended meanwhile to be looked through."""
_IN_THREAD_ABOVE: Final = 1024 * 1024
"""Bytes of a head that is read beside the event loop: Starfish's may hold all elements."""


class CachedHead(NamedTuple):
    """A head as it is stored under `etag`. `fetched_at_ms`: when this node last knew that it is."""

    head: LogHead
    etag: str
    fetched_at_ms: int


class HeadCache:
    """The heads of a store. Those read or written last are kept, so that an append need not read."""

    def __init__(self, store: Store, now_ms: Callable[[], int], corruption: CorruptionReporter) -> None:
        self.store = store
        self._corruption = corruption
        self._now_ms = now_ms
        self._heads = BoundedCache[tuple[str, str], CachedHead](CACHE_BYTES, _size)

    async def read(self, key: str, field: str) -> CachedHead | None:
        """The head at `key` as it is now, None where nothing is stored. Raises DocumentCorrupt,
        StoreUnavailable."""
        known = self._heads.get((key, field))
        found = await self.store.get(key, None if known is None else known.etag)
        if isinstance(found, NotModified):
            return known
        if found is None:
            self.invalidate(key, field)
            return None
        with self._corruption.reporting("log", key):
            if len(found.body) > _IN_THREAD_ABOVE:
                head = await asyncio.to_thread(LogHead.read, found.body, field)
            else:
                head = LogHead.read(found.body, field)
        return self.put(key, field, head, found.etag)

    async def missing_object_error(self, key: str, field: str, head: LogHead) -> PysyncError:
        """Return the error for the loss of an object that `head`, which was read at `key`, names:
        DocumentCorrupt, or StoreUnavailable if the log has expired meanwhile."""
        now = await self.read(key, field)
        return DocumentCorrupt() if now is not None and now.head.id == head.id else StoreUnavailable()

    def cached(self, key: str, field: str) -> CachedHead | None:
        """The head at `key` as it was when this node last met it. Another node may have written since."""
        return self._heads.get((key, field))

    async def get_fresh(self, key: str, field: str) -> CachedHead | None:
        """The head at `key`, as this node knows it if it has just met it, else as `read`."""
        known = self.cached(key, field)
        if known is not None and self._now_ms() - known.fetched_at_ms < FRESH_MS:
            return known
        return await self.read(key, field)

    def put(self, key: str, field: str, head: LogHead, etag: str) -> CachedHead:
        """Know that this is the head at `key`, now under `etag`."""
        held = CachedHead(head, etag, self._now_ms())
        if head.size > _MAX_HEAD_BYTES or head.is_chunked:
            self.invalidate(key, field)
            return held
        self._heads.put((key, field), held)
        return held

    def invalidate(self, key: str, field: str) -> None:
        """Know nothing of `key`."""
        self._heads.evict((key, field))


def _size(cached: CachedHead) -> int:
    return cached.head.size + _OVERHEAD_BYTES
