"""Counters of what is stored for whom, in the database of a local store.

A row of `object` that is counted names its *owner*, and has its size in `size`. The table `usage` has one
row of amounts for each owner and each subject, and `charge` says which of them a row counts for. So the
amounts are always the sums over the rows of `object`, whatever process writes these, and however it ends:

- A document that a service with quotas puts has the negative id of its owner, and `UsageCounters` adds the
  amounts of all documents of a group at once, before its commit.
- For all other writes triggers do, in the database. They exist only while usage is tracked. A row that
  another process wrote without knowing an owner has none, until a service counts it.

Ids of owners are never used again, so rows of an earlier time when usage was tracked have an owner that does
not exist.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import orjson

from pysync._core import split_key
from pysync.errors import QuotaExceeded
from pysync.model import Usage
from pysync.store.base import ABSENT, ANY, Etag, Precondition
from pysync.store.usage import (
    NOTHING,
    Account,
    Charge,
    CountedRow,
    QuotaLimit,
    QuotaLimits,
    Subject,
    check_limit,
)

TABLES: Final = """
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
    INSERT INTO usage_state VALUES(1, 0)
"""
"""`elements` is NULL for documents and files, and 0 for objects of a log that are not its head."""

OFF: Final = 0
INCOMPLETE: Final = 1
COUNTING: Final = 2
COMPLETE: Final = 3

_OWNER: Final = "owner"
"""The kind of the rows of `usage` that are owners. Their name is the account as JSON."""


def _add(row: str, sign: str, owner: str) -> str:
    """Return the statement of a trigger that adds the amounts of a row, or with the sign `-` takes them."""
    return f"""
        UPDATE usage SET bytes = bytes {sign} {row}.size,
            documents = documents {sign} ({row}.sha256 IS NULL AND {row}.elements IS NULL),
            elements = elements {sign} coalesce({row}.elements, 0),
            files = files {sign} ({row}.sha256 IS NOT NULL)
        WHERE id IN (SELECT usage FROM charge WHERE owner = {owner});"""  # noqa: S608


_NOTE_UNCOUNTED = "UPDATE usage_state SET state = 1 WHERE NEW.owner IS NULL AND state > 1;"
_TRIGGERS: Final = {
    "usage_new": f"""
        AFTER INSERT ON object WHEN NEW.owner IS NULL OR NEW.owner > 0
        BEGIN {_add("NEW", "+", "NEW.owner")} {_NOTE_UNCOUNTED} END""",
    # To replace a row fires no trigger of its deletion.
    "usage_replaced": """
        BEFORE INSERT ON object WHEN NEW.sha256 IS NOT NULL
        BEGIN DELETE FROM object WHERE parent = NEW.parent AND name = NEW.name; END""",
    "usage_changed": f"""
        AFTER UPDATE OF owner, size ON object WHEN NEW.owner IS NULL OR NEW.owner > 0
        BEGIN {_add("OLD", "-", "abs(OLD.owner)")} {_add("NEW", "+", "NEW.owner")} {_NOTE_UNCOUNTED} END""",
    "usage_gone": f"""
        AFTER DELETE ON object WHEN OLD.owner IS NOT NULL
        BEGIN {_add("OLD", "-", "abs(OLD.owner)")} END""",
}

_FIND_OWNER = f"SELECT id FROM usage WHERE kind = '{_OWNER}' AND name = ?"  # noqa: S608
_ADD_SUBJECT = "INSERT OR IGNORE INTO usage(kind, name) VALUES(?, ?)"
_ADD_CHARGE = "INSERT INTO charge SELECT ?, id FROM usage WHERE kind = ? AND name = ?"
_CHARGED = """
    SELECT id, kind, bytes, documents, elements, files FROM charge JOIN usage ON id = usage WHERE owner = ?"""
_OLD_ROW = """
    SELECT owner, size, elements, sha256 IS NOT NULL FROM object
    WHERE parent = ? AND name = ? AND owner IS NOT NULL"""
_ADD_AMOUNTS = """
    UPDATE usage SET bytes = bytes + ?, documents = documents + ?, elements = elements + ?, files = files + ?
    WHERE id = ?"""
# An object that is counted twice changes nothing: the trigger takes its earlier amounts back.
_COUNT_ROW = "UPDATE object SET owner = ?, size = ?, elements = ? WHERE id = ? AND etag = ?"
_PRUNE = (
    "DELETE FROM usage WHERE bytes = 0 AND documents = 0 AND elements = 0 AND files = 0",
    "DELETE FROM charge WHERE owner NOT IN (SELECT id FROM usage)",
)

MAX_CACHED: Final = 10_000
"""Number of owners, and of receipts, that are cached. With more the cache is emptied."""


class _Counter:
    """What a subject with a limit uses, with what is not written yet. It may be too much after a deletion."""

    __slots__ = ("kind", "limit", "used")

    def __init__(self, kind: str, limit: QuotaLimit, used: list[int]) -> None:
        self.kind = kind
        self.limit = limit
        self.used = used


class _Owner:
    """An owner. `charged` are the ids of its rows of `usage`, `counters` are its subjects that have a limit,
    and `pending` are the amounts that are to be added to these rows."""

    __slots__ = ("charged", "counters", "id", "pending")

    def __init__(self, id_: int, charged: Sequence[int], counters: Sequence[_Counter]) -> None:
        self.id = id_
        self.charged = charged
        self.counters = counters
        self.pending = [0, 0, 0, 0]


class Receipt(NamedTuple):
    """What a stored object counts as, and for which owner: the server's own objects for 0."""

    owner: int
    amounts: Usage


