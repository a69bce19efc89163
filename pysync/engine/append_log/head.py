"""The heads of logs, read from the store or cached, the settings of their collections, and logs in the format
of Starfish, until their first append converts them: their chunks are at `<key>__seg/<ts>`."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import orjson

from pysync._core import LogHead
from pysync.cache import CACHED_BYTES, BoundedCache
from pysync.concurrency import CORE_IN_THREAD_ABOVE, run_heavy
from pysync.config import Collection
from pysync.corruption import CorruptionReporter
from pysync.errors import CheckpointTooOld, DocumentCorrupt, StoreUnavailable
from pysync.store import PAGE, NotModified, ReadableStore, Store


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The members of `appendOnly` with their defaults, and `ttlMs` and `forceFullFetch` of the collection."""

    field: str = "items"
    persist: bool = True
    max_items: int | None = None
    chunk_size: int | None = None
    require_author_signature: bool = True
    allow_full: bool = True
    max_pull_limit: int | None = None
    max_checkpoint_age_ms: int | None = None
    keep_elements: int | None = None
    keep_ms: int | None = None
    ttl_ms: int | None = None
    force_full: bool = False

    @classmethod
    def from_collection(cls, collection: Collection) -> "LogSettings":
        """Return the settings of `collection`, which must be append-only."""
        options = collection.append_only
        assert options is not None, "the collection is not append-only"
        return cls(
            field="items" if options.field is None else options.field,
            persist=options.persist is not False,
            max_items=options.max_items,
            chunk_size=options.chunk_size,
            require_author_signature=options.require_author_signature is not False,
            allow_full=options.allow_full is not False,
            max_pull_limit=options.max_pull_limit,
            max_checkpoint_age_ms=options.max_checkpoint_age_ms,
            keep_elements=options.keep_elements,
            keep_ms=options.keep_ms,
            ttl_ms=collection.ttl_ms,
            force_full=collection.force_full_fetch,
        )

    def is_expired(self, head: LogHead, now_ms: int) -> bool:
        """Return True if the log is older than `ttl_ms` and therefore reads as missing."""
        return self.ttl_ms is not None and head.written_ms + self.ttl_ms < now_ms

    @property
    def drops_elements(self) -> bool:
        """True if old elements leave the log."""
        return self.keep_elements is not None or self.keep_ms is not None

    def check_checkpoint_age(self, since: int | None, now_ms: int) -> None:
        """Raise CheckpointTooOld if `since` lies further back than the collection allows."""
        age_ms = self.max_checkpoint_age_ms
        if since is not None and age_ms is not None and since < now_ms - age_ms:
            raise CheckpointTooOld


_MAX_HEAD_BYTES: Final = CACHED_BYTES // 16
_OVERHEAD_BYTES: Final = 1024
FRESH_MS: Final = 2_000
"""Age up to which a cached head is fresh. Few enough elements are appended in that time to be searched."""
_CHUNK_DIGITS: Final = 16


class CachedHead(NamedTuple):
    """A head as it is stored under `etag`. `fetched_at_ms` is the time at which this node last read or wrote
    it."""

    head: LogHead
    etag: str
    fetched_at_ms: int


