"""The usage totals of all processes on one machine, in the database of a local coordinator."""

import sqlite3
from collections.abc import Collection, Mapping
from typing import Final

from pysync.coordinator.usage import NOTHING
from pysync.model import Addition, Usage, check_limit
from pysync.sqlite.connection import GroupCommit, SnapshotReader

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


class LocalUsage:
    """The `UsageTotals` of a local coordinator."""

    def __init__(self, reader: SnapshotReader, writer: GroupCommit) -> None:
        self._reader = reader
        self._writer = writer

    async def add(self, addition: Addition) -> bool:
        """See `UsageTotals.add`."""
        return await self._writer.submit(add_usage, addition)

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
        await self._writer.submit(_begin, token)

    async def count(self, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
        """See `UsageTotals.count`."""
        return await self._writer.submit(_count, token, passed, more)

    async def end_count(self, token: str, now_ms: int) -> bool:
        """See `UsageTotals.end_count`."""
        return await self._writer.submit(_end, token, now_ms)

    async def forget(self, names: Collection[str]) -> None:
        """See `UsageTotals.forget`."""
        await self._writer.submit(_forget, names)

    async def clear(self) -> None:
        """See `UsageTotals.clear`."""
        await self._writer.submit(_clear)


def add_usage(cursor: sqlite3.Cursor, addition: Addition) -> bool:
    """Do as `UsageTotals.add`, in a transaction of other writes. Decides before it changes anything."""
    for kind, name, limit in addition.limited():
        found = cursor.execute(_READ_ONE, (name,)).fetchall()
        check_limit(kind, limit, found[0] if found else NOTHING, addition.more)
    more = dict.fromkeys(addition.subjects.values(), addition.more)
    ((passed,),) = cursor.execute("SELECT passed FROM usage_count").fetchall()
    in_count = passed is not None and "" < addition.key <= passed
    if in_count:
        _add(cursor, 1, more)
    _add(cursor, 0, more)
    return in_count


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


def _add(cursor: sqlite3.Cursor, is_count: int, more: Mapping[str, Usage]) -> None:
    cursor.executemany(_ADD, [(is_count, name, *amounts) for name, amounts in more.items()])
    less = [(is_count, name) for name, amounts in more.items() if min(amounts) < 0]
    if less:
        cursor.executemany(_FORGET_UNUSED, less)
