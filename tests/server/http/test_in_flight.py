"""Bytes of bodies and responses that the server holds: the bound holds, nothing hangs, all is given back."""

import asyncio
import contextlib
import gzip
import json
import logging
import os
import tracemalloc
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from support.clients import Browser, Reply, Start
from support.collections import LOG, collection
from support.faulty_store import FaultyStore
from support.loop_time import loop_time
from yarl import URL

from pysync.errors import Overloaded
from pysync.server.app import App
from pysync.server.http import in_flight
from pysync.server.http.connection import HttpServer
from pysync.server.http.in_flight import BytesInFlight, Reservation
from pysync.server.http.responses import Response
from pysync.server.http.streaming import StreamingResponse
from pysync.store.memory import MemoryStore

MB = 200_000
"""A large body, by the standards of these tests."""
BUDGET = 4 * MB
BIG = collection("big", maxBodyBytes=6_000_000)
FILES = collection("files", maxBodyBytes=8 * MB, allowedMimeTypes=["image/*"])
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Site:
    """A service whose budget is small, behind a proxy that says who asks."""

    def __init__(self, app: App, store: FaultyStore, browser: Browser) -> None:
        self.app, self.store, self.browser = app, store, browser
        self.in_flight = app.in_flight

    async def push(self, key: str, size: int, sender: str = "10.0.0.1") -> Reply:
        return await self.browser.push(key, {"text": "x" * size}, headers=said_by(sender))

    async def begin(self, text: bytes, sender: str = "10.0.0.1") -> Streams:
        """A connection on which `text` was sent."""
        url = URL(self.browser.base)
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1000)
        writer.write(text.replace(b"\r\n", f"\r\nHost: h\r\nX-Forwarded-For: {sender}\r\n".encode(), 1))
        return reader, writer

    @contextlib.asynccontextmanager
    async def holding(self, size: int, sender: str = "10.0.0.9") -> AsyncIterator[None]:
        """Another client has sent the beginning of a body of `size` bytes, and no more."""
        before = self.in_flight.held
        _, writer = await self.begin(push_head("big/other", size) + b"{", sender)
        await self.until_held(before + 1)
        try:
            yield
        finally:
            writer.transport.abort()
        async with asyncio.timeout(10):
            while self.in_flight.held > before:
                await asyncio.sleep(0)

    async def until_held(self, least: int) -> None:
        async with asyncio.timeout(10):
            while self.in_flight.held < least:
                await asyncio.sleep(0)

    async def until_all_is_given_back(self) -> None:
        async with asyncio.timeout(10):
            while self.in_flight.held or self.in_flight.work.held or self.in_flight.watched:
                await asyncio.sleep(0)


def said_by(sender: str) -> dict[str, str]:
    return {"X-Forwarded-For": sender}


@pytest_asyncio.fixture
async def site(start: Start, session: aiohttp.ClientSession) -> AsyncIterator[Site]:
    store = FaultyStore(MemoryStore())
    members = {
        "server": {"maxBytesInFlight": BUDGET, "trustedProxyHops": 1},
        "collections": [BIG, FILES, LOG],
    }
    base = await start(members, store=store)
    found = Site(start.apps[-1], store, Browser(base, session))  # type: ignore[attr-defined]
    yield found
    await found.until_all_is_given_back()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for room, and nobody is ended to make some."""
    monkeypatch.setattr(in_flight, "GRACE_S", float("inf"))
    monkeypatch.setattr(in_flight, "WAIT_S", 0.0)
    monkeypatch.setattr(in_flight, "WORK_WAIT_S", 0.0)


@pytest.fixture
def strict(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes no progress is ended at once when there is no room."""
    monkeypatch.setattr(in_flight, "GRACE_S", 0.0)
    monkeypatch.setattr(in_flight, "SEARCH_EVERY_S", 0.0)
    monkeypatch.setattr(in_flight, "SLOW_BYTES_PER_S", float("inf"))


def is_overloaded(answer: Reply) -> bool:
    return answer.status == 503 and answer.json["code"] == "overloaded" and "Retry-After" in answer.headers


def push_head(key: str, length: int, media_type: str = "application/json") -> bytes:
    lines = f"Content-Type: {media_type}\r\nContent-Length: {length}"
    return f"POST /push/{key} HTTP/1.1\r\n{lines}\r\n\r\n".encode()


