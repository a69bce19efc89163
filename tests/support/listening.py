"""A service that only listens and answers, and clients of it with plain sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from pysync.server.http.connection import HttpServer
from pysync.server.http.load import Load
from pysync.server.http.responses import Response

Handler = Callable[[web.BaseRequest], Awaitable[Response]]


async def respond(request: web.BaseRequest) -> Response:
    return Response(200, b"answered")


@asynccontextmanager
async def listening(handler: Handler = respond, load: Load | None = None) -> AsyncIterator[tuple[str, int]]:
    """A service that answers every request. Yields its address."""
    server = HttpServer(handler, load)
    await server.start()
    try:
        yield server.address
    finally:
        await server.close()


def connect(address: tuple[str, int], request: bytes = b"") -> socket.socket:
    """Return a client that the kernel has connected and that the service has yet to accept."""
    client = socket.create_connection(address)
    client.sendall(request)
    client.setblocking(False)
    return client


async def receive(client: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(client, 4096)
