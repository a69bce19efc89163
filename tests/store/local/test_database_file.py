"""A database that is deleted or replaced while it is open: nothing that is lost with it is acknowledged."""

import asyncio
import errno
import logging
import os
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Reply, Signed, Start, root_device
from support.collections import MINE, NOTES, collection
from support.server_process import serving
from support.worker_processes import gone, on_fresh_connection, replies_of_all_workers, until, workers

from pysync.clock import HybridTimestamp
from pysync.coordinator.local import LocalCoordinator
from pysync.errors import CoordinatorUnavailable, StoreUnavailable
from pysync.sqlite import connection
from pysync.store.local.store import LocalStore
from pysync.store.local.tables import SCHEMA


def delete(folder: Path) -> None:
    for name in ("pysync.db", "pysync.db-wal", "pysync.db-shm"):
        (folder / name).unlink()


def delete_the_file_alone(folder: Path) -> None:
    (folder / "pysync.db").unlink()


def delete_the_log_of_sqlite(folder: Path) -> None:
    (folder / "pysync.db-wal").unlink()


def replace(folder: Path) -> None:
    shutil.copy(folder / "pysync.db", folder / "copy.db")
    os.replace(folder / "copy.db", folder / "pysync.db")


def delete_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def rename_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


LOSSES = [
    delete,
    delete_the_file_alone,
    delete_the_log_of_sqlite,
    replace,
    delete_the_folder,
    rename_the_folder,
]


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def chunks(*several: bytes) -> AsyncIterator[bytes]:
    for chunk in several:
        yield chunk


def criticals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]


@pytest.mark.parametrize("lose", LOSSES)
async def test_no_write_to_a_database_that_is_gone_is_acknowledged(
    store: LocalStore, folder: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("a", b"{}")
    lose(folder)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await store.put("a", b'{"n":1}')
    with pytest.raises(StoreUnavailable):
        await store.delete("a")
    (message,) = criticals(caplog)
    assert "pysync.db" in message
    assert "deleted or replaced" in message
    assert "docs/how-to/repair-damage.md" in message


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_database_that_is_gone_is_not_read_and_the_store_is_not_ready(
    store: LocalStore, folder: Path, lose: Callable[[Path], None]
) -> None:
    await store.put("a", b"{}")
    lose(folder)
    with pytest.raises(StoreUnavailable):
        await store.probe()
    with pytest.raises(StoreUnavailable):
        await store.get("a")
    with pytest.raises(StoreUnavailable):
        await store.list("", None, 10)
    with pytest.raises(StoreUnavailable):
        await store.change_log.last_id()


async def test_a_write_whose_database_is_deleted_before_it_is_acknowledged_is_rejected(
    store: LocalStore, folder: Path
) -> None:
    def key_in_the_transaction(tick: HybridTimestamp) -> str:
        delete(folder)
        return "a/b"

    with pytest.raises(StoreUnavailable):
        await store.write_ordered(key_in_the_transaction, chunks(b"1"), "text/plain", lambda tick, sha256: [])


async def test_file_is_kept_when_its_database_was_deleted(store: LocalStore, folder: Path) -> None:
    await store.write("a/b", chunks(b"old"), "text/plain")
    replace(folder)
    with pytest.raises(StoreUnavailable):
        await store.write("a/b", chunks(b"new"), "text/plain")
    assert (folder / "files/a/b").read_bytes() == b"old"


async def test_a_database_that_is_put_back_is_not_trusted_before_a_restart(
    store: LocalStore, folder: Path
) -> None:
    await store.put("a", b"{}")
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable):
        await store.put("a", b'{"n":1}')
    folder.with_name("elsewhere").rename(folder)
    with pytest.raises(StoreUnavailable):
        await store.put("a", b'{"n":2}')
    await store.close()
    again = await LocalStore.open_folder(folder)
    assert await again.get("a") is not None
    await again.close()


