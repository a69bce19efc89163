"""Counters of what is stored for whom, in the database of a local store.

A row of `object` that is counted names its *owner*, and has its size in `size`. The table `usage` has one
row of amounts for each subject, and `charge` says for which of them the rows of an owner count. So the
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
from math import inf
from operator import add, gt
from typing import Final

import orjson

from pysync._core import split_key
from pysync.model import QuotaLimit, QuotaLimits, check_limit
from pysync.store.types import ANY, Etag, Precondition
from pysync.store.usage import Account, Charge, CountedRow, Subject

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

_IS_VERSION: Final = "parent > '_pysync/history/' AND parent < '_pysync/history0' AND owner IS NOT NULL"
INDEXES: Final = f"""
    CREATE INDEX object_version ON object(abs(owner), name) WHERE {_IS_VERSION};
    CREATE INDEX charge_usage ON charge(usage)
"""
"""Find the earlier versions of documents that count for somebody, the oldest first by their names."""
MAX_DISPLACED: Final = 100
"""Number of earlier versions that one write displaces."""

OFF: Final = 0
INCOMPLETE: Final = 1
COUNTING: Final = 2
COMPLETE: Final = 3

_OWNER: Final = "owner"
"""The kind of the rows of `usage` that are owners. Their name is the account as JSON, and they have no
amounts."""


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
_OWNERS = "SELECT owner FROM charge WHERE usage = ? LIMIT 1000"
_OLDEST_VERSIONS = f"""
    SELECT name, id, size FROM object WHERE abs(owner) = ? AND {_IS_VERSION}
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

MAX_CACHED: Final = 10_000
"""Number of owners, and of receipts, that are cached. With more the cache is emptied."""


class _Subject:
    """A subject with a limit, by its id in `usage`. `used` is what it uses, with what is not written yet; it
    may be too much after a deletion. `limits` has the greatest amounts, with their indexes in `Usage`."""

    __slots__ = ("id", "kind", "limits", "used")

    def __init__(self, id_: int, kind: str, limit: QuotaLimit, used: list[int]) -> None:
        self.id = id_
        self.kind = kind
        self.limits = [(at, most) for at, most in enumerate(limit) if most != inf]
        self.used = used


class Owner:
    """An owner. `charged` are the ids of its subjects in `usage`, `subjects` are those that have a limit, and
    `pending` are the amounts that are to be added to all of them, None for nothing. `used` is that of each of
    `subjects`."""

    __slots__ = ("charged", "id", "pending", "subjects", "used")

    def __init__(self, id_: int, charged: Sequence[int], subjects: Sequence[_Subject]) -> None:
        self.id = id_
        self.charged = charged
        self.subjects = subjects
        self.used = [subject.used for subject in subjects]
        self.pending: list[int] | None = None


# Pushes make these, and named tuples cost three times as much.
Amounts = tuple[int, int, int, int]
"""The amounts of one object, in the order of `Usage`."""
Receipt = tuple[int, Amounts]
"""The owner of a stored object, and what it counts as. The server's own objects have the owner 0."""

NO_RECEIPT: Final[Receipt] = (0, (0, 0, 0, 0))


