"""SQLite as pysync uses it: connections opened one way, and writes committed in groups by one thread.

A commit that reaches the disk costs about a millisecond, a statement some microseconds: so all writes that
wait at one moment share a transaction, and its outcome reaches the event loop in one call.
"""

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

from pysync.errors import Unavailable
from pysync.sqlite.database_file import DatabaseFile

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BUSY_TIMEOUT_MS: Final = 5_000
"""How long a write waits for another process's transaction before it is refused."""

READ_BUSY_TIMEOUT_MS: Final = 100
"""Readers of a WAL database wait only while another process recovers it; they run on the event loop."""

MAX_WAITING: Final = 4_096
"""Writes that may wait at once; one more is refused rather than queued."""

CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two checks that an idle database is still at its path."""

_DATABASE_AND_WAL: Final = 2

_STATEMENT_ERRORS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)
"""Errors of one statement, after which the transaction still stands."""


class Schema(NamedTuple):
    """The tables of a database file, as they came to be: each step is the statements that bring a file of the
    version before it to the next, the first of them a new file. A file's version is in its `user_version`."""

    steps: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.steps)


def make_private_dir(path: Path, *, may_be_link: bool = False) -> None:
    """Make `path` and its parents, closed to other users. Raises OSError, also for a symbolic link, unless it
    may be one."""
    if not may_be_link and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not path.is_dir():
        make_private_dir(path.parent, may_be_link=True)  # `parents` of mkdir would leave them open to others
        path.mkdir(mode=0o700, exist_ok=True)


class Database(NamedTuple):
    """An open database: `reader` is for the event loop, `writer` for `GroupCommit`."""

    reader: sqlite3.Connection
    writer: sqlite3.Connection
    file: DatabaseFile
    is_durable: bool = True
    """True if commits survive the loss of power."""


def open_database(path: Path, schema: Schema, synchronous: str, traces: Sequence[Path] = ()) -> Database:
    """`create_database`, and open it. `synchronous` is SQLite's: FULL survives the loss of power."""
    create_database(path, schema, traces)
    file = DatabaseFile(path)
    reader, writer = connect_reader(path), connect_writer(path, synchronous)
    for connection in (reader, writer):
        connection.execute("SELECT 1 FROM sqlite_master").fetchall()  # opens the files beside
    real = os.path.realpath(path)  # SQLite has them beside the file that a link leads to
    file.watch(Path(f"{real}-wal"), Path(f"{real}-shm"))
    file.check()
    return Database(reader, writer, file, is_durable=synchronous == "FULL")


