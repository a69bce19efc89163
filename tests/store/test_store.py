"""The stores: one contract, and what is promised of the local one alone: crashes, processes, cost."""

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contracts.files import chunks_of, read_file
from contracts.stores import StoreContract, TransactionalStoreContract
from support.faulty_disk import broken_descriptors
from support.faulty_store import FaultyStore
from support.python_process import run_python, run_together

from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.store import ABSENT, NOT_MODIFIED, Store, StoredObject, open_store
from pysync.store.local import LocalStore
from pysync.store.local.store import CACHE_BYTES, CACHE_OBJECT_BYTES, LIST
from pysync.store.memory import MemoryStore

DATA_PAGES = 14
"""Pages before this one hold the schema and the tables' roots."""


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = MemoryStore()
        yield store
        await store.close()


class TestLocalStore(TransactionalStoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = await LocalStore.open_folder(tmp_path / "data")
        yield store
        await store.close()


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    async def store(self) -> Store:
        return FaultyStore(MemoryStore())


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def test_a_url_names_its_store(folder: Path) -> None:
    local = await open_store(StoreConfig(url=f"file:{folder}"))
    assert isinstance(local, LocalStore)
    await local.close()
    assert isinstance(await open_store(StoreConfig(url="memory:")), MemoryStore)
    for url in ("file:", "memory:x", "ftp://x", ""):
        with pytest.raises(ValueError, match="is no store: use file:DIR, s3://bucket/prefix or memory:"):
            await open_store(StoreConfig(url=url))


async def test_the_folder_is_closed_to_others(store: LocalStore, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_stored_objects_are_there_after_reopening(folder: Path) -> None:
    first = await LocalStore.open_folder(folder)
    etag = await first.put("a", b"one")
    sha256 = await first.write("f/b.parquet", chunks_of(b"file"), "text/plain")
    await first.close()
    second = await LocalStore.open_folder(folder)
    found = await second.get("a")
    assert isinstance(found, StoredObject)
    assert (found.body, found.etag) == (b"one", etag)
    assert (await read_file(second, "f/b.parquet"))[0].sha256 == sha256
    await second.close()


async def test_closing_finishes_the_writes_under_way(folder: Path) -> None:
    first = await LocalStore.open_folder(folder)
    writes = [asyncio.ensure_future(first.put(f"n/{n}", b"1")) for n in range(50)]
    await asyncio.sleep(0)
    await first.close()
    await asyncio.gather(*writes)
    second = await LocalStore.open_folder(folder)
    assert len(await second.list("n", None, 100)) == 50
    await second.close()
    assert not list(folder.glob("*-wal")), "the log was not folded into the database"


async def test_a_closed_store_rejects_writes(folder: Path) -> None:
    store = await LocalStore.open_folder(folder)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.put("a", b"1")
    with pytest.raises(StoreUnavailable):
        await store.get("a")


async def test_too_many_waiting_writes_are_rejected(store: LocalStore) -> None:
    outcomes = await asyncio.gather(
        *(store.put(f"n/{n}", b"1") for n in range(4_196)), return_exceptions=True
    )
    rejected = sum(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert rejected == 100
    assert len(await store.list("n", None, 10_000)) == 4_096


async def test_a_newer_schema_is_rejected_by_name(folder: Path) -> None:
    await (await LocalStore.open_folder(folder)).close()
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="newer"):
        await LocalStore.open_folder(folder)


async def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StoreUnavailable):
        await LocalStore.open_folder(tmp_path / "data")


async def test_a_damaged_database_is_unavailable_and_never_empty(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = await LocalStore.open_folder(folder)
    for n in range(200):
        await first.put(f"n/{n}", bytes(1000))
    await first.close()
    with open(folder / "pysync.db", "r+b") as database:
        database.seek(DATA_PAGES * 4096)
        database.write(b"\xff" * (os.path.getsize(folder / "pysync.db") - DATA_PAGES * 4096))
    second = await LocalStore.open_folder(folder)
    rejected = 0
    for n in range(200):
        try:
            found = await second.get(f"n/{n}")
        except StoreUnavailable:
            rejected += 1
        else:
            assert isinstance(found, StoredObject)
            assert found.body == bytes(1000)
    assert rejected > 100
    async with asyncio.timeout(60):  # a thread checks the file before it is called damaged
        while "damaged" not in caplog.text:
            await asyncio.sleep(0.01)
    await second.close()


async def test_a_database_damaged_at_its_root_is_rejected_on_opening(folder: Path) -> None:
    await (await LocalStore.open_folder(folder)).close()
    with open(folder / "pysync.db", "r+b") as database:
        database.write(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreUnavailable, match="cannot open the store"):
        await LocalStore.open_folder(folder)


async def test_failing_disk_rejects_the_group_and_keeps_earlier_data(store: LocalStore, folder: Path) -> None:
    await store.put("a", b"one")
    with broken_descriptors(folder / "pysync.db-wal"):
        outcomes = await asyncio.gather(
            *(store.put(f"n/{n}", bytes(50_000)) for n in range(4)), return_exceptions=True
        )
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert await store.list("n", None, 10) == []
    assert isinstance(await store.get("a"), StoredObject)
    await store.put("n/1", bytes(50_000))
    assert await store.list("n", None, 10) == ["1"]


@pytest.mark.slow
async def test_a_late_page_of_a_listing_costs_what_the_first_does(store: LocalStore, folder: Path) -> None:
    for start in range(0, 6_000, 2_000):
        await asyncio.gather(*(store.put(f"p/{n:05}", b"1") for n in range(start, start + 2_000)))
        await asyncio.gather(*(store.put(f"p/{n:05}/deep", b"1") for n in range(start, start + 100)))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    costs = []
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        database.execute(LIST, ("", "", 1)).fetchall()  # loads the schema
        database.set_progress_handler(count, 1)
        for after in ("", "03000", "05500"):
            steps = 0
            ((names,),) = database.execute(LIST, ("p", after, 100)).fetchall()
            assert json.loads(names) == await store.list("p", after, 100)
            costs.append(steps)
    assert max(costs) <= min(costs) + 10
    assert max(costs) < 1_000


async def test_reading_leaves_no_snapshot_behind(store: LocalStore, folder: Path) -> None:
    await store.put("a", b"one")
    await store.get("a")
    await store.list("", None, 1)
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as other:
        await store.put("a", b"two")
        busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not busy


async def test_a_document_is_kept_until_anybody_commits(store: LocalStore, folder: Path) -> None:
    await store.put("a/b", b"1")
    found = await store.get("a/b")
    assert await store.get("a/b") is found
    other = await LocalStore.open_folder(folder)
    await other.put("elsewhere", b"2")
    await other.close()
    again = await store.get("a/b")
    assert again == found
    assert again is not found


async def test_a_document_is_unmodified_until_anybody_commits_another(
    store: LocalStore, folder: Path
) -> None:
    etag = await store.put("a/b", b"1")
    for _ in range(3):
        assert await store.get("a/b", etag) is NOT_MODIFIED
    found = await store.get("a/b", "another")
    assert isinstance(found, StoredObject)
    assert found.body == b"1"
    other = await LocalStore.open_folder(folder)
    await other.put("a/b", b"2")
    await other.close()
    found = await store.get("a/b", etag)
    assert isinstance(found, StoredObject)
    assert found.body == b"2"


async def test_cache_is_bounded(store: LocalStore) -> None:
    *keys, last = [f"n/{n}" for n in range(CACHE_BYTES // CACHE_OBJECT_BYTES + 1)]
    await asyncio.gather(*(store.put(key, bytes(CACHE_OBJECT_BYTES)) for key in (*keys, last)))
    await store.put("big", bytes(CACHE_OBJECT_BYTES + 1))
    kept = [await store.get(key) for key in keys]
    for key, found in zip(keys, kept, strict=True):
        assert await store.get(key) is found
    assert await store.get("big") is not await store.get("big")
    await store.get(last)
    assert await store.get(keys[0]) is not kept[0], "the last one made room for itself"


async def test_a_write_that_returned_is_seen_by_every_other_store_on_the_folder(
    store: LocalStore, folder: Path
) -> None:
    other = await LocalStore.open_folder(folder)
    for n in range(100):
        await other.get("a")
        etag = await store.put("a", b"%d" % n)
        found = await other.get("a")
        assert isinstance(found, StoredObject)
        assert found.etag == etag
    await other.close()


COUNT_UP = """
import asyncio, sys
from pysync.store import ABSENT, Etag, EtagMismatch
from pysync.store.local import LocalStore

async def main(folder, times):
    store = await LocalStore.open_folder(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(times)):
        while True:
            found = await store.get("counter")
            count, expect = (int(found.body), Etag(found.etag)) if found else (0, ABSENT)
            try:
                await store.put("counter", b"%d" % (count + 1), expect=expect)
                break
            except EtagMismatch:
                pass
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.process
async def test_two_processes_on_one_folder_lose_no_update(folder: Path) -> None:
    await run_together(COUNT_UP, str(folder), "200")
    store = await LocalStore.open_folder(folder)
    found = await store.get("counter")
    assert isinstance(found, StoredObject)
    assert found.body == b"400"
    await store.close()


WRITE_ON = """
import asyncio, itertools, sys
from pysync.store.local import LocalStore

async def write(store, lane):
    for n in itertools.count():
        await store.put(f"lane{lane}/{n:06}", b"%d" % n * 300)
        print(f"lane{lane}/{n:06}", flush=True)

async def main(folder):
    store = await LocalStore.open_folder(folder)
    await asyncio.gather(*(write(store, lane) for lane in range(8)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_every_acknowledged_write_survives_a_kill(folder: Path) -> None:
    process = run_python(WRITE_ON, str(folder))
    assert process.stdout is not None
    acknowledged = [await asyncio.to_thread(process.stdout.readline) for _ in range(2_000)]
    process.kill()
    # Not `communicate`, which would begin in the middle of a line: `readline` has read ahead.
    acknowledged += await asyncio.to_thread(process.stdout.readlines)
    process.communicate()
    keys = [line[:-1] for line in acknowledged if line.endswith("\n")]
    store = await LocalStore.open_folder(folder)
    for key in keys:
        found = await store.get(key)
        assert isinstance(found, StoredObject)
        assert found.body == b"%d" % int(key[-6:]) * 300
    await store.close()
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


class TestFaultyStore:
    """The tool itself: a test is worth what its faults are."""

    async def test_a_failing_call_does_nothing(self) -> None:
        inner = MemoryStore()
        store = FaultyStore(inner)
        store.fail("put", times=2)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.put("a", b"1")
        assert await inner.get("a") is None
        await store.put("a", b"1")
        assert store.calls["put"] == 3

    async def test_a_lost_reply_has_done_its_work(self) -> None:
        inner = MemoryStore()
        store = FaultyStore(inner)
        store.lose_reply("put")
        with pytest.raises(StoreUnavailable):
            await store.put("a", b"1", expect=ABSENT)
        assert isinstance(await inner.get("a"), StoredObject)

    async def test_a_torn_read_returns_half(self) -> None:
        store = FaultyStore(MemoryStore())
        await store.put("a", b"12345678")
        store.truncate_next_get()
        bodies = []
        for _ in range(2):
            found = await store.get("a")
            assert isinstance(found, StoredObject)
            bodies.append(found.body)
        assert bodies == [b"1234", b"12345678"]

    async def test_delayed_calls_wait_and_overlapping_reads_are_counted(self) -> None:
        store = FaultyStore(MemoryStore())
        release = asyncio.Event()
        arrived = [store.delay("get", release) for _ in range(2)]
        reads = [asyncio.ensure_future(store.get("a")) for _ in arrived]
        for event in arrived:
            await event.wait()
        assert not any(read.done() for read in reads)
        assert store.max_concurrent_reads == 2
        release.set()
        assert await asyncio.gather(*reads) == [None, None]
