"""Stores and indexes that say what sweeps list, so that tests can count it or come in between."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from pysync.store import KeyShape, ListEntry
from pysync.store.memory import MemoryStore
from pysync.store.protocol import TimeIndex


class Listing:
    """The keys that were listed, in turn. `on_listed` is awaited before an entry is yielded."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.on_listed: Callable[[ListEntry], Awaitable[None]] | None = None

    async def watch(self, entries: AsyncIterator[ListEntry]) -> AsyncIterator[ListEntry]:
        async for entry in entries:
            self.keys.append(entry.key)
            if self.on_listed is not None:
                await self.on_listed(entry)
            yield entry


class WatchedMemoryStore(MemoryStore):
    """A store in memory whose walks are watched."""

    def __init__(self, listing: Listing, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms)
        self._listing = listing

    async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""
        async for entry in self._listing.watch(super().walk(prefix, after)):
            yield entry


class WatchedIndex:
    """A time index that is watched."""

    def __init__(self, listing: Listing, index: TimeIndex) -> None:
        self._listing = listing
        self._index = index

    async def prepare(self, shapes: Collection[KeyShape]) -> None:
        """See `TimeIndex.prepare`."""
        await self._index.prepare(shapes)

    def written_before(self, shape: KeyShape, before_ms: int, after_ms: int = 0) -> AsyncIterator[ListEntry]:
        """See `TimeIndex.written_before`."""
        return self._listing.watch(self._index.written_before(shape, before_ms, after_ms))
