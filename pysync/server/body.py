"""Request bodies: bounded before they are buffered, inflated no further than the bound."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from functools import partial

from aiohttp import StreamReader, web

from pysync.errors import BadRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType

STALL_S = 30.0
INFLATE_IN_THREAD_ABOVE = 64 * 1024
INFLATE_BYTES = 256 * 1024
"""What is inflated at once of a body that is not held whole."""


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body of `request`, inflated if it was sent with gzip.

    Raises:
        PayloadTooLarge: declared, streamed or inflated, it is longer than `max_bytes` (wire sections 2, 3).
        RequestTimeout: nothing arrived for 30 s.
        UnsupportedMediaType: another Content-Encoding than gzip.
        BadRequest: not gzip, or the client left early.
    """
    is_gzip = check_declared(request, max_bytes)
    body = await _receive(request, max_bytes)
    if not is_gzip:
        return body
    if len(body) > INFLATE_IN_THREAD_ABOVE:
        return await asyncio.to_thread(_inflate, body, max_bytes)
    return _inflate(body, max_bytes)


async def stream_body(request: web.BaseRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body of `request` as it arrives, inflated if it was sent with gzip. Raises as `read_body`, for what
    is too long when that much has come."""
    is_gzip = check_declared(request, max_bytes)
    arriving = _arriving(request, max_bytes)
    async with aclosing(_inflated(arriving, max_bytes) if is_gzip else arriving) as chunks:
        async for chunk in chunks:
            yield chunk


def check_declared(request: web.BaseRequest, max_bytes: int) -> bool:
    """Return True if the body is sent with gzip. Raises UnsupportedMediaType, PayloadTooLarge or BadRequest
    if the head alone is reason to refuse it."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise UnsupportedMediaType("Content-Encoding must be gzip or identity")
    try:
        declared = request.content_length or 0
    except ValueError:  # more leading zeros than Python converts
        raise BadRequest("Malformed request") from None
    if declared > max_bytes:
        raise PayloadTooLarge
    return encoding == "gzip"


async def _receive(request: web.BaseRequest, max_bytes: int) -> bytes:
    content = request.content
    if content.is_eof():
        body = content.read_nowait(-1)
        if len(body) > max_bytes:
            raise PayloadTooLarge
        return body
    return b"".join([chunk async for chunk in _arriving(request, max_bytes)])


async def _arriving(request: web.BaseRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it is sent."""
    content = request.content
    if not content.is_eof():
        _invite(request)
    # Of a length that is known it comes in blocks as large as were read; joining them would copy them all.
    next_chunk = content.readany if request.content_length is None else partial(_next_block, content)
    size = 0
    try:
        while chunk := await _in_time(next_chunk()):
            size += len(chunk)
            if size > max_bytes:
                raise PayloadTooLarge
            yield chunk
    except (web.RequestPayloadError, ConnectionError):
        raise BadRequest("Incomplete body") from None


async def _next_block(content: StreamReader) -> bytes:
    block, _ = await content.readchunk()
    return block


async def _in_time(chunk: Awaitable[bytes]) -> bytes:
    """The next chunk. Raises RequestTimeout where none comes."""
    try:
        async with asyncio.timeout(STALL_S):
            return await chunk
    except TimeoutError:
        raise RequestTimeout from None


def _invite(request: web.BaseRequest) -> None:
    """Ask for the body of a client that waits for `100 Continue`."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _inflate(body: bytes, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        text = inflater.decompress(body, max_bytes + 1)
    except zlib.error:
        raise BadRequest("Invalid gzip body") from None
    if len(text) > max_bytes:
        raise PayloadTooLarge
    if not inflater.eof or inflater.unused_data:
        raise BadRequest("Invalid gzip body")
    return text


async def _inflated(arriving: AsyncGenerator[bytes, None], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """What `arriving` inflates to, in pieces of bounded length."""
    inflater = zlib.decompressobj(wbits=31)
    size = 0
    async with aclosing(arriving):
        async for chunk in arriving:
            full = False
            while chunk or full:
                try:
                    piece = inflater.decompress(chunk, INFLATE_BYTES)
                except zlib.error:
                    raise BadRequest("Invalid gzip body") from None
                size += len(piece)
                if size > max_bytes:
                    raise PayloadTooLarge
                if piece:
                    yield piece
                chunk, full = inflater.unconsumed_tail, len(piece) == INFLATE_BYTES
            if inflater.unused_data:
                raise BadRequest("Invalid gzip body")
    if not inflater.eof:
        raise BadRequest("Invalid gzip body")
