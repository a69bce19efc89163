"""The HTTP server and its connections: aiohttp's, with sockets of our own, a time limit for request heads and
JSON errors."""

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader

from pysync import protocol
from pysync.concurrency import every
from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout, Unavailable, UriTooLong
from pysync.server.http.in_flight import release
from pysync.server.http.load import Address, Load
from pysync.server.http.responses import STALL_S, Response, error_response

HEAD_TIMEOUT_S = 10.0
"""How long a connection may take for its first byte, and for the head of a request."""
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0
MAX_TARGET_BYTES: Final = 16 * 1024 - len("OPTIONS  HTTP/1.1\r\n")
"""The longest target of a request. With it the request line has 16 KB, which fits into a buffer of nginx."""
READ_BUFFER_BYTES = 32 * 1024
"""Bytes of a body that are read ahead. Reading stops at twice as many."""
BACKLOG: Final = 128
"""Connections that wait until they are accepted, as many as aiohttp's own servers let wait. While requests
wait, each turn of the event loop accepts one, and answers 32. So the last of them waits for about 4,000
answers; behind more, its client would have given up when its turn comes."""
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


class Connection(web.RequestHandler):
    """A connection of a client to `server`."""

    __slots__ = ("accepted", "address", "is_silent", "load", "waits_since")

    def __init__(self, server: web.Server, load: Load, **aiohttp_options: Any) -> None:
        super().__init__(server, **aiohttp_options)
        # aiohttp's parser counts a request that was taken before its body had arrived, so it may stop one
        # request earlier than the connection expects, which would then never let it go on.
        self._max_msg_queue_size -= 1
        self.load = load
        self.address: Address | None = None
        """What the connection counts for; None once it is closed."""
        self.accepted: asyncio.Transport | None = None
        """The transport, also while it closes and waits for a client that does not read."""
        self.is_silent = True
        """True until its first byte."""
        self.waits_since = 0.0
        """When its last request arrived, as `Load.now` has it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless the connection gave way meanwhile."""
        super().connection_made(transport)
        self.accepted = self.transport
        if self.address is None:
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection, which is closed."""
        self.load.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Note when a head begins to arrive."""
        load, address = self.load, self.address
        if address is not None and self in address.idle and (self.is_silent or self not in load.heads):
            load.heads.pop(self, None)
            load.heads[self] = load.now()
        self.is_silent = False
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """True if no request is being handled."""
        return self.address is None or self in self.address.idle

    def abort(self) -> None:
        """End the connection at once."""
        self.load.closed(self)
        if self.accepted is not None:
            self.accepted.abort()

    def detach(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Hand the connection, whose last response has begun, to `protocol`, which may write the rest for
        hours. The state that aiohttp keeps for a connection is several times larger than such a response
        needs, so it is released as if the connection were lost. Raises ConnectionResetError if the connection
        is lost."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.transport = None
        self.connection_lost(None)
        transport.set_protocol(protocol)
        if self.writing_paused:
            protocol.pause_writing()
        transport.resume_reading()
        return transport

    def time_out(self) -> None:
        """Close, because a head did not arrive in time. If a part of it did, the response is 408."""
        if self.transport is not None and not self.is_silent:
            self.transport.write(_protocol_error(RequestTimeout()).to_bytes())
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write a response. What the request held is then free."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if len(request):  # few requests have stored anything
                release(request)
            self.load.end(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Response:
        """Return the response to a request that aiohttp could not parse, or to an unhandled error."""
        error: PysyncError
        if status >= 500:
            if not isinstance(exc, ConnectionError):  # the client has not gone
                log.error("unhandled error", exc_info=exc)
            error = Unavailable() if isinstance(exc, MemoryError) else InternalError()
        else:
            error = BadRequest("Malformed request")
            if isinstance(exc, LineTooLong) and MAX_TARGET_BYTES in exc.args:  # headers have another limit
                error = UriTooLong()
            if exc is not None:
                exc.__traceback__ = None  # its frames have the bytes, and lead to the error
        return _protocol_error(error)


def begin_request(
    message: RawRequestMessage,
    payload: StreamReader,
    connection: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    """Return a request whose handler is about to be called."""
    assert isinstance(connection, Connection)
    connection.load.begin(connection)
    return web.BaseRequest(message, payload, connection, writer, task, asyncio.get_running_loop())


def _protocol_error(error: PysyncError) -> Response:
    """Return the response to bytes that are not a request. It has a request id too."""
    response = error_response(error, close=True)
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: {os.urandom(8).hex()}\r\n"
    return response


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Return sockets that are bound to every address of `host`, all to the same port; port 0 selects a free
    one. Other processes may bind to it too if it is `shared`. Raises OSError, with a message that names the
    address, if it is in use or unavailable."""
    sockets: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, number, _, address in dict.fromkeys(addresses):
        sock = socket.socket(family, kind, number)
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
        for _ in range(1 if self.load.has_waiting else ACCEPT_AT_ONCE):
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
            # The kernel may hold whole responses of a client that reads nothing, and nobody waits for those.
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # only Linux has it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALL_S * 1000))
            loop = asyncio.get_running_loop()
            connection = Connection(
                self,
                self.load,
                loop=loop,
                access_log=None,
                auto_decompress=False,  # bodies are passed on as they were sent
                keepalive_timeout=KEEPALIVE_S,
                lingering_time=0,
                max_line_size=MAX_TARGET_BYTES,
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