_NO_RECEIPT: Final = Receipt(0, NOTHING)


class UsageCounters:
    """The counters as commit hooks of `GroupCommit`. All methods are called in the thread that commits, those
    with a cursor within a transaction, so no other process counts meanwhile."""

    def __init__(self, limits: QuotaLimits) -> None:
        self._limits = limits
        self._by_account: dict[Account | None, _Owner] = {}
        self._by_id: dict[int, _Owner] = {}
        self._counters: dict[int, _Counter] = {}
        self._changed: dict[int, _Owner] = {}
        self._receipts: dict[str, Receipt] = {}
        self._version = -1
        self._is_on = False
        self.has_work = False

    def is_on(self, cursor: sqlite3.Cursor) -> bool:
        """Return True unless another service has switched the counters off. Call it first in each
        transaction."""
        if not self.has_work:
            self.has_work = True
            ((version,),) = cursor.execute("PRAGMA data_version")
            if version != self._version:  # another process has written
                self._forget()
                ((state,),) = cursor.execute("SELECT state FROM usage_state")
                self._version, self._is_on = version, state != OFF
        return self._is_on

    def charge(
        self,
        cursor: sqlite3.Cursor,
        key: tuple[str, str],
        expect: Precondition,
        charge: Charge,
        amounts: Usage,
    ) -> tuple[Receipt, int]:
        """Return the receipt of the object that a write with this precondition replaces, and the owner of
        what it writes. Raises QuotaExceeded if the charge is checked and what is written is not smaller."""
        old = self._replaced(cursor, key, expect)
        if charge.inherits and self._owner_with(cursor, old.owner).charged:
            return old, old.owner
        owner = self._owner(cursor, charge.account)
        is_less = amounts.bytes < old.amounts.bytes and amounts.log_elements <= old.amounts.log_elements
        if is_less or not (charge.checked and owner.counters):
            return old, owner.id
        try:
            _check(owner, old, amounts)
        except QuotaExceeded:  # perhaps not, because something was deleted
            self.flush(cursor)
            self._forget()
            owner = self._owner(cursor, charge.account)
            _check(owner, old, amounts)
        return old, owner.id

    def replace(self, cursor: sqlite3.Cursor, old: Receipt, new: Receipt, etag: str) -> None:
        """Count a document that replaced `old` and was written under `etag`."""
        if old.owner == new.owner:
            self._add(cursor, new.owner, new.amounts.minus(old.amounts))
        else:
            self._add(cursor, old.owner, NOTHING.minus(old.amounts))
            self._add(cursor, new.owner, new.amounts)
        if len(self._receipts) >= MAX_CACHED:
            self._receipts.clear()
        self._receipts[etag] = new

    def charge_file(self, cursor: sqlite3.Cursor, key: str, size: int, charge: Charge) -> int | None:
        """Return the owner of a file that is about to be written; None if nothing is counted. A trigger
        counts it. Raises QuotaExceeded."""
        if not self.is_on(cursor):
            return None
        amounts = Usage(size, files=1)
        old, owner = self.charge(cursor, split_key(key), ANY, charge, amounts)
        more = amounts.minus(old.amounts) if old.owner == owner else amounts
        for counter in self._by_id[owner].counters:
            counter.used = list(Usage(*counter.used).plus(more))
        return owner

    def count_rows(self, cursor: sqlite3.Cursor, rows: Iterable[CountedRow]) -> None:
        """Give rows their owners. Triggers count them."""
        if self.is_on(cursor):
            for row, charge in rows:
                owner, elements = self._owner(cursor, charge.account).id, charge.elements
                cursor.execute(_COUNT_ROW, (owner, row.size, elements, row.id, row.etag))
            self.flush(cursor)
            self._forget()

    def prune(self, cursor: sqlite3.Cursor) -> None:
        """Forget the subjects that use nothing."""
        if self.is_on(cursor):
            self.flush(cursor)
            for statement in _PRUNE:
                cursor.execute(statement)
            self._forget()

    def flush(self, cursor: sqlite3.Cursor) -> None:
        """Write the amounts that are not written yet."""
        totals: dict[int, list[int]] = {}
        for owner in self._changed.values():
            for id_ in owner.charged:
                total = totals.setdefault(id_, [0, 0, 0, 0])
                for at, amount in enumerate(owner.pending):
                    total[at] += amount
            owner.pending = [0, 0, 0, 0]
        self._changed.clear()
        cursor.executemany(_ADD_AMOUNTS, [(*total, id_) for id_, total in totals.items() if any(total)])

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        """Write the amounts of the group."""
        if self._changed:
            self.flush(cursor)

    def after_commit(self) -> None:
        """End the group."""
        self.has_work = False

    def after_rollback(self) -> None:
        """Forget what was not committed."""
        self._changed.clear()
        self._forget()
        self._version = -1
        self.has_work = False

    def _forget(self) -> None:
        """Forget what may have changed in the database. Nothing may be pending."""
        self._by_account.clear()
        self._by_id.clear()
        self._counters.clear()

    def _replaced(self, cursor: sqlite3.Cursor, key: tuple[str, str], expect: Precondition) -> Receipt:
        if expect == ABSENT:
            return _NO_RECEIPT
        if isinstance(expect, Etag) and (known := self._receipts.get(expect.value)) is not None:
            return known
        for owner, size, elements, is_file in cursor.execute(_OLD_ROW, key).fetchall():
            return Receipt(abs(owner), amounts_of(size, elements, is_file=bool(is_file)))
        return _NO_RECEIPT

    def _owner(self, cursor: sqlite3.Cursor, account: Account | None) -> _Owner:
        """Return the owner of what counts for this account, which is made if there is none."""
        owner = self._by_account.get(account)
        if owner is not None:
            return owner
        id_ = 0
        if account is not None:
            name = orjson.dumps(list(account)).decode()
            found = cursor.execute(_FIND_OWNER, (name,)).fetchone()
            id_ = _add_owner(cursor, name, account) if found is None else found[0]
        owner = self._by_account[account] = self._owner_with(cursor, id_)
        return owner

    def _owner_with(self, cursor: sqlite3.Cursor, id_: int) -> _Owner:
        """Return the owner with this id. One of an earlier time has no rows."""
        owner = self._by_id.get(id_)
        if owner is None:
            if len(self._by_id) >= MAX_CACHED:
                self.flush(cursor)
                self._forget()
            rows = cursor.execute(_CHARGED, (id_,)).fetchall() if id_ else ()
            counters = [self._counter(*row) for row in rows if row[1] in self._limits]
            owner = self._by_id[id_] = _Owner(id_, [row[0] for row in rows], counters)
        return owner

    def _counter(self, id_: int, kind: str, *used: int) -> _Counter:
        """Return the counter of a subject, which its owners share."""
        found = self._counters.get(id_)
        if found is None:
            found = self._counters[id_] = _Counter(kind, self._limits[kind], list(used))
        return found

    def _add(self, cursor: sqlite3.Cursor, owner_id: int, amounts: Usage) -> None:
        if not owner_id or amounts == NOTHING:
            return
        owner = self._owner_with(cursor, owner_id)
        self._changed[owner_id] = owner
        for total in (owner.pending, *[counter.used for counter in owner.counters]):
            total[0] += amounts.bytes
            total[1] += amounts.documents
            total[2] += amounts.log_elements
            total[3] += amounts.files


