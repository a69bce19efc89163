"""A server that runs out of memory refuses what it cannot do, and goes on."""

import asyncio
import resource
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, cast

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import NOTES, collection
from support.server_process import serving

from pysync import _core
from pysync.concurrency import Job
from pysync.engine.outbox import Outbox
from pysync.server.process.background import OutboxRelay
from pysync.store import NotModified, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

MEGABYTE = 1 << 20


def exhausted(*args: object, **options: object) -> NoReturn:
    raise MemoryError


async def test_a_handler_without_memory_is_a_503_that_may_be_repeated(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted(MemoryStore):
        is_exhausted = False

        async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
            return exhausted() if self.is_exhausted else await super().get(key, if_none_match)

    store = Exhausted()
    browser = Browser(await start({"collections": [NOTES]}, store), session)
    with monkeypatch.context() as patched:
        patched.setattr(_core, "decode_push", exhausted)
        store.is_exhausted = True
        for refused in (await browser.push("notes/a", {"n": 1}), await browser.pull("notes/a")):
            assert (refused.status, refused.json["code"]) == (503, "unavailable")
            assert refused.headers["Retry-After"] == "1"
    store.is_exhausted = False
    assert (await browser.push("notes/a", {"n": 1})).status == 200
    assert (await browser.pull("notes/a")).json["data"] == {"n": 1}


async def test_a_handler_that_gets_no_thread_is_a_503_that_may_be_repeated(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = Browser(await start({"collections": [NOTES]}), session)

    def no_thread(*args: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_core, "decode_push", no_thread)
        refused = await browser.push("notes/a", {"n": 1})
    assert (refused.status, refused.json["code"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "1"
    assert (await browser.push("notes/a", {"n": 1})).status == 200


async def test_a_body_that_finds_no_memory_as_it_arrives_is_a_503_that_may_be_repeated(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = Browser(await start({"collections": [NOTES]}), session)
    feed = aiohttp.StreamReader.feed_data

    def feed_once_memory_is_there(reader: aiohttp.StreamReader, *args: Any) -> Any:
        monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed)
        raise MemoryError

    monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed_once_memory_is_there)
    refused = await browser.push("notes/a", {"n": 1})
    assert (refused.status, refused.json["code"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "1"
    assert (await browser.push("notes/a", {"n": 1})).status == 200


async def test_a_snapshot_that_ends_without_memory_is_not_read_from_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await LocalStore.open_folder(folder)
    reader = store._reader
    real = reader._cursor

    class Exhausted:
        def execute(self, statement: str, *args: Any) -> object:
            return exhausted() if statement == "COMMIT" else real.execute(statement, *args)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "_cursor", Exhausted())
        assert await store.get("notes/a") is None
        await store.put("notes/a", b"{}")
    assert await store.get("notes/a") is not None
    await store.close()


async def test_lost_announcements_are_recovered_after_a_round_without_memory() -> None:
    class Exhausted:
        is_transactional = False
        rounds = 0

        async def recover(self, *, early: bool) -> int:
            self.rounds += 1
            return exhausted() if self.rounds == 1 else 0

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