def create_database(path: Path, schema: Schema, traces: Sequence[Path] = ()) -> None:
    """Bring the file at `path` to `schema`, in any number of processes at once: all steps that it lacks, or
    none.

    Raises ValueError if a newer version wrote it, or if it is gone although one of `traces`, which are made
    after it, exists; sqlite3.Error or OSError if it cannot be used.
    """
    # Turning a database to WAL ignores the busy timeout, so that step needs a lock of its own.
    with open(path.with_suffix(".lock"), "ab", opener=_open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or not path.stat().st_size:
            _check_is_new(path, traces)
            # Only a new file: closing one ends the locks that this process has on it.
            open(path, "ab", opener=_open_private).close()
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > schema.version:
                raise ValueError(
                    f"{path} has schema {version}, and this version of pysync knows {schema.version}: "
                    "it was written by a newer one"
                )
            if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise ValueError(
                    f"{path} has tables and no version, as what the command .dump of sqlite3 writes: give it "
                    f"that of the original, with PRAGMA user_version = {schema.version} if this version of "
                    "pysync is the version that wrote it"
                )
            if version < schema.version:
                connection.execute("PRAGMA journal_mode = WAL")
                steps = ";".join(schema.steps[version:])
                connection.executescript(
                    f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {schema.version}; COMMIT;"
                )
        finally:
            connection.close()
        fsync_dir(path.parent)
        fsync_dir(path.parent.parent)


def _check_is_new(path: Path, traces: Sequence[Path]) -> None:
    for trace in traces:
        if trace.exists():
            raise ValueError(
                f"{path} is missing or empty, but {trace} is there, which was made with it: put the database "
                f"back, or restore it from a backup. To begin with an empty store, move {path.parent} away"
            )


def _open_private(path: str, flags: int) -> int:
    """Open a file that other users cannot read, whatever its folder; not through a symbolic link. SQLite
    gives its own files the same mode."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def fsync_dir(path: str | Path) -> None:
    """Make the names in a folder survive the loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection for short reads on the event loop's thread."""
    connection = _connect(path, READ_BUSY_TIMEOUT_MS)
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect_writer(path: Path, synchronous: str) -> sqlite3.Connection:
    """A connection for `GroupCommit`. `synchronous` is SQLite's: FULL survives the loss of power."""
    connection = _connect(path, BUSY_TIMEOUT_MS)
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _connect(path: Path, busy_timeout_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=busy_timeout_ms / 1000, check_same_thread=False
    )
    connection.execute("PRAGMA cache_size = -8192")
    return connection


def as_unavailable(error: BaseException, unavailable: type[Unavailable]) -> Unavailable:
    """The error that a caller gets when the database fails."""
    refused = unavailable()
    refused.__cause__ = error
    return refused


class SnapshotReader:
    """Short reads on the event loop's thread. The reads of one turn of the loop share one transaction: taking
    and releasing a snapshot costs two system calls, as much as a lookup itself.

    A read is never stale. Whatever a commit leads to on this loop, be it the result of a write of ours or a
    request of somebody who heard of one, is called in a later turn, and the snapshot ends before.
    """

    def __init__(self, database: Database) -> None:
        self._file = database.file
        self._connection = connection = database.reader
        self._cursor = connection.cursor()
        self._loop = asyncio.get_running_loop()
        self._version: int | None = None
        self._closed = False

    def version(self) -> int:
        """A number that stays the same while nobody, in any process, commits. Raises sqlite3.Error."""
        version = self._version
        if version is None:
            self._file.raise_if_moved()
            try:
                self._cursor.execute("BEGIN")
                self._loop.call_soon(self._end_snapshot)
                (version,) = self._cursor.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error as error:
                self._file.record_error(error)
                raise
            self._version = version
        return version

    def rows(self, statement: str, args: tuple[Any, ...]) -> list[Any]:
        """All rows of a query. Raises sqlite3.Error."""
        self.version()
        try:
            return self._cursor.execute(statement, args).fetchall()
        except sqlite3.Error as error:
            self._file.record_error(error)
            raise

    def close(self) -> None:
        """End the transaction and close the connection."""
        if not self._closed:
            self._end_snapshot()
            self._closed = True
            self._cursor.close()
            self._connection.close()

    def _end_snapshot(self) -> None:
        self._version = None
        if self._closed or not self._connection.in_transaction:
            return
        try:
            self._cursor.execute("COMMIT")
        except sqlite3.Error as error:  # after damage was met
            self._file.record_error(error)
            with suppress(sqlite3.Error):
                self._connection.rollback()


class CommitHooks(Protocol):
    """What is done once for all writes of a group, in the thread that commits them."""

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        """Called in the transaction, before its commit. Raises sqlite3.Error or OSError to undo the group."""

    def after_commit(self) -> None:
        """Called before anybody is told. Raises nothing."""

    def after_rollback(self) -> None:
        """Called where the group was not committed, or nobody knows."""


class _Write(NamedTuple):
    future: asyncio.Future[Any]
    work: Callable[..., Any]
    args: tuple[Any, ...]


class _Outcome(NamedTuple):
    future: asyncio.Future[Any]
    value: Any
    error: BaseException | None


class GroupCommit:
    """Writes to one database, each durable (as its connection is set) once its future has a result.

    A write is a function of a cursor. It decides before it changes anything: an exception of its own reaches
    its caller and leaves its neighbours alone. Where the database fails, the whole group gets `unavailable`.
    """

    def __init__(
        self,
        database: Database,
        unavailable: type[Unavailable],
        hooks: CommitHooks | None = None,
    ) -> None:
        self._file = database.file
        self._checked_at = time.monotonic()
        self._is_durable = database.is_durable
        self._connection = database.writer
        self._unavailable = unavailable
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._submitted: list[_Write] = []
        self._waiting = 0
        self._closed = False
        self._queue: SimpleQueue[list[_Write]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sqlite-writer", daemon=True)
        self._thread.start()

    def submit(self, write: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """The result of `write(cursor, *args)`, after its commit. Raises `unavailable` at once when too many
        wait. Cancelling the future only stops the waiting: the write is carried out."""
        if self._closed or self._waiting >= MAX_WAITING:
            raise self._unavailable()
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._submitted:
            # What one turn of the loop submits is handed over together, with one wake-up of the thread.
            self._loop.call_soon(self._flush)
        self._submitted.append(_Write(future, write, args))
        self._waiting += 1
        return future

    async def close(self) -> None:
        """Finish what was submitted, then close the connection."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        self._queue.put([])
        await asyncio.to_thread(self._thread.join)

    def _flush(self) -> None:
        if self._submitted:
            self._queue.put(self._submitted)
            self._submitted = []

    def _run(self) -> None:
        cursor = self._connection.cursor()
        closing = False
        while not closing:
            try:
                parts = [self._queue.get(timeout=CHECK_INTERVAL_S)]
            except Empty:
                with suppress(Exception):
                    self._check()
                continue
            while not self._queue.empty():
                parts.append(self._queue.get())
            closing = not parts[-1]
            group = [write for part in parts for write in part]
            if group:
                outcomes = self._commit(cursor, group)
                self._loop.call_soon_threadsafe(self._resolve, outcomes)
        cursor.close()
        self._connection.close()

    def _commit(self, cursor: sqlite3.Cursor, group: list[_Write]) -> list[_Outcome]:
        try:
            if time.monotonic() - self._checked_at > CHECK_INTERVAL_S:
                self._check()
            cursor.execute("BEGIN IMMEDIATE")
            outcomes = [self._attempt(cursor, write) for write in group]
            if self._hooks is not None:
                self._hooks.before_commit(cursor)
            cursor.execute("COMMIT")
            if self._is_durable:
                # After the commit: what is acknowledged was in the files at their paths.
                self._file.check(_DATABASE_AND_WAL)
        except BaseException as error:  # a panic of the core is no Exception: whoever waits is told anyway
            self._file.record_error(error)
            if not isinstance(error, (sqlite3.Error, OSError)):
                log.exception("a group of writes failed unexpectedly")
            self._roll_back()
            return [_Outcome(write.future, None, as_unavailable(error, self._unavailable)) for write in group]
        if self._hooks is not None:
            try:
                self._hooks.after_commit()
            except BaseException:
                log.exception("a callback after a commit failed unexpectedly")
        return outcomes

    def _roll_back(self) -> None:
        try:
            try:
                if self._connection.in_transaction:
                    self._connection.rollback()
            finally:
                if self._hooks is not None:
                    self._hooks.after_rollback()
        except BaseException:
            log.exception("a group of writes cannot be undone")

    def _check(self) -> None:
        self._file.check()
        self._checked_at = time.monotonic()

    @staticmethod
    def _attempt(cursor: sqlite3.Cursor, write: _Write) -> _Outcome:
        try:
            return _Outcome(write.future, write.work(cursor, *write.args), None)
        except _STATEMENT_ERRORS as error:
            return _Outcome(write.future, None, error)
        except sqlite3.Error:
            raise
        except StopIteration as error:  # which no future takes
            return _Outcome(write.future, None, RuntimeError(repr(error)))
        except Exception as error:
            return _Outcome(write.future, None, error)

    def _resolve(self, outcomes: list[_Outcome]) -> None:
        self._waiting -= len(outcomes)
        for future, value, error in outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
