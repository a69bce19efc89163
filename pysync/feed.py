"""The feed of latest changes: where each object stands now, in the order of the last changes.

The change log has one entry for each write, and forgets. The feed has one entry for each object, however
often it was written, so that it never has to forget one (docs/explanation/change-log.md#the-feed).
"""

from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple, Protocol


class ObjectVersion(NamedTuple):
    """The hash (hex) and the time of a stored version."""

    hash: str
    timestamp_ms: int


class LatestChange(NamedTuple):
    """The last change of the object at `key`, or its removal. `id` is its position in the feed. `hash` (hex)
    and `timestamp_ms` are those of the version; both are None if the store would have to read the object. A
    removal has the hash `""` and the time at which it was made."""

    id: str
    key: str
    hash: str | None
    timestamp_ms: int | None
    removed: bool = False


class ResetReason(Enum):
    """Why a reader cannot continue from its cursor, and has to compare everything."""

    FORGOTTEN = "forgotten"
    """A removal since then is forgotten, or the log does not reach back so far."""
    OTHER_EPOCH = "other epoch"
    """The cursor is not of this log: it is ahead of it, or from before the store was put back."""


class FeedPage(NamedTuple):
    """A page of the feed. The store has looked at `scanned` rows for it. `cursor` is the position after all
    of them: with `is_end`, it is the newest id of the change log."""

    changes: list[LatestChange]
    scanned: int
    is_end: bool
    cursor: str
    run: str = ""

    def cursor_after(self, change: LatestChange) -> str:
        """Return the position after a change of the page, for a reader that takes no more of it."""
        return change.id + self.run


class Feed(Protocol):
    """The latest changes of a store. Raises the errors of the store."""

    async def latest(self, folders: Collection[str], since: str, limit: int) -> FeedPage | ResetReason:
        """Return the latest changes after the cursor `since`, which `Cursor.parse` accepts, of the objects at
        or below these keys, oldest first. `""` stands for all keys, and for the beginning of the feed. A page
        has at most `limit` changes, at least 1.

        An object that changes while pages are read moves to its new place: a reader that goes on to the end
        has been given the newest version of each, perhaps after an earlier one. The server's own objects
        are not in the feed, nor is what was written without a change of its own since the object's last one.
        """

    async def versions(self, keys: Collection[str]) -> dict[str, ObjectVersion]:
        """Return the versions of those objects at these keys that are known without reading them."""

    async def erase(self, selects: Callable[[str], bool]) -> None:
        """Forget the removals at the keys that this function selects, so that nothing names them. It may be
        called in another thread. A reader that has not received one does not get a reset from here."""
