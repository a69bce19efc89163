"""A server that runs out of memory refuses what it cannot do, and goes on."""

import asyncio
import resource
import sqlite3
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import NOTES, collection
from support.server_process import serving

from pysync.concurrency import Job
from pysync.engine.outbox import Outbox
from pysync.errors import StoreUnavailable
from pysync.server.process.background import OutboxRelay
from pysync.sqlite.connection import SnapshotReader
from pysync.sqlite.database_file import Database, DatabaseFile
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

MEGABYTE = 1 << 20


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
async def test_a_handler_without_memory_or_a_thread_is_a_503_that_may_be_repeated(
    start: Start, session: aiohttp.ClientSession, error: Exception
) -> None:
    class Exhausted(MemoryStore):
        is_exhausted = True

        async def get(self, *args: Any, **options: Any) -> Any:
            if self.is_exhausted:
                raise error
            return await super().get(*args, **options)

        async def put(self, *args: Any, **options: Any) -> Any:
            if self.is_exhausted:
                raise error
            return await super().put(*args, **options)

    store = Exhausted()
    browser = Browser(await start({"collections": [NOTES]}, store), session)
    for rejected in (await browser.push("notes/a", {"n": 1}), await browser.pull("notes/a")):
        assert (rejected.status, rejected.json["code"]) == (503, "unavailable")
        assert rejected.headers["Retry-After"] == "1"
    store.is_exhausted = False
    assert (await browser.push("notes/a", {"n": 1})).status == 200
    assert (await browser.pull("notes/a")).json["data"] == {"n": 1}


async def test_a_body_that_finds_no_memory_as_it_arrives_is_a_503_that_may_be_repeated(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = Browser(await start({"collections": [NOTES]}), session)
    feed = aiohttp.StreamReader.feed_data

    def feed_once_memory_is_there(reader: aiohttp.StreamReader, *args: Any) -> Any:
        monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed)
        raise MemoryError

    monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed_once_memory_is_there)
    rejected = await browser.push("notes/a", {"n": 1})
    assert (rejected.status, rejected.json["code"]) == (503, "unavailable")
    assert rejected.headers["Retry-After"] == "1"
    assert (await browser.push("notes/a", {"n": 1})).status == 200


async def test_a_snapshot_that_ends_without_memory_is_not_read_from_for_ever(folder: Path) -> None:
    class Exhausted(sqlite3.Cursor):
        is_exhausted = True

        def execute(self, statement: str, *args: Any) -> Any:
            if statement == "COMMIT" and Exhausted.is_exhausted:
                Exhausted.is_exhausted = False
                raise MemoryError
            return super().execute(statement, *args)

    class Connection(sqlite3.Connection):
        def cursor(self, *args: Any) -> Any:
            return super().cursor(Exhausted)

    opened = await LocalStore.open_folder(folder)
    path = folder / "pysync.db"
    with closing(sqlite3.connect(path, isolation_level=None, factory=Connection)) as connection:
        database = Database(connection, connection, DatabaseFile(path))
        reader = SnapshotReader(database, StoreUnavailable)
        count = "SELECT count(*) FROM object"
        assert reader.rows(count) == [(0,)]
        await opened.put("notes/a", b"{}")
        assert not Exhausted.is_exhausted
        assert reader.rows(count) == [(1,)]
    await opened.close()


async def test_lost_announcements_are_recovered_after_a_round_without_memory() -> None:
    class Exhausted:
        is_transactional = False
        rounds = 0

        async def recover(self, *, early: bool) -> int:
            self.rounds += 1
            if self.rounds == 1:
                raise MemoryError
            return 0

    slept: asyncio.Queue[float] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        slept.put_nowait(seconds)
        await asyncio.sleep(0)

    outbox = Exhausted()
    relay = Job(OutboxRelay(cast("Outbox", outbox), sleep=sleep).run)
    relay.start()
    for _ in range(3):
        await slept.get()
    await relay.close()
    assert outbox.rounds >= 3


@pytest.mark.process
async def test_a_process_whose_memory_is_limited_survives_bodies_that_do_not_fit(tmp_path: Path) -> None:
    members: dict[str, Any] = {"collections": [NOTES, collection("large", maxBodyBytes=32 * MEGABYTE)]}
    async with serving(tmp_path, **members) as service, aiohttp.ClientSession() as session:
        browser = Browser(service.base, session)
        assert (await browser.push("notes/a", {"n": 1})).status == 200
        pid = service.process.pid
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + 16 * MEGABYTE
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
        body = b'{"data":{"text":"' + b"x" * (24 * MEGABYTE) + b'"},"baseHash":null}'
        for n in range(3):
            url = f"{service.base}/push/large/{n}"
            headers = {"Content-Type": "application/json"}
            with suppress(aiohttp.ClientError):  # the event loop had no memory for bytes that arrived
                async with session.post(url, data=BytesIO(body), headers=headers) as answer:
                    assert answer.status == 503, await answer.read()
        assert (await browser.pull("notes/a")).json["data"] == {"n": 1}
        assert (await browser.push("notes/b", {"n": 2})).status == 200
        assert service.process.returncode is None
