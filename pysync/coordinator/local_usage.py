"""The usage totals of all processes on one machine, in the database of a local coordinator."""

import sqlite3
from collections.abc import Callable, Collection, Mapping
from operator import add
from typing import Final, TypeVar

from pysync.coordinator.usage import NOTHING
from pysync.model import Addition, Usage, check_limit
from pysync.sqlite.connection import GroupCommit, SnapshotReader

T = TypeVar("T")

TABLES: Final = """
    CREATE TABLE usage(
        is_count INTEGER NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        documents INTEGER NOT NULL,
        elements INTEGER NOT NULL,
        files INTEGER NOT NULL,
        PRIMARY KEY(is_count, name)
    ) WITHOUT ROWID;
    CREATE TABLE usage_count(token TEXT, passed TEXT, counted_ms INTEGER);
    INSERT INTO usage_count VALUES(NULL, NULL, NULL)
"""
"""`token` is that of the count that is under way; its totals are the rows with `is_count`."""

_FORGET_COUNT = "UPDATE usage_count SET token = NULL, passed = NULL, counted_ms = NULL"
FORGET_SQL: Final = ("DELETE FROM usage", _FORGET_COUNT)
"""Statements that forget everything."""

_ADD = """
    INSERT INTO usage VALUES(?, ?, ?, ?, ?, ?)
    ON CONFLICT(is_count, name) DO UPDATE SET
        bytes = bytes + excluded.bytes, documents = documents + excluded.documents,
        elements = elements + excluded.elements, files = files + excluded.files"""
_FORGET_UNUSED = """
    DELETE FROM usage
    WHERE is_count = ? AND name = ? AND bytes = 0 AND documents = 0 AND elements = 0 AND files = 0"""
_READ = """
    SELECT name, bytes, documents, elements, files FROM usage
    WHERE is_count = 0 AND bytes | documents | elements | files"""
_READ_ONE = "SELECT bytes, documents, elements, files FROM usage WHERE is_count = 0 AND name = ?"


Amounts = tuple[int, ...]
"""Amounts in the order of `Usage`."""


class _Group:
    """What the writes of one transaction add, as commit hooks: it is written once, before the commit. A
    statement for each write would let go of the interpreter as often."""

    def __init__(self) -> None:
        self.has_work = False
        self._passed: str | None = None
        self._before: dict[str, Amounts] = {}
        self._totals: dict[str, Amounts] = {}
        self._counted: dict[str, Amounts] = {}

    def add(self, cursor: sqlite3.Cursor, addition: Addition) -> bool:
        """Do as `UsageTotals.add`."""
        if not self.has_work:
            ((self._passed,),) = cursor.execute("SELECT passed FROM usage_count").fetchall()
            self.has_work = True
        for kind, name, limit in addition.limited():
            check_limit(kind, limit, self._used(cursor, name), addition.more)
        in_count = self._passed is not None and "" < addition.key <= self._passed
        for name in addition.subjects.values():
            _sum(self._totals, name, addition.more)
            if in_count:
                _sum(self._counted, name, addition.more)
        return in_count

    def apart(self, cursor: sqlite3.Cursor, write: Callable[..., T], *args: object) -> T:
        """Return the result of another write to the totals, for which all before it are written."""
        self.before_commit(cursor)
        self.after_commit()
        return write(cursor, *args)

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        """Write what was added."""
        _add(cursor, 0, self._totals)
        _add(cursor, 1, self._counted)

    def after_commit(self) -> None:
        """Forget what is written."""
        self.has_work = False
        for amounts in (self._before, self._totals, self._counted):
            amounts.clear()

    def after_rollback(self) -> None:
        """Forget what was not written."""
        self.after_commit()

    def _used(self, cursor: sqlite3.Cursor, name: str) -> Amounts:
        before = self._before.get(name)
        if before is None:
            found = cursor.execute(_READ_ONE, (name,)).fetchall()
            before = self._before[name] = found[0] if found else NOTHING
        more = self._totals.get(name)
        return before if more is None else tuple(map(add, before, more))


