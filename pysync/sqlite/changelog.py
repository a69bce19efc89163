"""A change log in a database: its rows are inserted in the transaction of the write that they announce.

The ids of the rows have no gaps, and the oldest row is never delivered: it marks the position before the
first change (docs/explanation/change-log.md#the-sentinel).
"""

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from pysync.changelog import WAIT_S, Change, ChangePage, Cursor, OriginFilter, Retention, change_id, split_id
from pysync.sqlite.connection import GroupCommit, SnapshotReader

_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"  # in steps of a millisecond

TABLE: Final = f"""
    CREATE TABLE change(
        id INTEGER PRIMARY KEY,
        at_ms INTEGER NOT NULL,
        text BLOB NOT NULL,
        identity TEXT NOT NULL
    );
    INSERT INTO change VALUES({_NOW}, 0, x'', '')
"""

ADD_ORIGIN_SQL: Final = """
    ALTER TABLE change ADD COLUMN origin TEXT NOT NULL DEFAULT '';
    CREATE INDEX change_origin ON change(origin)
"""
"""Upgrades such a table to this version. The origin of existing rows is unknown."""

ADD_EPOCHS_SQL: Final = """
    CREATE TABLE epoch(first INTEGER PRIMARY KEY, tag TEXT NOT NULL);
    INSERT INTO epoch SELECT 0, iif(count(*) > 1, '', lower(hex(randomblob(4)))) FROM change
"""
"""Upgrades such a table to this version. Ids that are known already stay valid: theirs is an epoch without a
name. A new log begins with one that has a name."""

POLL_S: Final = 0.02
"""Seconds between checks of `wait_for_change` for a commit of another process."""

TRIM_EVERY: Final = 128
"""The number of changes after which old ones are deleted: up to twice as many as were added since, so that no
backlog builds up."""

# Without AUTOINCREMENT, which would write a second table. An id is one more than the greatest existing id,
# and the table is never empty.
_INSERT = "INSERT INTO change(at_ms, text, identity, origin) VALUES(?, ?, ?, ?)"
_EPOCH_OF = "(SELECT tag FROM epoch WHERE first <= {} ORDER BY first DESC LIMIT 1)"
LAST: Final = f"SELECT max(id), {_EPOCH_OF.format('(SELECT max(id) FROM change)')} FROM change"  # noqa: S608
"""The number and the epoch of the newest id."""
BOUNDS: Final = f"""
    SELECT (SELECT min(id) FROM change), max(id), {_EPOCH_OF.format("(SELECT max(id) FROM change)")},
        ?1 <= max(id) AND ?2 = {_EPOCH_OF.format("?1")} FROM change"""  # noqa: S608
"""The oldest number, the newest one and its epoch, and whether the log has issued a number in an epoch: it is
not ahead of the log, and the log was not put back since from a copy that is older than the number."""
_COLUMNS = f"SELECT id, {_EPOCH_OF.format('id')}, text, identity, origin FROM change "  # noqa: S608
_AFTER = _COLUMNS + "WHERE id > ? ORDER BY id LIMIT ?"
_NEWEST = _COLUMNS + "WHERE id > (SELECT min(id) FROM change) ORDER BY id DESC LIMIT ?"  # noqa: S608
_ORIGINS = """
    WITH RECURSIVE found(origin) AS (
        SELECT min(origin) FROM change
        UNION ALL
        SELECT (SELECT min(origin) FROM change WHERE origin > found.origin) FROM found
        WHERE found.origin IS NOT NULL
    )
    SELECT origin FROM found WHERE origin IS NOT NULL"""
_IDS_OF = "SELECT id FROM change WHERE origin = ? AND id > ? ORDER BY id LIMIT ?"
_WITH_IDS = _COLUMNS + "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id"  # noqa: S608
_COUNT_OF = "SELECT count(*) FROM (SELECT 1 FROM change WHERE origin = ? AND id > ? LIMIT ?)"
_FIRST_SINCE = "SELECT id FROM change WHERE id > ? AND id <= ? AND at_ms >= ? ORDER BY id LIMIT 1"
_BEGIN_EPOCH = """
    INSERT OR REPLACE INTO epoch
    SELECT (SELECT max(id) FROM change) + 1, ?1 WHERE NOT EXISTS(SELECT 1 FROM epoch WHERE tag = ?1)"""
