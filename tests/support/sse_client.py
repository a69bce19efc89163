"""A client of change streams that sees every byte: for tests of what the server sends."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
import pytest_asyncio

from support.clients import Browser, Start
from support.nginx_fixture import open_request


@dataclass
class StreamBlock:
    """One block of a stream: its lines, read."""

    id: str = ""
    event: str = ""
    data: Any = None
    retry: int | None = None
    comments: int = 0


@dataclass
class EventStream:
    """An open stream. `last_id` is the newest id that came with a complete block."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""
    last_id: str = ""
    blocks: list[StreamBlock] = field(default_factory=list)

    async def block(self) -> StreamBlock:
        """The next block. Raises EOFError at the end of the stream, ConnectionError where it was cut."""
        try:
            text = await self.reader.readuntil(b"\n\n")
        except asyncio.IncompleteReadError as error:
            raise EOFError(error.partial.decode()) from None
        assert b"\r" not in text
        block = StreamBlock()
        for line in text.decode().splitlines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "":
                block.comments += bool(line)
            elif name == "id":
                block.id = self.last_id = value
            elif name == "event":
                block.event = value
            elif name == "retry":
                block.retry = int(value)
            else:
                assert name == "data", line
                block.data = json.loads(value)
        self.blocks.append(block)
        return block

    async def event(self) -> StreamBlock:
        """The next block that says something."""
        while (block := await self.block()).data is None:
            pass
        return block

    async def events(self, count: int) -> list[Any]:
        """The data of the next `count` events."""
        return [(await self.event()).data for _ in range(count)]

    async def rest(self) -> list[StreamBlock]:
        """What comes until the stream ends."""
        found = []
        try:
            while True:
                found.append(await self.block())
        except EOFError:
            return found

    async def close(self) -> None:
        """Hang up."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def listen(
    browser: Browser,
    target: str = "/events",
    headers: dict[str, str] | None = None,
    *,
    method: str = "GET",
    **query: object,
) -> EventStream:
    """Ask for a stream as `browser` would, signed where it signs; of `query` what is no text is sent as JSON.
    What comes is `Heard`; where it is no stream, with its whole body."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in query.items()
        if value is not None
    }
    if texts:
        target += "?" + urlencode(texts)
    signed = browser.headers(method, target, b"") if hasattr(browser, "headers") else {}
    reader, writer = await open_request(browser.base, method, target, signed | (headers or {}))
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except BaseException:
        writer.transport.abort()
        raise
    first, *lines = head.strip().split("\r\n")
    found = {name.title(): value for name, _, value in (line.partition(": ") for line in lines)}
    stream = EventStream(int(first.split()[1]), found, reader, writer)
    if "Content-Length" in found:
        stream.body = await reader.readexactly(int(found["Content-Length"]))
    return stream


Serve = Callable[..., Awaitable[Browser]]
Listen = Callable[..., Awaitable[EventStream]]


@pytest.fixture
def serve(start: Start, session: aiohttp.ClientSession) -> Serve:
    """Starts a service with the collections it is called with: `await serve(NOTES, auth={...})`. What is no
    member of the configuration, as `store` or `now_ms`, is given to `create_app`."""

    async def serve_one(*collections: dict[str, Any], **members: Any) -> Browser:
        given = {name: members.pop(name) for name in ("store", "coordinator", "now_ms") if name in members}
        return Browser(await start({"collections": list(collections), **members}, **given), session)

    return serve_one


@pytest_asyncio.fixture
async def subscribe() -> AsyncIterator[Listen]:
    """`listen`, which hangs up when the test ends."""
    async with AsyncExitStack() as stack:

        async def subscribe_one(*args: Any, **options: Any) -> EventStream:
            stream = await listen(*args, **options)
            stack.push_async_callback(stream.close)
            return stream

        yield subscribe_one
