"""Answers that are too long to be held: written piece by piece, as the client takes them."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import suppress

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion, HttpVersion11

from pysync.errors import PysyncError
from pysync.protocol import JSON_TYPE
from pysync.server.responses import STALL_S, Response, send
from pysync.store import ByteStream, SendfileStream

log = logging.getLogger("pysync.server")

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class StreamingResponse(Response):
    """An answer whose body is `first` and then `chunks`: in memory there is one piece, and the little that
    the connection holds back, however slowly the client reads. Where its `size` is known, the answer tells
    it; else it is sent in chunks, and to a client of HTTP/1.0, which knows none, it ends where the
    connection does.

    Where a piece fails, or they are not as long as was told, the head has long been sent: the connection is
    cut, so that the client sees that the body is incomplete. `chunks` is closed in any case; None are for
    HEAD.
    """

    def __init__(
        self,
        first: bytes,
        chunks: ByteStream | None,
        headers: str = "",
        *,
        status: int = 200,
        content_type: str = JSON_TYPE,
        size: int | None = None,
    ) -> None:
        super().__init__(status, first, headers, content_type=content_type)
        self._chunks = chunks
        self._size = size

    @property
    def size(self) -> int | None:
        """`Response.size`."""
        return self._size

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write head and body to the connection of `request`."""
        if self._eof_sent:
            return None
        try:
            await self._write(request)
        finally:
            if self._chunks is not None:
                await self._chunks.aclose()
        return None

    async def _write(self, request: web.BaseRequest) -> None:
        transport = self._begin(request)
        chunked = self._size is None and request.version >= HttpVersion11
        self._keep_alive = self._keep_alive and (chunked or self._size is not None)
        head = self._head(request.version)
        if request.method == "HEAD" or self._chunks is None:
            transport.write(head)
            return
        try:
            await self._write_body(request, transport, head, self._chunks, chunked)
        except BaseException as error:
            _abort(transport, reset=not chunked and self._size is None)
            if isinstance(error, PysyncError):
                log.warning(
                    "an answer was cut off: %s", error.code,
                    extra={"request_id": self.request_id}, exc_info=error.__cause__,
                )  # fmt: skip
            elif isinstance(error, Exception) and not isinstance(error, ConnectionError):
                log.exception("an answer was cut off", extra={"request_id": self.request_id})
            else:
                raise
            raise ConnectionResetError("the answer was cut off") from None

    async def _write_body(
        self,
        request: web.BaseRequest,
        transport: asyncio.Transport,
        head: bytes,
        chunks: ByteStream,
        chunked: bool,
    ) -> None:
        """Write the head and all pieces, the first of them together. Raises ConnectionResetError for a client
        that has gone, ValueError where the pieces are not as long as the head says."""
        piece, self.content = self.content, b""
        left = self._size
        while True:
            if left is not None:
                left -= len(piece)
                if left < 0:
                    raise ValueError("the body is longer than its head says")
            transport.write(head + (b"%x\r\n" % len(piece) if chunked and piece else b""))
            head = b""
            await send(request, transport, piece)
            if chunked and piece:
                head = b"\r\n"
            del piece
            try:
                piece = await anext(chunks)
            except StopAsyncIteration:
                break
        if left:
            raise ValueError("the body is shorter than its head says")
        if chunked:
            transport.write(head + b"0\r\n\r\n")

    def _length(self, version: HttpVersion) -> str:
        if self._size is not None:
            return f"Content-Length: {self._size}\r\n"
        return "Transfer-Encoding: chunked\r\n" if version >= HttpVersion11 else ""


class SendfileResponse(StreamingResponse):
    """An answer whose body the kernel takes out of a file: not a byte of it is in our memory, and none is
    copied. It writes to the connection beside the transport, which has nothing to write meanwhile."""

    def __init__(
        self, file: SendfileStream, headers: str, *, status: int, content_type: str, size: int
    ) -> None:
        super().__init__(b"", file, headers, status=status, content_type=content_type, size=size)
        self._file = file

    async def _write_body(
        self,
        request: web.BaseRequest,
        transport: asyncio.Transport,
        head: bytes,
        chunks: ByteStream,
        chunked: bool,
    ) -> None:
        connection = transport.get_extra_info("socket")
        if connection is None or transport.get_write_buffer_size():
            await super()._write_body(request, transport, head, chunks, chunked)
            return
        # A descriptor of our own: the transport's may be closed, and its number taken, while we wait.
        with socket.socket(connection.family, socket.SOCK_STREAM, fileno=os.dup(connection.fileno())) as own:
            await self._send_head(transport, own, head)
            while True:
                await self._file.ensure_cached()
                if transport.is_closing():
                    raise ConnectionResetError("the client has gone")
                try:
                    if not self._file.send(own.fileno()):
                        return
                except BlockingIOError:
                    await _wait_writable(own)
                else:
                    await asyncio.sleep(0)

    async def _send_head(self, transport: asyncio.Transport, own: socket.socket, head: bytes) -> None:
        while head:
            if transport.is_closing():
                raise ConnectionResetError("the client has gone")
            try:
                head = head[own.send(head, socket.MSG_MORE) :]
            except BlockingIOError:
                await _wait_writable(own)


async def streaming_response(
    request: web.BaseRequest, chunks: AsyncGenerator[bytes, None], headers: str = ""
) -> StreamingResponse:
    """The answer that `chunks` make. The first is awaited here, so that what fails at once is refused like
    anything else; for HEAD none is."""
    first = b"" if request.method == "HEAD" else await anext(chunks, b"")
    return StreamingResponse(first, chunks, headers)


async def _wait_writable(connection: socket.socket) -> None:
    """Wait until the connection takes more, or fails. Raises ConnectionResetError for a client that takes
    nothing for a minute."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(connection.fileno(), _resolve, ready)
    try:
        async with asyncio.timeout(STALL_S):
            await ready
    except TimeoutError:
        raise ConnectionResetError("the client takes nothing") from None
    finally:
        loop.remove_writer(connection.fileno())


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _abort(transport: asyncio.Transport, *, reset: bool) -> None:
    """End the connection as it is. A body that only the connection's end completes needs a `reset`: it would
    look complete otherwise."""
    connection = transport.get_extra_info("socket")
    if reset and connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
