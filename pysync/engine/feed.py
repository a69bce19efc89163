"""The feed of latest changes for stores that have none of their own: what a change log still has of it, and
the feed of a service whose store and coordinator are in its memory.

See docs/explanation/change-log.md#the-feed.
"""

from collections.abc import Callable, Collection, Iterable

from pysync.changelog import Change, ChangeLog
from pysync.config.key_templates import RESERVED
from pysync.coordinator import Coordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef, parse_change
from pysync.feed import Feed, FeedPage, LatestChange, ObjectVersion, ResetReason
from pysync.store import Store

KeyOf = Callable[[DocumentRef], str]
"""Returns the key of a document in the store, `""` if nothing says it."""


def feed_of(store: Store, coordinator: Coordinator, key_of: KeyOf) -> Feed:
    """Return the feed that suits the store."""
    if store.transactional is not None:
        return store.transactional.feed
    if isinstance(coordinator, MemoryCoordinator) and not store.is_remote:
        return MemoryFeed(coordinator, key_of)
    return LogFeed(coordinator, key_of)


class LogFeed:
    """A `Feed` that reaches as far back as a change log. A document that changed several times is on several
    pages, and its hash is that of the last change on a page."""

    def __init__(self, log: ChangeLog, key_of: KeyOf) -> None:
        self._log = log
        self._key_of = key_of

    async def latest(self, folders: Collection[str], since: str, limit: int) -> FeedPage | ResetReason:
        """See `Feed.latest`."""
        if not since:
            return ResetReason.FORGOTTEN
        found = await self._log.read(since, limit)
        if found is None:
            return ResetReason.OTHER_EPOCH
        cursor = found[-1][0] if found else since
        return FeedPage(_latest(found, folders, self._key_of), len(found), len(found) < limit, cursor)

    async def versions(self, keys: Collection[str]) -> dict[str, ObjectVersion]:
        """See `Feed.versions`: none is known."""
        return {}

    async def erase(self, selects: Callable[[str], bool]) -> None:
        """See `Feed.erase`: nothing is kept."""


class MemoryFeed(LogFeed):
    """A `Feed` of a store that has existed for as long as its coordinator, in the memory of one process."""

    def __init__(self, coordinator: MemoryCoordinator, key_of: KeyOf) -> None:
        super().__init__(coordinator, key_of)
        coordinator.has_feed = True
        self._coordinator = coordinator

    async def latest(self, folders: Collection[str], since: str, limit: int) -> FeedPage | ResetReason:
        """See `Feed.latest`."""
        found = self._coordinator.latest(since, limit)
        if isinstance(found, ResetReason):
            return found
        changes, is_end, cursor, run = found
        return FeedPage(_latest(changes, folders, self._key_of), len(changes), is_end, cursor, run)

    async def erase(self, selects: Callable[[str], bool]) -> None:
        """See `Feed.erase`."""
        self._coordinator.forget_latest(lambda change: selects(self._key_of(parse_change(change).ref)))


def _latest(
    changes: Iterable[tuple[str, Change]], folders: Collection[str], key_of: KeyOf
) -> list[LatestChange]:
    """Return the last of the changes of each key at or below these, in their order."""
    below = tuple(folder and f"{folder}/" for folder in folders)
    found: dict[str, LatestChange] = {}
    for id_, change in changes:
        ref, hash_, timestamp_ms, removed, _ = parse_change(change)
        key = key_of(ref)
        if f"{key}/".startswith(below) and key.partition("/")[0] != RESERVED:
            found.pop(key, None)
            found[key] = LatestChange(id_, key, "" if removed else hash_, timestamp_ms, removed)
    return list(found.values())
