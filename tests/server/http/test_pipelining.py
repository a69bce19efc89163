"""Requests that a client sends without waiting for the responses to earlier ones."""

import asyncio

from aiohttp import web
from support.listening import listening

from pysync.server.http.responses import Response

PUSH = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"
PULL = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_many_requests_behind_a_body_that_arrives_late_are_all_answered() -> None:
    begun = asyncio.Event()

    async def handle(request: web.BaseRequest) -> Response:
        begun.set()
        return Response(200, await request.content.read())

    async with listening(handle) as address:
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
    async with listening() as address:
        reader, writer = await asyncio.open_connection(*address)
        upgrade = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(PULL.replace(b"Host: h\r\n", upgrade) + PULL * 2)
        async with asyncio.timeout(10):
            for _ in range(3):
                await reader.readuntil(b"answered")
        writer.close()
