"""A damaged database, a disk that hangs: what readiness and the start say of it."""

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from contracts.files import chunks_of
from support.cli_runner import Shell
from support.clients import Browser, Start
from support.collections import collection

from pysync import config
from pysync._core import decode_push
from pysync.clock import HybridTimestamp
from pysync.coordinator import Coordinator
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable, StoreUnavailable
from pysync.server.process import readiness, serve
from pysync.sqlite.database_file import quick_check
from pysync.store import StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

NOTES = collection("notes", listable=True)
PAGE = 4096


async def filled(folder: Path, documents: int = 1, body: bytes = b"{}") -> None:
    """Make a folder that has been used and is closed, so that all pages are in the database itself."""
    store = await LocalStore.open_folder(folder)
    for number in range(documents):
        await store.put(f"notes/a{number:03}", body)
    await store.close()
    coordinator = await LocalCoordinator.open_folder(folder)
    await coordinator.put_if_absent("key", b"", 60_000)
    await coordinator.close()


def overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"X" * 100)


def damage_table(path: Path, table: str) -> None:
    """Overwrite the beginning of a table's first page."""
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    overwrite(path, (page - 1) * PAGE)


def served(folder: Path, **members: Any) -> dict[str, Any]:
    return {"store": f"file:{folder}", "collections": [NOTES], **members}


@pytest.mark.parametrize(
    ("database", "table"),
    [
        ("pysync.db", "object"),
        ("pysync.db", "change"),
        ("pysync.db", "probe"),
        ("coordinator.db", "claim"),
        ("coordinator.db", "counter"),
    ],
)
async def test_a_service_whose_tables_are_damaged_is_not_ready(
    folder: Path, start: Start, session: aiohttp.ClientSession, database: str, table: str
) -> None:
    await filled(folder)
    damage_table(folder / database, table)
    browser = Browser(await start(served(folder)), session)
    rejected = await browser.request("GET", "/health/ready")
    assert rejected.status == 503
    assert str(folder).encode() not in rejected.body
    assert (await browser.request("GET", "/health")).status == 200


async def test_a_service_that_has_met_damage_is_not_ready_any_more(
    folder: Path, start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "PROBE_EVERY_S", 0.0)
    await filled(folder, documents=200, body=b'{"v":1}' + b" " * 1000)
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        ((page,),) = database.execute(
            "SELECT pageno FROM dbstat WHERE name = 'object' AND pagetype = 'leaf' ORDER BY path LIMIT 1"
        )
    overwrite(folder / "pysync.db", (page - 1) * PAGE)
    browser = Browser(await start(served(folder)), session)
    assert (await browser.request("GET", "/health/ready")).status == 200
    assert (await browser.pull("notes/a000")).status == 503
    for _ in range(2):
        assert (await browser.request("GET", "/health/ready")).status == 503
    assert (await browser.push("notes/new", {"n": 1})).status == 200, "what is whole is served"


