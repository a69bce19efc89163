"""The coordinator of all processes on one machine, in a folder.

DIR/coordinator.db   counters, idempotency records, the change log, prepared writes and the last timestamp
DIR/nonces/          the nonce log (`nonce_log.py`): on the path of every signed request, too hot for SQLite
DIR/leads/<name>     leases (`LeaseFiles`)
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

import orjson

from pysync.changelog import Change, Retention, split_id
from pysync.clock import HybridTimestamp, boot_id, elapsed_of, wall_clock_ms
from pysync.coordinator.nonce_log import NonceLog
from pysync.coordinator.protocol import LEASE_MS, MAX_LIVE_NONCES, PreparedWrite, Standing, window_end_ms
from pysync.errors import CoordinatorUnavailable
from pysync.model import Diagnosis, Observe, unobserved
from pysync.sqlite import changelog
from pysync.sqlite.changelog import ChangeRows, SqliteChangeLog
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import (
    Database,
    Schema,
    make_private_dir,
    open_database,
    purge_database,
    reason_of,
)

log = logging.getLogger(__name__)

SCHEMA: Final = Schema(
    (
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
        "CREATE TABLE change(id INTEGER PRIMARY KEY)",  # in another form, which was never read
        f"""
        DROP TABLE change;
        {changelog.TABLE};
        CREATE TABLE intent(
            id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, changes BLOB NOT NULL
        );
        CREATE TABLE boot(id TEXT NOT NULL);
        INSERT INTO boot VALUES('')
        """,
        """
        CREATE TABLE tick(ms INTEGER NOT NULL, number INTEGER NOT NULL);
        INSERT INTO tick VALUES(0, 0)
        """,
        changelog.ADD_ORIGIN_SQL,
        changelog.ADD_EPOCHS_SQL,
    )
)

MAX_PAGES: Final = 262_144
CHANGES_PER_PAGE: Final = 4
"""A gigabyte of counters, claims and prepared writes, and a kilobyte for each retained change. Beyond it
writes are refused until some expire."""

SWEEP_ROWS: Final = 2
"""Expired rows that each write removes at most: twice what it adds, so that none pile up."""

_COUNT = """
    INSERT INTO counter VALUES(?, ?, ?, ?)
    ON CONFLICT(bucket, window_ms) DO UPDATE SET
        count = CASE WHEN ends_ms = excluded.ends_ms THEN count ELSE 0 END + excluded.count,
        ends_ms = excluded.ends_ms
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
_PREPARED = "SELECT id, at_ms, changes FROM intent ORDER BY id LIMIT ?"
_PROBES = (
    "INSERT INTO counter VALUES('', 0, 0, 0)",
    "DELETE FROM counter WHERE bucket = '' AND window_ms = 0",
    "INSERT INTO claim VALUES('', 0, x'')",
    "DELETE FROM claim WHERE key = ''",
    "INSERT INTO intent(id, at_ms, changes) VALUES(-1, 0, x'')",
    "DELETE FROM intent WHERE id = -1",
)