def amounts_of(size: int, elements: int | None, *, is_file: bool = False) -> Usage:
    """Return the amounts of a stored object. `elements` is None unless it belongs to a log."""
    return Usage(size, int(elements is None and not is_file), elements or 0, int(is_file))


def _check(owner: _Owner, old: Receipt, amounts: Usage) -> None:
    more = amounts.minus(old.amounts) if old.owner == owner.id else amounts
    for counter in owner.counters:
        check_limit(counter.kind, counter.limit, counter.used, more)


def _add_owner(cursor: sqlite3.Cursor, name: str, account: Account) -> int:
    subjects = [Subject(_OWNER, name), *account.subjects()]
    cursor.executemany(_ADD_SUBJECT, subjects)
    ((id_,),) = cursor.execute(_FIND_OWNER, (name,)).fetchall()
    cursor.executemany(_ADD_CHARGE, [(id_, *subject) for subject in subjects])
    return int(id_)


def switch_on(cursor: sqlite3.Cursor) -> None:
    """Begin to track usage, from nothing, unless it is tracked already."""
    if _state(cursor) == OFF:
        cursor.execute("DELETE FROM usage")
        cursor.execute("DELETE FROM charge")
        for name, body in _TRIGGERS.items():
            cursor.execute(f"CREATE TRIGGER {name} {body}")
        is_empty = cursor.execute("SELECT 1 FROM object LIMIT 1").fetchone() is None
        set_state(cursor, OFF, COMPLETE if is_empty else INCOMPLETE)


def forget_unused(cursor: sqlite3.Cursor) -> None:
    """Forget the subjects that use nothing, if everything is counted."""
    if cursor.execute("SELECT 1 FROM usage_state WHERE state = ?", (COMPLETE,)).fetchall():
        for statement in _PRUNE:
            cursor.execute(statement)


def switch_off(cursor: sqlite3.Cursor) -> None:
    """Stop tracking usage."""
    for name in _TRIGGERS:
        cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
    cursor.execute("UPDATE usage_state SET state = ?", (OFF,))
    cursor.execute("DELETE FROM usage")
    cursor.execute("DELETE FROM charge")


def set_state(cursor: sqlite3.Cursor, before: int, after: int) -> None:
    """Set the state, if it is `before`."""
    cursor.execute("UPDATE usage_state SET state = ? WHERE state = ?", (after, before))


def _state(cursor: sqlite3.Cursor) -> int:
    ((state,),) = cursor.execute("SELECT state FROM usage_state").fetchall()
    return int(state)
