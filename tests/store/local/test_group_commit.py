"""Group commit, where the stores cannot show it: who shares a failure, and who does not."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from pysync import concurrency
from pysync.errors import StoreUnavailable
from pysync.sqlite import database_file
from pysync.sqlite.connection import GroupCommit
from pysync.sqlite.database_file import Database, DatabaseFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
async def writer(path: Path) -> AsyncIterator[GroupCommit]:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t(v INTEGER PRIMARY KEY)")
    writer = GroupCommit(Database(connection, connection, DatabaseFile(path)), StoreUnavailable)
    yield writer
    await writer.close()


def insert(cursor: sqlite3.Cursor, value: int) -> int:
    cursor.execute("INSERT INTO t VALUES(?)", (value,))
    return value


def values(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [value for (value,) in connection.execute("SELECT v FROM t")]
    finally:
        connection.close()


async def test_a_write_is_committed_when_its_future_has_a_result(writer: GroupCommit, path: Path) -> None:
    assert await writer.submit(insert, 7) == 7
    assert values(path) == [7]


async def test_writes_that_wait_together_share_a_transaction(writer: GroupCommit) -> None:
    def transaction(cursor: sqlite3.Cursor) -> list[int]:
        cursor.execute("CREATE TEMP TABLE IF NOT EXISTS seen(v)")
        cursor.execute("INSERT INTO seen VALUES(1)")
        return [count for (count,) in cursor.execute("SELECT count(*) FROM seen")]

    def start_over(cursor: sqlite3.Cursor) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    futures = [writer.submit(transaction) for _ in range(5)] + [writer.submit(start_over)]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert await writer.submit(transaction) == [1]


async def test_a_failure_that_cannot_even_be_logged_does_not_end_the_thread(
    writer: GroupCommit, path: Path
) -> None:
    def exhausted(_: object) -> NoReturn:
        raise MemoryError

    logger = logging.getLogger("pysync.sqlite")
    logger.addFilter(exhausted)
    try:
        with pytest.raises(StoreUnavailable):
            await writer.submit(exhausted)
    finally:
        logger.removeFilter(exhausted)
    assert await writer.submit(insert, 7) == 7
    assert values(path) == [7]


async def test_one_writers_own_fault_is_its_own(writer: GroupCommit, path: Path) -> None:
    def reject(cursor: sqlite3.Cursor) -> int:
        raise LookupError("mine")

    outcomes = await asyncio.gather(
        writer.submit(insert, 1),
        writer.submit(reject),
        writer.submit(insert, 1),
        writer.submit(insert, 2),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [int, LookupError, sqlite3.IntegrityError, int]
    assert values(path) == [1, 2]


async def test_a_group_waits_for_the_transaction_of_another_process(failing: GroupCommit, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO t VALUES(1)")
    Failing.attempts = 0
    writing = failing.submit(insert, 2)
    while Failing.attempts < 3:
        await asyncio.sleep(0)
    assert not writing.done()
    other.execute("COMMIT")
    assert await writing == 2
    assert values(path) == [1, 2]
    other.close()


async def test_a_database_locked_elsewhere_is_unavailable_until_it_is_free(
    writer: GroupCommit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_file, "BUSY_TIMEOUT_MS", 0)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        await writer.submit(insert, 1)
    other.execute("ROLLBACK")
    other.close()
    assert await writer.submit(insert, 1) == 1


async def hang(writer: GroupCommit, released: threading.Event) -> asyncio.Future[bool]:
    """A write that is under way until `released` is set."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(cursor: sqlite3.Cursor) -> bool:
        loop.call_soon_threadsafe(begun.set)
        return released.wait()

    future = writer.submit(wait, size=10)
    await begun.wait()
    return future


