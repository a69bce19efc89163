"""Open SQLite databases: short reads on the event loop, and writes that one thread commits in groups.

A commit that reaches the disk takes about a millisecond, a statement some microseconds. All writes that wait
at one moment therefore share a transaction, and their results reach the event loop in one call.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

from pysync.concurrency import MAX_WAITING, MAX_WAITING_BYTES, GroupSize
from pysync.errors import Unavailable
from pysync.model import Observe, unobserved
from pysync.sqlite import database_file
from pysync.sqlite.database_file import CHECK_INTERVAL_S, DATABASE_ERRORS, Database

log = logging.getLogger("pysync.sqlite")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STALLED_S: Final = 10.0
"""Seconds that a group may take to commit. Beyond it the disk hangs, or another process holds the lock, and
writes are rejected rather than queued, until the group is done."""

BUSY_RETRY_S: Final = 0.000_3
"""Seconds between two attempts to begin a group while another process writes. That one is done after a flush,
and may begin its next group soon. SQLite would sleep for 1, 2, 5, 10 and more milliseconds."""
MAX_BUSY_RETRY_S: Final = 0.005
BUSY_RETRY_SHARE: Final = 64
"""One that takes longer than a flush does is asked less often: a group waits for as long as it has waited,
divided by this, up to `MAX_BUSY_RETRY_S`."""

_DATABASE_AND_WAL: Final = 2

_STATEMENT_ERRORS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)
"""Errors of one statement that leave the transaction intact."""


class SnapshotReader:
    """Short reads on the thread of the event loop. The reads of one tick of the loop share one transaction,
    because to take and release a snapshot costs two system calls, as much as a lookup itself.

    A read is never stale. Anything that follows from a commit on this loop, such as the result of a write or
    a request from a client that was notified of one, runs in a later tick, and the snapshot ends before that.
    """

    def __init__(self, database: Database, unavailable: type[Unavailable]) -> None:
        self._file = database.file
        self._unavailable = unavailable
        self._connection = connection = database.reader
        self._cursor = connection.cursor()
        self._loop = asyncio.get_running_loop()
        self._version: int | None = None
        self._closed = False

    def version(self) -> int:
        """Return a number that stays the same until a process commits. Begins the transaction of this tick
        if it has not begun. Raises `unavailable`."""
        version = self._version
        if version is None:
            try:
                if self._file.moved:
                    self._file.raise_if_moved()
                if self._connection.in_transaction:  # an earlier error left it open
                    self._connection.rollback()
                self._cursor.execute("BEGIN")
                self._loop.call_soon(self._end_snapshot)
                (version,) = self._cursor.execute("PRAGMA data_version").fetchone()
            except DATABASE_ERRORS as error:
                self._file.record_error(error)
                raise self._unavailable() from error
            self._version = version
        return version

    def rows(self, statement: str, *args: Any) -> list[Any]:
        """Return all rows of a query. Raises `unavailable`."""
        self.version()
        try:
            return self._cursor.execute(statement, args).fetchall()
        except DATABASE_ERRORS as error:
            self._file.record_error(error)
            raise self._unavailable() from error

    def iterate(self, statement: str, *args: Any) -> Iterator[Any]:
        """Yield the rows of a query, each read when it is asked for. The caller takes them in one tick of the
        loop, before the next query, and may leave some. Raises as `rows`."""
        self.version()
        try:
            for row in self._cursor.execute(statement, args):  # noqa: UP028 (it would close the cursor)
                yield row
        except DATABASE_ERRORS as error:
            self._file.record_error(error)
            raise self._unavailable() from error

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
        except DATABASE_ERRORS as error:  # after damage was found
            self._file.record_error(error)
            with suppress(*DATABASE_ERRORS):
                self._connection.rollback()


class CommitHooks(Protocol):
    """Work that is done once for all writes of a group, in the thread that commits them."""

    @property
    def has_work(self) -> bool:
        """False if there is nothing to do for the writes so far. `before_commit` and `after_commit` are not
        called then."""

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        """Called in the transaction, before its commit. Raises sqlite3.Error or OSError to undo the group."""

    def after_commit(self) -> None:
        """Called before the results of the writes are delivered. Must not raise."""

    def after_rollback(self) -> None:
        """Called if the group was not committed, or its outcome is unknown."""


# Plain tuples, because a named one takes several times as long to make.
_Write = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], int]
"""The future result of a write, its function of a cursor, further arguments, and its size in bytes."""
_Outcome = Any
"""The value of a write, or its `_Failure`."""


class _Failure:
    """The error of a write."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class GroupCommit:
    """Writes to one database. Each is durable, to the degree that its connection is set to, once its future
    has a result.

    A write is a function of a cursor. It must decide before it changes anything: an exception of its own goes
    to its caller only, and the other writes of the group are committed. If the database fails, all writes of
    the group get `unavailable`. `observe` gets the time and the size of each group, as of this `part`.
    """

    def __init__(
        self,
        database: Database,
        unavailable: type[Unavailable],
        hooks: CommitHooks | None = None,
        observe: Observe = unobserved,
        part: str = "store",
    ) -> None:
        self._file = database.file
        self._checked_at = time.monotonic()
        self._is_durable = database.is_durable
        self._connection = database.writer
        self._connection.execute("PRAGMA busy_timeout = 0")  # `_begin` waits
        self._unavailable = unavailable
        self._hooks = hooks
        self._observe, self._part = observe, part
        self._loop = asyncio.get_running_loop()
        self._submitted: list[_Write] = []
        self._group_size = GroupSize()
        self._waiting = self._waiting_bytes = 0
        self._committing_since: float | None = None
        self._closed = False
        self._queue: SimpleQueue[list[_Write]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sqlite-writer", daemon=True)
        self._thread.start()

    def submit(
        self, write: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts, size: int = 0
    ) -> asyncio.Future[T]:
        """Return the future result of `write(cursor, *args)`, which is set after its commit. `size` is the
        number of bytes that it keeps in memory. Raises `unavailable` at once if too many writes wait, or the
        current ones hang. Cancelling the future stops only the waiting: the write is still made."""
        if self._closed or self._waiting >= MAX_WAITING:
            raise self._unavailable()
        if self._waiting:
            if self._waiting_bytes + size > MAX_WAITING_BYTES:
                raise self._unavailable("too many bytes wait to be written")
            since = self._committing_since
            if since is not None and time.monotonic() - since > STALLED_S:
                raise self._unavailable(f"a commit takes longer than {STALLED_S:g} s")
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._submitted:
            # The writes of some ticks of the loop go to the thread together, with one wake-up.
            self._loop.call_soon(self._flush)
        self._submitted.append((future, write, args, size))
        self._waiting += 1
        self._waiting_bytes += size
        return future

    async def close(self) -> None:
        """Finish the submitted writes, then close the connection."""
        if self._closed:
            return
        self._closed = True
        self._hand_over()
        self._queue.put([])
        await asyncio.to_thread(self._thread.join)

    def _flush(self) -> None:
        """Hand the submitted writes over, as soon as they are a group."""
        if not self._submitted or self._group_size.is_complete(len(self._submitted)):
            self._hand_over()
        else:
            self._loop.call_soon(self._flush)

    def _hand_over(self) -> None:
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
                self._committing_since = since = time.monotonic()
                outcomes = self._commit(cursor, group)
                self._committing_since = None
                seconds = time.monotonic() - since
                size = sum(size for _, _, _, size in group)
                futures = [write[0] for write in group]
                self._loop.call_soon_threadsafe(self._resolve, futures, outcomes, size, seconds)
                del futures, outcomes
            del parts, group  # while nothing is written they would keep the last bodies
        cursor.close()
        self._connection.close()

    def _commit(self, cursor: sqlite3.Cursor, group: list[_Write]) -> list[_Outcome]:
        try:
            if time.monotonic() - self._checked_at > CHECK_INTERVAL_S:
                self._check()
            _begin(cursor)
            attempt = self._attempt
            outcomes = [attempt(cursor, write, args) for _, write, args, _ in group]
            hooks = self._hooks if self._hooks is not None and self._hooks.has_work else None
            if hooks is not None:
                hooks.before_commit(cursor)
            cursor.execute("COMMIT")
            if self._is_durable:
                # Check after the commit: acknowledged writes were in the files at their paths.
                self._file.check(_DATABASE_AND_WAL)
        except (
            BaseException
        ) as error:  # a panic of the core is not an Exception, and callers still need a result
            with suppress(Exception):  # without memory even this fails, and must not end the thread
                self._file.record_error(error)
                if not isinstance(error, (sqlite3.Error, OSError)):
                    _log_failure("failed to commit a group of writes")
            self._roll_back()
            return [_Failure(self._failure(error)) for _ in group]
        if hooks is not None:
            try:
                hooks.after_commit()
            except BaseException:
                _log_failure("a hook failed after a commit")
        return outcomes

    def _failure(self, cause: BaseException) -> Unavailable:
        failure = self._unavailable()
        failure.__cause__ = cause
        return failure

    def _roll_back(self) -> None:
        try:
            try:
                if self._connection.in_transaction:
                    self._connection.rollback()
            finally:
                if self._hooks is not None:
                    self._hooks.after_rollback()
        except BaseException:
            _log_failure("failed to roll back a group of writes")

    def _check(self) -> None:
        self._file.check()
        self._checked_at = time.monotonic()

    @staticmethod
    def _attempt(cursor: sqlite3.Cursor, write: Callable[..., Any], args: tuple[Any, ...]) -> _Outcome:
        # Its frame, which an error refers to, must not have the future, which refers to the error.
        try:
            return write(cursor, *args)
        except _STATEMENT_ERRORS as error:
            return _Failure(error)
        except DATABASE_ERRORS:
            raise
        except StopIteration as error:  # a future does not accept it
            return _Failure(RuntimeError(repr(error)))
        except Exception as error:
            return _Failure(error)

    def _resolve(
        self, futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[_Outcome], size: int, seconds: float
    ) -> None:
        self._observe(f"pysync_{self._part}_seconds", seconds, "commit")
        self._observe("pysync_commit_writes", len(futures), self._part)
        self._waiting -= len(futures)
        self._waiting_bytes -= size
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue
            if type(outcome) is _Failure:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome)


def _begin(cursor: sqlite3.Cursor) -> None:
    """Begin a transaction that writes. Raises sqlite3.OperationalError, also if other processes hold the lock
    for BUSY_TIMEOUT_MS."""
    since: float | None = None
    while True:
        try:
            cursor.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            now = time.monotonic()
            since = now if since is None else since
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or now - since >= database_file.BUSY_TIMEOUT_MS / 1000:
                raise
        time.sleep(min(max(BUSY_RETRY_S, (now - since) / BUSY_RETRY_SHARE), MAX_BUSY_RETRY_S))


def _log_failure(message: str) -> None:
    """Log an error that was just caught, if there is memory for it."""
    with suppress(Exception):
        log.exception(message)