async def test_idle_store_checks_its_database(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CHECK_INTERVAL_S", 0.001)
    found = threading.Event()
    handler = logging.Handler(logging.CRITICAL)
    handler.emit = lambda record: found.set()  # type: ignore[method-assign]
    logger = logging.getLogger("pysync")
    logger.addHandler(handler)
    store = await LocalStore.open_folder(folder)
    await store.put("a", b"{}")
    delete(folder)
    await asyncio.to_thread(found.wait)
    logger.removeHandler(handler)
    with pytest.raises(StoreUnavailable):
        await store.get("a")
    await store.close()


@pytest.mark.parametrize("lose", [delete, delete_the_file_alone])
async def test_of_two_processes_one_does_not_begin_a_second_database(
    store: LocalStore, folder: Path, lose: Callable[[Path], None]
) -> None:
    await store.put("a", b"{}")
    lose(folder)
    with pytest.raises(ValueError, match=r"pysync\.db"):
        await LocalStore.open_folder(folder)
    with pytest.raises(StoreUnavailable):
        await store.put("a", b'{"n":1}')


async def test_of_two_processes_only_the_one_with_the_database_that_is_there_serves(
    store: LocalStore, folder: Path
) -> None:
    await store.put("a", b"{}")
    replace(folder)
    (folder / "pysync.db-wal").unlink()
    (folder / "pysync.db-shm").unlink()
    other = await LocalStore.open_folder(folder)
    await other.put("b", b"{}")
    with pytest.raises(StoreUnavailable):
        await store.put("b", b'{"n":1}')
    with pytest.raises(StoreUnavailable):
        await store.get("a")
    await other.close()


@pytest.mark.parametrize("left", ["a file", "nothing but the lock", "the log of sqlite"])
async def test_a_start_that_misses_the_database_of_what_it_finds_says_what_to_do(
    folder: Path, left: str
) -> None:
    store = await LocalStore.open_folder(folder)
    if left == "a file":
        await store.write("a/b", chunks(b"x"), "text/plain")
    await store.close()
    (folder / "pysync.db").unlink()
    if left == "nothing but the lock":
        shutil.rmtree(folder / "files")
    elif left == "the log of sqlite":
        shutil.rmtree(folder / "files")
        (folder / "pysync.db-wal").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"restore it from a backup.*begin with an empty store"):
            await LocalStore.open_folder(folder)
    (folder / "pysync.db").touch()
    with pytest.raises(ValueError, match="is missing or empty"):
        await LocalStore.open_folder(folder)


async def test_a_folder_that_served_a_coordinator_alone_takes_a_store(folder: Path) -> None:
    await (await LocalCoordinator.open_folder(folder)).close()
    store = await LocalStore.open_folder(folder)
    assert await store.get("a") is None
    await store.close()


async def test_store_opens_though_its_lock_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    store = await LocalStore.open_folder(folder)
    assert await store.get("a") is None
    await store.close()


@pytest.mark.parametrize("found", ["", "lost+found"], ids=["empty", "a file system of its own"])
async def test_an_empty_folder_for_files_is_no_sign_of_a_lost_database(folder: Path, found: str) -> None:
    (folder / "files" / found).mkdir(parents=True)
    store = await LocalStore.open_folder(folder)
    assert await store.get("a") is None
    await store.close()


async def test_a_start_over_tables_without_a_version_says_what_to_do(folder: Path) -> None:
    """The output of sqlite3's command .dump lacks the version."""
    await (await LocalStore.open_folder(folder)).close()
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 0")
    with pytest.raises(
        ValueError, match=f"PRAGMA user_version = {SCHEMA.version}.*the version that wrote it"
    ):
        await LocalStore.open_folder(folder)


async def test_a_coordinator_whose_database_is_gone_admits_and_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CHECK_INTERVAL_S", 1e-6)
    coordinator = await LocalCoordinator.open_folder(tmp_path / "data")
    await coordinator.put_if_absent("key", b"", 1000)
    (tmp_path / "data/coordinator.db").unlink()
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.put_if_absent("key", b"", 1000)
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.consume_nonce("aa", "n", 0)
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.last_id()
    await coordinator.close()


async def test_a_coordinator_whose_replay_memory_is_gone_admits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CHECK_INTERVAL_S", 1e-6)
    coordinator = await LocalCoordinator.open_folder(tmp_path / "data")
    shutil.rmtree(tmp_path / "data/nonces")
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.put_if_absent("key", b"", 1000)
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.consume_nonce("aa", "n", 0)
    await coordinator.close()


