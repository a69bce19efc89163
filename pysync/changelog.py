"""Changes, which notify subscribers of writes, and the interface of the logs that store them.

See docs/reference/protocol.md#delivery.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

import orjson

WAIT_S: Final = 1.0
"""Maximum seconds that `ChangeLog.wait_for_change` waits."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The changes that a log retains at least: the newest `count`, except those older than `age_ms`. It may
    retain more. A feed retains the removals that are not older than `removals_ms`."""

    count: int = 100_000
    age_ms: int = 86_400_000
    removals_ms: int = 7_776_000_000


_ERASED: Final = b'{"collection":"",'


class Change(NamedTuple):
    """One write or removal. `text` is the JSON object that subscribers receive, but for their own names of
    the document. `identity` (the writer, `""` if unknown)
    and `origin` (the collection that wrote it, `""` if unknown) are for the server's own use."""

    text: bytes
    identity: str = ""
    origin: str = ""

    def is_for_hash(self, hash_: str) -> bool:
        """Return True if the change is of the version with this hash."""
        return b'"hash":"%b"' % hash_.encode() in self.text

    @property
    def removed(self) -> bool:
        """True if the document was removed. `hash` is then that of its last version."""
        return b'"removed":true' in self.text  # no text inside a JSON string looks like this

    def erased(self, collections: Iterable[tuple[str | None, str]]) -> Self:
        """Return what stands in its place after an erasure. It names the `collections` that had the document,
        by namespace (None: the root) and name, and neither the document nor the writer."""
        timestamp_ms = orjson.loads(self.text)["timestamp"]
        members = {"collection": "", "params": {}, "hash": "", "timestamp": timestamp_ms}
        return self._replace(text=orjson.dumps(members | {"erased": list(collections)}), identity="")

    @property
    def is_erased(self) -> bool:
        """True if it stands in the place of a change that was erased. It concerns no document."""
        return self.text.startswith(_ERASED)

    @property
    def erased_from(self) -> set[tuple[str | None, str]]:
        """The collections whose readers miss this change, since it was erased."""
        erased = orjson.loads(self.text).get("erased", ()) if self.is_erased else ()
        return {(namespace, name) for namespace, name in erased}


_ID = "[0-9]{17}(?:-[0-9a-f]{8})?"  # ids of before there were epochs have none
_REDIS_ID = r"[0-9]{15}\.[0-9]{15}-[0-9]{10}"
_match_cursor: Final = re.compile(f"({_ID}|{_REDIS_ID})|([0-9]{{17}})~({_ID})~({_ID})").fullmatch


def change_id(number: int, epoch: str) -> str:
    """Return the id of a change: its number in the log, and the epoch in which it was made."""
    return f"{number:017d}-{epoch}" if epoch else f"{number:017d}"


def split_id(id_: str) -> tuple[int, str]:
    """Return the number and the epoch of an id, or of a position, which has no epoch. The number is -1 for an
    id of Redis, so that it is of no other log."""
    number, _, epoch = id_.partition("-")
    return (int(number), epoch) if number.isdigit() else (-1, "")


class Cursor(NamedTuple):
    """The position of a reader: an id of the change log, or a place within a run of pages of the
    feed (docs/explanation/change-log.md#cursors).

    The reader has everything up to `position`. Everything that it holds was there at `first` or later, so it
    needs the removals since then. `latest` was the newest id of the log when it read last. For an id all are
    that id.
    """

    position: str
    first: str
    latest: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor of any kind of log that `text` is. Raises ValueError if it is none."""
        found = _match_cursor(text)
        if found is None:
            raise ValueError("not a cursor")
        id_, position, first, latest = found.groups()
        return cls(position or id_, first or id_, latest or id_)

    def __str__(self) -> str:
        """Return the cursor as `parse` reads it."""
        if self.position == self.first == self.latest:
            return self.position
        return f"{self.position}~{self.first}~{self.latest}"


OriginFilter = Callable[[str], bool]
"""Returns True for the `origin` of requested changes, and for an unknown origin (`""`)."""


class ChangePage(NamedTuple):
    """A page of changes with their ids, oldest first. It includes all matching changes up to the id `last`.
    If `is_end`, the log has no more for now. `scanned` is the number of changes that the log read to find
    them."""

    changes: list[tuple[str, Change]]
    last: str
    is_end: bool
    scanned: int


class ChangeLog(Protocol):
    """A log of changes, ordered by id. Changes to one document appear in the order of its writes. All
    processes that use one store share its log. Methods raise Unavailable if the log cannot be read or
    written."""

    async def append(self, changes: Sequence[Change]) -> str:
        """Append changes, at least one, and return the id of the last, which is now the newest id of the log.
        Ids increase, compared as text. If this raises, the changes may have been appended nevertheless."""

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        """Return the first `limit` changes after the id or `Cursor` `after` with their ids, oldest first;
        `""` stands for the start of the log. Return None if changes after `after` are no longer retained, or
        if the log never issued that id."""

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        """Return a page of the changes after the id `after` whose origin passes the filter. A log with an
        index reads only their changes; the page may include others. Return None if changes after `after` are
        no longer retained."""

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        """Return the number of matching changes after an id, counted up to `most` and possibly one more; None
        if the log cannot count them without reading them."""

    async def newest(self, limit: int) -> list[tuple[str, Change]]:
        """Return the newest changes with their ids, at most `limit`, the newest first."""

    async def last_id(self) -> str:
        """Return an id that follows every change so far and precedes every later one. `read` accepts it, even
        if the log is empty."""

    async def erase(self, changes: Mapping[str, Change]) -> None:
        """Put these changes in the place of those with their ids, so that nothing of the latter is stored.
        They have the same origins. Ids that are gone are skipped. Nothing remains either of the last change
        that was trimmed."""

    async def begin_epoch(self) -> None:
        """Forget all changes, because the store was restored: whoever resumes from an id that was issued
        before gets a reset."""

    async def wait_for_change(self, after: str) -> None:
        """Return when there may be a change after `after`: immediately if this process appended one, within
        about 20 ms if another did, and after a second in any case."""
