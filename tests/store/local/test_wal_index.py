"""Whether a process has committed is seen without a transaction, and never too late."""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from pysync.errors import StoreUnavailable
from pysync.sqlite import connection
from pysync.sqlite.wal_index import wal_index_header
from pysync.store.local.store import LocalStore
from pysync.store.types import StoredObject

KEYS = ("notes/a", "notes/b")


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    for key in KEYS:
        await store.put(key, b"old")
    yield store
    await store.close()


def statements(store: LocalStore) -> list[str]:
    """Return what the store's reader executes from now on."""
    executed: list[str] = []
    store._reader._connection.set_trace_callback(executed.append)
    return executed


async def body(store: LocalStore, key: str = KEYS[0]) -> bytes:
    found = await store.get(key)
    assert isinstance(found, StoredObject)
    return found.body


async def test_cached_documents_are_read_without_a_statement(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await store.get_many(KEYS)
    await asyncio.sleep(0)
    executed = statements(store)
    assert await body(store) == b"old"
    assert await store.get_many(KEYS) == found
    assert await store.info_many(KEYS) == found
    assert executed == []


@pytest.mark.process
async def test_a_commit_of_another_process_is_seen_at_once(store: LocalStore, folder: Path) -> None:
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"
    for number in range(3):
        assert await body(store) == (b"%d" % (number - 1) if number else b"old")
        await asyncio.sleep(0)  # the transaction of this tick ends
        update = f"UPDATE object SET body = CAST('{number}' AS BLOB)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(folder / "pysync.db"), update
        )
        assert await process.wait() == 0
        assert await body(store) == b"%d" % number


async def test_a_commit_of_another_store_in_this_process_is_seen_at_once(
    store: LocalStore, folder: Path
) -> None:
    other = await LocalStore.open_folder(folder)
    for number in range(3):
        await other.put(KEYS[0], b"%d" % number)
        assert await body(store) == await body(other) == b"%d" % number
    await other.close()
    await store.put(KEYS[0], b"after")
    assert await body(store) == b"after"


async def test_documents_read_together_are_of_one_moment(store: LocalStore) -> None:
    """The one in the cache is not older than the one that is read, though a commit comes in between."""
    assert await body(store) == b"old"
    await asyncio.sleep(0)
    begin = store._reader.begin

    def commit_and_begin() -> int:
        with closing(sqlite3.connect(store._database.path)) as other, other:
            other.execute("UPDATE object SET body = CAST('new' AS BLOB)")
        return begin()

    store._reader.begin = commit_and_begin  # type: ignore[method-assign]
    found = await store.get_many(KEYS)
    assert [each and each.body for each in found.values()] == [b"new", b"new"]


async def test_without_the_index_each_tick_queries_the_database(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "wal_index_header", lambda index: None)
    store = await LocalStore.open_folder(folder)
    await store.put(KEYS[0], b"old")
    assert await body(store) == b"old"
    await asyncio.sleep(0)
    executed = statements(store)
    assert await body(store) == b"old"
    assert executed == ["BEGIN", "PRAGMA data_version"]
    await store.close()


async def test_closed_store_does_not_read_the_index(folder: Path) -> None:
    store = await LocalStore.open_folder(folder)
    await store.put(KEYS[0], b"old")
    assert await body(store) == b"old"
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.get(KEYS[0])


def test_a_file_that_is_not_mapped_has_no_header(tmp_path: Path) -> None:
    (tmp_path / "pysync.db-shm").write_bytes(bytes(32_768))
    assert wal_index_header(tmp_path / "pysync.db-shm") is None
    assert wal_index_header(tmp_path / "nothing") is None


def test_a_header_changes_with_each_commit_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a b.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x)")
        header = wal_index_header(tmp_path / "a b.db-shm")
        assert header is not None
        seen = [header()]
        for number in range(3):
            database.execute("INSERT INTO t VALUES (?)", (number,))
            seen.append(header())
        assert len(set(seen)) == 4
        database.execute("SELECT * FROM t").fetchall()
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO t VALUES (3)")
        database.execute("ROLLBACK")
        assert header() == seen[-1]
