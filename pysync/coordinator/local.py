"""The coordinator of all processes on one machine, in a folder.

DIR/coordinator.db   counters and claims, in SQLite
DIR/nonces/          replay memory (`replay.py`): on the path of every signed request, too hot for SQLite
"""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from pysync.clock import wall_clock_ms
from pysync.coordinator import MAX_LIVE_NONCES, Window, window_end_ms
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
    1,
    """
    CREATE TABLE counter(
        bucket TEXT NOT NULL,
        window_ms INTEGER NOT NULL,
        ends_ms INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY(bucket, window_ms)
    ) WITHOUT ROWID;
    CREATE INDEX counter_end ON counter(ends_ms);
    CREATE TABLE claim(key TEXT PRIMARY KEY, expires_ms INTEGER NOT NULL, value BLOB NOT NULL);
    CREATE INDEX claim_expiry ON claim(expires_ms)
    """,
)

MAX_PAGES: Final = 262_144
"""A gigabyte of counters and claims; beyond it writes are refused until some expire."""

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


class LocalCoordinator:
    """A `Coordinator` in a folder, for any number of processes. Make one with `at`."""

    def __init__(
        self,
        writer: GroupCommit,
        nonces: ReplayLedgers,
        now_ms: Callable[[], int],
    ) -> None:
        self._writer = writer
        self._nonces = nonces
        self._now_ms = now_ms

    @classmethod
    async def at(
        cls,
        folder: str | Path,
        now_ms: Callable[[], int] = wall_clock_ms,
        max_live_nonces: int = MAX_LIVE_NONCES,
    ) -> Self:
        """The coordinator in `folder`, created where it is missing. Raises ValueError where a newer version
        wrote it, CoordinatorUnavailable where it cannot be used."""
        try:
            writer, nonces = await asyncio.to_thread(_prepare, Path(folder), now_ms, max_live_nonces)
        except (sqlite3.Error, OSError) as error:
            raise CoordinatorUnavailable(f"cannot open the coordinator in {folder}: {error}") from error
        return cls(GroupCommit(writer, CoordinatorUnavailable), nonces, now_ms)

    async def remember_nonce(self, presenter: str, nonce: str) -> bool:
        return await self._nonces.remember(presenter, nonce)

    async def count(self, bucket: str, window_ms: int) -> Window:
        return await self._writer.submit(_count, bucket, window_ms, self._now_ms)

    async def claim(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        return await self._writer.submit(_claim, key, value, ttl_ms, self._now_ms)

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