class HeadCache:
    """The heads of a store. The most recently read or written ones are cached, so that an append need not
    read."""

    def __init__(self, store: Store, now_ms: Callable[[], int], corruption: CorruptionReporter) -> None:
        self.store = store
        self._corruption = corruption
        self._now_ms = now_ms
        self._heads = BoundedCache[tuple[str, str], CachedHead](CACHED_BYTES, _size)

    async def read(self, key: str, field: str) -> CachedHead | None:
        """Return the current head at `key`, None if nothing is stored. Raises DocumentCorrupt and
        StoreUnavailable."""
        cached = self._heads.get((key, field))
        found = await self.store.get(key, None if cached is None else cached.etag)
        if isinstance(found, NotModified):
            return cached
        if found is None:
            self.invalidate(key, field)
            return None
        with self._corruption.reporting("log", key):
            if len(found.body) > CORE_IN_THREAD_ABOVE:  # a head of Starfish's may hold all elements
                head = await run_heavy(LogHead.read, found.body, field)
            else:
                head = LogHead.read(found.body, field)
        return self.put(key, field, head, found.etag)

    async def explain_missing(self, key: str, field: str, head: LogHead, end: int) -> LogHead:
        """Return the current head of the log if an object with the elements up to position `end` is missing
        because they have left the log since `head` was read at `key`. Raises DocumentCorrupt if it should be
        there, and StoreUnavailable if the log has expired meanwhile."""
        now = await self.read(key, field)
        if now is None or now.head.id != head.id:
            raise StoreUnavailable
        if end > now.head.start:
            raise DocumentCorrupt
        return now.head

    def cached(self, key: str, field: str) -> CachedHead | None:
        """Return the cached head at `key`. Another node may have written the log since."""
        return self._heads.get((key, field))

    async def get_fresh(self, key: str, field: str) -> CachedHead | None:
        """Return the cached head at `key` if it is fresh (`FRESH_MS`), or else the result of `read`."""
        cached = self.cached(key, field)
        if cached is not None and self._now_ms() - cached.fetched_at_ms < FRESH_MS:
            return cached
        return await self.read(key, field)

    def put(self, key: str, field: str, head: LogHead, etag: str) -> CachedHead:
        """Cache the head at `key`, which is now stored under `etag`, unless it is too large."""
        cached = CachedHead(head, etag, self._now_ms())
        if head.size > _MAX_HEAD_BYTES or head.is_chunked:
            self.invalidate(key, field)
            return cached
        self._heads.put((key, field), cached)
        return cached

    def invalidate(self, key: str, field: str) -> None:
        """Remove the head at `key` from the cache."""
        self._heads.evict((key, field))


def _size(cached: CachedHead) -> int:
    return cached.head.size + _OVERHEAD_BYTES


def convert_head(key: str, field: str, head: LogHead, etag: str) -> LogHead:
    """Return the log that is stored under `etag`, with an id that is the same on every node and for every
    attempt."""
    return head.adopted(hashlib.sha256(f"{field} {key} {etag}".encode()).hexdigest()[:32])


async def load_chunks(
    store: Store, key: str, head: LogHead, since: int | None = None, newest: int | None = None
) -> LogHead:
    """Return the log whose elements Starfish stores in chunks, with as many chunks as are needed for the
    elements above `since` and, of those, the `newest`. The key of a chunk has the ts of its first element.

    Raises DocumentCorrupt, also if all chunks together have fewer elements than the head states.
    """
    keys = await chunk_keys(store, key)
    total = len(keys)
    if since is not None:
        later = next((at for at, chunk in enumerate(keys) if int(chunk[-_CHUNK_DIGITS:]) > since), total)
        keys = keys[max(later - 1, 0) :]
    chunks: list[bytes] = []
    count = 0
    for chunk in reversed(keys):
        if chunks and newest is not None and count >= newest:
            break
        found = await store.get(chunk)
        if found is None or isinstance(found, NotModified):
            raise DocumentCorrupt
        chunks.insert(0, found.body)
        if newest is not None:
            count += _element_count(found.body)
    return head.gather(chunks, whole=len(chunks) == total)


def _element_count(chunk: bytes) -> int:
    """Return the number of elements of the chunk. Raises DocumentCorrupt."""
    try:
        return len(orjson.loads(chunk))
    except (ValueError, TypeError):
        raise DocumentCorrupt from None


async def chunk_keys(store: ReadableStore, key: str) -> list[str]:
    """Return the keys of the chunks that Starfish stores for the log at `key`, in the order of the log."""
    folder = f"{key}__seg"
    names: list[str] = []
    page: list[str] | None = None
    while page is None or len(page) == PAGE:
        page = await store.list(folder, names[-1] if names else None, PAGE)
        names += page
    return [f"{folder}/{name}" for name in names if len(name) == _CHUNK_DIGITS and name.isdecimal()]