async def test_writes_are_rejected_while_a_commit_hangs_and_accepted_afterwards(
    writer: GroupCommit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    hanging = await hang(writer, released)
    waiting = writer.submit(insert, 1)
    monkeypatch.setattr("pysync.sqlite.connection.STALLED_S", -1)
    with pytest.raises(StoreUnavailable, match="a commit takes longer than"):
        writer.submit(insert, 2)
    released.set()
    assert await hanging
    assert await waiting == 1
    assert await writer.submit(insert, 3) == 3
    assert values(path) == [1, 3]


async def test_the_bytes_that_wait_are_bounded_but_one_write_is_always_accepted(
    writer: GroupCommit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.sqlite.connection.MAX_WAITING_BYTES", 20)
    assert await writer.submit(insert, 1, size=1000) == 1
    released = threading.Event()
    hanging = await hang(writer, released)
    waiting = writer.submit(insert, 2, size=10)
    with pytest.raises(StoreUnavailable, match="too many bytes"):
        writer.submit(insert, 3, size=1)
    released.set()
    assert await hanging
    assert await waiting == 2
    assert await writer.submit(insert, 4, size=20) == 4
    assert values(path) == [1, 2, 4]


async def test_writes_of_several_ticks_share_a_transaction_if_as_many_did_before(
    failing: GroupCommit, work: "Work", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "GATHER_S", inf)
    writer = failing

    async def write_after(ticks: int) -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        await writer.submit(insert, ticks)

    await asyncio.gather(*[writer.submit(insert, -value) for value in range(1, 9)])
    before = work.calls.count("committed")
    await asyncio.gather(*map(write_after, range(8)))
    assert work.calls.count("committed") == before + 1


async def test_closing_commits_a_group_that_still_waits_for_others(writer: GroupCommit, path: Path) -> None:
    await asyncio.gather(*[writer.submit(insert, value) for value in range(8)])
    last = writer.submit(insert, 8)
    await asyncio.sleep(0)  # it waits for others now
    await writer.close()
    assert await last == 8
    assert values(path) == list(range(9))


async def test_closing_carries_out_what_was_submitted(writer: GroupCommit, path: Path) -> None:
    futures = [writer.submit(insert, value) for value in range(10)]
    await writer.close()
    assert await asyncio.gather(*futures) == list(range(10))
    with pytest.raises(StoreUnavailable):
        writer.submit(insert, 11)
    assert values(path) == list(range(10))


class Panic(BaseException):
    """As the core's, which is no Exception."""


class Work:
    """Group work that fails where it is told to, once."""

    has_work = True

    def __init__(self) -> None:
        self.fails: dict[str, BaseException] = {}
        self.calls: list[str] = []

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        self._do("prepare")

    def after_commit(self) -> None:
        self._do("committed")

    def after_rollback(self) -> None:
        self._do("undone")

    def _do(self, step: str) -> None:
        self.calls.append(step)
        if step in self.fails:
            raise self.fails.pop(step)


class Failing(sqlite3.Connection):
    """A connection that fails with `failures` at statements, once each, and counts its attempts to write."""

    failures: ClassVar[dict[str, BaseException]] = {}
    attempts: ClassVar[int] = 0

    def cursor(self, *args: Any, **options: Any) -> Any:
        return super().cursor(FailingCursor)


class FailingCursor(sqlite3.Cursor):
    def execute(self, statement: str, *args: Any) -> Any:
        Failing.attempts += statement == "BEGIN IMMEDIATE"
        if statement in Failing.failures:
            raise Failing.failures.pop(statement)
        return super().execute(statement, *args)


@pytest.fixture
async def work() -> Work:
    return Work()


@pytest.fixture
async def failing(path: Path, work: Work) -> AsyncIterator[GroupCommit]:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Failing)
    connection.execute("CREATE TABLE t(v INTEGER PRIMARY KEY)")
    writer = GroupCommit(Database(connection, connection, DatabaseFile(path)), StoreUnavailable, work)
    yield writer
    await writer.close()


@pytest.mark.parametrize("error", [LookupError("unforeseen"), MemoryError(), Panic("unforeseen")])
@pytest.mark.parametrize("step", ["BEGIN IMMEDIATE", "COMMIT", "prepare"])
async def test_an_unexpected_error_fails_its_group_and_no_other(
    failing: GroupCommit, path: Path, work: Work, step: str, error: BaseException
) -> None:
    (work.fails if step == "prepare" else Failing.failures)[step] = error
    outcomes = await asyncio.gather(
        failing.submit(insert, 1), failing.submit(insert, 2), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
    assert work.calls[-1] == "undone"
    assert await failing.submit(insert, 3) == 3
    assert values(path) == [3]


async def test_a_write_that_panics_fails_its_group_and_no_other(failing: GroupCommit, path: Path) -> None:
    def panic(cursor: sqlite3.Cursor) -> None:
        raise Panic

    outcomes = await asyncio.gather(failing.submit(insert, 1), failing.submit(panic), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
    assert await failing.submit(insert, 2) == 2
    assert values(path) == [2]


async def test_failure_after_the_commit_undoes_nothing(failing: GroupCommit, path: Path, work: Work) -> None:
    work.fails["committed"] = LookupError("unforeseen")
    assert await failing.submit(insert, 1) == 1
    assert await failing.submit(insert, 2) == 2
    assert "undone" not in work.calls


async def test_failure_during_a_rollback_keeps_nobody_waiting(
    failing: GroupCommit, path: Path, work: Work
) -> None:
    Failing.failures["COMMIT"] = sqlite3.OperationalError("disk I/O error")
    work.fails["undone"] = LookupError("unforeseen")
    with pytest.raises(StoreUnavailable):
        await failing.submit(insert, 1)
    assert await failing.submit(insert, 2) == 2


async def test_a_write_whose_error_no_future_takes_keeps_nobody_waiting(writer: GroupCommit) -> None:
    def end(cursor: sqlite3.Cursor) -> None:
        raise StopIteration

    outcomes = await asyncio.gather(writer.submit(end), writer.submit(insert, 1), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, int]


@pytest.mark.parametrize("error", [MemoryError(), sqlite3.OperationalError("disk I/O error")])
async def test_a_write_that_fails_halfway_is_undone_with_its_group(
    writer: GroupCommit, path: Path, error: Exception
) -> None:
    def write_half(cursor: sqlite3.Cursor) -> None:
        insert(cursor, 1)
        raise error

    outcomes = await asyncio.gather(
        writer.submit(insert, 2), writer.submit(write_half), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
    assert await writer.submit(insert, 3) == 3
    assert values(path) == [3]
