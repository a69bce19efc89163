"""Complete responses, serialised and written in one piece."""

import asyncio
import fcntl
import sys
import termios
import time
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from hashlib import sha256
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion, HttpVersion10, HttpVersion11

from pysync import protocol
from pysync.errors import PysyncError
from pysync.protocol import CHUNK_BYTES, JSON_TYPE
from pysync.server.http.in_flight import Reservation
from pysync.server.process.metrics import BUCKETS_S, REQUEST_SECONDS, Counters

NO_STORE = "Cache-Control: no-store\r\n"
DRAIN_ABOVE = 64 * 1024
"""Bytes buffered by a connection above which a response waits for its client."""

STALL_S = 30.0
"""Time after which a client is disconnected that does not send its body or read its response or its events,
or less than `MIN_BYTES_PER_S` of a body or response. The time that the server itself takes does not count."""
MIN_BYTES_PER_S: Final = 1024
UNREAD_BYTES: Final = 256 * 1024
"""Bytes that a client's kernel may acknowledge although the client reads nothing."""

_REASONS = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}
_DRAIN_REQUEST_BYTES = 64 * 1024
_DRAIN_REQUEST_S = 2.0
_CLOSE_DELAY_S = 1.0
"""Seconds that a client has to read its response while it is still sending. Closing with unread bytes resets
the connection, and a client that sees the reset first may never read the response: nginx then reports that
the server has failed."""


class Response(web.StreamResponse):
    """A complete response that is written in one piece.

    aiohttp builds a header multidict for each response and serialises it again. A response of this service is
    complete when it is created, so its head is one formatted string. `headers` are complete lines, each
    terminated by CR LF (`header_lines`). `close` closes the connection after reading at most 64 KiB of a body
    that is not needed, and with a short delay if there is more of it.
    """

    request_id = ""
    _reservation: Reservation | None = None
    _written = 0
    _has_begun = False
    _stays_open = False
    _request: web.BaseRequest | None = None

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: str = "",
        *,
        content_type: str = JSON_TYPE,
        close: bool = False,
    ) -> None:
        # `super().__init__` would make state that is not used, such as headers.
        self._code = status
        self.content = body
        self.header_text = headers
        self.media_type = content_type
        self.close = close

    @property
    def status(self) -> int:
        """The status code."""
        return self._code

    @property
    def prepared(self) -> bool:
        """True once the response has begun."""
        return self._has_begun

    @property
    def keep_alive(self) -> bool:
        """True if the connection stays open after the response."""
        return self._stays_open

    @property
    def held_bytes(self) -> int:
        """Number of bytes that are in memory while the client reads the response."""
        return len(self.content)

    async def reserve(self, reservation: Reservation) -> None:
        """Reserve the bytes that are in memory. Raises Overloaded if there is no room for them; the response
        cannot be sent then."""
        reservation.resize(self.held_bytes)
        self._reservation = reservation

    @property
    def size(self) -> int | None:
        """Number of bytes of the body; None if it is not known yet."""
        return len(self.content)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write head and body to the connection of `request`."""
        if self._has_begun:
            return None
        transport = self._begin(request)
        if self._reservation is not None:
            self._watch(transport, self._reservation)
        head = self._head(request.version)
        body = b"" if request.method == "HEAD" else self.content
        if len(body) <= DRAIN_ABOVE:
            transport.write(head + body)
        else:
            transport.write(head)
            await self._send(request, transport, body)
        del body
        self.content = b""  # the connection keeps its last response until the next request
        if transport.get_write_buffer_size() > DRAIN_ABOVE:
            await flush(request, transport)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Finish the response. Part of an unread request body is drained first, so that the client can read
        the response."""
        if self.close and self._request is not None:
            await _drain_request(self._request)

    def to_bytes(self, *, keep_alive: bool = False) -> bytes:
        """Return the whole response as bytes, for a connection that is then closed unless `keep_alive`."""
        self._stays_open = keep_alive
        return self._head(HttpVersion11) + self.content

    def _begin(self, request: web.BaseRequest) -> asyncio.Transport:
        """Return the connection of `request`. Raises ConnectionResetError if it is closed."""
        self._has_begun = True
        self._stays_open = request.keep_alive and not self.close
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self._request = request
        return transport

    async def _send(self, request: web.BaseRequest, transport: asyncio.Transport, body: bytes) -> None:
        """Write a long body as fast as the client reads it, and yield to other tasks. Raises
        ConnectionResetError if the client has disconnected, or reads too little."""
        text = memoryview(body)
        for start in range(0, len(body), CHUNK_BYTES):
            piece = text[start : start + CHUNK_BYTES]
            transport.write(piece)
            self._written += len(piece)
            await flush(request, transport)
            await asyncio.sleep(0)
            if transport.is_closing():
                raise ConnectionResetError("the client has disconnected")

    def _watch(self, transport: asyncio.Transport, reservation: Reservation) -> None:
        """Let the response be ended if its client reads less of it than others do of theirs."""

        def read_bytes() -> int:
            return self._written - unsent_bytes(transport) - UNREAD_BYTES

        reservation.watch(read_bytes, transport.abort)

    def _length(self, version: HttpVersion) -> str:
        """Return the header line that determines the end of the body."""
        return f"Content-Length: {len(self.content)}\r\n"

    def _head(self, version: HttpVersion) -> bytes:
        if self._code in (204, 304):
            length = ""
        else:
            length = f"Content-Type: {self.media_type}\r\n{self._length(version)}"
        if not self._stays_open:
            connection = "Connection: close\r\n"
        elif version == HttpVersion10:
            connection = "Connection: keep-alive\r\n"
        else:
            connection = ""
        return (
            f"HTTP/1.1 {_REASONS[self._code]}\r\n"
            f"{length}{self.header_text}{connection}Date: {_date(int(time.time()))}\r\n\r\n"
        ).encode("latin-1")