@pytest.mark.usefixtures("impatient")
async def test_bodies_beyond_the_budget_are_rejected_and_small_requests_are_not(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    arrived = site.store.delay("put", release)
    first = asyncio.create_task(site.push("big/a", 3 * MB))
    await arrived.wait()
    assert is_overloaded(await site.push("big/b", 2 * MB, "10.0.0.2"))
    assert (await site.push("big/small", 1000, "10.0.0.2")).status == 200
    assert (await site.browser.pull("big/small")).status == 200
    page = (await site.browser.request("GET", "/metrics")).body
    assert b"\npysync_bytes_in_flight 6000" in page
    assert b"\npysync_bytes_rejections_total 1.0\n" in page
    release.set()
    assert (await first).status == 200
    assert (await site.push("big/b", 2 * MB, "10.0.0.2")).status == 200
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_body_waits_for_room(site: Site) -> None:
    async with site.holding(BUDGET):
        second = asyncio.create_task(site.push("big/b", 2 * MB))
        while not site.in_flight.budget.waiting:
            await asyncio.sleep(0)
    assert (await second).status == 200


@pytest.mark.usefixtures("impatient")
async def test_one_address_has_no_more_than_its_share(site: Site) -> None:
    async with site.holding(2 * MB + 1, "10.0.0.1"):
        assert is_overloaded(await site.push("big/a", MB))
        assert (await site.push("big/a", MB, "10.0.0.2")).status == 200


@pytest.mark.usefixtures("impatient")
async def test_a_body_that_is_larger_than_the_budget_is_read_alone(site: Site) -> None:
    assert (await site.push("big/a", BUDGET + MB)).status == 200
    async with site.holding(2):
        assert is_overloaded(await site.push("big/b", BUDGET + MB))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["chunked", "gzip"])
async def test_a_body_whose_length_is_not_declared_is_read_alone_if_it_is_larger(
    site: Site, kind: str
) -> None:
    text = json.dumps({"data": {"text": "x" * (BUDGET + MB)}, "baseHash": None}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(text), 100_000):
            yield text[start : start + 100_000]

    async def push() -> int:
        headers = {"Content-Type": "application/json"}
        if kind == "gzip":
            headers["Content-Encoding"] = kind
        data = pieces() if kind == "chunked" else gzip.compress(text)
        url = f"{site.browser.base}/push/big/a"
        async with site.browser.session.post(url, data=data, headers=headers) as answer:
            return answer.status

    async with site.holding(MB):
        assert await push() == 503
    await site.until_all_is_given_back()
    assert await push() == 200


@pytest.mark.usefixtures("impatient")
async def test_bodies_beyond_what_may_be_decoded_at_once_are_rejected(site: Site) -> None:
    size = 3 * MB // 2  # there is room for both, and work for one
    release = asyncio.Event()
    arrived = site.store.delay("put", release)
    first = asyncio.create_task(site.push("big/a", size))
    await arrived.wait()
    assert is_overloaded(await site.push("big/b", size, "10.0.0.2"))
    release.set()
    assert (await first).status == 200
    assert (await site.push("big/b", size, "10.0.0.2")).status == 200


@pytest.mark.parametrize("length", [50_000, 3 * MB])
async def test_a_body_whose_client_leaves_is_given_back(site: Site, length: int) -> None:
    _, writer = await site.begin(push_head("big/a", length) + b"{")
    await site.until_held(length if length > in_flight.SMALL_BYTES else in_flight.MIN_BYTES)
    assert site.in_flight.held <= length
    writer.transport.abort()
    await site.until_all_is_given_back()


async def test_an_invalid_body_is_given_back(site: Site) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await site.browser.request("POST", "/push/big/a", b"{" * MB, headers)
    assert answer.status == 400
    await site.until_all_is_given_back()


@pytest.mark.usefixtures("strict")
async def test_a_body_that_makes_no_progress_makes_room_for_others(site: Site) -> None:
    reader, writer = await site.begin(push_head("big/a", 3 * MB) + b"{")
    await site.until_held(3 * MB)
    assert (await site.push("big/b", 2 * MB, "10.0.0.2")).status == 200
    assert (await reader.read(1000)).startswith(b"HTTP/1.1 503 ")
    writer.close()
    page = (await site.browser.request("GET", "/metrics")).body
    assert b"\npysync_slow_transfers_ended_total 1.0\n" in page


