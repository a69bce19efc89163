"""Requests that a client sends without waiting for the responses to earlier ones."""

import asyncio
from math import inf
from typing import Any

import pytest
from support.listening import listening

from pysync.server.connection import Connection, Request
from pysync.server.overload import LoadShedder
from pysync.server.responses import Response

PUSH = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"
PULL = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_many_requests_behind_a_body_that_arrives_late_are_all_answered() -> None:
    begun = asyncio.Event()

    async def handle(request: Request) -> Response:
        begun.set()
        return Response(200, await request.content.read())

    async with listening(LoadShedder(inf), handle) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(PUSH + b"x")
        await begun.wait()
        writer.write(b"x" + PULL * 100)
        for length in (2, *[0] * 100):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: %d\r\n" % length in head
            assert await reader.readexactly(length) == b"x" * length
        writer.close()


async def test_requests_behind_an_upgrade_request_are_answered() -> None:
    async with listening(LoadShedder(inf)) as address:
        reader, writer = await asyncio.open_connection(*address)
        upgrade = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(PULL.replace(b"Host: h\r\n", upgrade) + PULL * 2)
        async with asyncio.timeout(10):
            for _ in range(3):
                await reader.readuntil(b"answered")
        writer.close()


async def test_a_connection_whose_next_request_cannot_be_made_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_request(*parts: object) -> Request:
        raise MemoryError

    monkeypatch.setattr(Connection, "_make_request", make_request)
    load = LoadShedder(inf)
    async with listening(load) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(PULL)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
            while load.connections:
                await asyncio.sleep(0)
        writer.close()


async def test_a_connection_is_not_idle_before_the_task_of_its_request_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    make_request = Connection._make_request

    def watched(connection: Connection, *parts: Any) -> Request:
        asyncio.get_running_loop().call_soon(lambda: seen.append(connection.is_idle))
        return make_request(connection, *parts)

    monkeypatch.setattr(Connection, "_make_request", watched)
    async with listening(LoadShedder(inf), isolates_requests=True) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(PULL)
        await reader.readuntil(b"answered")
        writer.close()
    assert seen == [False]