class UsageCounters:
    """The counters as commit hooks of `GroupCommit`. All methods are called in the thread that commits, those
    with a cursor within a transaction, so no other process counts meanwhile."""

    def __init__(self, limits: QuotaLimits) -> None:
        self._limits = limits
        self._by_account: dict[Account | None, Owner] = {}
        self._by_id: dict[int, Owner] = {}
        self._subjects: dict[int, _Subject] = {}
        self._changed: list[Owner] = []
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

    def replaced(self, cursor: sqlite3.Cursor, parent: str, name: str, expect: Precondition) -> Receipt:
        """Return the receipt of the object that a write with this precondition replaces, unless the
        precondition fails."""
        if isinstance(expect, Etag) and (known := self._receipts.get(expect.value)) is not None:
            return known
        for owner, size, elements, is_file in cursor.execute(_OLD_ROW, (parent, name)).fetchall():
            amounts = (size, 0, 0, 1) if is_file else amounts_of(size, elements)
            return abs(owner), amounts
        return NO_RECEIPT

    def charge(self, cursor: sqlite3.Cursor, old: Receipt, charge: Charge, new: Amounts) -> Owner:
        """Return the owner of an object that replaces `old`. Raises QuotaExceeded if the charge is checked,
        unless the object is smaller than the one before, and of its kind."""
        owner = self.owner_of(cursor, charge.account)
        if charge.inherits:
            before = self._owner_with(cursor, old[0])
            owner = before if before.charged else owner
        if charge.checked and owner.subjects and old != (owner.id, new):
            more = _minus(new, old[1]) if old[0] == owner.id else new
            for subject in owner.subjects:
                used = subject.used
                for at, most in subject.limits:
                    if more[at] > 0 and used[at] + more[at] > most:
                        return self._check_again(cursor, old, charge, new)
        return owner

    def owner_of(self, cursor: sqlite3.Cursor, account: Account | None) -> Owner:
        """Return the owner of what counts for this account."""
        return self._by_account.get(account) or self._open_account(cursor, account)

    def owner_of_kept(self, cursor: sqlite3.Cursor, old: Receipt, charge: Charge) -> Owner:
        """Return the owner of the earlier version that a write with this charge makes of `old`: that of
        `old`, if it was counted. An account is not filled by what others wrote and it replaced or deleted."""
        before = self._owner_with(cursor, old[0])
        return before if before.charged else self.owner_of(cursor, charge.account)

    def add_bytes(self, owner: Owner, size: int) -> None:
        """Count objects of `owner` that replace nothing, and are neither documents nor files."""
        self._add(owner, (size, 0, 0, 0))

    def replace(self, cursor: sqlite3.Cursor, old: Receipt, owner: Owner, new: Amounts, etag: str) -> None:
        """Count a document of `owner` that replaced `old` and was written under `etag`."""
        before, amounts = old
        if before != owner.id:
            self._add(owner, new)
            if before:
                self._add(self._owner_with(cursor, before), _minus(NO_RECEIPT[1], amounts))
        elif amounts != new:
            self._add(owner, _minus(new, amounts))
        if len(self._receipts) >= MAX_CACHED:
            self._receipts.clear()
        self._receipts[etag] = owner.id, new

    def charge_file(self, cursor: sqlite3.Cursor, key: str, size: int, charge: Charge) -> int | None:
        """Return the owner of a file that is about to be written; None if nothing is counted. A trigger
        counts it. Raises QuotaExceeded."""
        if not self.is_on(cursor):
            return None
        old, new = self.replaced(cursor, *split_key(key), ANY), (size, 0, 0, 1)
        owner = self.charge(cursor, old, charge, new)
        more = _minus(new, old[1]) if old[0] == owner.id else new
        for used in owner.used:
            used[:] = map(add, used, more)
        return owner.id

    def count_rows(self, cursor: sqlite3.Cursor, rows: Iterable[CountedRow]) -> None:
        """Give rows their owners. Triggers count them."""
        if self.is_on(cursor):
            for row, charge in rows:
                owner, elements = self._open_account(cursor, charge.account).id, charge.elements
                cursor.execute(_COUNT_ROW, (owner, row.size, elements, row.id, row.etag))
            self.flush(cursor)
            self._forget()

    def prune(self, cursor: sqlite3.Cursor) -> None:
        """Forget the subjects that use nothing."""
        if self.is_on(cursor):
            self.flush(cursor)
            prune(cursor)
            self._forget()

    def flush(self, cursor: sqlite3.Cursor) -> None:
        """Write the amounts that are not written yet."""
        totals: dict[int, list[int]] = {}
        for owner in self._changed:
            pending, owner.pending = owner.pending, None
            assert pending is not None, "it was changed"
            for id_ in owner.charged:
                total = totals.get(id_)
                totals[id_] = pending if total is None else list(map(add, total, pending))
        self._changed.clear()
        cursor.executemany(_ADD_AMOUNTS, [(*total, id_) for id_, total in totals.items()])

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
        self._subjects.clear()

    def _check_again(self, cursor: sqlite3.Cursor, old: Receipt, charge: Charge, new: Amounts) -> Owner:
        """Return the owner as `charge` does, by the amounts in the database: something may have been
        deleted."""
        self.flush(cursor)
        self._forget()
        owner = self._open_account(cursor, charge.account)
        more = _minus(new, old[1]) if old[0] == owner.id else new
        if new[0] >= old[1][0] or any(map(gt, new[1:], old[1][1:])):
            if self._displace_versions(cursor, owner, more):
                owner = self._open_account(cursor, charge.account)
            for subject in owner.subjects:
                check_limit(subject.kind, self._limits[subject.kind], subject.used, more)
        return owner

    def _displace_versions(self, cursor: sqlite3.Cursor, owner: Owner, more: Amounts) -> bool:
        """Delete the oldest earlier versions of what has too little room for the bytes of `more`: of all
        collections for an identity or a space, else of the owner. Deletes none, and returns False, if that
        makes not enough room."""
        chosen: dict[int, int] = {}
        for subject in owner.subjects:
            room = [most - subject.used[at] - more[at] for at, most in enumerate(self._limits[subject.kind])]
            if any(left < 0 < added for left, added in zip(room[1:], more[1:], strict=True)):
                return False
            lacking = -room[0]
            if more[0] <= 0 or lacking <= 0:
                continue
            owners = [(owner.id,)]
            if subject.kind in ("identity", "space"):
                owners = cursor.execute(_OWNERS, (subject.id,)).fetchall()
            versions = [row for one in owners for row in cursor.execute(_OLDEST_VERSIONS, one)]
            for _, id_, size in sorted(versions)[:MAX_DISPLACED]:
                if lacking > 0:
                    chosen[id_] = size
                    lacking -= size
            if lacking > 0:
                return False
        if not chosen or len(chosen) > MAX_DISPLACED:
            return False
        cursor.executemany(_DISPLACE, [(id_,) for id_ in chosen])
        self._forget()
        return True

    def _open_account(self, cursor: sqlite3.Cursor, account: Account | None) -> Owner:
        """Return the owner of what counts for this account, which is made if there is none."""
        id_ = 0
        if account is not None:
            name = orjson.dumps(list(account)).decode()
            found = cursor.execute(_FIND_OWNER, (name,)).fetchone()
            id_ = _add_owner(cursor, name, account) if found is None else found[0]
        owner = self._owner_with(cursor, id_)
        self._by_account[account] = owner
        return owner

    def _owner_with(self, cursor: sqlite3.Cursor, id_: int) -> Owner:
        """Return the owner with this id. One of an earlier time has no subjects."""
        owner = self._by_id.get(id_)
        if owner is None:
            if len(self._by_id) >= MAX_CACHED:
                self.flush(cursor)
                self._forget()
            rows = cursor.execute(_CHARGED, (id_,)).fetchall() if id_ else ()
            subjects = [self._subject(*row) for row in rows if row[1] in self._limits]
            owner = self._by_id[id_] = Owner(id_, [row[0] for row in rows], subjects)
        return owner

    def _subject(self, id_: int, kind: str, *used: int) -> _Subject:
        """Return a subject, which its owners share."""
        found = self._subjects.get(id_)
        if found is None:
            found = self._subjects[id_] = _Subject(id_, kind, self._limits[kind], list(used))
        return found

    def _add(self, owner: Owner, more: Amounts) -> None:
        if not owner.charged:
            return
        if owner.pending is None:
            owner.pending = [0, 0, 0, 0]
            self._changed.append(owner)
        size, documents, elements, files = more
        for total in (owner.pending, *owner.used):
            total[0] += size
            total[1] += documents
            total[2] += elements
            total[3] += files


def amounts_of(size: int, elements: int | None) -> Amounts:
    """Return the amounts of a stored object that is no file. `elements` is None unless it belongs to a
    log."""
    return (size, 1, 0, 0) if elements is None else (size, 0, elements, 0)


def _minus(amounts: Amounts, others: Amounts) -> Amounts:
    size, documents, elements, files = others
    return amounts[0] - size, amounts[1] - documents, amounts[2] - elements, amounts[3] - files


def _add_owner(cursor: sqlite3.Cursor, name: str, account: Account) -> int:
    subjects = list(account.subjects())
    cursor.executemany(_ADD_SUBJECT, [Subject(_OWNER, name), *subjects])
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


def prune(cursor: sqlite3.Cursor) -> None:
    """Delete the subjects that use nothing, and their owners. Nothing of this process may be pending."""
    for statement in _PRUNE:
        cursor.execute(statement)


def set_state(cursor: sqlite3.Cursor, before: int, after: int) -> None:
    """Set the state, if it is `before`."""
    cursor.execute("UPDATE usage_state SET state = ? WHERE state = ?", (after, before))


def _state(cursor: sqlite3.Cursor) -> int:
    ((state,),) = cursor.execute("SELECT state FROM usage_state").fetchall()
    return int(state)
