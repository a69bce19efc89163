"""The ledger of a local store: what is stored for whom, counted in its database.

A row of `object` that is counted names its *owner*, and has its size in `size`. The table `usage` has one
row of amounts for each subject, and `charge` says for which of them the rows of an owner count. Triggers keep
the amounts the sums over the rows of `object`, whatever process writes these, and however it ends. They exist
only while usage is tracked. A row that another process wrote without knowing an owner has none, until a
service counts it.

Ids of owners are never used again, so rows of an earlier time when usage was tracked have an owner that does
not exist.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from math import inf
from operator import gt, sub
from typing import Final

import orjson

from pysync._core import split_key
from pysync.errors import QuotaExceeded
from pysync.model import QuotaLimits, Usage, check_limit
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.ledger import (
    Account,
    Charge,
    ChargeOf,
    CountedRow,
    Subject,
    SubjectKind,
    UncountedRow,
)

_IS_VERSION: Final = "parent > '_pysync/history/' AND parent < '_pysync/history0' AND owner IS NOT NULL"
TABLES: Final = f"""
    ALTER TABLE object ADD COLUMN owner INTEGER;
    ALTER TABLE object ADD COLUMN elements INTEGER;
    CREATE TABLE usage(
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL DEFAULT 0,
        documents INTEGER NOT NULL DEFAULT 0,
        elements INTEGER NOT NULL DEFAULT 0,
        files INTEGER NOT NULL DEFAULT 0,
        UNIQUE(kind, name)
    );
    CREATE TABLE charge(owner INTEGER, usage INTEGER, PRIMARY KEY(owner, usage)) WITHOUT ROWID;
    CREATE TABLE usage_state(id INTEGER PRIMARY KEY CHECK(id = 1), state INTEGER NOT NULL);
    INSERT INTO usage_state VALUES(1, 0);
    CREATE INDEX object_version ON object(owner, name) WHERE {_IS_VERSION};
    CREATE INDEX charge_usage ON charge(usage)
"""
"""`elements` is NULL for documents and files, and 0 for objects of a log that are not its head. The indexes
find the earlier versions of documents that count for somebody, the oldest first by their names."""
MAX_DISPLACED: Final = 100
"""Number of earlier versions that one write displaces."""
_USED = "SELECT bytes, documents, elements, files FROM usage WHERE kind = ? AND name = ?"
_LARGEST = """
    SELECT name, bytes, documents, elements, files FROM usage
    WHERE kind = ? ORDER BY bytes DESC, name LIMIT ?"""
_WINDOW = "SELECT max(id) FROM (SELECT id FROM object WHERE id > ? ORDER BY id LIMIT 256)"
_UNCOUNTED = """
    SELECT o.id, parent, o.name, etag, CASE WHEN sha256 IS NULL THEN length(body) ELSE o.size END,
        sha256 IS NOT NULL
    FROM object AS o WHERE o.id > ? AND o.id <= ? AND (owner IS NULL OR owner != 0
        AND NOT EXISTS(SELECT 1 FROM charge WHERE charge.owner = o.owner)) ORDER BY o.id"""

OwnerOf = Callable[[sqlite3.Cursor, str, int], int | None]
"""Returns the owner that counts a file of this key and size. May raise QuotaExceeded."""


class CountState(IntEnum):
    """The state of the counts of a store, as `usage_state` has it."""

    OFF = 0
    INCOMPLETE = 1
    COUNTING = 2
    COMPLETE = 3


_OWNER: Final = "owner"
"""The kind of the rows of `usage` that are owners. Their name is the account as JSON, and they have no
amounts."""


def _amounts(row: str) -> dict[str, str]:
    """Return what a row of `object` counts as, by the columns of `usage`."""
    return {
        "bytes": f"{row}.size",
        "documents": f"({row}.sha256 IS NULL AND {row}.elements IS NULL)",
        "elements": f"coalesce({row}.elements, 0)",
        "files": f"({row}.sha256 IS NOT NULL)",
    }


def _add(more: dict[str, str], owner: str) -> str:
    """Return the statement of a trigger that adds to the amounts of an owner's subjects."""
    added = ", ".join(f"{column} = {column} {amount}" for column, amount in more.items())
    return f"UPDATE usage SET {added} WHERE id IN (SELECT usage FROM charge WHERE owner = {owner});"  # noqa: S608