@pytest.mark.usefixtures("strict")
async def test_a_client_that_never_reads_makes_room_for_others(site: Site) -> None:
    text = "x" * 5_000_000  # more than the kernel holds
    body = json.dumps({"data": {"text": text}, "baseHash": None}).encode()
    reader, writer = await site.begin(push_head("big/a", len(body)) + body)
    assert (await reader.read(1000)).startswith(b"HTTP/1.1 200 ")
    await site.until_all_is_given_back()
    writer.write(b"GET /pull/big/a HTTP/1.1\r\nHost: h\r\n\r\n")
    await site.until_held(len(text))
    answer = await site.browser.pull("big/a", said_by("10.0.0.2"))
    assert answer.status == 200
    assert answer.json["data"]["text"] == text
    received = 0
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(100_000):
            received += len(piece)
    assert received < len(text)
    writer.close()


@pytest.mark.usefixtures("impatient")
async def test_a_response_beyond_the_budget_is_rejected(site: Site) -> None:
    assert (await site.push("big/a", 3 * MB)).status == 200
    async with site.holding(2 * MB):
        assert is_overloaded(await site.browser.pull("big/a"))
        assert (await site.browser.request("HEAD", "/pull/big/a")).status == 200
    assert (await site.browser.pull("big/a")).status == 200


