"""Request bodies: bounded before they are buffered, inflated no further than the bound.

What writes of JSON have in common: how a body comes in, who made it, how it is known again.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from aiohttp import StreamReader, web

from pysync import _core, protocol
from pysync.auth import sealed
from pysync.auth.signing import APPEND_AUTHOR, DOCUMENT_AUTHOR
from pysync.errors import (
    BadRequest,
    Forbidden,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from pysync.model import Caller
from pysync.protocol import JSON_TYPE
from pysync.server.authorization import Access, Authorizer
from pysync.server.json_schema import Validator
from pysync.server.router import Match

STALL_S = 30.0
INFLATE_IN_THREAD_ABOVE = 64 * 1024
INFLATE_BYTES = 256 * 1024
"""What is inflated at once of a body that is not held whole."""


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body of `request`, inflated if it was sent with gzip.

    Raises:
        PayloadTooLarge: declared, streamed or inflated, it is longer than `max_bytes`.
        RequestTimeout: nothing arrived for 30 s.
        UnsupportedMediaType: another Content-Encoding than gzip.
        BadRequest: not gzip, or the client left early.

    See docs/reference/protocol.md#requests-and-responses.
    """
    is_gzip = check_body_headers(request, max_bytes)
    body = await _read_all(request, max_bytes)
    if not is_gzip:
        return body
    if len(body) > INFLATE_IN_THREAD_ABOVE:
        return await asyncio.to_thread(_inflate, body, max_bytes)
    return _inflate(body, max_bytes)


async def stream_body(request: web.BaseRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body of `request` as it arrives, inflated if it was sent with gzip. Raises as `read_body`, for what
    is too long when that much has come."""
    is_gzip = check_body_headers(request, max_bytes)
    arriving = _read_chunks(request, max_bytes)
    async with aclosing(_inflate_stream(arriving, max_bytes) if is_gzip else arriving) as chunks:
        async for chunk in chunks:
            yield chunk


def check_body_headers(request: web.BaseRequest, max_bytes: int) -> bool:
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


async def _read_all(request: web.BaseRequest, max_bytes: int) -> bytes:
    content = request.content
    if content.is_eof():
        body = content.read_nowait(-1)
        if len(body) > max_bytes:
            raise PayloadTooLarge
        return body
    return b"".join([chunk async for chunk in _read_chunks(request, max_bytes)])


async def _read_chunks(request: web.BaseRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it is sent."""
    content = request.content
    if not content.is_eof():
        _send_continue(request)
    # Of a length that is known it comes in blocks as large as were read; joining them would copy them all.
    next_chunk = content.readany if request.content_length is None else partial(_next_block, content)
    size = 0
    try:
        while chunk := await _with_stall_timeout(next_chunk()):
            size += len(chunk)
            if size > max_bytes:
                raise PayloadTooLarge
            yield chunk
    except (web.RequestPayloadError, ConnectionError):
        raise BadRequest("Incomplete body") from None


async def _next_block(content: StreamReader) -> bytes:
    block, _ = await content.readchunk()
    return block


async def _with_stall_timeout(chunk: Awaitable[bytes]) -> bytes:
    """The next chunk. Raises RequestTimeout where none comes."""
    try:
        async with asyncio.timeout(STALL_S):
            return await chunk
    except TimeoutError:
        raise RequestTimeout from None


def _send_continue(request: web.BaseRequest) -> None:
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


async def _inflate_stream(
    arriving: AsyncGenerator[bytes, None], max_bytes: int
) -> AsyncGenerator[bytes, None]:
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


Authored = Literal["document", "append"]
"""What an author proof is of."""

_TAGS: Mapping[Authored, str] = {"document": DOCUMENT_AUTHOR, "append": APPEND_AUTHOR}

CHECK_IN_THREAD_ABOVE = 64 * 1024
IN_THREAD_ABOVE = 256 * 1024
"""Bytes that the core decodes in about 2 ms, without the interpreter's lock."""

P = ParamSpec("P")
T = TypeVar("T")

_is_idempotency_key = re.compile(r"[\x20-\x7e]{1,128}").fullmatch


async def read_authorized_body(
    request: web.BaseRequest, match: Match, authorizer: Authorizer, *, pushes_document: bool = False
) -> tuple[Access, bytes]:
    """Return the access of an allowed write, and its body. The server refuses what it can by the headers
    before it reads the body.

    Raises UnsupportedMediaType for what is not JSON, and what `Authorizer.authorize` and `read_body` do.
    """
    credentials = authorizer.credentials_for(request, match.policy)
    if media_type(request) != JSON_TYPE:
        raise UnsupportedMediaType(f"Content-Type must be {JSON_TYPE}")
    text = await read_body(request, match.policy.collection.max_body_bytes)
    access = await authorizer.authorize(request, match, credentials, text, pushes_document=pushes_document)
    return access, text


def media_type(request: web.BaseRequest) -> str:
    """What the body is sent as, without parameters, `""` where nobody says."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """The result of work of the core's over `size` bytes: beside the event loop where these are many."""
    if size > IN_THREAD_ABOVE:
        return await asyncio.to_thread(work, *args, **options)
    return work(*args, **options)


def verify_author_proof(
    kind: Authored, body: _core.PushBody | _core.Append, caller: Caller, key: str
) -> None:
    """Refuse an author proof that does not hold, or that another key than the presenter's made; a body
    without one is anybody's (docs/reference/protocol.md#author-proofs). Raises Forbidden."""
    if body.author_pubkey is None or body.author_signature is None:
        return
    if caller.presenter and body.author_pubkey != caller.presenter:
        raise Forbidden(f"{kind} author must be the request presenter")
    if not _core.verify_author(_TAGS[kind], key, body.canonical, body.author_pubkey, body.author_signature):
        raise Forbidden(f"invalid {kind} author signature")


async def check_sealed(match: Match, data: bytes) -> None:
    """Refuse data that is not sealed, where the collection takes no other; a keyring is plaintext. Raises
    DataNotSealed."""
    keyrings = match.route.keyrings
    if keyrings is None or match.key.rpartition("/")[2] == sealed.KEYRING:
        return
    if not any(keyring.matches(match.key) for keyring in keyrings):
        await validate(sealed.check_sealed, data)


async def validate(check: Validator, data: bytes) -> None:
    """Run a schema's check, beside the event loop where there is much to look at."""
    if len(data) > CHECK_IN_THREAD_ABOVE:
        await asyncio.to_thread(check, data)
    else:
        check(data)


def idempotency_key(request: web.BaseRequest, caller: Caller, key: str) -> str | None:
    """Under what a repetition of this write is recognised: it belongs to one caller and one document. None
    where the client asks for nothing. Raises BadRequest for an unusable Idempotency-Key."""
    sent = request.headers.get(protocol.HEADER_IDEMPOTENCY_KEY)
    if sent is None:
        return None
    if not _is_idempotency_key(sent):
        raise BadRequest("Idempotency-Key must be 1 to 128 printable ASCII characters")
    holder = caller.presenter or ("admin" if "admin" in caller.roles else "")
    return f"{holder} {key} {sent}"
