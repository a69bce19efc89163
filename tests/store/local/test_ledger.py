"""Usage of a local store: its counters are exact, whatever is written by whom, and quotas hold."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contracts.files import chunks_of
from support.depth import depth
from support.usage_operations import TYPE, account_of, count_all, open_store, stored

from pysync.errors import QuotaExceeded
from pysync.model import Usage
from pysync.store import ABSENT, Charge, Etag, Segment, Subject, Write
from pysync.store.local import LocalStore

ANNA, BEN = Subject("identity", "anna"), Subject("identity", "ben")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    """A store in which each identity may have 100 bytes."""
    opened = await open_store(tmp_path, 100)
    yield opened
    await opened.close()


async def used(store: LocalStore, account: Subject) -> Usage:
    assert store.ledger is not None
    return (await store.ledger.used([account]))[account]


async def test_documents_logs_and_files_count_for_their_account(store: LocalStore) -> None:
    await store.put("notes/anna/1", b"x" * 10)
    await store.commit(Write("notes/anna/2", b"x" * 20, charge=Charge(account_of("ben"))))
    await store.commit(Write("notes/anna/log", b"x" * 30, charge=Charge(elements=7)))
    await store.write("notes/anna/file", chunks_of(b"x" * 40), TYPE)
    assert await used(store, ANNA) == Usage(80, 1, 7, 1)
    assert await used(store, BEN) == Usage(20, 1, 0, 0)
    assert await used(store, Subject("namespace", "")) == Usage(100, 2, 7, 1)
    assert await used(store, Subject("collection", "notes")) == Usage(100, 2, 7, 1)
    assert await used(store, Subject("space", "space-anna")) == Usage(80, 1, 7, 1)
    assert await used(store, Subject("issuer", "issuer")) == Usage(100, 2, 7, 1)


async def test_a_document_counts_for_its_last_account(store: LocalStore) -> None:
    etag = await store.put("notes/anna/1", b"x" * 10)
    etag = await store.commit(Write("notes/anna/1", b"x" * 20, Etag(etag), charge=Charge(account_of("ben"))))
    assert await used(store, ANNA) == Usage()
    assert await used(store, BEN) == Usage(20, 1, 0, 0)
    await store.write("notes/anna/1", chunks_of(b"x" * 30), TYPE, charge=Charge(account_of("anna")))
    assert await used(store, BEN) == Usage()
    assert await used(store, ANNA) == Usage(30, 0, 0, 1)
    await store.delete("notes/anna/1")
    assert await used(store, ANNA) == Usage()


async def test_a_write_of_the_server_counts_for_whom_the_replaced_object_counted(store: LocalStore) -> None:
    await store.commit(Write("notes/anna/1", b"x" * 10, charge=Charge(account_of("ben"))))
    await store.put("notes/anna/1", b"x" * 20)
    assert await used(store, BEN) == Usage(20, 1, 0, 0)
    await store.write("notes/anna/1", chunks_of(b"x" * 30), TYPE)
    assert await used(store, BEN) == Usage(30, 0, 0, 1)
    assert await used(store, ANNA) == Usage()


async def test_the_servers_own_objects_count_for_nobody(store: LocalStore) -> None:
    await store.put("_pysync/scrub", b"x" * 1000)
    assert store.ledger is not None
    assert await store.ledger.largest("namespace", 9) == []


async def test_a_write_over_the_quota_is_rejected(store: LocalStore) -> None:
    charge = Charge(account_of("anna"))
    etag = await store.commit(Write("notes/anna/1", b"x" * 60, charge=charge))
    with pytest.raises(QuotaExceeded) as found:
        await store.commit(Write("notes/anna/2", b"x" * 41, charge=charge))
    assert found.value.extras == {"quota": "identity.bytes", "used": 60, "allowed": 100}
    with pytest.raises(QuotaExceeded):
        await store.write("notes/anna/2", chunks_of(b"x" * 41), TYPE, charge=charge)
    await store.commit(Write("notes/anna/2", b"x" * 40, charge=charge))
    assert await store.get("notes/anna/3") is None
    with pytest.raises(QuotaExceeded):
        await store.commit(Write("notes/anna/1", b"x" * 61, Etag(etag), charge=charge))
    await store.commit(Write("notes/anna/1", b"x" * 59, Etag(etag), charge=charge))
    assert await used(store, ANNA) == Usage(99, 2, 0, 0)


async def test_a_smaller_document_is_stored_even_over_the_quota(store: LocalStore) -> None:
    await store.put("notes/anna/1", b"x" * 1000)  # by the server itself, which is not limited
    await store.commit(Write("notes/anna/1", b"x" * 900, charge=Charge(account_of("anna"))))
    await store.commit(Write("notes/anna/1", b"x" * 800, charge=Charge(account_of("ben"))))
    assert await used(store, ANNA) == Usage()
    assert await used(store, BEN) == Usage(800, 1, 0, 0)


async def test_a_smaller_file_in_place_of_a_document_is_one_file_more(tmp_path: Path) -> None:
    store = await open_store(tmp_path, 1000, files=1)
    charge = Charge(account_of("anna"))
    await store.write("notes/anna/1", chunks_of(b"x" * 10), TYPE, charge=charge)
    await store.commit(Write("notes/anna/2", b"x" * 100, charge=charge))
    with pytest.raises(QuotaExceeded) as found:
        await store.write("notes/anna/2", chunks_of(b"x" * 50), TYPE, charge=charge)
    assert found.value.extras == {"quota": "identity.files", "used": 1, "allowed": 1}
    assert await used(store, ANNA) == Usage(110, 1, 0, 1)
    await store.close()


async def test_an_append_over_the_quota_stores_no_segments(tmp_path: Path) -> None:
    store = await open_store(tmp_path, elements=2)
    charge = Charge(account_of("anna"), 2)
    etag = await store.commit(Write("notes/anna/log", b"x" * 30, charge=charge))
    sealed = [Segment("_pysync/logs/1/0-2", b"x" * 20)]
    append = Write(
        "notes/anna/log", b"x" * 10, Etag(etag), charge=charge._replace(elements=3), segments=sealed
    )
    with pytest.raises(QuotaExceeded):
        await store.commit(append)
    assert await store.get("_pysync/logs/1/0-2") is None
    await store.close()


async def test_a_quota_counts_what_an_append_moves_into_segments(tmp_path: Path) -> None:
    store = await open_store(tmp_path, 100)
    charge = Charge(account_of("anna"), 1)
    etag = await store.commit(Write("notes/anna/log", b"x" * 60, charge=charge))
    sealed = [Segment("_pysync/logs/1/0-1", b"x" * 50)]
    append = Write(
        "notes/anna/log", b"x" * 51, Etag(etag), charge=charge._replace(elements=2), segments=sealed
    )
    with pytest.raises(QuotaExceeded):
        await store.commit(append)
    assert await used(store, ANNA) == Usage(60, 0, 1)
    await store.commit(append._replace(body=b"x" * 50))
    assert await used(store, ANNA) == Usage(100, 0, 2)
    await store.close()


async def test_deleted_bytes_may_be_stored_again(store: LocalStore) -> None:
    charge = Charge(account_of("anna"))
    for number in range(3):
        await store.commit(Write(f"notes/anna/{number}", b"x" * 100, charge=charge))
        await store.delete(f"notes/anna/{number}")


async def test_of_writers_who_together_exceed_a_quota_some_are_rejected(tmp_path: Path) -> None:
    stores = [await open_store(tmp_path, 100) for _ in range(2)]
    charge = Charge(account_of("anna"))
    writes = [
        stores[number % 2].commit(Write(f"notes/anna/{number}", b"x" * 30, ABSENT, charge=charge))
        for number in range(20)
    ]
    uploads = [
        stores[number % 2].write(f"notes/anna/f{number}", chunks_of(b"x" * 30), TYPE, charge=charge)
        for number in range(20)
    ]
    outcomes = await asyncio.gather(*writes, *uploads, return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 3
    assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 37
    assert (await used(stores[0], ANNA)).bytes == 90
    for store in stores:
        await store.close()


async def test_earlier_data_is_counted_once(tmp_path: Path) -> None:
    before = await LocalStore.open_folder(tmp_path)
    for number in range(600):
        await before.put(f"notes/anna/{number}", b"x" * 10)
    await before.write("notes/anna/file", chunks_of(b"x" * 50), TYPE)
    store = await open_store(tmp_path)
    assert store.ledger is not None
    assert await used(store, ANNA) == Usage()
    assert not await store.ledger.is_complete()
    await store.put("notes/anna/1", b"x" * 20)
    await store.delete("notes/anna/2")
    await count_all(store)
    assert await used(store, ANNA) == Usage(6050, 599, 0, 1)
    assert await store.ledger.is_complete()
    await before.put("notes/anna/3", b"x" * 15)  # by a process that counts for nobody
    assert not await store.ledger.is_complete()
    await count_all(store)
    assert await used(store, ANNA) == Usage(6055, 599, 0, 1)
    await before.close()
    await store.close()


async def test_switched_off_and_on_again_everything_is_counted_anew(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await store.put("notes/anna/1", b"x" * 10)
    await store.close()
    store = await LocalStore.open_folder(tmp_path)
    await store.stop_tracking_usage()
    await store.put("notes/anna/1", b"x" * 20)
    await store.put("notes/anna/2", b"x" * 20)
    await store.close()
    store = await open_store(tmp_path)
    await store.delete("notes/anna/2")
    assert await used(store, ANNA) == Usage()
    await count_all(store)
    assert await used(store, ANNA) == Usage(20, 1, 0, 0)
    await store.close()


async def test_subjects_that_use_nothing_are_forgotten(store: LocalStore, tmp_path: Path) -> None:
    await store.put("notes/anna/1", b"x" * 10)
    await store.put("notes/ben/1", b"x" * 10)
    await store.delete("notes/anna/1")
    assert store.ledger is not None
    await store.ledger.prune()
    assert await store.ledger.largest("identity", 9) == [("ben", Usage(10, 1, 0, 0))]
    assert not any("anna" in name for _, name in stored(tmp_path)[0])
    await store.put("notes/anna/1", b"x" * 10)
    assert await used(store, ANNA) == Usage(10, 1, 0, 0)


async def test_a_purge_leaves_no_name_of_those_who_store_nothing(store: LocalStore, tmp_path: Path) -> None:
    await store.put("notes/anna/1", b"x" * 10)
    other = await LocalStore.open_folder(tmp_path)  # as `pysync erase` opens it
    await other.delete("notes/anna/1")
    await other.purge_deleted()
    await other.close()
    assert stored(tmp_path) == ({}, {})
    for path in tmp_path.glob("pysync.db*"):
        assert b"anna" not in path.read_bytes()
    await store.put("notes/anna/1", b"x" * 10)
    assert await used(store, ANNA) == Usage(10, 1, 0, 0)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(depth(120, 3600))
def test_counters_are_exact_after_random_operations_and_crashes(tmp_path: Path) -> None:
    operations, rounds = depth((400, 4), (4_000, 25))
    for seed in range(rounds):
        command = [
            sys.executable,
            "-m",
            "support.usage_operations",
            str(tmp_path),
            str(seed),
            str(operations),
        ]
        ended = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
        assert ended.returncode == (-9 if seed % 2 else 0)
        counters, sums = stored(tmp_path)
        assert counters == sums
        assert len(counters) > 5
