"""Responses that are too large for memory, written chunk by chunk as the client reads them."""

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

from pysync.errors import Overloaded, PysyncError
from pysync.protocol import CHUNK_BYTES, JSON_TYPE
from pysync.server.http.in_flight import Reservation
from pysync.server.http.responses import STALL_S, Response, is_stalled, unacknowledged_bytes
from pysync.store import ByteStream, SendfileStream

log = logging.getLogger("pysync.server")

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class StreamingResponse(Response):
    """A response whose body is `first` and then `chunks`. One chunk is in memory at a time, and the little
    that the connection buffers, however slowly the client reads. If `size` is known, it is sent as the
    length. Otherwise the body is sent in chunked encoding; to a client of HTTP/1.0, which does not support
    that, it ends when the connection closes.

    If a chunk fails or the length is wrong, the head has already been sent. The connection is then aborted,
    so that the client sees that the body is incomplete. `chunks` is closed in any case; it is None for HEAD.
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
    def held_bytes(self) -> int:
        """See `Response.held_bytes`: a chunk as long as the first, and what the connection buffers."""
        if self._chunks is None:
            return 0
        held = len(self.content) + CHUNK_BYTES
        return held if self._size is None else min(held, self._size)

    async def reserve(self, reservation: Reservation) -> None:
        """See `Response.reserve`."""
        try:
            await super().reserve(reservation)
        except Overloaded:
            if self._chunks is not None:
                await self._chunks.aclose()
            raise

    @property
    def size(self) -> int | None:
        """See `Response.size`."""
        return self._size

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """See `Response.prepare`."""
        if self._has_begun:
            return None
        try:
            await self._write(request)
        finally:
            if self._chunks is not None:
                await self._chunks.aclose()
        return None

    async def _write(self, request: web.BaseRequest) -> None:
        transport = self._begin(request)
        if self._reservation is not None:
            self._watch(transport, self._reservation)
        chunked = self._is_chunked(request.version)
        self._stays_open = self._stays_open and (chunked or self._size is not None)
        head = self._head(request.version)
        if request.method == "HEAD" or self._chunks is None:
            transport.write(head)
            return
        try:
            await self._write_body(request, transport, head, self._chunks)
        except BaseException as error:
            _abort(transport, reset=not chunked and self._size is None)
            if isinstance(error, PysyncError):
                log.warning(
                    "aborted a response: %s", error.code,
                    extra={"request_id": self.request_id}, exc_info=error.__cause__,
                )  # fmt: skip
            elif isinstance(error, Exception) and not isinstance(error, ConnectionError):
                extra = {"request_id": self.request_id}
                log.exception("aborted a response", extra=extra)
            else:
                raise
            raise ConnectionResetError("the response was aborted") from None

    async def _write_body(
        self, request: web.BaseRequest, transport: asyncio.Transport, head: bytes, chunks: ByteStream
    ) -> None:
        """Write the head and all chunks, the first of them together. Raises ConnectionResetError if the
        client has disconnected, and ValueError if the length differs from that in the head."""
        piece, self.content = self.content, b""
        left, chunked = self._size, self._is_chunked(request.version)
        while True:
            if left is not None:
                left -= len(piece)
                if left < 0:
                    raise ValueError("the body is longer than its head says")
            transport.write(head + (b"%x\r\n" % len(piece) if chunked and piece else b""))
            head = b""
            await self._send(request, transport, piece)
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
        return "Transfer-Encoding: chunked\r\n" if self._is_chunked(version) else ""

    def _is_chunked(self, version: HttpVersion) -> bool:
        return self._size is None and version >= HttpVersion11


class SendfileResponse(StreamingResponse):
    """A response whose body the kernel sends from a file, without copying it into the memory of the process.
    It writes to the socket itself, while the buffer of the transport is empty."""

    def __init__(
        self, file: SendfileStream, headers: str, *, status: int, content_type: str, size: int
    ) -> None:
        super().__init__(b"", file, headers, status=status, content_type=content_type, size=size)
        self._file = file

    @property
    def held_bytes(self) -> int:
        """See `Response.held_bytes`. The kernel holds the file."""
        return 0

    async def _write_body(
        self, request: web.BaseRequest, transport: asyncio.Transport, head: bytes, chunks: ByteStream
    ) -> None:
        connection = transport.get_extra_info("socket")
        if connection is None or transport.get_write_buffer_size():
            await super()._write_body(request, transport, head, chunks)
            return
        # Use a duplicate: the transport's descriptor may be closed, and its number reused, during a wait.
        with socket.socket(connection.family, socket.SOCK_STREAM, fileno=os.dup(connection.fileno())) as own:
            await self._send_head(transport, own, head)
            while True:
                await self._file.ensure_cached()
                if transport.is_closing():
                    raise ConnectionResetError("the client has disconnected")
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
                raise ConnectionResetError("the client has disconnected")
            try:
                head = head[own.send(head, socket.MSG_MORE) :]
            except BlockingIOError:
                await _wait_writable(own)


async def streaming_response(
    request: web.BaseRequest, chunks: AsyncGenerator[bytes, None], headers: str = ""
) -> StreamingResponse:
    """Return the response with the body `chunks`. The first chunk is awaited here, so that an error that
    occurs at once becomes an error response. For HEAD no chunk is read."""
    first = b"" if request.method == "HEAD" else await anext(chunks, b"")
    return StreamingResponse(first, chunks, headers)


async def _wait_writable(connection: socket.socket) -> None:
    """Wait until the connection is writable, or fails. Raises ConnectionResetError if the client reads too
    little."""
    loop = asyncio.get_running_loop()
    is_writable = asyncio.Event()
    loop.add_writer(connection.fileno(), is_writable.set)
    try:
        while not is_writable.is_set():
            before = unacknowledged_bytes(connection.fileno())
            with suppress(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await is_writable.wait()
                return
            if is_stalled(before, unacknowledged_bytes(connection.fileno())):
                raise ConnectionResetError("the client reads nothing")
    finally:
        loop.remove_writer(connection.fileno())


def _abort(transport: asyncio.Transport, *, reset: bool) -> None:
    """Abort the connection. A body that only the end of the connection delimits needs a `reset`, because it
    would look complete otherwise."""
    connection = transport.get_extra_info("socket")
    if reset and connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
