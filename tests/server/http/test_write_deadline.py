"""Writes that take too long: what their callers are told, and what becomes of the writes."""

import asyncio
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from contracts.files import chunks_of
from support.clients import Browser, Reply, Start
from support.collections import NOTES, UNSIGNED, collection

from pysync.concurrency import WriteDeadline
from pysync.errors import StoreUnavailable
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

LOG = collection("log", appendOnly=UNSIGNED)
FILES = collection("files", allowedMimeTypes=["text/plain"])
CONFIG = {"collections": [NOTES, LOG, FILES], "server": {"writeTimeoutMs": 1}}


class Stuck(MemoryStore):
    """A store whose writes wait until `goes` is set, and are then made."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = asyncio.Event()

    async def put(self, *arguments: Any, **options: Any) -> Any:
        await self.goes.wait()
        return await super().put(*arguments, **options)

    async def write(self, key: str, chunks: AsyncIterable[bytes], *rest: Any, **options: Any) -> Any:
        async def then_wait() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
            await self.goes.wait()

        return await super().write(key, then_wait(), *rest, **options)


class StuckBucket(Stuck):
    """A bucket, whose late uploads go on."""

    is_remote = True


ONCE = {"Idempotency-Key": "one"}


async def decided(send: Callable[[], Awaitable[Reply]]) -> Reply:
    """The first reply that is not 503, to the same request again and again."""
    while (reply := await send()).status == 503:
        await asyncio.sleep(0)
    return reply


async def test_a_push_that_takes_too_long_is_503_and_its_repetition_finds_it(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Stuck()
    browser = Browser(await start(CONFIG, store=store), session)
    reply = await browser.push("notes/a", {"n": 1}, headers=ONCE)
    assert reply.error == (503, "store_unavailable")
    assert reply.headers["Retry-After"] == "1"
    store.goes.set()
    repeated = await decided(lambda: browser.push("notes/a", {"n": 1}, headers=ONCE))
    assert repeated.status == 200
    assert (await browser.pull("notes/a")).json["hash"] == repeated.json["hash"]
    assert (await decided(lambda: browser.push("notes/a", {"n": 2}))).status == 409
    metrics = await browser.request("GET", "/metrics")
    assert b"pysync_write_timeouts_total 0.0" not in metrics.body


async def test_a_late_push_is_counted_as_it_was_answered(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    store = Stuck()
    browser = Browser(await start(CONFIG, store=store), session)
    caplog.set_level("INFO", "pysync.server")
    reply = await browser.push("notes/a", {"n": 1}, headers={"X-Request-Id": "mine"})
    assert reply.status == 503
    assert reply.headers["X-Request-Id"] == "mine"
    assert "Connection" not in reply.headers, "it serves on"
    store.goes.set()
    while "a write succeeded after its time was up" not in caplog.text:
        await asyncio.sleep(0)
    metrics = await browser.request("GET", "/metrics")
    counted = [line for line in metrics.body.decode().splitlines() if 'requests_total{action="push"' in line]
    assert counted == ['pysync_requests_total{action="push",collection="notes",status="503"} 1.0']
    late = [record for record in caplog.records if "takes longer" in record.message]
    assert [getattr(record, "request_id", None) for record in late] == ["mine"]


@pytest.mark.parametrize("kind", ["push", "append", "upload"])
async def test_a_late_write_counts_as_bytes_in_flight_until_it_ends(
    start: Start, session: aiohttp.ClientSession, kind: str
) -> None:
    store = StuckBucket()
    browser = Browser(await start(CONFIG, store=store), session)
    path, body, content_type = {
        "push": ("notes/a", b'{"data":{"n":"%s"},"baseHash":null}' % (b"x" * 200_000), "application/json"),
        "append": ("log/a", b'{"data":{"n":"%s"}}' % (b"x" * 200_000), "application/json"),
        "upload": ("files/a", b"x" * 200_000, "text/plain"),
    }[kind]

    async def bytes_in_flight() -> float:
        metrics = (await browser.request("GET", "/metrics")).body.decode()
        return float(metrics.partition("\npysync_bytes_in_flight ")[2].split()[0])

    reply = await browser.request("POST", f"/push/{path}", body, {"Content-Type": content_type})
    assert reply.error == (503, "store_unavailable")
    held = await bytes_in_flight()
    store.goes.set()
    assert held >= 200_000
    while await bytes_in_flight():
        await asyncio.sleep(0)


async def test_an_append_that_takes_too_long_is_503_and_not_doubled_by_its_repetition(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Stuck()
    browser = Browser(await start(CONFIG, store=store), session)

    async def append() -> Reply:
        return await browser.request("POST", "/push/log/a", {"data": {"n": 1}}, ONCE)

    for _ in range(3):
        assert (await append()).error == (503, "store_unavailable")
    store.goes.set()
    assert (await decided(append)).status == 200
    items = (await browser.request("GET", "/pull/log/a?last=10")).json["data"]["items"]
    assert [item["data"] for item in items] == [{"n": 1}]


async def test_writes_that_wait_for_the_lock_of_a_database_are_503_and_made_once(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    base = await start({**CONFIG, "store": f"file:{tmp_path}/data", "coordinator": "memory:"})
    browser = Browser(base, session)

    async def push() -> Reply:
        return await browser.push("notes/a", {"n": 1}, headers=ONCE)

    async def append() -> Reply:
        return await browser.request("POST", "/push/log/a", {"data": {"n": 1}}, ONCE)

    with closing(sqlite3.connect(tmp_path / "data/pysync.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            assert (await push()).error == (503, "store_unavailable")
            assert (await append()).error == (503, "store_unavailable")
        other.execute("ROLLBACK")
    assert (await decided(push)).status == (await decided(append)).status == 200
    assert (await browser.pull("notes/a")).json["data"] == {"n": 1}
    items = (await browser.request("GET", "/pull/log/a?last=10")).json["data"]["items"]
    assert [item["data"] for item in items] == [{"n": 1}]


async def test_a_file_that_takes_too_long_to_store_is_503(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = Stuck()
    base = await start(CONFIG, store=store)

    async def upload() -> tuple[int, bytes]:
        headers = {"Content-Type": "text/plain"}
        async with session.post(f"{base}/push/files/a", data=b"text", headers=headers) as answer:
            return answer.status, await answer.read()

    status, body = await upload()
    assert (status, b"store_unavailable" in body) == (503, True)
    store.goes.set()
    while (await upload())[0] == 503:
        pass
    assert (await Browser(base, session).pull("files/a")).body == b"text"


async def test_an_upload_that_took_too_long_replaces_no_acknowledged_file_later(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    members = {**CONFIG, "store": f"file:{folder}", "server": {"writeTimeoutMs": 100}}
    browser = Browser(await start(members), session)
    store: LocalStore = start.apps[-1].store  # type: ignore[attr-defined]
    await store.write("files/a", chunks_of(b"acknowledged"), "text/plain")
    text = {"Content-Type": "text/plain"}
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            reply = await browser.request("POST", "/push/files/a", b"late", text)
            assert reply.error == (503, "store_unavailable")
        other.execute("ROLLBACK")
    await store.put("notes/next", b"{}")  # the writes of a process are made one after another
    assert (await browser.pull("files/a")).body == b"acknowledged"
    assert list((folder / "files/~incoming").iterdir()) == []


async def test_the_time_of_an_upload_begins_when_it_has_arrived() -> None:
    timeouts: list[None] = []
    deadline = WriteDeadline(0, lambda: timeouts.append(None))

    async def slow_sender() -> AsyncIterator[bytes]:
        for _ in range(10):
            await asyncio.sleep(0)
            yield b"x"

    async def write(chunks: AsyncIterable[bytes]) -> int:
        return len([chunk async for chunk in chunks])

    async def hang(chunks: AsyncIterable[bytes]) -> None:
        await write(chunks)
        await asyncio.Event().wait()

    assert await deadline.run_upload(slow_sender(), write) == 10
    assert not timeouts
    with pytest.raises(StoreUnavailable):
        await deadline.run_upload(slow_sender(), hang)
    assert len(timeouts) == 1


async def test_a_write_is_cancelled_with_its_request() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    request = asyncio.create_task(WriteDeadline(60, lambda: None).run(write()))
    await begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ended.is_set()
