"""Connections: aiohttp's protocol with a time limit for request heads and JSON errors."""

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, Final

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.web_protocol import ERROR, _ErrInfo

from pysync import protocol
from pysync.concurrency import every
from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout, Unavailable
from pysync.server.early_rejection import EarlyRejections
from pysync.server.in_flight import release
from pysync.server.overload import Address, Arrival, LoadShedder
from pysync.server.responses import Response, error_response

HEAD_TIMEOUT_S = 10.0
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0
READ_BUFFER_BYTES = 32 * 1024
"""Bytes of a body that are read ahead. Reading stops at twice as many."""
DRAIN_CHECK_S = 0.02
CANCEL_S = 0.5
_TCP_INFO: Final = struct.Struct("=B51xI")
"""Of Linux's `struct tcp_info`: the state, and `tcpi_last_data_recv` in milliseconds."""
_ESTABLISHED: Final = 1

log = logging.getLogger("pysync.server")

NoteFailure = Callable[[web.BaseRequest], None]


class Request(web.BaseRequest):
    """A request, and when it arrived."""

    ATTRS = web.BaseRequest.ATTRS | {"arrival", "connection"}
    arrival: Arrival
    connection: "Connection"
    """The connection on which it was sent."""


class Connection(web.RequestHandler):
    """One client connection of `server`, which counts for `address`. `head_since` is the loop time at which
    an unfinished head began, else 0.0. `ended_head` is True if the last bytes ended a head, so that the next
    begin another. `arrivals` has the arrival of each request that waits for its turn."""

    __slots__ = ("_http", "address", "arrivals", "ended_head", "head_since", "load", "was_served")

    def __init__(self, server: "HttpServer", address: Address, **options: Any) -> None:
        super().__init__(server, **options)
        self._http = server
        self.load = server.load
        self.address: Address | None = address
        self.arrivals: deque[Arrival] = deque()
        self.head_since = 0.0
        self.ended_head = True
        self.was_served = False
        # The parser counts a request that was taken before its body had arrived, so it may stop one request
        # earlier than the connection expects, which would then never let it go on.
        self._max_msg_queue_size -= 1

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection, which is closed."""
        if self.address is not None:
            self.load.closed(self)
            super().connection_lost(exc)

    async def start(self) -> None:
        """Handle the requests of the connection, one after another.

        This replaces `start` of aiohttp, which makes a task for each request. That costs a small request some
        percent of its time, and is needed only for plugins: what they put into context variables must not be
        seen by the next request.
        """
        loop, server, make_request = self._loop, self._http, self._request_factory
        assert make_request is not None
        writer = StreamWriter(self, loop)
        try:
            while not self._force_close:
                if not self._messages:
                    self._waiter = loop.create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
                message, payload = self._messages.popleft()
                if self._parser is not None:
                    self._parser.message_consumed()
                if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                    self._resume_reading_if_drained()
                server.requests_count += 1
                handler = self._request_handler
                if isinstance(message, _ErrInfo):
                    handler, message = self._make_error_handler(message), ERROR
                task = self._task_handler or asyncio.current_task()
                assert handler is not None
                assert task is not None
                request = make_request(message, payload, self, writer, task)
                handling = self._handle_request(request, None, handler)
                self._request_in_progress = True  # also until a task of its own has begun
                try:
                    response, is_lost = await (
                        loop.create_task(handling) if server.isolates_requests else handling
                    )
                    if is_lost:
                        break
                    self._keepalive = bool(response.keep_alive)
                    if not payload.is_eof() and not self._force_close:
                        self.close()
                except ConnectionError:
                    break
                finally:
                    if len(request):  # few requests have stored anything
                        release(request)
                if not self._keepalive or self._close or self._force_close:
                    break
                self._next_keepalive_close_time = loop.time() + self._keepalive_timeout
                if self._keepalive_handle is None:
                    self._keepalive_handle = loop.call_at(
                        self._next_keepalive_close_time, self._process_keepalive
                    )
                if self._messages:
                    await asyncio.sleep(0)  # let other connections have their turn
        except Exception as error:
            self.force_close()
            self.log_exception("Unhandled exception", exc_info=error)
        except BaseException:
            self.force_close()
            raise
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client, and note when a request arrives and when its head begins."""
        admitted: Arrival | None = None
        rejections = self._http.early_rejections if self.load.is_overloaded else None
        if rejections is not None and self._is_ready:
            decision = rejections.decide(self, data)
            if isinstance(decision, bytes):
                assert self.transport is not None
                self.transport.write(decision)
                self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
                self.load.pause(self)
                return
            admitted = decision
        waiting = len(self._messages)
        super().data_received(data)
        arrived = len(self._messages) - waiting
        self.ended_head = arrived > 0 and data.endswith(b"\r\n\r\n")
        if arrived:
            if admitted is not None and arrived == 1:
                self.arrivals.append(admitted)
            else:
                self.arrivals.extend(self.load.arrivals(self, arrived))
            if not self._request_in_progress:
                self.load.will_start(self)
        if self._request_in_progress or self._messages:
            self.head_since = 0.0
        elif self.head_since == 0.0:
            self.head_since = self._loop.time()

    def next_arrival(self) -> Arrival:
        """Return the arrival of the request whose turn has come. One that waited behind a request for an
        upgrade arrives now: aiohttp parses it when that is answered."""
        if not self.arrivals:
            self.arrivals.extend(self.load.arrivals(self, 1))
        return self.arrivals.popleft()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on after `pause_reading`, and parse what arrived before. aiohttp calls this at the end of each
        body, whether it paused or not, when there is mostly nothing to do."""
        if self._reading_paused or self._messages:
            super().resume_reading(resume_parser)

    def kernel_wait_s(self) -> float | None:
        """Return how long ago the kernel received the last bytes; None if the client has closed."""
        return None if self.transport is None else kernel_wait_s(self.transport.get_extra_info("socket"))

    def abort(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.abort()

    @property
    def _is_ready(self) -> bool:
        """True if the next bytes begin a request that would be handled at once, and the client reads what it
        is sent."""
        return self.is_idle and self.ended_head and not (self._paused or self._close or self._force_close)

    @property
    def has_more(self) -> bool:
        """True if other requests wait, or a part of one is still to come."""
        return bool(self._messages) or self._is_receiving

    @property
    def _is_receiving(self) -> bool:
        current = self._current_request
        return (
            self.head_since > 0.0
            or (current is not None and not current.content.is_eof())
            or any(not payload.is_eof() for _, payload in self._messages)
        )

    def stop_reading(self) -> bool:
        """Stop reading. Return False if the rest of a request is still to come, so that reading goes on."""
        if self.transport is None or self._is_receiving:
            return False
        self.transport.pause_reading()
        return True

    def read_on(self, since: float) -> None:
        """Read again. Reading stopped at the time `since`."""
        if self.transport is not None:
            self.load.read_again(self, since)
            self.transport.resume_reading()

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting for the end of its response."""
        return not self._request_in_progress and not self._messages

    def detach(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Hand the connection, whose last response has begun, to `protocol`, which may write the rest for
        hours. The state that aiohttp keeps for a connection is several times larger than such a response
        needs, so it is released as if the connection were lost. Raises ConnectionResetError if the connection
        is lost."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.load.resume(self)
        self.transport = None
        self.connection_lost(None)
        transport.set_protocol(protocol)
        if self._paused:
            protocol.pause_writing()
        if self._buffer_paused or self._reading_paused:
            transport.resume_reading()
        return transport

    def time_out(self) -> None:
        """Send 408 for a head that did not arrive in time, and close."""
        if self.transport is not None:
            self.transport.write(_protocol_error(RequestTimeout()).to_bytes())
        self.force_close()

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
            log.error("unhandled error", exc_info=exc, extra={"repeats": repr(exc)})
            error = Unavailable() if isinstance(exc, MemoryError) else InternalError()
        else:
            error = BadRequest("Malformed request")
            self._http.note_failure(request)
        return _protocol_error(error)


def kernel_wait_s(sock: socket.socket) -> float | None:
    """Return how long ago the kernel received the last bytes of a connection, 0.0 if that is unknown; None if
    the client has closed it."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):  # not TCP, or not Linux
        return 0.0
    state, wait_ms = _TCP_INFO.unpack(info)
    return wait_ms / 1000 if state == _ESTABLISHED else None


def _protocol_error(error: PysyncError) -> Response:
    """Return the response to bytes that are not a request. It has a request id too."""
    response = error_response(error, close=True)
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: {os.urandom(8).hex()}\r\n"
    return response


class HttpServer(web.Server):
    """Creates the connections of a `Listener`, and times out those whose head takes longer than 10 s. On
    shutdown it lets requests finish that are being handled; aiohttp would discard the part of their bodies
    that has not arrived yet. `note_failure` counts requests that are malformed. With `isolates_requests`,
    each request has context variables of its own."""

    def __init__(
        self,
        handler: Any,
        load: LoadShedder | None = None,
        note_failure: NoteFailure = lambda request: None,
        early_rejections: EarlyRejections | None = None,
        *,
        isolates_requests: bool = False,
    ) -> None:
        super().__init__(
            handler,
            access_log=None,
            auto_decompress=False,  # bodies are passed on as they were sent
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=0,
            max_field_size=16 * 1024,
            read_bufsize=READ_BUFFER_BYTES,
        )
        self.load: Final = load or LoadShedder(inf)
        self.note_failure: Final = note_failure
        self.early_rejections: Final = early_rejections
        self.isolates_requests: Final = isolates_requests
        self._watch: asyncio.Task[None] | None = None

    def make_connection(self, address: Address) -> Connection:
        """Return the protocol of a connection that counts for `address`."""
        if self._watch is None:
            checks = every(CHECK_EVERY_S, self._time_out_slow_heads, "cannot time out slow clients", log)
            self._watch = asyncio.get_running_loop().create_task(checks)
        return Connection(self, address, loop=self._loop, **self._kwargs)

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> Request:
        request = Request(message, payload, protocol, writer, task, self._loop)
        assert isinstance(protocol, Connection)
        request.connection = protocol
        request.arrival = protocol.next_arrival()
        return request

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 (aiohttp's name)
        """Wait up to `timeout` seconds until all connections are idle, then close them."""
        if self._watch is not None:
            self._watch.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not all(connection.is_idle for connection in self._own_connections()):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_CHECK_S)
        await super().shutdown(CANCEL_S)

    def pre_shutdown(self) -> None:
        """Close the idle connections."""
        for connection in self._own_connections():
            if connection.is_idle:
                connection.close()

    def _own_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if isinstance(connection, Connection)]

    async def _time_out_slow_heads(self) -> None:
        latest = asyncio.get_running_loop().time() - HEAD_TIMEOUT_S
        for connection in self._own_connections():
            if 0.0 < connection.head_since <= latest:
                connection.time_out()
