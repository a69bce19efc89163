"""Request bodies, bounded before they are buffered and inflated no further than the bound.

Also the checks that all writes of JSON share: author proofs, schemas, idempotency keys, and the form of
sealed data, by which the server recognises it without a key.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, Literal, ParamSpec, TypeVar

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11
from aiohttp.streams import StreamReader

from pysync import _core, protocol
from pysync.auth.authentication import AuthorProof
from pysync.auth.certificates import decode_base64
from pysync.auth.signing import APPEND_AUTHOR, DOCUMENT_AUTHOR
from pysync.auth.verification import VerifiedCertificate
from pysync.concurrency import CORE_IN_THREAD_ABOVE, PYTHON_IN_THREAD_ABOVE, run_heavy
from pysync.errors import (
    AppendProofMissing,
    BadRequest,
    DataNotSealed,
    Forbidden,
    PayloadTooLarge,
    PysyncError,
    RequestTimeout,
    Unavailable,
    UnsupportedMediaType,
)
from pysync.model import Caller
from pysync.protocol import CHUNK_BYTES, JSON_TYPE
from pysync.server.authorization import Access, Authorizer
from pysync.server.http.in_flight import SMALL_BYTES, STREAMED_BYTES, BytesInFlight, Reservation
from pysync.server.http.responses import MIN_BYTES_PER_S, STALL_S
from pysync.server.http.router import Match, Validator

CHECKS: Final = 3
"""Number of times that a body is checked for progress in `STALL_S`."""
STEP_BYTES: Final = 16 * 1024
"""Bytes that are reserved ahead while a small body arrives. A body whose length is not declared reserves
`SMALL_BYTES` once it is longer than that."""

Authored = Literal["document", "append"]
"""The kinds of content that an author proof covers."""

_TAGS: Mapping[Authored, str] = {"document": DOCUMENT_AUTHOR, "append": APPEND_AUTHOR}


P = ParamSpec("P")
T = TypeVar("T")
Body = TypeVar("Body", _core.PushBody, _core.Append)

KEYRING: Final = "_keyring"
_OVERHEAD_BYTES: Final = 28
"""Bytes of the iv and the tag of AES-256-GCM."""
_ENTRY_KEYS: Final = ("subKem", "ephKem", "addedBy")
"""Members of an envelope's entry that hold a key, 32 bytes in hex digits."""

_is_idempotency_key = re.compile(r"[\x20-\x7e]{1,128}").fullmatch


async def read_body(request: web.BaseRequest, max_bytes: int, in_flight: BytesInFlight) -> bytes:
    """Return the whole body of `request`, inflated if it was sent with gzip. The bytes that it takes are
    reserved in `in_flight` until the request has been answered; a small one that has arrived already needs
    no reservation.

    Raises PayloadTooLarge above `max_bytes`, as declared, received or inflated; Overloaded if there is no
    room for it; RequestTimeout if nothing arrives for 30 s, or too little for longer;
    Unavailable if it finds no memory; UnsupportedMediaType for a Content-Encoding other than gzip; and
    BadRequest if it is not valid gzip or the client disconnects early. See
    docs/reference/protocol.md#requests-and-responses.
    """
    is_gzip = check_body_headers(request, max_bytes)
    content = request.content
    if content.is_eof() and content.total_bytes <= SMALL_BYTES:
        body = content.read_nowait(-1)
        if len(body) > max_bytes:
            raise PayloadTooLarge
        if not is_gzip:
            return body
        reservation = None
    else:
        reservation = in_flight.reservation(request)
        body = await _read_all(request, max_bytes, reservation)
    if is_gzip:
        # The last four bytes are the length of the text.
        size = int.from_bytes(body[-4:], "little")
        if max(size, len(body)) > PYTHON_IN_THREAD_ABOVE:
            reservation = reservation or in_flight.reservation(request)
            await reservation.grow(len(body) + min(size, max_bytes))
            body = await run_heavy(_inflate, body, max_bytes, size)
        else:
            body = _inflate(body, max_bytes, size)
    if reservation is not None and len(body) > CORE_IN_THREAD_ABOVE:
        await reservation.begin_work(len(body))
    return body


