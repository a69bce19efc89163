"""Group commit, where the stores cannot show it: who shares a failure, and who does not."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pysync.errors import StoreUnavailable
from pysync.sqlite import Database, GroupCommit
from pysync.sqlite_file import DatabaseFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
async def writer(path: Path) -> AsyncIterator[GroupCommit]:
    # No busy timeout: a lock held elsewhere is refused at once, and the tests need not wait.
    connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
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


async def test_one_writers_own_fault_is_its_own(writer: GroupCommit, path: Path) -> None:
    def refuse(cursor: sqlite3.Cursor) -> int:
        raise LookupError("mine")

    outcomes = await asyncio.gather(
        writer.submit(insert, 1),
        writer.submit(refuse),
        writer.submit(insert, 1),
        writer.submit(insert, 2),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [int, LookupError, sqlite3.IntegrityError, int]
    assert values(path) == [1, 2]


async def test_a_database_locked_elsewhere_is_unavailable_until_it_is_free(
    writer: GroupCommit, path: Path
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        await writer.submit(insert, 1)
    other.execute("ROLLBACK")
    other.close()
    assert await writer.submit(insert, 1) == 1


async def test_closing_carries_out_what_was_submitted(writer: GroupCommit, path: Path) -> None:
    futures = [writer.submit(insert, value) for value in range(10)]
    await writer.close()
    assert await asyncio.gather(*futures) == list(range(10))
    with pytest.raises(StoreUnavailable):
        writer.submit(insert, 11)
    assert values(path) == list(range(10))