class LocalCoordinator(SqliteChangeLog):
    """A `Coordinator` in a folder, for any number of processes. Make one with `open_folder`."""

    def __init__(
        self,
        database: Database,
        nonces: NonceLog,
        leases: "LeaseFiles",
        now_ms: Callable[[], int],
        retention: Retention,
        observe: Observe,
    ) -> None:
        reader = SnapshotReader(database, CoordinatorUnavailable)
        writer = GroupCommit(database, CoordinatorUnavailable, None, observe, "coordinator")
        super().__init__(reader, writer, now_ms, retention)
        self.consume_nonce: Final = nonces.consume
        """See `Coordinator.consume_nonce`."""
        self._database = database.file
        self._nonces = nonces
        self._leases = leases
        self._is_closed = False

    @classmethod
    async def open_folder(
        cls,
        folder: str | Path,
        now_ms: Callable[[], int] = wall_clock_ms,
        max_live_nonces: int = MAX_LIVE_NONCES,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        observe: Observe = unobserved,
    ) -> Self:
        """Return the coordinator in `folder`, which is created if it is missing. Raises ValueError if a newer
        version wrote it, and CoordinatorUnavailable if it cannot be used."""
        try:
            database, nonces, leases = await asyncio.to_thread(
                _prepare, Path(folder), now_ms, max_live_nonces, retention.count
            )
        except (sqlite3.Error, OSError) as error:
            reason = reason_of(error, folder)
            raise CoordinatorUnavailable(f"cannot open the coordinator in {folder}: {reason}") from error
        return cls(database, nonces, leases, now_ms, retention, observe)

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> int:
        """See `Coordinator.increment`."""
        return await self._writer.submit(_increment, bucket, window_ms, by, self._now_ms)

    async def put_if_absent(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        """See `Coordinator.put_if_absent`."""
        return await self._writer.submit(_put_if_absent, key, value, ttl_ms, self._now_ms)

    async def compare_and_set(self, key: str, expected: bytes, value: bytes | None) -> bool:
        """See `Coordinator.compare_and_set`."""
        return await self._writer.submit(_compare_and_set, key, expected, value)

    async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
        """See `Coordinator.append`."""
        id_ = await self._writer.submit(_append, self.rows_of(changes), prepared)
        self.notify(split_id(id_)[0])
        return id_

    async def prepare(self, changes: Sequence[Change]) -> str:
        """See `Coordinator.prepare`."""
        return str(await self._writer.submit(_insert_prepared, _texts_of(changes), self._now_ms()))

    async def abort(self, name: str) -> None:
        """See `Coordinator.abort`."""
        await self._writer.submit(_delete_prepared, name)

    async def prepared(self, limit: int) -> list[PreparedWrite]:
        """See `Coordinator.prepared`."""
        now_ms = self._now_ms()
        return [
            PreparedWrite(
                str(id_),
                now_ms - at_ms,
                [Change(text.encode(), identity) for text, identity in orjson.loads(texts)],
            )
            for id_, at_ms, texts in self._reader.rows(_PREPARED, limit)
        ]

    async def next_timestamp(self) -> HybridTimestamp:
        """See `Coordinator.next_timestamp`."""
        return await self._writer.submit(_next_timestamp, self._now_ms)

    async def forget(
        self, buckets: Callable[[str], bool], claims: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """See `Coordinator.forget`."""
        return await self._writer.submit(_forget, buckets, claims)

    async def purge_deleted(self) -> None:
        """See `Coordinator.purge_deleted`."""
        try:
            await purge_database(self._database.path)
        except (sqlite3.Error, TimeoutError) as error:
            raise CoordinatorUnavailable(f"cannot write {self._database.path} anew: {error}") from error

    async def acquire_lease(self, name: str) -> bool:
        """See `Coordinator.acquire_lease`."""
        try:
            return self._leases.acquire_lease(name)
        except OSError as error:
            raise CoordinatorUnavailable from error

    async def probe(self) -> None:
        """See `Coordinator.probe`."""
        if (fault := self._database.fault) is not None:
            raise CoordinatorUnavailable(fault)
        await self._writer.submit(_probe)
        await self.last_id()
        await self.consume_nonce("", os.urandom(8).hex(), self._now_ms(), Standing.OWNER)

    async def diagnose(self) -> Diagnosis:
        """See `Coordinator.diagnose`."""
        return Diagnosis()

    async def close(self) -> None:
        """See `Coordinator.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._writer.close()
        self._reader.close()
        self._nonces.close()
        self._leases.close()


def _prepare(
    folder: Path, now_ms: Callable[[], int], max_live_nonces: int, max_changes: int
) -> tuple[Database, NonceLog, "LeaseFiles"]:
    folder = folder.absolute()
    make_private_dir(folder, may_be_link=True)
    path = folder / "coordinator.db"
    if not path.exists() and (folder / "nonces").exists():
        log.warning("%s is missing: counters, idempotency keys and announcements start empty", path)
    # NORMAL: a loss of power leaves the file intact, but may undo the last transactions.
    with ExitStack() as opened:
        database = opened.enter_context(closing(open_database(path, SCHEMA, "NORMAL")))
        boot = boot_id()
        database.writer.execute(f"PRAGMA max_page_count = {MAX_PAGES + max_changes // CHANGES_PER_PAGE}")
        _reset_after_reboot(database.writer, boot)
        nonces = NonceLog(folder / "nonces", now_ms, max_live_nonces, boot, database.file)
        opened.pop_all()
    return database, nonces, LeaseFiles(folder / "leads", elapsed_of(now_ms))


def _reset_after_reboot(writer: sqlite3.Connection, boot: str) -> None:
    """Restart the change log if the machine was restarted since the folder was last opened. Its newest rows
    and prepared writes may have been lost with the power, so followers must reset."""
    writer.execute("BEGIN IMMEDIATE")
    if writer.execute("SELECT id FROM boot").fetchone() != (boot,):
        writer.execute("UPDATE boot SET id = ?", (boot,))
        changelog.begin_anew(writer.cursor())
    writer.execute("COMMIT")


def _increment(cursor: sqlite3.Cursor, bucket: str, window_ms: int, by: int, clock: Callable[[], int]) -> int:
    # The clock is read here, in the order of the writes: at a window's end no count falls back into the old.
    now_ms = clock()
    cursor.execute(_SWEEP_COUNTERS, (now_ms,))
    ends_ms = window_end_ms(now_ms, window_ms)
    ((count,),) = cursor.execute(_COUNT, (bucket, window_ms, ends_ms, by)).fetchall()
    return int(count)


def _put_if_absent(
    cursor: sqlite3.Cursor, key: str, value: bytes, ttl_ms: int, clock: Callable[[], int]
) -> bytes:
    now_ms = clock()
    cursor.execute(_SWEEP_CLAIMS, (now_ms,))
    ((held,),) = cursor.execute(_CLAIM, (key, now_ms + ttl_ms, value, now_ms, now_ms)).fetchall()
    return bytes(held)


def _compare_and_set(cursor: sqlite3.Cursor, key: str, expected: bytes, value: bytes | None) -> bool:
    if value is None:
        cursor.execute("DELETE FROM claim WHERE key = ? AND value = ?", (key, expected))
    else:
        cursor.execute("UPDATE claim SET value = ? WHERE key = ? AND value = ?", (value, key, expected))
    return cursor.rowcount == 1


def _forget(
    cursor: sqlite3.Cursor, buckets: Callable[[str], bool], claims: Callable[[bytes], bool]
) -> tuple[int, int]:
    counted = cursor.execute("SELECT bucket, window_ms FROM counter").fetchall()
    counters = [key for key in counted if buckets(key[0])]
    held = cursor.execute("SELECT key, value FROM claim").fetchall()
    keys = [(key,) for key, value in held if claims(bytes(value))]
    cursor.executemany("DELETE FROM counter WHERE bucket = ? AND window_ms = ?", counters)
    cursor.executemany("DELETE FROM claim WHERE key = ?", keys)
    return len(counters), len(keys)


def _texts_of(changes: Sequence[Change]) -> bytes:
    return orjson.dumps([(change.text.decode(), change.identity) for change in changes])


def _insert_prepared(cursor: sqlite3.Cursor, changes: bytes, now_ms: int) -> int:
    cursor.execute("INSERT INTO intent(at_ms, changes) VALUES(?, ?)", (now_ms, changes))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _append(cursor: sqlite3.Cursor, rows: ChangeRows, prepared: str) -> str:
    if prepared:
        _delete_prepared(cursor, prepared)
    return changelog.append(cursor, rows)


def _delete_prepared(cursor: sqlite3.Cursor, prepared: str) -> None:
    cursor.execute("DELETE FROM intent WHERE id = ?", (prepared,))


def _probe(cursor: sqlite3.Cursor) -> None:
    """Write what requests write, and take it back."""
    for statement in _PROBES:
        cursor.execute(statement)
    changelog.probe(cursor)


def _next_timestamp(cursor: sqlite3.Cursor, clock: Callable[[], int]) -> HybridTimestamp:
    tick = HybridTimestamp(*cursor.execute("SELECT ms, number FROM tick").fetchone()).next(clock())
    cursor.execute("UPDATE tick SET ms = ?, number = ?", tick)
    return tick


class LeaseFiles:
    """The leases that this process holds, of all processes that share `folder`. Raises OSError.

    Each lease is a file that its holder locks, and touches at each renewal. The kernel releases the lock of a
    process that ends, so that another acquires the lease at once. A process that hangs keeps its lock. Once
    its file is older than a lease, another process replaces the file, and the process that hung finds at its
    next renewal that its file is gone.
    """

    def __init__(self, folder: Path, elapsed_ms: Callable[[], int]) -> None:
        make_private_dir(folder)
        self._folder = folder
        self._elapsed_ms = elapsed_ms
        self._leases: dict[str, int] = {}

    def acquire_lease(self, name: str) -> bool:
        """Acquire or renew the lease for `LEASE_MS`; return True if this process holds it. Raises OSError."""
        path = self._folder / quote(name, safe="")
        if name in self._leases and not _is_same_file(path, self._leases[name]):
            os.close(self._leases.pop(name))
        if name not in self._leases:
            lock = self._try_lock(path)
            if lock is None:
                return False
            self._leases[name] = lock
        now_ns = self._elapsed_ms() * 1_000_000
        os.utime(self._leases[name], ns=(now_ns, now_ns))
        return True

    def close(self) -> None:
        """Release all leases."""
        for lock in self._leases.values():
            os.close(lock)
        self._leases.clear()

    def _try_lock(self, path: Path) -> int | None:
        """Return the file at `path`, locked by this process; None while another process holds the lease."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hangs = os.fstat(lock).st_mtime_ns // 1_000_000 + LEASE_MS < self._elapsed_ms()
            if hangs and _is_same_file(path, lock):
                path.unlink()
            os.close(lock)
            return self._try_lock(path) if hangs else None
        if _is_same_file(path, lock):
            return lock
        os.close(lock)
        return None


def _is_same_file(path: Path, lock: int) -> bool:
    """Return True if the open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