async def test_a_service_without_its_database_answers_503(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    browser = Browser(await start({"store": f"file:{folder}", "collections": [NOTES]}), session)
    assert (await browser.push("notes/a", {"n": 1})).status == 200
    delete(folder)
    rejected = await browser.push("notes/b", {"n": 1})
    assert (rejected.status, rejected.json["code"]) == (503, "store_unavailable")
    assert (await browser.pull("notes/a")).status == 503
    assert (await browser.request("GET", "/health/ready")).status == 503
    assert (await browser.request("GET", "/health")).status == 200


@pytest.mark.process
async def test_workers_acknowledge_nothing_after_their_database_was_deleted(
    tmp_path: Path, folder: Path
) -> None:
    async def push(browser: Browser) -> Reply:
        return await browser.push(f"notes/{os.urandom(4).hex()}", {"n": 1})

    async with workers(tmp_path, server={"workers": 2}) as service:
        assert (await on_fresh_connection(service.base, push)).status == 200
        delete(folder)
        replies = await replies_of_all_workers(service.base, push, 2)
        assert {reply.status for reply in replies} == {503}
        killed = service.pids()[2]
        os.kill(killed, signal.SIGKILL)
        await gone([killed])
        ends = [f"worker 2 {how}" for how in ("was ended by SIGKILL", "ended with status 1")]
        for end in ends:
            await until(lambda end=end: any(end in entry["message"] for entry in service.entries()))  # type: ignore[misc]
        for _ in range(5):
            assert (await on_fresh_connection(service.base, push)).status == 503
        assert not (folder / "pysync.db").exists()
        message = [entry for entry in service.entries() if entry["level"] == "critical"]
        stored = [entry["worker"] for entry in message if "pysync.db" in entry["message"]]
        assert sorted(stored) == [1, 2], "each says so once"


async def test_a_database_that_is_a_link_of_the_operators_is_served_and_watched(
    folder: Path, tmp_path: Path
) -> None:
    await (await LocalStore.open_folder(folder)).close()
    real = tmp_path / "disk"
    real.mkdir()
    (folder / "pysync.db").rename(real / "real.db")
    (folder / "pysync.db").symlink_to(real / "real.db")
    store = await LocalStore.open_folder(folder)
    await store.put("a", b"{}")
    (real / "real.db-wal").unlink()
    with pytest.raises(StoreUnavailable):
        await store.put("a", b"{}")
    await store.close()


BACK_UP = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.backup(sqlite3.connect(sys.argv[2]))
database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
database.close()
"""


@pytest.mark.process
async def test_a_database_that_others_open_back_up_and_close_is_still_there(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    other = await LocalStore.open_folder(folder)
    for number in range(2):
        await store.put(f"a{number}", b"{}")
        command = (sys.executable, "-c", BACK_UP, str(folder / "pysync.db"), str(tmp_path / "copy.db"))
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0
        await other.close()
        await store.put(f"b{number}", b"{}")
        await store.probe()
    assert await store.list("", None, 10) == ["a0", "a1", "b0", "b1"]


@pytest.mark.process
async def test_a_worker_that_is_replaced_after_the_folder_was_deleted_begins_no_empty_store(
    tmp_path: Path, folder: Path
) -> None:
    async def push(browser: Browser) -> Reply:
        return await browser.push(f"notes/{os.urandom(4).hex()}", {"n": 1})

    def is_logged(text: str) -> bool:
        return any(text in entry["message"] + entry.get("error", "") for entry in service.entries())

    async with workers(tmp_path, server={"workers": 2}) as service:
        delete_the_folder(folder)
        replies = await replies_of_all_workers(service.base, push, 2)
        assert {(reply.status, reply.json["code"]) for reply in replies} == {(503, "store_unavailable")}
        os.kill(service.pids()[2], signal.SIGKILL)
        await until(lambda: is_logged("worker 2 ended with status 1"))
        assert is_logged("was deleted while the service ran")
        assert {(await on_fresh_connection(service.base, push)).status for _ in range(5)} == {503}
        assert not folder.exists()


@pytest.mark.process
async def test_a_service_whose_folder_was_deleted_says_so_and_makes_no_other(
    tmp_path: Path, folder: Path, session: aiohttp.ClientSession
) -> None:
    files = collection("files", allowedMimeTypes=["*/*"])
    async with serving(tmp_path, collections=[NOTES, MINE, files]) as service:
        anyone = Browser(service.base, session)
        owner = Signed(service.base, session, ISSUER, root_device(ISSUER, collections=("mine",)))
        key = f"u/{ISSUER.user_id}/a"
        assert (await anyone.push("notes/a", {"n": 1})).status == 200
        assert (await owner.push(key, {"n": 1})).status == 200
        delete_the_folder(folder)
        replies = [
            await anyone.push("notes/a", {"n": 2}),
            await anyone.request("POST", "/push/files/a", b"x", {"Content-Type": "text/plain"}),
            await anyone.pull("notes/a"),
            await anyone.pull("notes/never-written"),
            await owner.push(key, {"n": 2}),
            await owner.pull(key),
        ]
        assert {reply.status for reply in replies} == {503}
        while (await anyone.request("GET", "/health/ready")).status != 503:
            await asyncio.sleep(0.05)
        assert (await anyone.request("GET", "/health")).status == 200
        assert "pysync.db was deleted or replaced" in service.log.read_text()
        assert not folder.exists()