_DELETE_BEFORE = "DELETE FROM change WHERE id < ?"

ChangeRows = tuple[int, Sequence[Change], Retention, str]
"""When changes are made, in milliseconds, the changes, the limits of the log, and the epoch that they begin,
`""` for none. A plain tuple, because each write makes one."""


class SqliteChangeLog:
    """A `ChangeLog` in the table `TABLE` of a database that `reader` reads and `writer` writes."""

    def __init__(
        self,
        reader: SnapshotReader,
        writer: GroupCommit,
        now_ms: Callable[[], int],
        retention: Retention,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._now_ms = now_ms
        self._retention = retention
        self._announced = 0
        # Each process begins an epoch with its first change: it cannot know what was lost before.
        self._epoch = os.urandom(4).hex()
        self._arrival = asyncio.Event()

    def rows_of(self, changes: Sequence[Change]) -> ChangeRows:
        """Return the rows that `insert_changes` writes for changes that are made now."""
        now_ms = self._now_ms()
        retention = self._retention
        if not getattr(self._now_ms, "is_stable", True):  # the age at this reading of the clock
            retention = replace(retention, age_ms=now_ms, removals_ms=now_ms)
        return now_ms, changes, retention, "" if self._announced else self._epoch

    def notify(self, last: int) -> None:
        """Wake all waiting readers. `last` is the id of a committed change, or 0 for none."""
        if last > self._announced:
            self._announced = last
            self._arrival.set()

    async def append(self, changes: Sequence[Change]) -> str:
        """See `ChangeLog.append`."""
        id_ = await self._writer.submit(append, self.rows_of(changes))
        self.notify(split_id(id_)[0])
        return id_

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        """See `ChangeLog.read`."""
        # In one tick of the event loop, and so in one snapshot.
        start, newest, _ = self._bounds(after)
        if start is None:
            return None
        return _read(self._reader.rows(_AFTER, start, limit) if start < newest else [])

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        """See `ChangeLog.read_matching`."""
        start, newest, epoch = self._bounds(after)
        if start is None:
            return None
        origins, others = self._origins(written_by)
        if not others:
            found = self._reader.rows(_AFTER, start, limit)
        else:
            ids = sorted(
                id_ for origin in origins for (id_,) in self._reader.rows(_IDS_OF, origin, start, limit)
            )
            found = self._reader.rows(_WITH_IDS, json.dumps(ids[:limit]))
        changes, is_end = _read(found), len(found) < limit
        last = change_id(newest, epoch) if is_end else changes[-1][0]
        return ChangePage(changes, last, is_end, len(found))

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        """See `ChangeLog.count_after`."""
        start, newest, _ = self._bounds(after)
        if start is None:
            return 0
        if newest - start <= most:
            return newest - start
        origins, others = self._origins(written_by)
        if not others:
            return most + 1
        count = 0
        for origin in origins:
            ((some,),) = self._reader.rows(_COUNT_OF, origin, start, most + 1 - count)
            count += some
        return count

    async def newest(self, limit: int) -> list[tuple[str, Change]]:
        """See `ChangeLog.newest`."""
        return [entry for entry in _read(self._reader.rows(_NEWEST, limit)) if not entry[1].is_erased]

    async def last_id(self) -> str:
        """See `ChangeLog.last_id`."""
        return change_id(*self._reader.rows(LAST)[0])

    async def erase(self, changes: Mapping[str, Change]) -> None:
        """See `ChangeLog.erase`."""
        await self._writer.submit(
            _erase, [(*change[:2], split_id(id_)[0]) for id_, change in changes.items()]
        )

    async def begin_epoch(self) -> None:
        """See `ChangeLog.begin_epoch`."""
        self.notify(await self._writer.submit(begin_anew))

    async def wait_for_change(self, after: str) -> None:
        """See `ChangeLog.wait_for_change`."""
        seen = -1
        for _ in range(round(WAIT_S / POLL_S)):
            if after < change_id(self._announced, ""):
                return
            version = self._reader.version()
            if version != seen and after < await self.last_id():
                return
            seen = version
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._arrival.wait()

    def _bounds(self, after: str) -> tuple[int | None, int, str]:
        """Return the row of the position of a cursor, None if changes after it are gone, and the newest row
        and its epoch."""
        try:
            position, _, latest = Cursor.parse(after) if after else ("", "", "")
        except ValueError:
            position = latest = "-"
        ((oldest, newest, epoch, is_issued),) = self._reader.rows(BOUNDS, *split_id(latest))
        start = split_id(position)[0] if after else oldest
        return start if not after or (is_issued and oldest <= start) else None, newest, epoch

    def _origins(self, written_by: OriginFilter) -> tuple[list[str], list[str]]:
        """Return the stored origins: those that `written_by` selects, and the others."""
        origins = [origin for (origin,) in self._reader.rows(_ORIGINS)]
        return list(filter(written_by, origins)), [each for each in origins if not written_by(each)]


def _read(rows: Sequence[Any]) -> list[tuple[str, Change]]:
    return [(change_id(id_, epoch), Change(*columns)) for id_, epoch, *columns in rows]


def append(cursor: sqlite3.Cursor, rows: ChangeRows) -> str:
    """Insert changes, at least one, and return the id of the last."""
    insert_changes(cursor, rows)
    return change_id(*cursor.execute(LAST).fetchone())


def insert_changes(cursor: sqlite3.Cursor, rows: ChangeRows) -> int:
    """Insert changes, in the transaction of the write that they announce. Returns the id of the last one; 0
    if there are none."""
    now_ms, changes, retention, epoch = rows
    if not changes:
        return 0
    if epoch:
        cursor.execute(_BEGIN_EPOCH, (epoch,))
    for change in changes:
        cursor.execute(_INSERT, (now_ms, *change))
    last = cursor.lastrowid
    assert last is not None
    if last % TRIM_EVERY < len(changes):
        _trim(cursor, last, 2 * max(TRIM_EVERY, len(changes)), now_ms, retention)
    return last


def begin_anew(cursor: sqlite3.Cursor) -> int:
    """Delete all changes and epochs. Leave one row, which is never delivered, and return it."""
    cursor.execute(_INSERT, (0, b"", "", ""))
    last = cursor.lastrowid
    assert last is not None
    cursor.execute(_DELETE_BEFORE, (last,))
    cursor.execute("DELETE FROM epoch")
    cursor.execute("INSERT INTO epoch VALUES(0, ?)", (os.urandom(4).hex(),))
    return last


def probe(cursor: sqlite3.Cursor) -> None:
    """Insert a change and delete it again, to find out if the table is writable."""
    cursor.execute(_INSERT, (0, b"", "", ""))
    cursor.execute("DELETE FROM change WHERE id = ?", (cursor.lastrowid,))


def _erase(cursor: sqlite3.Cursor, rows: Sequence[tuple[bytes, str, int]]) -> None:
    """Replace texts and writers of rows. The oldest row, which is never delivered, loses both."""
    cursor.executemany("UPDATE change SET text = ?, identity = ? WHERE id = ?", rows)
    cursor.execute("UPDATE change SET text = x'', identity = '' WHERE id = (SELECT min(id) FROM change)")


def _trim(cursor: sqlite3.Cursor, newest: int, most: int, now_ms: int, retention: Retention) -> None:
    """Delete at most `most` of the oldest changes that need not be kept."""
    ((oldest,),) = cursor.execute("SELECT min(id) FROM change").fetchall()
    end = min(oldest + most, newest)
    young = cursor.execute(_FIRST_SINCE, (oldest, end, now_ms - retention.age_ms)).fetchone()
    last_old = end if young is None else young[0] - 1
    cursor.execute(_DELETE_BEFORE, (min(max(last_old, newest - retention.count), end),))