async def reserve_stream(request: web.BaseRequest, in_flight: BytesInFlight) -> None:
    """Reserve what is held at once of a body that is streamed. Raises Overloaded if there is no room."""
    content, length = request.content, request.content_length
    if not (content.is_eof() and content.total_bytes <= SMALL_BYTES):
        size = STREAMED_BYTES if length is None else min(length, STREAMED_BYTES)
        await in_flight.reservation(request).begin_body(content, size)


async def stream_body(request: web.BaseRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the body of `request` as it arrives, inflated if it was sent with gzip. Raises as `read_body`;
    PayloadTooLarge once that much has arrived."""
    is_gzip = check_body_headers(request, max_bytes)
    arriving = _read_chunks(request, max_bytes)
    async with aclosing(_inflate_stream(arriving, max_bytes) if is_gzip else arriving) as chunks:
        async for chunk in chunks:
            yield chunk


def check_body_headers(request: web.BaseRequest, max_bytes: int) -> bool:
    """Return True if the body is sent with gzip. Raises UnsupportedMediaType, PayloadTooLarge or BadRequest
    if the headers alone are a reason to reject it."""
    sent = request.headers.get(hdrs.CONTENT_ENCODING)
    encoding = "" if sent is None else sent.strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise UnsupportedMediaType("Content-Encoding must be gzip or identity")
    try:
        declared = request.content_length or 0
    except ValueError:  # more digits than Python converts
        raise BadRequest("Malformed request") from None
    if declared > max_bytes:
        raise PayloadTooLarge
    return encoding == "gzip"


async def _read_all(request: web.BaseRequest, max_bytes: int, reservation: Reservation) -> bytes:
    content, length = request.content, request.content_length
    is_large = length is not None and length > SMALL_BYTES
    await reservation.begin_body(content, length if length and is_large else content.total_bytes)
    if is_large:
        content.set_read_chunk_size(reservation.size)
    chunks, size = [], 0
    async for chunk in _read_chunks(request, max_bytes, is_reserved=is_large):
        chunks.append(chunk)
        size += len(chunk)
        if size > reservation.size:
            await reservation.grow(size + (STEP_BYTES if size < SMALL_BYTES else SMALL_BYTES))
    reservation.unwatch()
    return b"".join(chunks)


async def _read_chunks(
    request: web.BaseRequest, max_bytes: int, *, is_reserved: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the body as it is sent. If there is room for all of it, wait for its end only."""
    content = request.content
    if not content.is_eof():
        if request.transport is None:  # the client had gone before its request began
            raise BadRequest("Incomplete body")
        _send_continue(request)
    size = 0

    async def next_block() -> bytes:
        if is_reserved and size == content.total_bytes:
            await content.wait_eof()
        block, _ = await content.readchunk()
        return block

    # With a known length, chunks arrive as they were read; joining them would copy all of them.
    next_chunk = content.readany if request.content_length is None else next_block
    arrival = _Arrival(content)
    try:
        while chunk := await arrival.wait(next_chunk):
            size += len(chunk)
            if size > max_bytes:
                raise PayloadTooLarge
            yield chunk
    except (web.RequestPayloadError, ConnectionError) as error:
        if isinstance(error.__cause__, MemoryError):
            raise Unavailable from error.__cause__
        raise BadRequest("Incomplete body") from None
    finally:
        arrival.close()


class _Arrival:
    """Gives up a body that arrives too slowly. There is one timer for the whole body, and it counts only the
    time in which the server waits for the client."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._loop = asyncio.get_running_loop()
        self._seen = content.total_bytes
        self._waits_since: float | None = None
        self._waited_s = 0.0
        self._progress_at = 0.0
        """The value of the time waited at the last check that saw progress."""
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, next_chunk: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the next chunk. Raises RequestTimeout if the body arrives too slowly."""
        if self._content.is_eof():
            return await next_chunk()
        if self._timer is None:
            self._schedule()
        self._waits_since = began = self._loop.time()
        try:
            return await next_chunk()
        finally:
            self._waited_s += self._loop.time() - began
            self._waits_since = None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(STALL_S / CHECKS, self._check)

    def _check(self) -> None:
        if self._content.is_eof():
            return
        waited_s = self._waited_s
        if self._waits_since is not None:
            waited_s += self._loop.time() - self._waits_since
        arrived = self._content.total_bytes
        if arrived > self._seen:
            self._seen, self._progress_at = arrived, waited_s
        is_stalled = waited_s - self._progress_at >= STALL_S
        if is_stalled or waited_s - STALL_S > arrived / MIN_BYTES_PER_S:
            self._content.set_exception(RequestTimeout())
        else:
            self._schedule()


def _send_continue(request: web.BaseRequest) -> None:
    """Send `100 Continue` to a client that waits for it. One of HTTP/1.0 would take it for the response."""
    is_expected = request.headers.get("Expect", "").lower() == "100-continue"
    if is_expected and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _inflate(body: bytes, max_bytes: int, size: int) -> bytes:
    """Return the text of a gzip body, whose end says that it has `size` bytes. If it is longer than that, no
    more of it is inflated."""
    inflater = zlib.decompressobj(wbits=31)
    try:
        text = inflater.decompress(body, min(max_bytes, size) + 1)
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
    """Yield the inflated bytes of `arriving`, in chunks of bounded length."""
    inflater = zlib.decompressobj(wbits=31)
    size = 0
    async with aclosing(arriving):
        async for chunk in arriving:
            full = False
            while chunk or full:
                try:
                    piece = inflater.decompress(chunk, CHUNK_BYTES)
                except zlib.error:
                    raise BadRequest("Invalid gzip body") from None
                size += len(piece)
                if size > max_bytes:
                    raise PayloadTooLarge
                if piece:
                    yield piece
                chunk, full = inflater.unconsumed_tail, len(piece) == CHUNK_BYTES
            if inflater.unused_data:
                raise BadRequest("Invalid gzip body")
    if not inflater.eof:
        raise BadRequest("Invalid gzip body")


async def read_authorized_body(
    request: web.BaseRequest,
    match: Match,
    authorizer: Authorizer,
    in_flight: BytesInFlight,
    kind: Authored,
    decode: Callable[[bytes], Body],
    *,
    needs_author: bool = True,
) -> tuple[Access, Body]:
    """Return the access and the decoded body of an allowed write. Checks that only need the headers come
    before the body is read. Its author proof is valid if `needs_author`, or it has none.

    If the certificate is known, a small body with a proof is decoded before its signature is verified, so
    that both are verified together.

    Raises UnsupportedMediaType if the body is not JSON, AppendProofMissing if the author of an append is not
    named, and as `Authorizer.authorize`, `read_body`, `decode` and `verify_author_proof`.
    """
    credentials = authorizer.credentials_for(request, match.policy)
    if media_type(request) != JSON_TYPE:
        raise UnsupportedMediaType(f"Content-Type must be {JSON_TYPE}")
    text = await read_body(request, match.policy.collection.max_body_bytes, in_flight)
    body: Body | None = None
    author: AuthorProof | None = None
    is_known = isinstance(credentials.certificate, VerifiedCertificate)
    if needs_author and is_known and len(text) <= PYTHON_IN_THREAD_ABOVE and b'"authorSignature"' in text:
        with suppress(PysyncError):  # a caller that is refused is told nothing of the body
            body = decode(text)
            author = _author_proof(kind, body, match.key)
    access = await authorizer.authorize(
        request, match, credentials, text, pushes_document=kind == "document", author=author
    )
    if body is None:
        body = await in_thread_if_large(len(text), decode, text)
    if not needs_author or (author is not None and author.is_verified):
        return access, body
    if body.author_pubkey is not None:
        await in_thread_if_large(len(text), verify_author_proof, kind, body, access.caller, match.key)
    elif kind == "append":
        raise AppendProofMissing
    return access, body


def media_type(request: web.BaseRequest) -> str:
    """Return the media type of the body, without parameters; `""` if there is none."""
    sent = request.headers.get(hdrs.CONTENT_TYPE, "")
    return sent if sent == JSON_TYPE else sent.partition(";")[0].strip().lower()


async def in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of `work` of the core on `size` bytes, in the thread for heavy work if these are
    many."""
    if size > CORE_IN_THREAD_ABOVE:
        return await run_heavy(work, *args, **options)
    return work(*args, **options)


def verify_author_proof(
    kind: Authored, body: _core.PushBody | _core.Append, caller: Caller, key: str
) -> None:
    """Raise Forbidden if an author proof is invalid, or if its key is not the presenter's. A body without one
    is accepted (docs/reference/protocol.md#author-proofs)."""
    author = _author_proof(kind, body, key)
    if author is None:
        return
    if caller.presenter and author.pubkey != caller.presenter:
        raise Forbidden(f"{kind} author must be the request presenter")
    if not _core.verify_author(author.tag, key, author.data, author.pubkey, author.signature):
        raise Forbidden(f"invalid {kind} author signature")


def _author_proof(kind: Authored, body: _core.PushBody | _core.Append, key: str) -> AuthorProof | None:
    if body.author_pubkey is None or body.author_signature is None:
        return None
    return AuthorProof(_TAGS[kind], key, body.canonical, body.author_pubkey, body.author_signature)


async def validate(check: Validator, data: bytes) -> None:
    """Run a check of data, in the thread for heavy work if the data is large."""
    if len(data) > PYTHON_IN_THREAD_ABOVE:
        await run_heavy(check, data)
    else:
        check(data)


def idempotency_key(request: web.BaseRequest, caller: Caller, key: str) -> str | None:
    """Return the key by which a repetition of this write is recognised. It belongs to one caller and one
    document. None if the client sent no Idempotency-Key. Raises BadRequest for an invalid one."""
    sent = request.headers.get(protocol.HEADER_IDEMPOTENCY_KEY)
    if sent is None:
        return None
    if not _is_idempotency_key(sent):
        raise BadRequest("Idempotency-Key must be 1 to 128 printable ASCII characters")
    holder = caller.presenter or ("admin" if "admin" in caller.roles else "")
    return f"{holder} {key} {sent}"


async def check_sealed(match: Match, data: bytes) -> None:
    """Raise DataNotSealed if the collection accepts only sealed data or keyrings, and this is neither
    (docs/reference/protocol.md#sealed-data)."""
    keyrings = match.route.keyrings
    if keyrings is None or match.key.rpartition("/")[2] == KEYRING:
        return
    if not any(keyring.matches(match.key) for keyring in keyrings):
        await validate(_check_sealed_form, data)


def _check_sealed_form(data: bytes) -> None:
    """Raise DataNotSealed unless `data` (JSON text) is sealed by its form: a document or log element under a
    keyring, or an envelope for one recipient, without any other members."""
    value = orjson.loads(data)
    if not (_is_document(value) or _is_envelope(value)):
        raise DataNotSealed


def _is_document(value: dict[str, Any]) -> bool:
    """Return True for `{"_encrypted", "_epoch"?}`."""
    epoch = value.get("_epoch", 1)
    return (
        value.keys() <= {"_encrypted", "_epoch"}
        and type(epoch) is int
        and epoch >= 0
        and _is_ciphertext(value.get("_encrypted"))
    )


def _is_envelope(value: dict[str, Any]) -> bool:
    """Return True for `{"entry", "ct", "v"?}`. The spaces library writes its ciphertext in hex."""
    entry, text = value.get("entry"), value.get("ct")
    return (
        value.keys() <= {"entry", "ct", "v"}
        and value.get("v", 1) == 1
        and isinstance(entry, dict)
        and entry.keys() == {*_ENTRY_KEYS, "ct", "addedSig", "addedAt"}
        and all(_is_hex(entry[name], 32) for name in _ENTRY_KEYS)
        and _is_ciphertext(entry["ct"])
        and isinstance(entry["addedSig"], str)
        and len(decode_base64(entry["addedSig"]) or b"") == 64
        and type(entry["addedAt"]) is int
        and (_is_ciphertext(text) or _is_hex(text))
    )


def _is_ciphertext(text: object) -> bool:
    return isinstance(text, str) and len(decode_base64(text) or b"") >= _OVERHEAD_BYTES


def _is_hex(text: object, size: int | None = None) -> bool:
    """Return True if the text is hex digits of `size` bytes, or by default of any ciphertext."""
    try:
        found = len(bytes.fromhex(text)) if isinstance(text, str) and text.isalnum() else 0
    except ValueError:
        return False
    return found == size if size is not None else found >= _OVERHEAD_BYTES
