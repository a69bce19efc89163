"""Request bodies: bounded before they are buffered, inflated no further than the bound."""

import asyncio
import zlib

from aiohttp import StreamReader, web

from pysync.errors import BadRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType

STALL_S = 30.0


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body of `request`, inflated if it was sent with gzip.

    Raises:
        PayloadTooLarge: declared, streamed or inflated, it is longer than `max_bytes` (wire sections 2, 3).
        RequestTimeout: nothing arrived for 30 s.
        UnsupportedMediaType: another Content-Encoding than gzip.
        BadRequest: not gzip, or the client left early.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise UnsupportedMediaType("Content-Encoding must be gzip or identity")
    if (request.content_length or 0) > max_bytes:
        raise PayloadTooLarge
    body = await _receive(request, max_bytes)
    return _inflate(body, max_bytes) if encoding == "gzip" else body


async def _receive(request: web.BaseRequest, max_bytes: int) -> bytes:
    content = request.content
    if content.is_eof():
        body = content.read_nowait(-1)
        if len(body) > max_bytes:
            raise PayloadTooLarge
        return body
    _invite(request)
    chunks: list[bytes] = []
    size = 0
    try:
        while chunk := await _next_chunk(content):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise PayloadTooLarge
    except (web.RequestPayloadError, ConnectionError):
        raise BadRequest("Incomplete body") from None
    return b"".join(chunks)


async def _next_chunk(content: StreamReader) -> bytes:
    try:
        async with asyncio.timeout(STALL_S):
            return await content.readany()
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