async def flush(request: web.BaseRequest, transport: asyncio.Transport) -> None:
    """Wait until the connection has little left to send. Raises ConnectionResetError if the client has
    disconnected, or reads too little."""
    if transport.get_write_buffer_size() <= DRAIN_ABOVE:
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    # Abort the transport rather than cancel the wait, which later waits share.
    def check_progress(before: int) -> None:
        nonlocal timer
        left = unsent_bytes(transport)
        if is_stalled(before, left):
            transport.abort()
        else:
            timer = loop.call_later(STALL_S, check_progress, left)

    timer = loop.call_later(STALL_S, check_progress, unsent_bytes(transport))
    try:
        await request.writer.drain()
    finally:
        timer.cancel()
    if transport.is_closing():
        raise ConnectionResetError("the client has disconnected, or reads nothing")


def unsent_bytes(transport: asyncio.BaseTransport) -> int:
    """Return the number of bytes that were written to a connection and that the client has not acknowledged.
    The kernel holds some of them."""
    buffered = transport.get_write_buffer_size() if isinstance(transport, asyncio.WriteTransport) else 0
    connection = transport.get_extra_info("socket")
    return buffered + (0 if connection is None else unacknowledged_bytes(connection.fileno()))


def unacknowledged_bytes(fileno: int) -> int:
    """Return the number of bytes of a socket that the client has not acknowledged; 0 if it is closed."""
    try:
        answer = fcntl.ioctl(fileno, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0
    return int.from_bytes(answer, sys.byteorder)


def is_stalled(before: int, left: int) -> bool:
    """Return True if a client has read too little in `STALL_S`. `before` and `left` are the bytes that were
    not acknowledged at the beginning of that time and at its end."""
    return before - left <= STALL_S * MIN_BYTES_PER_S


def write_response(version: str, timestamp_ms: int) -> Response:
    """Return the response to a push or append: `{"hash", "timestamp"}`."""
    return Response(200, f'{{"hash":"{version}","timestamp":{timestamp_ms}}}'.encode(), NO_STORE)


class HeadResponse(Response):
    """A response to HEAD whose length only building the body would give: the headers of GET without
    `Content-Length`, which RFC 9110 (section 9.3.2) allows to omit."""

    def __init__(self, headers: str) -> None:
        super().__init__(200, b"", headers)

    def _length(self, version: HttpVersion) -> str:
        return ""


def wants_body(request: web.BaseRequest) -> bool:
    """Return True if the response always has a body. It may have none for HEAD, and if the client may already
    have the content."""
    return request.method != "HEAD" and protocol.HEADER_IF_NONE_MATCH not in request.headers


def json_response(value: object, headers: str) -> Response:
    """Return a response with `value` as its JSON body."""
    return Response(200, orjson.dumps(value), headers)


def error_response(error: PysyncError, *, close: bool = False) -> Response:
    """Return the response for `error` (docs/reference/protocol.md#errors), which is never cached."""
    lines = NO_STORE + header_lines(error.headers)
    return Response(error.status, protocol.error_body(error), lines, close=close)


def count_response(
    counters: Counters, status: int, seconds: float, action: str = "none", collection: str = ""
) -> None:
    """Count a response. `seconds` is the time until the response began; `action` and `collection` are those
    of its route, if it has one."""
    key = (action, collection, status)
    counters.statuses[key] = counters.statuses.get(key, 0) + 1
    values = counters.histograms.get((REQUEST_SECONDS, action))
    if values is None:
        counters.observe(REQUEST_SECONDS, seconds, action)
    else:  # as `observe`, in half the time
        values[bisect_left(BUCKETS_S, seconds)] += 1
        values[-1] += seconds


def header_lines(headers: Mapping[str, str]) -> str:
    """Return the mapping as header lines. Raises ValueError if a name or value contains a control
    character."""
    for name, value in headers.items():
        if not (name + value).isprintable():
            raise ValueError(f"header {name!r} holds a control character")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def page_headers(script: bytes | None, style: bytes | None) -> str:
    """Return the security headers of a page for browsers, whose text has this script and this style alone;
    None: any that its text has or its address serves. The page sends requests to its own address alone."""
    scripts, styles = (
        "'self' 'unsafe-inline'" if part is None else f"'sha256-{b64encode(sha256(part).digest()).decode()}'"
        for part in (script, style)
    )
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    lines = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return header_lines({**lines, "X-Content-Type-Options": "nosniff"})


def cache_headers(ages_ms: Sequence[int | None], *, is_public: bool) -> str:
    """Return the caching headers of a response that consists of documents with these ages: it may be cached
    for the shortest of them, if all are known (docs/reference/protocol.md#caching)."""
    known_ms = [age_ms for age_ms in ages_ms if age_ms is not None]
    if known_ms and len(known_ms) == len(ages_ms):
        control = f"{'public' if is_public else 'private'}, max-age={min(known_ms) // 1000}"
    else:
        control = "no-cache" if is_public else "private, no-cache"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"


def bodiless_response(request: web.BaseRequest, version: str, headers: str) -> Response | None:
    """Return the response to a read of this version if it needs no body: 304 if the client has the version
    already, else the headers for HEAD."""
    if etag_matches(request, version):
        return Response(304, b"", headers)
    return HeadResponse(headers) if request.method == "HEAD" else None


def etag_matches(request: web.BaseRequest, version: str) -> bool:
    """Return True if the If-None-Match header names this version. The comparison is weak, as RFC 9110
    specifies for reads."""
    condition = request.headers.get(protocol.HEADER_IF_NONE_MATCH)
    if condition is None:
        return False
    if condition == f'"{version}"' or condition.strip() == "*":
        return True
    return any(tag.strip().removeprefix("W/") == f'"{version}"' for tag in condition.split(","))


async def _drain_request(request: web.BaseRequest) -> None:
    wanted = _DRAIN_REQUEST_BYTES
    try:
        async with asyncio.timeout(_DRAIN_REQUEST_S):
            while wanted > 0 and not request.content.at_eof():
                wanted -= len(await request.content.readany())
    except (TimeoutError, ConnectionError, web.RequestPayloadError, PysyncError):
        return  # a PysyncError ended the body
    if not request.content.at_eof():
        await asyncio.sleep(_CLOSE_DELAY_S)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
