"""Through a real nginx answers and bodies pass as they come, and connections are kept."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import aiohttp
import pytest_asyncio
from components.fixtures import StartNginx
from support.clients import SUBJECT, Browser, Start, root_device
from support.faulty_store import FaultyStore
from support.nginx_fixture import front, open_request
from support.nginx_site import ME, SERVICE, signer

from pysync.client import ChangeEvent, Client, LogCursor
from pysync.store.memory import MemoryStore

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def test_a_long_answer_is_passed_on_before_its_end_is_known(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    straight = await start(SERVICE, store=store)
    base = front(start_nginx, straight)
    for n in range(40):
        element = {"data": {"n": n, "pad": "x" * 5000}}
        assert (await signer(base, session).request("POST", f"/push/log/{ME}/l", element)).status == 200
    whole, reads = await all_of_log(straight, session, store)
    release = asyncio.Event()
    arrived = store.delay("get", release, after=reads - 1)
    reader, writer = await request_log(base, session)
    await reader.readuntil(b"\r\n\r\n")
    body = await chunk(reader)
    await arrived.wait()
    assert len(body) < whole
    release.set()
    while line := await chunk(reader):
        body += line
    assert [element["data"]["n"] for element in json.loads(body)["data"]["items"]] == list(range(40))
    writer.close()


async def all_of_log(base: str, session: aiohttp.ClientSession, store: FaultyStore) -> tuple[int, int]:
    """How many bytes all of the log is, and how many gets of the store it takes."""
    before = store.calls["get"]
    answer = await signer(base, session).pull(f"log/{ME}/l?full=true")
    return len(answer.body), store.calls["get"] - before


async def request_log(base: str, session: aiohttp.ClientSession) -> Streams:
    """A connection on which all of the log has been asked for."""
    target = f"/pull/log/{ME}/l?full=true"
    signed = signer(base, session).headers("GET", target, b"")
    return await open_request(base, "GET", target, signed)


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body, empty at its end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    body = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return body


class Upstream:
    """A server that keeps what came, and how: `connections`, `heads`, and whether a body has `begun`. It
    sends its answer in two halves, the second once it may go `on`."""

    def __init__(self) -> None:
        self.connections = 0
        self.heads: list[str] = []
        self.begun = asyncio.Event()
        self.on = asyncio.Event()
        self.on.set()
        self._serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(asyncio.current_task())
        try:
            await self._respond_to_all(reader, writer)
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        """End every connection."""
        for task in filter(None, self._serving):
            task.cancel()
        await asyncio.gather(*filter(None, self._serving), return_exceptions=True)

    async def _respond_to_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await self._head(reader):
            self.heads.append(head)
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length")),
                0,
            )
            if length:
                await reader.readexactly(1)
                self.begun.set()
                await reader.readexactly(length - 1)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
            await self.on.wait()
            writer.write(b"k")

    async def _head(self, reader: asyncio.StreamReader) -> str:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return ""


@pytest_asyncio.fixture
async def upstream(start_nginx: StartNginx) -> AsyncIterator[tuple[Upstream, str]]:
    """A recording server and the URL of the nginx before it."""
    recording = Upstream()
    server = await asyncio.start_server(recording.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield recording, front(start_nginx, f"{host}:{port}")
    finally:
        server.close()
        await recording.close()


async def test_connections_to_a_node_are_kept(
    upstream: tuple[Upstream, str], session: aiohttp.ClientSession
) -> None:
    recording, base = upstream
    for _ in range(10):
        answer = await Browser(base, session).request("GET", "/x", headers={"Connection": "close"})
        assert answer.body == b"ok"
    assert recording.connections == 1
    assert all("\r\nHost: 127.0.0.1:" in head and "\r\nConnection" not in head for head in recording.heads)


async def test_a_body_reaches_the_node_while_it_is_still_coming(upstream: tuple[Upstream, str]) -> None:
    recording, base = upstream
    headers = {"Content-Type": "application/octet-stream", "Content-Length": "100000"}
    reader, writer = await open_request(base, "POST", "/push/x", headers)
    writer.write(b"x")
    await recording.begun.wait()
    writer.write(b"x" * 99_999)
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_the_first_half_of_an_answer_does_not_wait_for_the_second(
    upstream: tuple[Upstream, str],
) -> None:
    recording, base = upstream
    recording.on.clear()
    reader, writer = await open_request(base, "GET", "/pull/x", {})
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(1) == b"o"
    recording.on.set()
    assert await reader.readexactly(1) == b"k"
    writer.close()


async def test_change_stream_delivers_writes_as_they_are_made(start: Start, start_nginx: StartNginx) -> None:
    base = front(start_nginx, await start(SERVICE))
    key = f"log/{ME}/l"

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    async with (
        Client(base, keys=SUBJECT, certificate=root_device(SUBJECT)) as me,
        me.watch(["mine"]) as changes,
        aclosing(LogCursor(me, key, since=0, sleep=never).follow(collection="log")) as found,
    ):
        for n in range(3):
            pushed = await me.push(f"u/{ME}/{n}", {})
            change = await anext(changes)
            assert isinstance(change, ChangeEvent)
            assert change.hash == pushed.hash
            waiting = asyncio.ensure_future(anext(found))
            await me.append(key, {"n": n})
            assert [element.data for element in await waiting] == [{"n": n}]


async def test_change_stream_passes_as_it_is_sent_and_ends_gracefully(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
    straight = await start({"collections": [notes]})
    browser = Browser(front(start_nginx, straight), session)
    async with session.get(f"{browser.base}/events") as stream:
        assert (stream.status, stream.content_type) == (200, "text/event-stream")
        first = await stream.content.readuntil(b"\n\n")
        assert first.startswith(b":\nid: ")
        written = (await browser.push("notes/a", {"n": 1})).json
        block = await stream.content.readuntil(b"\n\n")
        assert json.loads(block.partition(b"data: ")[2])["hash"] == written["hash"]
        cursor = block.partition(b"\n")[0].removeprefix(b"id: ").decode()
        await browser.push("notes/b", {})
        async with session.get(f"{browser.base}/events", headers={"Last-Event-ID": cursor}) as again:
            while b"data: " not in (block := await again.content.readuntil(b"\n\n")):
                pass
            assert json.loads(block.partition(b"data: ")[2])["params"] == {"id": "b"}
        (app,) = start.apps  # type: ignore[attr-defined]
        app.drain()
        assert b"\n\nretry: " in await stream.content.read()
