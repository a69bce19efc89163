"""The HTTP server: aiohttp's, with sockets and connections of our own."""

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from pysync.concurrency import every
from pysync.server.http.connection import Connection, begin_request
from pysync.server.http.load import Load

HEAD_TIMEOUT_S = 10.0
"""How long a connection may take for its first byte, and for the head of a request."""
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0
READ_BUFFER_BYTES = 32 * 1024
"""Bytes of a body that are read ahead. Reading stops at twice as many."""
BACKLOG: Final = 512
"""Connections that wait until they are accepted. While requests wait for long, each turn of the event loop
accepts one, so the clients of more would have given up."""
ACCEPT_AT_ONCE: Final = 16
"""Connections that are accepted in one turn of the event loop. uvloop's own servers accept one, so with long
turns a new connection would wait for all that came before it."""
RETRY_S: Final = 0.1
"""Pause before the next attempt when the system has no descriptor or memory for a connection."""
OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
DRAIN_S: Final = 60.0
DRAIN_CHECK_S = 0.02
CANCEL_S = 0.5

log = logging.getLogger("pysync.server")


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Return sockets that are bound to every address of `host`, all to the same port; port 0 selects a free
    one. Other processes may bind to it too if it is `shared`. Raises OSError, with a message that names the
    address, if it is in use or unavailable."""
    sockets: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        sock = socket.socket(family, kind, protocol)
        sockets.append(sock)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Allow binding while connections of an earlier service linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
        except OSError as error:
            for opened in sockets:
                opened.close()
            reason = os.strerror(error.errno or 0).lower()
            raise OSError(error.errno, f"cannot listen on {address[0]} port {port}: {reason}") from error
        port = sock.getsockname()[1]
    return sockets


class HttpServer(web.Server):
    """Listens at `host` and `port`, on which other processes may listen too if `shared`, and handles requests
    with `handler`. On shutdown it lets requests finish that are being handled; aiohttp would discard the part
    of their bodies that has not arrived yet."""

    def __init__(
        self,
        handler: Any,
        load: Load | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        shared: bool = False,
    ) -> None:
        super().__init__(handler, request_factory=begin_request)
        self.load: Final = load or Load()
        self._where = host, port
        self._shared = shared
        self._sockets: list[socket.socket] = []
        self._retry: asyncio.TimerHandle | None = None
        self._starting = set[asyncio.Task[None]]()
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which it listens, the first if it has several."""
        host, port, *_ = self._sockets[0].getsockname()
        return host, port

    async def start(self) -> None:
        """Listen. Raises OSError as `bound_sockets` does."""
        self._sockets = bound_sockets(*self._where, shared=self._shared)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
        self._accept_from_now()
        checks = every(CHECK_EVERY_S, self._time_out_slow_heads, "cannot time out slow clients", log)
        self._watch = asyncio.get_running_loop().create_task(checks)

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Stop listening, finish the requests in progress, for at most `drain_s`, and end all connections."""
        self._stop_accepting()
        for sock in self._sockets:
            sock.close()
        if self._starting:
            await asyncio.wait(self._starting)
        for _ in range(2):  # what has arrived begins, and is no idle connection
            await asyncio.sleep(0)
        self.pre_shutdown()
        await self.shutdown(drain_s)

    def pre_shutdown(self) -> None:
        """Close the idle connections."""
        for connection in self._own_connections():
            if connection.is_idle:
                connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 (aiohttp's name)
        """Wait up to `timeout` seconds until all connections are idle, then close them."""
        if self._watch is not None:
            self._watch.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not all(connection.is_idle for connection in self._own_connections()):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_CHECK_S)
        await super().shutdown(CANCEL_S)

    def _own_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if isinstance(connection, Connection)]

    def _accept_from_now(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock, self._accept, sock)

    def _stop_accepting(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self, listening: socket.socket) -> None:
        """Accept some of the connections that have come."""
        for _ in range(1 if self.load.is_late else ACCEPT_AT_ONCE):
            try:
                sock, peer = listening.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    log.warning("cannot accept connections: %s", error.strerror)
                    self._stop_accepting()
                    self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._accept_from_now)
                elif error.errno == errno.ECONNABORTED:
                    continue
                return
            sock.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(sock, peer[0]))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _serve(self, sock: socket.socket, ip: str) -> None:
        """Serve a connection, or end it if there is no room for it."""
        connection = None
        try:
            loop = asyncio.get_running_loop()
            connection = Connection(
                self,
                self.load,
                loop=loop,
                access_log=None,
                auto_decompress=False,  # bodies are passed on as they were sent
                keepalive_timeout=KEEPALIVE_S,
                lingering_time=0,
                max_field_size=16 * 1024,
                read_bufsize=READ_BUFFER_BYTES,
            )
            if self.load.opened(connection, ip):
                await loop.connect_accepted_socket(lambda: connection, sock)
            else:
                sock.close()
        except Exception as error:
            if connection is not None:
                self.load.closed(connection)
            sock.close()
            if not isinstance(error, OSError):  # the client has not gone
                log.error("cannot serve a connection: %r", error)

    async def _time_out_slow_heads(self) -> None:
        latest = self.load.now() - HEAD_TIMEOUT_S
        for connection, since in list(self.load.heads.items()):
            if since > latest:
                break
            connection.time_out()