_OLD, _NEW = _amounts("OLD"), _amounts("NEW")
_TAKE_OLD = _add({column: f"- {amount}" for column, amount in _OLD.items()}, "OLD.owner")
_ADD_NEW = _add({column: f"+ {amount}" for column, amount in _NEW.items()}, "NEW.owner")
_ADD_DIFFERENCE = _add({column: f"+ {_NEW[column]} - {_OLD[column]}" for column in _NEW}, "NEW.owner")
_DIFFERS = " OR ".join(f"{_NEW[column]} != {_OLD[column]}" for column in _NEW)
_NOTE_UNCOUNTED = "UPDATE usage_state SET state = 1 WHERE state > 1;"
_TRIGGERS: Final = {
    "usage_new": f"AFTER INSERT ON object WHEN NEW.owner > 0 BEGIN {_ADD_NEW} END",
    # To replace a row fires no trigger of its deletion.
    "usage_replaced": """
        BEFORE INSERT ON object WHEN NEW.sha256 IS NOT NULL
        BEGIN DELETE FROM object WHERE parent = NEW.parent AND name = NEW.name; END""",
    "usage_changed": f"""
        AFTER UPDATE OF owner, size ON object WHEN NEW.owner = OLD.owner AND ({_DIFFERS})
        BEGIN {_ADD_DIFFERENCE} END""",
    "usage_moved": f"""
        AFTER UPDATE OF owner, size ON object WHEN NEW.owner IS NOT OLD.owner
        BEGIN {_TAKE_OLD} {_ADD_NEW} END""",
    "usage_gone": f"AFTER DELETE ON object WHEN OLD.owner > 0 BEGIN {_TAKE_OLD} END",
    "usage_unknown": f"AFTER INSERT ON object WHEN NEW.owner IS NULL BEGIN {_NOTE_UNCOUNTED} END",
    "usage_forgotten": f"""
        AFTER UPDATE OF owner, size ON object WHEN NEW.owner IS NULL BEGIN {_NOTE_UNCOUNTED} END""",
}

_ADD_SUBJECT = "INSERT OR IGNORE INTO usage(kind, name) VALUES(?, ?)"
_ADD_CHARGE = """
    INSERT INTO charge SELECT o.id, s.id FROM usage AS o, usage AS s
    WHERE o.kind = ? AND o.name = ? AND s.kind = ? AND s.name = ?"""
# One row for all subjects, because SQLite lets go of the interpreter for each. It names all parameters.
_FIND_OWNER = f"""
    SELECT o.id, max(?2 + ?3 + ?4 + ?5 < 0{{}})
    FROM usage AS o CROSS JOIN charge ON owner = o.id CROSS JOIN usage AS s ON s.id = charge.usage
    WHERE o.kind = '{_OWNER}' AND o.name = ?1"""  # noqa: S608
_SUBJECTS = """
    SELECT id, kind, bytes, documents, elements, files FROM charge JOIN usage ON id = usage WHERE owner = ?"""
_OLD_ROW = """
    SELECT owner, size, elements, sha256 IS NOT NULL FROM object
    WHERE parent = ? AND name = ? AND owner IS NOT NULL"""
_IS_COUNTED = "SELECT 1 FROM charge WHERE owner = ? LIMIT 1"
# An object that is counted twice changes nothing: the trigger takes its earlier amounts back.
_COUNT_ROW = "UPDATE object SET owner = ?, size = ?, elements = ? WHERE id = ? AND etag = ?"
_OWNERS = "SELECT owner FROM charge WHERE usage = ? LIMIT 1000"
_OLDEST_VERSIONS = f"""
    SELECT name, id, size FROM object WHERE owner = ? AND {_IS_VERSION}
    ORDER BY name LIMIT {MAX_DISPLACED}"""  # noqa: S608
_DISPLACE = "DELETE FROM object WHERE id = ?"
_PRUNE = (
    f"""
    DELETE FROM usage
    WHERE kind != '{_OWNER}' AND bytes = 0 AND documents = 0 AND elements = 0 AND files = 0""",  # noqa: S608
    """
    DELETE FROM charge
    WHERE owner IN (SELECT owner FROM charge WHERE usage NOT IN (SELECT id FROM usage))""",
    f"DELETE FROM usage WHERE kind = '{_OWNER}' AND id NOT IN (SELECT owner FROM charge)",  # noqa: S608
)

Amounts = tuple[int, int, int, int]
"""The amounts of one object, in the order of `Usage`."""
_NONE: Final[Amounts] = (0, 0, 0, 0)


_Subject = tuple[int, str, int, int, int, int]
"""A subject of an owner: its id in `usage`, its kind and what it uses."""


