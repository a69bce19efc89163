"""Pushes and pulls of files as bytes, streamed in both directions; a pull may request a range.

See docs/reference/protocol.md#files.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple

from aiohttp import web

from pysync import protocol
from pysync.engine.files import FileSettings
from pysync.errors import RangeNotSatisfiable, UnsupportedMediaType
from pysync.model import Caller
from pysync.protocol import JSON_TYPE, MAX_INT, OCTET_STREAM, clamped_int
from pysync.server.api import Service
from pysync.server.api.documents import DocumentHandlers
from pysync.server.api.plugin_hooks import run_after_write
from pysync.server.authorization import Access
from pysync.server.http.in_flight import hold_until
from pysync.server.http.request_body import (
    check_body_headers,
    idempotency_key,
    media_type,
    read_body,
    reserve_stream,
    stream_body,
)
from pysync.server.http.responses import Response, etag_matches, wants_body, write_response
from pysync.server.http.router import Match
from pysync.server.http.streaming import SendfileResponse, StreamingResponse
from pysync.store import FileStat, OpenFile

MAX_CONTENT_TYPE: Final = 255
SENDFILE_MIN_BYTES: Final = 65_536
"""Number of bytes from which `sendfile` is faster than reading and writing."""
_SECURITY_HEADERS: Final = "X-Content-Type-Options: nosniff\r\nContent-Security-Policy: sandbox\r\n"
"""Keep browsers from running a pushed file as a page of this origin, which may serve other pages."""

_is_media_type = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+/[!#$%&'*+.^_`|~0-9a-z-]+").fullmatch
_range = re.compile(r"bytes=([0-9]*)-([0-9]*)", re.IGNORECASE).fullmatch
_unprintable = re.compile(r"[^ -~]")


class ByteRange(NamedTuple):
    """The bytes that a request asks for: [start, end), as `Store.open` takes them."""

    start: int
    end: int | None

    def is_satisfiable(self, size: int) -> bool:
        """Return True if a file of `size` bytes has any of these bytes. A range of the last bytes is always
        satisfiable; of an empty file it is the whole file."""
        return self.start < size if self.start >= 0 else True


class FileHandlers(DocumentHandlers):
    """The routes of collections that have files, and possibly documents too."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._files = service.files

    async def push(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `POST {ns}/push/<key>`: a file, or a document if the collection has both."""
        settings = file_settings(match)
        if settings.documents and media_type(request) == JSON_TYPE:
            return await super().push(request, match)
        # Authorise by the headers, then read and store the chunks as they arrive.
        caller, chunks = await self._authorize_upload(request, match, settings)
        content_type = settings.content_type or sanitize(request.headers["Content-Type"])
        async with aclosing(chunks):
            once = idempotency_key(request, caller, match.key)
            written = await self._service.write_deadline.run_upload(
                chunks,
                lambda chunks: self._files.push(
                    match.key, chunks, content_type, match.write_context(caller), once
                ),
                partial(hold_until, request),
            )
        if self._hooks.has_push_hooks:
            await run_after_write(self._service, match, caller, written, match.params, None)
        return write_response(written.hash, written.timestamp_ms)

    async def _respond(self, request: web.BaseRequest, match: Match, access: Access) -> Response:
        settings = file_settings(match)
        document = None
        for _ in range(2):  # one may replace the other meanwhile
            response = await self._try_file(request, match, settings)
            if response is not None:
                return response
            # Also where there are only files: a restore leaves a damaged document in place of a lost file.
            # Also where there are only files: a restore leaves a damaged document in place of a lost file.
            document = await self._load(request, match) if settings.template is None else None
            if document is not None:
                break
        return await self.document_response(request, match, access, document if settings.documents else None)

    async def _authorize_upload(
        self, request: web.BaseRequest, match: Match, settings: FileSettings
    ) -> tuple[Caller, AsyncGenerator[bytes, None]]:
        """Return the sender of a file, who may push it, and the file. The sender is authorised before the
        file is read: its signature covers an empty body. The signature does cover a body that is sent as
        JSON, which is therefore read whole first.

        Raises UnsupportedMediaType, and the errors of `check_body_headers` and `Authorizer.authorize`.
        """
        credentials = self._authorizer.credentials_for(request, match.policy)
        sent_as = media_type(request)
        if not (_is_media_type(sent_as) and settings.accepts(sent_as)):
            allowed = (JSON_TYPE, *settings.types) if settings.documents else settings.types
            raise UnsupportedMediaType(f"Content-Type must be {', '.join(allowed)}")
        max_bytes, in_flight = match.policy.collection.max_body_bytes, self._service.in_flight
        check_body_headers(request, max_bytes)
        signed = await read_body(request, max_bytes, in_flight) if sent_as == JSON_TYPE else b""
        access = await self._authorizer.authorize(request, match, credentials, signed)
        if sent_as == JSON_TYPE:
            return access.caller, _single_chunk(signed)
        await reserve_stream(request, in_flight)
        return access.caller, stream_body(request, max_bytes)

    async def _try_file(
        self, request: web.BaseRequest, match: Match, settings: FileSettings
    ) -> Response | None:
        """Return the response with the file; None if there is none. Raises RangeNotSatisfiable."""
        key, ttl_ms = file_key(match, settings), match.policy.collection.ttl_ms
        headers = request.headers
        if not wants_body(request):
            stat = await self._files.stat(key, ttl_ms)
            if stat is None:
                return None
            if etag_matches(request, stat.sha256):
                return Response(304, b"", f'{match.route.read_headers}ETag: "{stat.sha256}"\r\n')
            if request.method == "HEAD":
                lines, content_type = _file_headers(match, settings, stat)
                return StreamingResponse(b"", None, lines, content_type=content_type, size=stat.size)
        range_header = headers.get(protocol.HEADER_RANGE)
        span = None if range_header is None else parse_range(range_header)
        if span is not None:
            file = await self._files.open(key, span.start, span.end, ttl_ms)
            if file is None:
                return None
            if headers.get(protocol.HEADER_IF_RANGE, f'"{file.sha256}"') == f'"{file.sha256}"':
                if span.is_satisfiable(file.size):
                    return await _file_response(match, settings, file, is_partial=file.size > 0)
                await file.chunks.aclose()
                raise RangeNotSatisfiable(file.size)
            await file.chunks.aclose()
        file = await self._files.open(key, ttl_ms=ttl_ms)
        return None if file is None else await _file_response(match, settings, file)


def file_settings(match: Match) -> FileSettings:
    """Return the file settings of a route's collection. The route must be one of `FileHandlers`."""
    settings = match.route.files
    assert settings is not None, "only routes of such collections lead here"
    return settings


def file_key(match: Match, settings: FileSettings) -> str:
    """Return the key of the file that a path names."""
    if settings.template is None:
        return match.key
    return settings.template.fill(match.params) + settings.suffix


def parse_range(text: str) -> ByteRange | None:
    """Parse a Range header, whose numbers may have any number of digits. Returns None unless it is one valid
    range of bytes: then the whole file is sent (RFC 9110, section 14.2)."""
    found = _range(text.strip())
    if found is None:
        return None
    # Strip leading zeros, because Python converts at most 4,300 digits.
    first, last = (each and (each.lstrip("0") or "0") for each in found.groups())
    if not first:
        if not last:
            return None
        return ByteRange(MAX_INT, None) if last == "0" else ByteRange(-clamped_int(last), None)
    if not last:
        return ByteRange(clamped_int(first), None)
    if (len(last), last) < (len(first), first):
        return None
    return ByteRange(clamped_int(first), clamped_int(last) + 1)


def sanitize(content_type: str) -> str:
    """Return a Content-Type that is valid in a header: printable ASCII, up to MAX_CONTENT_TYPE characters."""
    return _unprintable.sub("", content_type).strip()[:MAX_CONTENT_TYPE]


async def _file_response(
    match: Match, settings: FileSettings, file: OpenFile, *, is_partial: bool = False
) -> Response:
    """Return the response with an opened file or a part of it. The first bytes are awaited here, so that a
    read that fails at once results in an error response."""
    lines, content_type = _file_headers(match, settings, file)
    status, size, chunks = 200, file.end - file.start, file.chunks
    if is_partial:
        status = 206
        lines += f"Content-Range: bytes {file.start}-{file.end - 1}/{file.size}\r\n"
    try:
        if size >= SENDFILE_MIN_BYTES and file.sendfile is not None:
            await file.sendfile.ensure_cached()
            return SendfileResponse(file.sendfile, lines, status=status, content_type=content_type, size=size)
        first = await anext(aiter(chunks), b"")
    except BaseException:
        await file.chunks.aclose()
        raise
    if len(first) == size:
        await file.chunks.aclose()
        return Response(status, first, lines, content_type=content_type)
    return StreamingResponse(first, file.chunks, lines, status=status, content_type=content_type, size=size)


def _file_headers(match: Match, settings: FileSettings, stat: FileStat) -> tuple[str, str]:
    """Return the header lines of a response with a file, and its content type."""
    content_type = settings.content_type or stat.content_type
    if not (content_type.isascii() and content_type.isprintable()):
        content_type = OCTET_STREAM  # stored by another program
    lines = f'{match.route.read_headers}ETag: "{stat.sha256}"\r\nAccept-Ranges: bytes\r\n{_SECURITY_HEADERS}'
    return lines, content_type


async def _single_chunk(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
