"""Connections: aiohttp's protocol with a time limit for request heads and JSON errors."""

import asyncio
import logging
import os
from collections import deque
from typing import Any, Final, NamedTuple

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion, HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import ERROR, _ErrInfo
from multidict import CIMultiDict, CIMultiDictProxy

from pysync import protocol
from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout, Unavailable
from pysync.server.early_rejection import EarlyRejections
from pysync.server.in_flight import release
from pysync.server.overload import Address, Arrival, Arrivals, LoadShedder, kernel_wait_s, spread
from pysync.server.responses import Response, error_response

HEALTH_PROBE: Final = b"GET /health"
KEPT_BYTES: Final = 64 * 1024
KEPT_READS: Final = 64
"""Bytes of requests that wait for their turn, for each connection, and how many reads they came with, after
which it is not read."""
SMALL_KEPT_BYTES: Final = 4 * 1024
"""Bytes of requests that wait for their turn for each connection, however many of others wait."""
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all requests that wait for their turn. Larger ones that come then begin at once."""


log = logging.getLogger("pysync.server")


class Kept(NamedTuple):
    """Bytes that begin with a request, not parsed yet, and when their requests arrived."""

    data: bytes
    arrivals: Arrivals

    @property
    def first(self) -> float:
        """When the first of its requests arrived."""
        return self.arrivals[0]


class ConnectionOptions(NamedTuple):
    """What all connections of a server share. With `isolates_requests`, each request has context
    variables of its own."""

    load: LoadShedder
    early_rejections: EarlyRejections | None
    isolates_requests: bool


class Request(web.BaseRequest):
    """A request, and when it arrived."""

    ATTRS = web.BaseRequest.ATTRS | {"arrival", "connection"}
    # Attributes instead of aiohttp's properties, which are functions with a cache in each request.
    method: str = ""
    raw_path: str = ""
    version: HttpVersion = HttpVersion11
    keep_alive: bool = False
    headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
    content: StreamReader = EMPTY_PAYLOAD
    arrival: Arrival
    connection: "Connection"
    """The connection on which it was sent."""


class Connection(web.RequestHandler):
    """One client connection of `server`, which counts for `address`. `head_since` is the loop time at which
    an unfinished head began, else 0.0. `arrivals` has the arrival of each request that was parsed and waits
    for its turn. `begins_request` is True if the next bytes are known to begin a request."""

    __slots__ = (
        "_kept",
        "_kept_bytes",
        "_options",
        "_reads_on",
        "address",
        "arrivals",
        "begins_request",
        "head_since",
        "load",
        "was_served",
    )

    def __init__(
        self, server: web.Server, options: ConnectionOptions, address: Address, **aiohttp_options: Any
    ) -> None:
        super().__init__(server, **aiohttp_options)
        self._options = options
        self.load = options.load
        self.address: Address | None = address
        self.arrivals: deque[Arrival] = deque()
        self.head_since = 0.0
        self.begins_request = True
        self.was_served = False
        self._kept: deque[Kept] = deque()
        self._kept_bytes = 0
        self._reads_on = True
        # The parser counts a request that was taken before its body had arrived, so it may stop one request
        # earlier than the connection expects, which would then never let it go on.
        self._max_msg_queue_size -= 1

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection, which is closed."""
        if self.address is not None:
            self._count_kept(-self._kept_bytes)
            self._kept.clear()
            self.load.closed(self)
            super().connection_lost(exc)

    async def start(self) -> None:
        """Handle the requests of the connection, one after another.

        This replaces `start` of aiohttp, which makes a task for each request. That costs a small request some
        percent of its time, and is needed only for plugins: what they put into context variables must not be
        seen by the next request.
        """
        loop, server, isolates_requests = self._loop, self._manager, self._options.isolates_requests
        assert server is not None
        writer = StreamWriter(self, loop)
        try:
            while not self._force_close:
                while not self._messages:
                    if self._kept:
                        self._wait_for_turn()
                        if self._messages:
                            break
                    self._waiter = loop.create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
                if self._force_close:  # the connection was lost before the turn of its request came
                    break
                message, payload = self._messages.popleft()
                if self._parser is not None:
                    self._parser.message_consumed()
                if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                    self._resume_reading_if_drained()
                server.requests_count += 1
                handler = self._request_handler
                if isinstance(message, _ErrInfo):
                    if message.exc is not None:
                        message.exc.__traceback__ = None  # its frames have the bytes, and lead to the error
                    handler, message = self._make_error_handler(message), ERROR
                task = self._task_handler or asyncio.current_task()
                assert handler is not None
                assert task is not None
                request = self._make_request(message, payload, writer, task)
                handling = self._handle_request(request, None, handler)
                self._request_in_progress = True  # also until a task of its own has begun
                try:
                    response, is_lost = await (loop.create_task(handling) if isolates_requests else handling)
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
                # Otherwise the last request would stay in memory until the next one comes.
                del message, payload, handler, task, request, handling, response
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

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        writer: StreamWriter,
        task: "asyncio.Task[None]",
    ) -> Request:
        request = Request(message, payload, self, writer, task, self._loop)
        request.method = message.method
        request.raw_path = message.path
        request.version = message.version
        request.keep_alive = not message.should_close
        request.headers = message.headers
        request.content = payload
        request.connection = self
        request.arrival = self.next_arrival()
        return request

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client, or keep them until the turn of the connection comes."""
        load = self.load
        arrivals = load.arrivals(self)
        waits = self._kept or (self.begins_request and (load.is_overloaded or load.queue.is_full))
        if not (data and waits):  # without data, aiohttp lets the parser go on
            self._parse(data, arrivals)
        elif not self._rejects(data):
            self._keep(data, arrivals)

    def _rejects(self, data: bytes) -> bool:
        """Reject the requests in `data` if there is no room for them. Return False if there is."""
        rejections = self._options.early_rejections
        if rejections is None or not self.load.is_overloaded or self._kept or not self._is_writable:
            return False
        responses = rejections.decide(self, data)
        if responses is None:
            return False
        self._send_rejections(responses)
        self.load.pause_if_busy(self)
        return True

    def _send_rejections(self, responses: bytes) -> None:
        assert self.transport is not None
        self.transport.write(responses)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    def _keep(self, data: bytes, arrivals: Arrivals) -> None:
        """Keep bytes until the turn of the connection comes. The first that are kept begin a request."""
        is_next = self.is_idle
        self._kept.append(Kept(data, arrivals))
        self._count_kept(len(data))
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._kept_bytes > SMALL_KEPT_BYTES and self.load.queue.kept_bytes > MAX_KEPT_BYTES:
            self._parse_kept()
            return
        reads = 1 if self.load.is_overloaded else KEPT_READS
        if self._kept_bytes > KEPT_BYTES or len(self._kept) > reads:
            self._reads_on = False
            self._pause_transport_reading()
        if is_next:
            self._wait_for_turn()

    def _count_kept(self, change: int) -> None:
        self._kept_bytes += change
        self.load.queue.kept_bytes += change

    def _wait_for_turn(self) -> None:
        """Handle the kept requests, in another tick if this one has enough to begin."""
        kept, load, rejections = self._kept[0], self.load, self._options.early_rejections
        if not load.queue.is_full or kept.data.startswith(HEALTH_PROBE):
            self.go_on()
            return
        address = self.address if rejections is None else rejections.address(self, kept.data)
        is_preferred = load.prefers(self, address)
        if is_preferred or load.queue.has_room_for_others:
            load.queue.add(self, kept.first, is_preferred=is_preferred)
        else:
            self._parse_kept()

    def go_on(self) -> None:
        """Handle the kept requests. Those that have waited too long are refused."""
        if self._kept and not (self.load.is_overloaded and self._refuses_stale()):
            self._parse_kept()

    def give_up(self) -> None:
        """Refuse the kept requests that have waited too long."""
        if not self._kept or self._refuses_stale():
            return
        if self._kept[0].first > self.load.stale_since():
            self._wait_for_turn()
        else:
            self._parse_kept()

    def _refuses_stale(self) -> bool:
        """Refuse the kept requests that have waited too long, unparsed. Return True if no others are left."""
        rejections, latest = self._options.early_rejections, self.load.stale_since()
        if rejections is None or not self._is_writable or self._kept[0].first > latest:
            return False
        kept = self._take_kept()
        responses, rest = rejections.reject_until(latest, self, kept.data, kept.arrivals)
        if responses:
            self._send_rejections(responses)
        if rest:
            first, last, read_at = kept.arrivals
            if responses:
                first = min(max(first, latest), last)
            self._kept.append(Kept(rest, (first, last, read_at)))
            self._count_kept(len(rest))
            return False
        self.load.pause_if_busy(self)
        return True

    def _take_kept(self) -> Kept:
        """Return all that is kept, and read again if reading stopped for it."""
        kept = self._kept[0]
        if len(self._kept) > 1:
            first, _, read_at = kept.arrivals
            _, last, _ = self._kept[-1].arrivals
            kept = Kept(b"".join([each.data for each in self._kept]), (first, last, read_at))
        self._kept.clear()
        self._count_kept(-self._kept_bytes)
        if not self._reads_on:
            self._reads_on = True
            self._resume_transport_reading()
        return kept

    def _parse_kept(self) -> None:
        try:
            self._parse(*self._take_kept())
        except BaseException:
            self.force_close()
            raise

    def _parse(self, data: bytes, arrivals: Arrivals) -> None:
        """Parse bytes, and note when their requests arrived and when a head begins."""
        waiting = len(self._messages)
        super().data_received(data)
        arrived = len(self._messages) - waiting
        if arrived:
            if arrived == 1:
                self.arrivals.append(arrivals[1:])
            else:
                self.arrivals.extend(spread(arrivals, arrived))
            if not (self._request_in_progress or isinstance(self._messages[0][0], _ErrInfo)):
                self.load.queue.will_start(self)
        self.begins_request = arrived > 0 and self._ends_request(data, arrived)
        if self._request_in_progress or self._messages:
            self.head_since = 0.0
        elif self.head_since == 0.0:
            self.head_since = self._loop.time()

    def _ends_request(self, data: bytes, arrived: int) -> bool:
        """Return True if `data`, in which so many requests arrived, is known to end with the end of one."""
        if self._upgraded or self._buffer_paused:  # what is left of it waits in the parser
            return False
        message, payload = self._messages[-1]
        if payload is EMPTY_PAYLOAD and data.endswith(b"\r\n\r\n"):
            return True
        if arrived > 1 or not (self.begins_request and payload.is_eof()) or isinstance(message, _ErrInfo):
            return False
        body_bytes = len(data) - data.find(b"\r\n\r\n") - 4
        return message.headers.get(hdrs.CONTENT_LENGTH) == str(body_bytes)

    def next_arrival(self) -> Arrival:
        """Return the arrival of the request whose turn has come. One that waited behind a request for an
        upgrade arrives now: aiohttp parses it when that is answered."""
        if not self.arrivals:
            self.arrivals.extend(spread(self.load.arrivals(self), 1))
        return self.arrivals.popleft()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on after `pause_reading`, and parse what arrived before. aiohttp calls this at the end of each
        body, whether it paused or not, when there is mostly nothing to do."""
        if self._reading_paused or self._messages:
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        """Read on, if nothing else holds up reading."""
        if self._reads_on and not (self._buffer_paused or self._reading_paused):
            super()._resume_transport_reading()

    def kernel_wait_s(self) -> float | None:
        """Return how long ago the kernel received the last bytes; None if the client has closed."""
        return None if self.transport is None else kernel_wait_s(self.transport.get_extra_info("socket"))

    def abort(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.abort()

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
        if self.transport is None or self._is_receiving or self._kept:
            return False
        self.transport.pause_reading()
        return True

    def read_on(self, since: float) -> None:
        """Read again. Reading stopped at the time `since`."""
        if self.transport is not None:
            self.load.read_again(self, since)
            self._resume_transport_reading()

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting for the end of its response."""
        return not (self._request_in_progress or self._messages or self._kept)

    @property
    def _is_writable(self) -> bool:
        """True if a response may be written now: that of no earlier request is due, and the client reads."""
        is_open = self.transport is not None and not self.transport.is_closing()
        return is_open and not (self._request_in_progress or self._messages or self._paused)

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
            log.error("unhandled error", exc_info=exc)
            error = Unavailable() if isinstance(exc, MemoryError) else InternalError()
        else:
            error = BadRequest("Malformed request")
        return _protocol_error(error)


def _protocol_error(error: PysyncError) -> Response:
    """Return the response to bytes that are not a request. It has a request id too."""
    response = error_response(error, close=True)
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: {os.urandom(8).hex()}\r\n"
    return response
