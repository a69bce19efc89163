"""Files over HTTP: pushed and pulled as bytes, streamed both ways, whole or a range (wire section 8)."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple

from aiohttp import web

from pysync import protocol
from pysync.config.key_templates import document_key
from pysync.engine.files import FileRules, Files
from pysync.errors import RangeNotSatisfiable, UnsupportedMediaType
from pysync.model import Caller, Written
from pysync.server.handlers.documents import Handlers
from pysync.server.request_body import check_declared, media_type, read_body, stream_body
from pysync.server.responses import NO_STORE, Answer, version_matches
from pysync.server.router import Match
from pysync.server.streaming import SentFile, StreamedAnswer
from pysync.store import JSON_TYPE, File, FileStat
from pysync.store.local.disk import Outgoing

MAX_CONTENT_TYPE: Final = 255
SENT_FROM: Final = 65_536
"""How many bytes are better sent by the kernel out of the file than read and written."""
OPAQUE_TYPE: Final = "application/octet-stream"
_LOOKS: Final = 2
"""How often file and document are looked for by turns: one may take the other's place meanwhile."""
_SAFE: Final = "X-Content-Type-Options: nosniff\r\nContent-Security-Policy: sandbox\r\n"
"""A file is whatever somebody pushed, and pages may be served from the same origin: it is no page of it."""