class Owners:
    """The owners of rows, and the room that limits leave them. All methods are called in a transaction."""

    def __init__(self, limits: QuotaLimits) -> None:
        self._limits = limits
        has_no_room = [
            f"s.kind = '{kind}' AND ?{at + 2} > 0 AND s.{column} + ?{at + 2} > {int(most)}"
            for kind, limit in limits.items()
            for at, (column, most) in enumerate(zip(_NEW, limit, strict=True))
            if most != inf
        ]
        self._find = _FIND_OWNER.format("".join(f" OR {each}" for each in has_no_room))

    def find(self, cursor: sqlite3.Cursor, account: Account | None, new: Amounts = _NONE) -> tuple[int, bool]:
        """Return the owner of what counts for this account, which is made if there is none, and whether there
        is room to add these amounts. The owner of the server's own objects is 0."""
        if account is None:
            return 0, True
        name = orjson.dumps(list(account)).decode()
        ((owner, has_no_room),) = cursor.execute(self._find, (name, *new)).fetchall()
        if owner is None:
            subjects = list(account.subjects())
            cursor.executemany(_ADD_SUBJECT, [Subject(_OWNER, name), *subjects])
            cursor.executemany(_ADD_CHARGE, [(_OWNER, name, *subject) for subject in subjects])
            ((owner, has_no_room),) = cursor.execute(self._find, (name, *new)).fetchall()
        return owner, not has_no_room

    def owner_of_replaced(self, cursor: sqlite3.Cursor, parent: str, name: str, owner: int) -> int:
        """Return the owner of the object at a key, and `owner` if the object is not counted. An account is
        not filled by what others wrote and it replaced or deleted."""
        before, _ = _replaced(cursor, parent, name)
        return before if cursor.execute(_IS_COUNTED, (before,)).fetchone() else owner

    def make_room(self, cursor: sqlite3.Cursor, owner: int, new: Amounts, parent: str, name: str) -> None:
        """Make room for an object of an owner. Earlier versions give way. Raises QuotaExceeded, unless the
        object is smaller than the one that it replaces, and of its kind."""
        before, old = _replaced(cursor, parent, name)
        if new[0] < old[0] and not any(map(gt, new[1:], old[1:])):
            return
        more = _minus(new, old) if before == owner else new
        rows = cursor.execute(_SUBJECTS, (owner,)).fetchall()
        limited: list[_Subject] = [row for row in rows if row[1] in self._limits]
        try:
            for _, kind, *used in limited:
                check_limit(kind, self._limits[kind], used, more)
        except QuotaExceeded:
            if not self._displace_versions(cursor, owner, limited, more):
                raise

    def _displace_versions(
        self, cursor: sqlite3.Cursor, owner: int, limited: Sequence[_Subject], more: Amounts
    ) -> bool:
        """Delete the oldest earlier versions of what has too little room for the bytes of `more`: of all
        collections for an identity or a space, else of the owner. Deletes none, and returns False, if that
        makes not enough room."""
        chosen: dict[int, int] = {}
        for id_, kind, *used in limited:
            room = [
                most - now - added for most, now, added in zip(self._limits[kind], used, more, strict=True)
            ]
            if any(left < 0 < added for left, added in zip(room[1:], more[1:], strict=True)):
                return False
            lacking = -room[0]
            if more[0] <= 0 or lacking <= 0:
                continue
            owners = [(owner,)]
            if kind in ("identity", "space"):
                owners = cursor.execute(_OWNERS, (id_,)).fetchall()
            versions = [row for one in owners for row in cursor.execute(_OLDEST_VERSIONS, one)]
            for _, version, size in sorted(versions)[:MAX_DISPLACED]:
                if lacking > 0:
                    chosen[version] = size
                    lacking -= size
            if lacking > 0:
                return False
        if len(chosen) > MAX_DISPLACED:
            return False
        cursor.executemany(_DISPLACE, [(version,) for version in chosen])
        return bool(chosen)

    def charge_file(self, cursor: sqlite3.Cursor, parent: str, name: str, size: int, charge: Charge) -> int:
        """Return the owner of a file that is about to be written. Raises QuotaExceeded."""
        new = (size, 0, 0, 1)
        owner, has_room = self.find(cursor, charge.account, new)
        if not charge.checked:
            return self.owner_of_replaced(cursor, parent, name, owner)
        if not has_room:
            self.make_room(cursor, owner, new, parent, name)
        return owner

    def count_rows(self, cursor: sqlite3.Cursor, rows: Iterable[CountedRow]) -> None:
        """Give rows their owners."""
        for row, charge in rows:
            owner, _ = self.find(cursor, charge.account)
            cursor.execute(_COUNT_ROW, (owner, row.size, charge.elements, row.id, row.etag))


def amounts_of(size: int, elements: int | None) -> Amounts:
    """Return the amounts of a stored object that is no file. `elements` is None unless it belongs to a
    log."""
    return (size, 1, 0, 0) if elements is None else (size, 0, elements, 0)


def _replaced(cursor: sqlite3.Cursor, parent: str, name: str) -> tuple[int, Amounts]:
    """Return the owner and the amounts of the object at a key; an owner of 0 for none."""
    for owner, size, elements, is_file in cursor.execute(_OLD_ROW, (parent, name)).fetchall():
        return owner, (size, 0, 0, 1) if is_file else amounts_of(size, elements)
    return 0, _NONE