async def test_a_coordinator_that_has_met_damage_is_not_ready_any_more(folder: Path) -> None:
    async def claim_all() -> None:
        for number in range(200):
            await coordinator.put_if_absent(f"k{number:03}", b"x" * 100, 60_000)

    coordinator = await LocalCoordinator.open_folder(folder)
    await claim_all()
    await coordinator.close()
    with closing(sqlite3.connect(folder / "coordinator.db")) as database:
        pages = database.execute(
            "SELECT pageno FROM dbstat WHERE name = 'claim' AND pagetype = 'leaf' ORDER BY path"
        ).fetchall()
    overwrite(folder / "coordinator.db", (pages[len(pages) // 2][0] - 1) * PAGE)
    coordinator = await LocalCoordinator.open_folder(folder)
    await coordinator.probe()
    with pytest.raises(CoordinatorUnavailable):
        await claim_all()
    with pytest.raises(CoordinatorUnavailable, match="reports damage"):
        await coordinator.probe()
    await coordinator.close()


async def test_nothing_that_damage_raises_leaves_a_callback_of_the_loop(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(folder)
    damage_table(folder / "pysync.db", "object")
    met: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: met.append(context))
    store = await LocalStore.open_folder(folder)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.get("notes/a000"),
        lambda: store.put("notes/b", b"{}"),
        store.probe,
    ]
    for call in calls * 2:
        with pytest.raises(StoreUnavailable):
            await call()
        await asyncio.sleep(0)
    assert await store.change_log.last_id()
    await store.close()
    await asyncio.sleep(0)
    assert met == []
    (message,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.CRITICAL]
    assert "reports damage" in message


async def test_a_probe_leaves_nothing_in_a_store(folder: Path) -> None:
    store = await LocalStore.open_folder(folder)
    newest = await store.change_log.last_id()
    for _ in range(3):
        await store.probe()
    assert await store.change_log.last_id() == newest
    assert [listed.key async for listed in store.walk("")] == []
    await store.put("a", b"{}")
    assert isinstance(await store.get("a"), StoredObject)
    await store.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_coordinator_that_admits_no_signed_request_is_not_ready(tmp_path: Path, kind: str) -> None:
    coordinator: Coordinator
    if kind == "memory":
        coordinator = MemoryCoordinator(max_live_nonces=3)
    else:
        coordinator = await LocalCoordinator.open_folder(tmp_path, max_live_nonces=3)
    await coordinator.probe()
    for number in range(2):
        await coordinator.consume_nonce("aa", f"{number}", 0)
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.probe()
    await coordinator.close()


async def test_a_coordinator_whose_probe_is_repeated_keeps_working(tmp_path: Path) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path)
    newest = await coordinator.last_id()
    for _ in range(3):
        await coordinator.probe()
    assert await coordinator.last_id() == newest
    assert await coordinator.prepared(10) == []
    await coordinator.close()


async def test_readiness_is_answered_while_the_disk_hangs(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "READY_S", 0.02)
    monkeypatch.setattr(readiness, "PROBE_EVERY_S", 0.0)
    flushed = asyncio.Event()

    class Hanging(MemoryStore):
        probes = 0

        async def probe(self) -> None:
            self.probes += 1
            while not flushed.is_set():  # as a thread that waits for a disk: it cannot be cancelled
                try:
                    await flushed.wait()
                except asyncio.CancelledError:
                    continue

    store = Hanging()
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    for _ in range(3):
        assert (await browser.request("GET", "/health/ready")).status == 503
    assert store.probes == 1
    flushed.set()
    while (await browser.request("GET", "/health/ready")).status != 200:
        pass
    assert (await browser.request("GET", "/health/ready")).status == 200
    assert store.probes >= 2


async def test_a_probe_that_fails_unexpectedly_is_no_readiness(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class BrokenStore(MemoryStore):
        async def probe(self) -> None:
            raise LookupError("unforeseen")

    browser = Browser(await start({"collections": [NOTES]}, store=BrokenStore()), session)
    assert (await browser.request("GET", "/health/ready")).status == 503


@pytest.mark.parametrize(("database", "table"), [("pysync.db", "object"), ("coordinator.db", "claim")])
async def test_a_server_does_not_start_on_a_damaged_database(
    folder: Path, shell: Shell, database: str, table: str
) -> None:
    await filled(folder)
    serve.check_databases(config.parse({"version": 1, **served(folder)}))
    damage_table(folder / database, table)
    status, output, errors = await shell.run_async("serve", "--store", f"file:{folder}", "--port", "0")
    assert (status, output) == (1, "")
    assert f"{folder / database} is damaged: " in errors
    assert ("Restore it from a backup" if database == "pysync.db" else "delete it") in errors
    assert ("command .dump of sqlite3" in errors) == (database == "pysync.db")


async def test_a_database_without_a_write_ahead_log_gets_one_when_it_is_opened(
    folder: Path, shell: Shell
) -> None:
    """`.recover` of sqlite3 into a new file leaves the journal mode that SQLite has by default."""
    document = decode_push(b'{"data":{}}').stored(1)
    await filled(folder, body=document)
    for name in ("pysync.db", "coordinator.db"):
        with closing(sqlite3.connect(folder / name)) as database:
            assert database.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    status, output, errors = await shell.run_async("verify", "--store", f"file:{folder}")
    assert (status, errors, json.loads(output)["objects"]) == (0, "", 1)
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await filled(folder, documents=2)
    store = await LocalStore.open_folder(folder)
    assert await store.list("notes", None, 10) == ["a000", "a001"]
    await store.close()


async def test_a_database_that_is_larger_than_configured_is_not_checked_at_the_start(folder: Path) -> None:
    await filled(folder)
    damage_table(folder / "pysync.db", "object")
    size = (folder / "pysync.db").stat().st_size
    settings = {"version": 1, **served(folder), "coordinator": "memory:"}
    for limit in (0, size - 1):
        serve.check_databases(config.parse({**settings, "server": {"quickCheckMaxBytes": limit}}))
    with pytest.raises(ValueError, match="is damaged"):
        serve.check_databases(config.parse({**settings, "server": {"quickCheckMaxBytes": size}}))
    with pytest.raises(ValueError, match="is damaged"):
        serve.check_databases(config.parse(settings))


async def test_stores_that_have_no_database_are_not_checked(tmp_path: Path) -> None:
    serve.check_databases(config.parse({"version": 1, "store": "memory:", "collections": [NOTES]}))
    serve.check_databases(
        config.parse({"version": 1, "store": f"file:{tmp_path}/new", "collections": [NOTES]})
    )
    assert list(tmp_path.iterdir()) == []


async def test_file_that_is_no_database_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database, and longer than its header" * 100)
    assert "is damaged: file is not a database. Restore it" in str(quick_check(tmp_path / "x.db"))


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_probe_of_a_configuration_checks_its_databases_whatever_their_size(
    folder: Path, shell: Shell, tmp_path: Path, is_damaged: bool
) -> None:
    await filled(folder)
    if is_damaged:
        damage_table(folder / "pysync.db", "change")
        damage_table(folder / "coordinator.db", "counter")
    (tmp_path / "service.json").write_text(
        '{"version": 1, "store": "file:data", "server": {"quickCheckMaxBytes": 0}, "collections": []}'
    )
    status, output, _ = await shell.run_async("check", "service.json", "--probe")
    if is_damaged:
        assert status == 1
        assert output.count("is damaged: ") == 2
    else:
        assert status == 0
        assert output.count("quick_check") == 2


async def test_readiness_is_answered_while_a_commit_hangs(
    folder: Path, start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "READY_S", 0.02)
    monkeypatch.setattr(readiness, "PROBE_EVERY_S", 0.0)
    browser = Browser(await start(served(folder)), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    begun, flushed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(tick: HybridTimestamp) -> str:
        loop.call_soon_threadsafe(begun.set)
        flushed.wait()
        return "files/a"

    hanging = asyncio.ensure_future(
        app.store.write_ordered(hang, chunks_of(b"1"), "text/plain", lambda tick, sha256: [])
    )
    await begun.wait()
    try:
        for _ in range(3):
            assert (await browser.request("GET", "/health/ready")).status == 503
        assert (await browser.pull("notes/a")).status == 200
    finally:
        flushed.set()
    await hanging
    while (await browser.request("GET", "/health/ready")).status != 200:
        pass
