"""The coordinator of all processes on one machine, in a folder.

DIR/coordinator.db   counters, claims and the log of changes, in SQLite
DIR/nonces/          replay memory (`replay.py`): on the path of every signed request, too hot for SQLite
"""

import asyncio
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from pysync.clock import wall_clock_ms
from pysync.coordinator import CHANGES_KEPT, MAX_LIVE_NONCES, Window, window_end_ms
from pysync.coordinator.replay import ReplayLedgers
from pysync.errors import CoordinatorUnavailable
from pysync.sqlite import (
    GroupCommit,
    Schema,
    connect_writer,
    create_database,
    create_folder,
)

SCHEMA: Final = Schema(
    2,
    """
    CREATE TABLE IF NOT EXISTS counter(
        bucket TEXT NOT NULL,
        window_ms INTEGER NOT NULL,
        ends_ms INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY(bucket, window_ms)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS counter_end ON counter(ends_ms);
    CREATE TABLE IF NOT EXISTS claim(key TEXT PRIMARY KEY, expires_ms INTEGER NOT NULL, value BLOB NOT NULL);
    CREATE INDEX IF NOT EXISTS claim_expiry ON claim(expires_ms);
    CREATE TABLE change(id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
    INSERT INTO sqlite_sequence VALUES('change', strftime('%s', 'now') * 1000000)
    """,
)
"""Ids of changes begin at the microsecond: none of an earlier file in this place is taken for one of this."""

MAX_PAGES: Final = 262_144
"""A gigabyte of counters, claims and changes; beyond it writes are refused until some expire."""

SWEEP_ROWS: Final = 2
"""Expired rows that each write removes at most: twice what it adds, so that none pile up."""

_COUNT = """
    INSERT INTO counter VALUES(?, ?, ?, 1)
    ON CONFLICT(bucket, window_ms) DO UPDATE SET
        count = CASE WHEN ends_ms = excluded.ends_ms THEN count + 1 ELSE 1 END, ends_ms = excluded.ends_ms
    RETURNING count"""
_SWEEP_COUNTERS = f"""
    DELETE FROM counter WHERE (bucket, window_ms) IN (
        SELECT bucket, window_ms FROM counter WHERE ends_ms <= ? LIMIT {SWEEP_ROWS})"""  # noqa: S608
_CLAIM = """
    INSERT INTO claim VALUES(?, ?, ?)
    ON CONFLICT(key) DO UPDATE SET
        value = CASE WHEN expires_ms > ? THEN value ELSE excluded.value END,
        expires_ms = CASE WHEN expires_ms > ? THEN expires_ms ELSE excluded.expires_ms END
    RETURNING value"""
_SWEEP_CLAIMS = f"""
    DELETE FROM claim WHERE key IN (SELECT key FROM claim WHERE expires_ms <= ? LIMIT {SWEEP_ROWS})"""  # noqa: S608
_TRIM = f"DELETE FROM change WHERE id IN (SELECT id FROM change WHERE id <= ? LIMIT {SWEEP_ROWS})"  # noqa: S608

_is_change_id = re.compile("[0-9]{17}").fullmatch


class LocalCoordinator:
    """A `Coordinator` in a folder, for any number of processes. Make one with `at`."""

    def __init__(
        self,
        writer: GroupCommit,
        nonces: ReplayLedgers,
        now_ms: Callable[[], int],
        changes_kept: int,
    ) -> None:
        self._writer = writer
        self._nonces = nonces
        self._now_ms = now_ms
        self._changes_kept = changes_kept

    @classmethod
    async def at(
        cls,
        folder: str | Path,
        now_ms: Callable[[], int] = wall_clock_ms,
        max_live_nonces: int = MAX_LIVE_NONCES,
        changes_kept: int = CHANGES_KEPT,
    ) -> Self:
        """The coordinator in `folder`, created where it is missing. Raises ValueError where a newer version
        wrote it, CoordinatorUnavailable where it cannot be used."""
        try:
            writer, nonces = await asyncio.to_thread(_prepare, Path(folder), now_ms, max_live_nonces)
        except (sqlite3.Error, OSError) as error:
            raise CoordinatorUnavailable(f"cannot open the coordinator in {folder}: {error}") from error
        return cls(GroupCommit(writer, CoordinatorUnavailable), nonces, now_ms, changes_kept)

    async def remember_nonce(self, presenter: str, nonce: str, signed_ms: int) -> bool:
        return await self._nonces.remember(presenter, nonce)

    async def count(self, bucket: str, window_ms: int) -> Window:
        return await self._writer.submit(_count, bucket, window_ms, self._now_ms)

    async def claim(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        return await self._writer.submit(_claim, key, value, ttl_ms, self._now_ms)

    async def announce(self, change: bytes) -> str:
        return f"{await self._writer.submit(_announce, change, self._changes_kept):017d}"

    async def changes(self, after: str, limit: int) -> list[tuple[str, bytes]] | None:
        if after and not _is_change_id(after):
            return None
        found = await self._writer.submit(_changes, int(after) if after else None, limit)
        return None if found is None else [(f"{n:017d}", change) for n, change in found]

    async def close(self) -> None:
        await self._writer.close()
        self._nonces.close()


def _prepare(
    folder: Path, now_ms: Callable[[], int], max_live_nonces: int
) -> tuple[sqlite3.Connection, ReplayLedgers]:
    folder = folder.absolute()
    create_folder(folder)
    database = folder / "coordinator.db"
    create_database(database, SCHEMA)
    # NORMAL: nothing here needs to outlive the loss of power, and the file stays whole.
    writer = connect_writer(database, "NORMAL")
    writer.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
    return writer, ReplayLedgers(folder / "nonces", now_ms, max_live_nonces)


def _count(cursor: sqlite3.Cursor, bucket: str, window_ms: int, clock: Callable[[], int]) -> Window:
    # The clock is read here, in the order of the writes: at a window's end no count falls back into the old.
    now_ms = clock()
    cursor.execute(_SWEEP_COUNTERS, (now_ms,))
    ends_ms = window_end_ms(now_ms, window_ms)
    ((count,),) = cursor.execute(_COUNT, (bucket, window_ms, ends_ms)).fetchall()
    return Window(count, ends_ms - now_ms)


def _claim(cursor: sqlite3.Cursor, key: str, value: bytes, ttl_ms: int, clock: Callable[[], int]) -> bytes:
    now_ms = clock()
    cursor.execute(_SWEEP_CLAIMS, (now_ms,))
    ((held,),) = cursor.execute(_CLAIM, (key, now_ms + ttl_ms, value, now_ms, now_ms)).fetchall()
    return bytes(held)


def _announce(cursor: sqlite3.Cursor, change: bytes, kept: int) -> int:
    ((n,),) = cursor.execute("INSERT INTO change(body) VALUES(?) RETURNING id", (change,)).fetchall()
    cursor.execute(_TRIM, (n - kept,))
    return int(n)


def _changes(cursor: sqlite3.Cursor, after: int | None, limit: int) -> list[tuple[int, bytes]] | None:
    if after is not None:
        ((is_kept,),) = cursor.execute(
            "SELECT EXISTS(SELECT 1 FROM change WHERE id = ?)", (after,)
        ).fetchall()
        if not is_kept:
            return None
    query = "SELECT id, body FROM change WHERE id > ? ORDER BY id LIMIT ?"
    return cursor.execute(query, (after or 0, limit)).fetchall()
