"""A service that only listens and answers, and clients of it with plain sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pysync.server.connection import Request
from pysync.server.early_rejection import EarlyRejections
from pysync.server.http_server import HttpServer
from pysync.server.listener import Listener
from pysync.server.overload import LoadShedder
from pysync.server.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


async def answer(request: Request) -> Response:
    return Response(200, b"answered")


@asynccontextmanager
async def listening(
    load: LoadShedder,
    handler: Handler = answer,
    early_rejections: EarlyRejections | None = None,
    *,
    isolates_requests: bool = False,
) -> AsyncIterator[tuple[str, int]]:
    """A service that answers every request. Yields its address."""
    server = HttpServer(handler, load, early_rejections=early_rejections, isolates_requests=isolates_requests)
    listener = Listener(server, "127.0.0.1")
    await listener.start()
    try:
        yield listener.address
    finally:
        load.close()
        await listener.close()


def connect(address: tuple[str, int], request: bytes = b"") -> socket.socket:
    """Return a client that the kernel has connected and that the service has yet to accept."""
    client = socket.create_connection(address)
    client.sendall(request)
    client.setblocking(False)
    return client


async def receive(client: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(client, 4096)