class LocalUsage:
    """The `UsageTotals` of a local coordinator."""

    def __init__(self, reader: SnapshotReader, writer: GroupCommit) -> None:
        group = _Group()
        writer.add_hooks(group)
        self._reader = reader
        self._writer = writer
        self._apart = group.apart
        self.add_within: Final = group.add
        """Does as `add`, in a write of the same group commit: `add_within(cursor, addition)`. It decides
        before it changes anything."""

    async def add(self, addition: Addition) -> bool:
        """See `UsageTotals.add`."""
        return await self._writer.submit(self.add_within, addition)

    async def read(self, names: Collection[str] | None = None) -> dict[str, Usage]:
        """See `UsageTotals.read`."""
        if names is None:
            rows = self._reader.rows(_READ)
        else:
            rows = [row for name in names for row in self._reader.rows(f"{_READ} AND name = ?", name)]
        return {name: Usage(*amounts) for name, *amounts in rows}

    async def counted_ms(self) -> int | None:
        """See `UsageTotals.counted_ms`."""
        ((counted_ms,),) = self._reader.rows("SELECT counted_ms FROM usage_count")
        return None if counted_ms is None else int(counted_ms)

    async def begin_count(self, token: str) -> None:
        """See `UsageTotals.begin_count`."""
        await self._writer.submit(self._apart, _begin, token)

    async def count(self, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
        """See `UsageTotals.count`."""
        return await self._writer.submit(self._apart, _count, token, passed, more)

    async def end_count(self, token: str, now_ms: int) -> bool:
        """See `UsageTotals.end_count`."""
        return await self._writer.submit(self._apart, _end, token, now_ms)

    async def forget(self, names: Collection[str]) -> None:
        """See `UsageTotals.forget`."""
        await self._writer.submit(self._apart, _forget, names)

    async def clear(self) -> None:
        """See `UsageTotals.clear`."""
        await self._writer.submit(self._apart, _clear)


def _begin(cursor: sqlite3.Cursor, token: str) -> None:
    cursor.execute("DELETE FROM usage WHERE is_count = 1")
    cursor.execute("UPDATE usage_count SET token = ?, passed = ''", (token,))


def _count(cursor: sqlite3.Cursor, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
    cursor.execute("UPDATE usage_count SET passed = ? WHERE token = ?", (passed, token))
    if not cursor.rowcount:
        return False
    _add(cursor, 1, more)
    return True


def _end(cursor: sqlite3.Cursor, token: str, now_ms: int) -> bool:
    cursor.execute(
        "UPDATE usage_count SET token = NULL, passed = NULL, counted_ms = ? WHERE token = ?", (now_ms, token)
    )
    if not cursor.rowcount:
        return False
    cursor.execute("DELETE FROM usage WHERE is_count = 0")
    cursor.execute("UPDATE usage SET is_count = 0")
    return True


def _forget(cursor: sqlite3.Cursor, names: Collection[str]) -> None:
    cursor.executemany("DELETE FROM usage WHERE is_count = 0 AND name = ?", [(name,) for name in names])
    cursor.execute("DELETE FROM usage WHERE is_count = 1")
    cursor.execute(_FORGET_COUNT)


def _clear(cursor: sqlite3.Cursor) -> None:
    for statement in FORGET_SQL:
        cursor.execute(statement)


def _add(cursor: sqlite3.Cursor, is_count: int, more: Mapping[str, Amounts]) -> None:
    added = [(name, amounts) for name, amounts in more.items() if any(amounts)]
    if added:
        cursor.executemany(_ADD, [(is_count, name, *amounts) for name, amounts in added])
    less = [(is_count, name) for name, amounts in added if min(amounts) < 0]
    if less:
        cursor.executemany(_FORGET_UNUSED, less)


def _sum(totals: dict[str, Amounts], name: str, more: Amounts) -> None:
    before = totals.get(name)
    totals[name] = more if before is None else tuple(map(add, before, more))