@pytest.mark.usefixtures("impatient")
async def test_a_chunked_body_reserves_what_has_arrived(site: Site) -> None:
    head = (
        b"POST /push/big/a HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n%b\r\n" % (10_000, b"x" * 10_000)
    async with site.holding(3 * MB):
        reader, writer = await site.begin(head)
        writer.write(10 * chunk)
        await site.until_held(3 * MB + 100_000)
        assert site.in_flight.held <= 3 * MB + 100_000 + 2 * in_flight.SMALL_BYTES
        writer.write(20 * chunk)
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 503 ")
        writer.close()


@pytest.mark.usefixtures("impatient")
async def test_a_gzip_body_reserves_its_inflated_length(site: Site) -> None:
    text = gzip.compress(json.dumps({"data": {"text": "x" * MB}, "baseHash": None}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with site.holding(BUDGET - MB // 2):
        assert is_overloaded(await site.browser.request("POST", "/push/big/a", text, headers))
    assert (await site.browser.request("POST", "/push/big/a", text, headers)).status == 200


async def test_a_gzip_body_is_inflated_no_further_than_it_says(site: Site) -> None:
    text = json.dumps({"data": {"text": "x" * 5_000_000}, "baseHash": None}).encode()
    body = gzip.compress(text)[:-4] + bytes(4)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    tracemalloc.start()
    try:
        answer = await site.browser.request("POST", "/push/big/a", body, headers)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.error == (400, "Invalid gzip body")
    assert most < len(text) / 2


@pytest.mark.usefixtures("impatient")
async def test_a_large_batch_is_rejected_before_its_documents_are_read(site: Site) -> None:
    for n in range(6):
        assert (await site.push(f"big/{n}", 2 * MB)).status == 200
    params = json.dumps({"big": [{"id": str(n)} for n in range(6)]})
    target = str(URL("/batch/pull").with_query(collections="big", params=params))
    async with site.holding(MB):
        assert is_overloaded(await site.browser.request("GET", target))
    await site.until_all_is_given_back()


@pytest.mark.usefixtures("impatient")
async def test_an_upload_that_is_streamed_reserves_what_is_held_of_it(site: Site) -> None:
    headers = {"Content-Type": "image/png"}
    picture = os.urandom(3 * MB)
    async with site.holding(MB):
        assert (await site.browser.request("POST", "/push/files/a", picture, headers)).status == 200
    async with site.holding(2 * MB):
        assert is_overloaded(await site.browser.request("POST", "/push/files/b", picture, headers))


async def test_a_body_below_the_minimum_rate_gets_408(site: Site) -> None:
    reader, writer = await site.begin(push_head("big/a", 10_000))
    answer = asyncio.create_task(reader.read(1000))
    with loop_time() as time:
        while not answer.done():
            writer.write(b"x")
            time.now_s += 1.0
            await asyncio.sleep(0)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    writer.close()


class Reservations:
    """A budget of 10 MB whose clock the test sets, and who asks for some of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bytes = BytesInFlight(10 * MB, lambda _: "", now=lambda: self.now)

    def reservation(self, address: str) -> Reservation:
        return Reservation(self.bytes, address)


async def test_waiting_requests_get_room_in_their_order() -> None:
    reservations = Reservations()
    first = reservations.reservation("a")
    await first.grow(10 * MB)
    order: list[int] = []

    async def wait(number: int) -> None:
        later = reservations.reservation(str(number))
        await later.grow(5 * MB)
        order.append(number)
        later.release()

    waiting = [asyncio.create_task(wait(n)) for n in range(4)]
    await asyncio.sleep(0)
    first.release()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3]
    assert reservations.bytes.held == 0


async def test_a_cancelled_wait_takes_nothing() -> None:
    reservations = Reservations()
    first, second = reservations.reservation("a"), reservations.reservation("b")
    await first.grow(10 * MB)
    waiting = asyncio.create_task(second.grow(MB))
    await asyncio.sleep(0)
    first.release()  # grants the room at the same time
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert reservations.bytes.held == 0


async def test_no_more_than_a_few_requests_wait() -> None:
    reservations = Reservations()
    first = reservations.reservation("a")
    await first.grow(10 * MB)

    async def wait() -> None:
        later = reservations.reservation("b")
        await later.grow(MB)
        later.release()

    waiting = [asyncio.create_task(wait()) for _ in range(in_flight.MAX_WAITING)]
    await asyncio.sleep(0)
    with loop_time(), pytest.raises(Overloaded):  # at once
        await reservations.reservation("c").grow(MB)
    first.release()
    await asyncio.gather(*waiting)


async def test_the_least_progress_is_ended_first() -> None:
    reservations, ended = Reservations(), list[str]()
    for name, moved in (("slow", 10), ("stalled", 0), ("quick", 4 * MB)):
        each = reservations.reservation(name)
        await each.grow(3 * MB)
        each.watch(lambda moved=moved: moved, lambda name=name: ended.append(name))  # type: ignore[misc]
    reservations.now = 60.0
    await reservations.reservation("x").grow(3 * MB)
    assert ended == ["stalled"]
    reservations.now = 61.0
    await reservations.reservation("y").grow(3 * MB)
    assert ended == ["stalled", "slow"]


async def test_an_address_with_its_share_ends_its_own_transfers_first() -> None:
    reservations, ended = Reservations(), list[str]()
    for name, size in (("other", MB), ("own", 6 * MB)):
        each = reservations.reservation(name)
        await each.grow(size)
        each.watch(lambda: 0, lambda name=name: ended.append(name))  # type: ignore[misc]
    reservations.now = 60.0
    await reservations.reservation("own").grow(2 * MB)
    assert ended == ["own"]


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_transfer_that_is_ended_while_it_grows_gives_back_what_it_took(is_waiting: bool) -> None:
    reservations = Reservations()
    other, growing = reservations.reservation("other"), reservations.reservation("own")
    await other.grow(6 * MB)
    await growing.grow(3 * MB)
    growing.watch(lambda: 0, lambda: None)
    if is_waiting:
        growth = asyncio.create_task(growing.grow(5 * MB))
        await asyncio.sleep(0)
        growing.end()
        await growth
    else:
        reservations.now = 60.0
        await growing.grow(5 * MB)  # it makes the least progress of all
    assert reservations.bytes.held == 8 * MB
    growing.release()
    assert reservations.bytes.held == 6 * MB


async def test_unsent_chunks_are_closed() -> None:
    reservations, is_closed = Reservations(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            yield b"second"
        finally:
            is_closed.set()

    chunks = pieces()
    await anext(chunks)
    reservations.bytes.budget.take(10 * MB, "other")
    with pytest.raises(Overloaded):
        await StreamingResponse(b"first", chunks).reserve(reservations.reservation("a"))  # type: ignore[arg-type]
    assert is_closed.is_set()


async def test_a_connection_does_not_keep_the_response_that_it_has_written() -> None:
    response = Response(200, b"x" * MB)

    async def handle(request: web.BaseRequest) -> Response:
        return response

    server = HttpServer(handle)
    await server.start()
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(MB) == b"x" * MB
    async with asyncio.timeout(10):
        while response.content:
            await asyncio.sleep(0)
    writer.close()
    await server.close()