_is_media_type = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+/[!#$%&'*+.^_`|~0-9a-z-]+").fullmatch
_range = re.compile(r"bytes=([0-9]*)-([0-9]*)", re.IGNORECASE).fullmatch
_FAR: Final = 2**53
"""No file reaches so far."""


class Span(NamedTuple):
    """Bytes that a request asks for: [start, end), as `Store.open` takes them."""

    start: int
    end: int | None

    def is_satisfiable(self, size: int) -> bool:
        """Whether a file of `size` bytes has any of them. The last bytes of an empty one are all of it."""
        return self.start < size if self.start >= 0 else True


class Upload(NamedTuple):
    """A file that is pushed, its sender admitted and allowed."""

    caller: Caller
    chunks: AsyncGenerator[bytes, None]
    content_type: str


class FileHandlers(Handlers):
    """The routes of collections that have files, and perhaps documents too."""

    def __init__(self, files: Files, *parts: Any) -> None:
        super().__init__(*parts)
        self._files = files

    async def push(self, request: web.BaseRequest, match: Match) -> Answer:
        """`POST {ns}/push/<key>`: a file, or a document where the collection has both."""
        if is_document(request, match):
            return await super().push(request, match)
        async with self._uploaded(request, match) as upload:
            written = await self._kept(match, upload)
        return Answer(200, protocol.written_body(written.hash, written.timestamp_ms), NO_STORE)

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        rules = rules_of(match)
        document = None
        for _ in range(_LOOKS):
            answer = await self._file(request, match, rules)
            if answer is not None:
                return answer
            if not rules.documents:
                break
            document = await self._found(request, match)
            if document is not None:
                break
        return await self._document(request, match, signer, caller, document)

    @asynccontextmanager
    async def _uploaded(self, request: web.BaseRequest, match: Match) -> AsyncIterator[Upload]:
        """The file that is pushed, once its sender is admitted and allowed: before it is read, because the
        signature covers an empty body. It covers what is sent as JSON, which is therefore held whole.

        Raises UnsupportedMediaType, and what `Access.present`, `check_declared` and `Callers.writer` do.
        """
        rule, rules = match.rule, rules_of(match)
        credentials = self._access.present(rule, request.headers)
        sent_as = media_type(request)
        if not (_is_media_type(sent_as) and rules.admits(sent_as)):
            allowed = (JSON_TYPE, *rules.types) if rules.documents else rules.types
            raise UnsupportedMediaType(f"Content-Type must be {', '.join(allowed)}")
        max_bytes = rule.collection.max_body_bytes
        check_declared(request, max_bytes)
        signed = await read_body(request, max_bytes) if sent_as == JSON_TYPE else b""
        _, caller = await self._callers.allowed(request, match, credentials, signed)
        chunks = _whole(signed) if sent_as == JSON_TYPE else stream_body(request, max_bytes)
        async with aclosing(chunks):
            yield Upload(caller, chunks, rules.content_type or clean(request.headers["Content-Type"]))

    async def _kept(self, match: Match, upload: Upload) -> Written:
        """Store a file that is allowed."""
        subject = match.subject(upload.caller)
        return await self._files.push(match.key, upload.chunks, upload.content_type, subject)

    async def _file(self, request: web.BaseRequest, match: Match, rules: FileRules) -> Answer | None:
        """The answer that the file makes; None where there is none. Raises RangeNotSatisfiable."""
        key, ttl_ms = file_key(match, rules), match.rule.collection.ttl_ms
        headers = request.headers
        is_head = request.method == "HEAD"
        condition = headers.get(protocol.HEADER_IF_NONE_MATCH)
        if is_head or condition is not None:
            stat = await self._files.stat(key, ttl_ms)
            if stat is None:
                return None
            if version_matches(condition, stat.sha256):
                return Answer(304, b"", f'{match.route.read_headers}ETag: "{stat.sha256}"\r\n')
            if is_head:
                lines, content_type = _told(match, rules, stat)
                return StreamedAnswer(b"", None, lines, content_type=content_type, size=stat.size)
        asked = headers.get(protocol.HEADER_RANGE)
        span = None if asked is None else span_of(asked)
        if span is None:
            file = await self._files.open(key, ttl_ms=ttl_ms)
            return None if file is None else await _sent(match, rules, file)
        file = await self._files.open(key, span.start, span.end, ttl_ms)
        if file is None:
            return None
        if headers.get(protocol.HEADER_IF_RANGE, f'"{file.sha256}"') != f'"{file.sha256}"':
            await file.chunks.aclose()
            file = await self._files.open(key, ttl_ms=ttl_ms)
            return None if file is None else await _sent(match, rules, file)
        if not span.is_satisfiable(file.size):
            await file.chunks.aclose()
            raise RangeNotSatisfiable(file.size)
        return await _sent(match, rules, file, is_part=file.size > 0)


def is_document(request: web.BaseRequest, match: Match) -> bool:
    """Whether what is pushed is a document."""
    return rules_of(match).documents and media_type(request) == JSON_TYPE


def rules_of(match: Match) -> FileRules:
    """How the collection of a route to `FileHandlers` has files."""
    rules = match.route.files
    assert rules is not None, "only routes of such collections lead here"
    return rules


def file_key(match: Match, rules: FileRules) -> str:
    """The key of the file that a path names."""
    if rules.template is None:
        return match.key
    return document_key(rules.template, match.params) + rules.suffix


def span_of(text: str) -> Span | None:
    """Parse a Range header, however many digits its numbers have. None if it is not one valid range of bytes:
    then the whole file is sent (RFC 9110, section 14.2)."""
    found = _range(text.strip())
    if found is None:
        return None
    # Without leading zeros: Python converts no more than 4,300 digits.
    first, last = (each and (each.lstrip("0") or "0") for each in found.groups())
    if not first:
        if not last:
            return None
        return Span(_FAR, None) if last == "0" else Span(-_number(last), None)
    if not last:
        return Span(_number(first), None)
    if (len(last), last) < (len(first), first):
        return None
    return Span(_number(first), _number(last) + 1)


def clean(content_type: str) -> str:
    """A Content-Type that fits in a header."""
    return "".join(sign for sign in content_type if " " <= sign <= "~").strip()[:MAX_CONTENT_TYPE]


def _number(digits: str) -> int:
    """The number; of one that is far too large, one that is far."""
    return _FAR if len(digits) > len(str(_FAR)) else min(int(digits), _FAR)


async def _sent(match: Match, rules: FileRules, file: File, *, is_part: bool = False) -> Answer:
    """The answer with what was opened of a file: all of it, or a part. The first bytes are awaited here, so
    that what fails at once is refused like anything else."""
    lines, content_type = _told(match, rules, file)
    status, size, chunks = 200, file.end - file.start, file.chunks
    if is_part:
        status = 206
        lines += f"Content-Range: bytes {file.start}-{file.end - 1}/{file.size}\r\n"
    try:
        if size >= SENT_FROM and isinstance(chunks, Outgoing):
            await chunks.fetch()
            return SentFile(chunks, lines, status=status, content_type=content_type, size=size)
        first = await anext(aiter(chunks), b"")
    except BaseException:
        await file.chunks.aclose()
        raise
    if len(first) == size:
        await file.chunks.aclose()
        return Answer(status, first, lines, content_type=content_type)
    return StreamedAnswer(first, file.chunks, lines, status=status, content_type=content_type, size=size)


def _told(match: Match, rules: FileRules, stat: FileStat) -> tuple[str, str]:
    """The header lines of an answer with a file, and its content type."""
    content_type = rules.content_type or stat.content_type
    if not (content_type.isascii() and content_type.isprintable()):
        content_type = OPAQUE_TYPE  # some other program's
    lines = f'{match.route.read_headers}ETag: "{stat.sha256}"\r\nAccept-Ranges: bytes\r\n{_SAFE}'
    return lines, content_type


async def _whole(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