def _minus(amounts: Amounts, others: Amounts) -> Amounts:
    size, documents, elements, files = map(sub, amounts, others)
    return size, documents, elements, files


def start_counting(cursor: sqlite3.Cursor) -> None:
    """Begin to track usage, from nothing, unless it is tracked already."""
    if _state(cursor) == CountState.OFF:
        cursor.execute("DELETE FROM usage")
        cursor.execute("DELETE FROM charge")
        for name, body in _TRIGGERS.items():
            cursor.execute(f"CREATE TRIGGER {name} {body}")
        is_empty = cursor.execute("SELECT 1 FROM object LIMIT 1").fetchone() is None
        set_state(cursor, CountState.OFF, CountState.COMPLETE if is_empty else CountState.INCOMPLETE)


def stop_counting(cursor: sqlite3.Cursor) -> None:
    """Stop tracking usage."""
    for name in _TRIGGERS:
        cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
    cursor.execute("UPDATE usage_state SET state = ?", (CountState.OFF,))
    cursor.execute("DELETE FROM usage")
    cursor.execute("DELETE FROM charge")


def prune_counters(cursor: sqlite3.Cursor) -> None:
    """Delete the subjects that use nothing, and their owners."""
    for statement in _PRUNE:
        cursor.execute(statement)


def set_state(cursor: sqlite3.Cursor, before: CountState, after: CountState) -> None:
    """Set the state, if it is `before`."""
    cursor.execute("UPDATE usage_state SET state = ? WHERE state = ?", (after, before))


def _state(cursor: sqlite3.Cursor) -> int:
    ((state,),) = cursor.execute("SELECT state FROM usage_state").fetchall()
    return int(state)


class LocalLedger:
    """The `Ledger` of a local store. Create one with `open`."""

    def __init__(
        self, reader: SnapshotReader, writer: GroupCommit, owners: Owners, charge_of: ChargeOf
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._charge_of = charge_of
        self.owners = owners

    @classmethod
    async def open(
        cls, reader: SnapshotReader, writer: GroupCommit, limits: QuotaLimits, charge_of: ChargeOf
    ) -> "LocalLedger":
        """Switch the counters on, if they are off, and return their ledger."""
        if not reader.rows("SELECT 1 FROM usage_state WHERE state != 0"):
            await writer.submit(start_counting)
        return cls(reader, writer, Owners(limits), charge_of)

    def charge(self, key: str, charge: Charge | None) -> Charge:
        """Return what a write of `key` counts as, if the writer says `charge`."""
        if charge is None:
            return self._charge_of(key)
        if charge.account is None:
            return charge._replace(account=self._charge_of(charge.key or key).account)
        return charge

    def owner_of_file(self, charge: Charge | None) -> OwnerOf:
        """Return the function that charges for a file."""

        def owner_of(cursor: sqlite3.Cursor, key: str, size: int) -> int:
            return self.owners.charge_file(cursor, *split_key(key), size, self.charge(key, charge))

        return owner_of

    async def used(self, subjects: Iterable[Subject]) -> dict[Subject, Usage]:
        """See `Ledger.used`."""
        return {
            subject: next((Usage(*row) for row in self._reader.rows(_USED, *subject)), Usage())
            for subject in subjects
        }

    async def largest(self, kind: SubjectKind, limit: int) -> list[tuple[str, Usage]]:
        """See `Ledger.largest`."""
        return [(name, Usage(*amounts)) for name, *amounts in self._reader.rows(_LARGEST, kind, limit)]

    async def is_complete(self) -> bool:
        """See `Ledger.is_complete`."""
        ((state,),) = self._reader.rows("SELECT state FROM usage_state")
        return bool(state == CountState.COMPLETE)

    async def begin_count(self) -> None:
        """See `CountableLedger.begin_count`."""
        await self._writer.submit(set_state, CountState.INCOMPLETE, CountState.COUNTING)

    async def end_count(self) -> None:
        """See `CountableLedger.end_count`."""
        await self._writer.submit(set_state, CountState.COUNTING, CountState.COMPLETE)

    def uncounted(self, after: int) -> tuple[list[UncountedRow], int | None]:
        """See `CountableLedger.uncounted`."""
        ((end,),) = self._reader.rows(_WINDOW, after)
        if end is None:
            return [], None
        rows = self._reader.rows(_UNCOUNTED, after, end)
        return [
            UncountedRow(id_, f"{parent}/{name}" if parent else name, etag, size, bool(is_file))
            for id_, parent, name, etag, size, is_file in rows
        ], end

    async def count(self, rows: Sequence[CountedRow]) -> None:
        """See `CountableLedger.count`."""
        if rows:
            await self._writer.submit(self.owners.count_rows, rows)

    async def prune(self) -> None:
        """See `CountableLedger.prune`."""
        await self._writer.submit(prune_counters)
