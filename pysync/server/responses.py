"""Answers as bytes: one head, one body, one write."""

import asyncio
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion, HttpVersion10, HttpVersion11

from pysync import protocol
from pysync.errors import PysyncError
from pysync.protocol import JSON_TYPE

NO_STORE = "Cache-Control: no-store\r\n"
DRAIN_ABOVE = 64 * 1024
"""Bytes that a connection holds back before an answer waits for its client."""

WRITE_BYTES = 256 * 1024
"""Bytes that are given to a connection at once. It copies what its client does not take yet."""
STALL_S = 60.0
"""Seconds for which a client may take nothing of an answer before its connection is cut."""

_REASONS = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}
_DRAIN_REQUEST_BYTES = 64 * 1024
_DRAIN_REQUEST_S = 2.0
_CLOSE_DELAY_S = 1.0
"""How long a client has to read its answer while it is still sending. To close on bytes that were not
read resets the connection, and who meets that first may never look at the answer: nginx then says that the
server has failed."""


class Response(web.StreamResponse):
    """A complete response that is written in one piece.

    aiohttp builds a header multidict for each response and serialises it again; an answer of this service
    is known in full when it is made, so its head is one formatted string. `headers` are complete lines,
    each ended by CR LF (`header_lines`).
    `close` ends the connection, after at most 64 KiB of a body that nobody wants has been read; a moment
    later, where there is more of it.
    """

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: str = "",
        *,
        content_type: str = JSON_TYPE,
        close: bool = False,
    ) -> None:
        super().__init__(status=status)
        self.content = body
        self.header_text = headers
        self.media_type = content_type
        self.close = close
        self.request_id = ""

    @property
    def size(self) -> int | None:
        """Bytes of the body; None where nobody knows yet."""
        return len(self.content)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write head and body to the connection of `request`."""
        if self._eof_sent:
            return None
        transport = self._begin(request)
        head = self._head(request.version)
        body = b"" if request.method == "HEAD" else self.content
        if len(body) <= DRAIN_ABOVE:
            transport.write(head + body)
        else:
            transport.write(head)
            await send(request, transport, body)
        if transport.get_write_buffer_size() > DRAIN_ABOVE:
            await flush(request, transport)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write. An unread body is drained a little, so that the client can read us."""
        if self.close and self._req is not None:
            await _drain_request(self._req)

    def to_bytes(self) -> bytes:
        """The whole answer as it goes on the wire of a connection that is then closed."""
        self._keep_alive = False
        return self._head(HttpVersion11) + self.content

    def _begin(self, request: web.BaseRequest) -> asyncio.Transport:
        """Take the connection of `request`. Raises ConnectionResetError where there is none any more."""
        self._eof_sent = True
        self._keep_alive = request.keep_alive and not self.close
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._req = request
        return transport

    def _length(self, version: HttpVersion) -> str:
        """The header line that says where the body ends."""
        return f"Content-Length: {len(self.content)}\r\n"

    def _head(self, version: HttpVersion) -> bytes:
        if self.status in (204, 304):
            length = ""
        else:
            length = f"Content-Type: {self.media_type}\r\n{self._length(version)}"
        if not self._keep_alive:
            connection = "Connection: close\r\n"
        elif version == HttpVersion10:
            connection = "Connection: keep-alive\r\n"
        else:
            connection = ""
        return (
            f"HTTP/1.1 {_REASONS[self.status]}\r\n"
            f"{length}{self.header_text}{connection}Date: {_date()}\r\n\r\n"
        ).encode("latin-1")


async def send(request: web.BaseRequest, transport: asyncio.Transport, body: bytes) -> None:
    """Write a long body as fast as the client takes it, and yield to others. Raises ConnectionResetError if
    the client has gone, or takes nothing for a minute."""
    text = memoryview(body)
    for start in range(0, len(body), WRITE_BYTES):
        transport.write(text[start : start + WRITE_BYTES])
        await flush(request, transport)
        await asyncio.sleep(0)
        if transport.is_closing():
            raise ConnectionResetError("the client has gone")


async def flush(request: web.BaseRequest, transport: asyncio.Transport) -> None:
    """Wait until the connection has little left to send. Raises ConnectionResetError as `send` does."""
    held = transport.get_write_buffer_size()
    if held <= DRAIN_ABOVE:
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    # A wait that is cancelled would be all that a later one finds to wait for.
    def look(before: int) -> None:
        nonlocal timer
        held = transport.get_write_buffer_size()
        if held >= before:
            transport.abort()
        else:
            timer = loop.call_later(STALL_S, look, held)

    timer = loop.call_later(STALL_S, look, held)
    try:
        await request.writer.drain()
    finally:
        timer.cancel()
    if transport.is_closing():
        raise ConnectionResetError("the client has gone, or takes nothing")


def write_response(version: str, timestamp_ms: int) -> Response:
    """The answer to a push or an append: `{"hash", "timestamp"}`."""
    return Response(200, b'{"hash":"%b","timestamp":%d}' % (version.encode(), timestamp_ms), NO_STORE)


class HeadResponse(Response):
    """The answer to HEAD if only building the body would give its length: the headers of GET without
    `Content-Length`, which RFC 9110 (section 9.3.2) allows to leave out."""

    def __init__(self, headers: str) -> None:
        super().__init__(200, b"", headers)

    def _length(self, version: HttpVersion) -> str:
        return ""


def wants_body(request: web.BaseRequest) -> bool:
    """True if the answer has a body whatever is stored: not for HEAD, nor if the client may have it
    already."""
    return request.method != "HEAD" and protocol.HEADER_IF_NONE_MATCH not in request.headers


def json_response(status: int, value: object, headers: str = "") -> Response:
    """An answer with `value` as its JSON body."""
    return Response(status, orjson.dumps(value), headers)


def error_response(error: PysyncError, *, close: bool = False) -> Response:
    """The answer that `error` stands for (docs/reference/protocol.md#errors), never cached."""
    lines = NO_STORE + header_lines(error.headers)
    return Response(error.status, protocol.error_body(error), lines, close=close)


def header_lines(headers: Mapping[str, str]) -> str:
    """The mapping as header lines. Raises ValueError where a value would break out of its line."""
    for name, value in headers.items():
        if not (name + value).isprintable():
            raise ValueError(f"header {name!r} holds a control character")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def etag_matches(condition: str | None, version: str) -> bool:
    """Whether an If-None-Match header names this version (weakly, as RFC 9110 has it for reads)."""
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
    except (TimeoutError, ConnectionError, web.RequestPayloadError):
        return
    if not request.content.at_eof():
        await asyncio.sleep(_CLOSE_DELAY_S)


class _DateCache:
    second = 0
    text = ""


def _date() -> str:
    second = int(time.time())
    if second != _DateCache.second:
        _DateCache.second, _DateCache.text = second, formatdate(second, usegmt=True)
    return _DateCache.text
