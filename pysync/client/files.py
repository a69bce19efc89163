"""Upload and download of files (docs/reference/protocol.md#files)."""

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import orjson

from pysync.client.models import PushResult, file_result
from pysync.client.transport import RETRYABLE, Transport, Unreachable, response_error
from pysync.errors import UnsupportedMediaType
from pysync.protocol import CHUNK_BYTES, JSON_TYPE, OCTET_STREAM, PARQUET_MIME_TYPES, PARQUET_TYPE

UploadSource = bytes | Path | AsyncIterable[bytes]
"""The bytes of a file, its path, or chunks that can be read once."""


OnProgress = Callable[[int, int | None], None]
"""Called with the number of bytes transferred so far and of all, None if that is unknown."""


def _ignore(done: int, size: int | None) -> None:
    pass


class UploadBody:
    """One attempt to send a `source`. It may take any time in all, but `stall_timeout` expires if the server
    takes no chunk for `idle_s`."""

    def __init__(self, source: UploadSource, idle_s: float | None, on_progress: OnProgress = _ignore) -> None:
        """Raises OSError for a missing file, and ValueError for a pipe or a device, whose size is unknown and
        which cannot be read twice. Of a file that grows, the bytes that it has now are sent."""
        size: int | None
        chunks: AsyncIterable[bytes]
        if isinstance(source, Path):
            begun = source.stat()
            if not stat.S_ISREG(begun.st_mode):
                raise ValueError(f"{source} is no regular file: pass its chunks")
            size, chunks = begun.st_size, _read(source, begun)
        elif isinstance(source, bytes):
            size, chunks = len(source), _slices(source)
        else:
            size, chunks = None, source
        self.size = size
        """Size in bytes; None if it is known only at the end."""
        self._chunks = chunks
        self._on_progress = on_progress
        self._idle_s = idle_s
        self.stall_timeout = asyncio.timeout(None)
        """The deadline for the current chunk."""
        self.failure: Exception | None = None
        """The error that the source raised."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        sent = 0
        try:
            async for chunk in self._chunks:
                if self._idle_s is not None:
                    self.stall_timeout.reschedule(asyncio.get_running_loop().time() + self._idle_s)
                yield chunk
                self.stall_timeout.reschedule(None)
                sent += len(chunk)
                self._on_progress(sent, self.size)
        except Exception as error:
            self.failure = error
            raise


async def _read(path: Path, initial_stat: os.stat_result) -> AsyncIterator[bytes]:
    """Yield the file as it was at `initial_stat`. Raises ValueError before the last chunk if the file was
    changed meanwhile."""
    left = initial_stat.st_size
    with await asyncio.to_thread(path.open, "rb") as file:
        while left:
            chunk = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
            left -= len(chunk)
            if not chunk or (not left and _has_changed(initial_stat, os.fstat(file.fileno()))):
                raise ValueError(f"{path} changed while it was sent")
            yield chunk


def _has_changed(initial_stat: os.stat_result, now: os.stat_result) -> bool:
    """Return True if the file was changed in any way but by appending to it."""
    if not os.path.samestat(initial_stat, now) or now.st_size < initial_stat.st_size:
        return True
    return now.st_size == initial_stat.st_size and now.st_mtime_ns != initial_stat.st_mtime_ns


async def _slices(source: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(source), CHUNK_BYTES):
        yield source[start : start + CHUNK_BYTES]


_EMPTY_DOCUMENT_BYTES: Final = 256
"""The response for a missing document is shorter."""
_is_sha256 = re.compile("[0-9a-f]{64}").fullmatch
_content_range = re.compile(r"bytes ([0-9]+)-[0-9]+/(?:[0-9]+|\*)").fullmatch


class FileChanged(Unreachable):
    """A download was interrupted, and the file was replaced before it could resume."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The metadata that a server sends before a file's bytes. `hash` is their SHA-256 in hex, another
    server's own version, or None if the server sends none; `size` is their number, if known."""

    content_type: str
    hash: str | None
    size: int | None


class ResumableDownload:
    """The progress of a download, from which it can resume after an interruption. `etag` is kept as the
    server sent it."""

    def __init__(self, head: FileInfo, etag: str) -> None:
        self.head = head
        self._etag = etag
        self._received = 0
        self._already_received = 0
        self._digest = hashlib.sha256()

    @property
    def can_resume(self) -> bool:
        """Return True if the ETag can show later that the file is unchanged."""
        return self._etag.startswith('"')

    def headers(self) -> dict[str, str]:
        """Return the headers that request the rest of the file."""
        return {"Range": f"bytes={self._received}-", "If-Range": self._etag}

    async def resume(self, response: aiohttp.ClientResponse) -> None:
        """Accept the response with the rest, or with the whole file again. Raises FileChanged, and the error
        for any other response."""
        if response.status not in (200, 206, 404, 416):
            raise response_error(response, await response.read())
        begins = _content_range(response.headers.get("Content-Range", ""))
        is_rest = response.status == 206 and begins is not None and int(begins[1]) == self._received
        is_whole = response.status == 200
        if not (is_rest or is_whole) or response.headers.get("ETag") != self._etag:
            raise FileChanged("the file is another since the pull was cut")
        self._already_received = self._received if is_whole else 0

    def consume(self, chunk: bytes) -> bytes:
        """Return the bytes of `chunk` that were not received before."""
        fresh = chunk[self._already_received :]
        self._already_received = max(0, self._already_received - len(chunk))
        self._digest.update(fresh)
        self._received += len(fresh)
        return fresh

    def verify(self) -> None:
        """Raise Unreachable if the bytes do not match the server's hash, and ValueError if they are not a
        file."""
        if self.head.hash is None or not _is_sha256(self.head.hash):
            return
        if self._digest.hexdigest() != self.head.hash:
            if self.head.content_type.startswith(JSON_TYPE):
                raise ValueError("what is stored is a document, not a file")
            raise Unreachable("the file was damaged on its way: its hash is another")


async def start_download(response: aiohttp.ClientResponse) -> tuple[ResumableDownload, bytes] | None:
    """Return the metadata and the first bytes of a download. None if nothing is stored: `404` without a body,
    or the empty document, which has no ETag. Raises the error for any other response."""
    if response.status != 200:
        body = await response.read()
        if response.status == 404 and not body:
            return None
        raise response_error(response, body)
    headers = response.headers
    content_type, etag = headers.get("Content-Type", OCTET_STREAM), headers.get("ETag", "")
    first = b""
    if not etag and response.content_type == JSON_TYPE:
        first = await _first(response)
        if _is_empty_document(first):
            return None
    head = FileInfo(content_type, etag.removeprefix("W/").strip('"') or None, response.content_length)
    return ResumableDownload(head, etag), first


async def _first(response: aiohttp.ClientResponse) -> bytes:
    first = b""
    async for chunk in response.content.iter_any():
        first += chunk
        if len(first) > _EMPTY_DOCUMENT_BYTES:
            break
    return first


def _is_empty_document(body: bytes) -> bool:
    try:
        members = orjson.loads(body)
    except ValueError:
        return False
    return isinstance(members, dict) and members.get("data") == {} and members.get("hash") == ""


class FileTooLarge(ValueError):
    """The file is larger than the caller allows."""


class File(NamedTuple):
    """A file. `hash` is the SHA-256 of `data` in hex, another server's own version, or None if the server
    sends none."""

    data: bytes
    content_type: str
    hash: str | None


class FileStream(NamedTuple):
    """A file that is being downloaded. `chunks` yields its bytes once."""

    head: FileInfo
    chunks: AsyncIterator[bytes]


class FileMethods(Transport):
    """The methods of a client that transfer files. They hold no file in memory, except bytes that they are
    given or return."""

    async def push_blob(
        self,
        key: str,
        source: UploadSource,
        content_type: str,
        *,
        idempotency_key: str | None = None,
        on_progress: OnProgress = _ignore,
    ) -> PushResult:
        """Store a file at `key`, and replace what is stored there: the last write wins.

        `source` is the file's bytes, its path, or chunks of bytes. A push of chunks, which can be read once,
        is not repeated after a failure. The signature does not cover the file's bytes, unless `content_type`
        is JSON; `source` must then be bytes, else ValueError. Raises UnsupportedMediaType, PayloadTooLarge,
        KeyConflict, and any error of `source`.
        """
        is_json = content_type.partition(";")[0].strip().lower() == JSON_TYPE
        if is_json and not isinstance(source, bytes):
            raise ValueError("a file of JSON is signed whole: pass its bytes")
        signed = source if is_json and isinstance(source, bytes) else b""
        headers = self._write_headers(idempotency_key, content_type)

        target = self._target("push", key)

        async def attempt() -> PushResult:
            upload = UploadBody(source, self._timeout.total, on_progress)
            length = {} if upload.size is None else {"Content-Length": str(upload.size)}
            sending = self._send(
                self._session, "POST", target, signed, headers | length, self._file_timeout, upload=upload
            )
            try:
                async with upload.stall_timeout, sending as response:
                    return await self._read(response, file_result)
            except TimeoutError:
                raise Unreachable(f"{self._base}: the file is not taken") from None
            except Unreachable:
                if upload.failure is not None:
                    raise upload.failure from None
                raise

        if isinstance(source, bytes | Path):
            return await self._retry(attempt, RETRYABLE)
        return await attempt()

    async def pull_blob(self, key: str, *, max_bytes: int | None = None) -> File | None:
        """Return the file at `key`; None if nothing is stored. Raises FileTooLarge above `max_bytes`,
        ValueError if a document is stored there, and as `open_blob`."""

        async def attempt() -> File | None:
            async with self.open_blob(key) as stream:
                if stream is None:
                    return None
                check_size(stream.head.size or 0, max_bytes)
                data = bytearray()
                async for chunk in stream.chunks:
                    data += chunk
                    check_size(len(data), max_bytes)
            return File(bytes(data), stream.head.content_type, stream.head.hash)

        return await self._retry(attempt, (FileChanged,))

    async def pull_blob_to(self, key: str, path: Path, on_progress: OnProgress = _ignore) -> FileInfo | None:
        """Download the file at `key` to `path` and return its metadata; None if nothing is stored. `path` is
        replaced atomically, or left as it is. Raises OSError, and as `pull_blob`."""

        part = path.with_name(f".{self._random(8).hex()}.part")

        async def attempt() -> FileInfo | None:
            async with self.open_blob(key) as stream:
                if stream is None:
                    return None
                # Not in a thread: it would go on when this is cancelled, and leave the file behind.
                with part.open("wb") as file:
                    async for chunk in stream.chunks:
                        await asyncio.to_thread(file.write, chunk)
                        on_progress(file.tell(), stream.head.size)
            await asyncio.to_thread(os.replace, part, path)
            return stream.head

        try:
            return await self._retry(attempt, (FileChanged,))
        finally:
            part.unlink(missing_ok=True)

    @asynccontextmanager
    async def open_blob(self, key: str) -> AsyncIterator[FileStream | None]:
        """Stream the file at `key`; None if nothing is stored.

        An interrupted download resumes where it stopped. The chunks raise FileChanged if the file was
        replaced meanwhile, Unreachable if the download cannot resume or the bytes do not match the hash, and
        ValueError if a document is stored there. The bytes are verified only after the last chunk.
        """
        async with aclosing(self._download(self._target("pull", key))) as parts:
            head = await anext(parts, None)
            yield FileStream(head, _bytes_of(parts)) if isinstance(head, FileInfo) else None

    async def push_parquet(
        self, key: str, source: UploadSource, *, idempotency_key: str | None = None
    ) -> PushResult:
        """Store a Parquet file, as `push_blob`."""
        return await self.push_blob(key, source, PARQUET_TYPE, idempotency_key=idempotency_key)

    async def pull_parquet(self, key: str, *, max_bytes: int | None = None) -> File | None:
        """Return a Parquet file, as `pull_blob`. Raises UnsupportedMediaType unless the media type is one of
        PARQUET_MIME_TYPES."""
        blob = await self.pull_blob(key, max_bytes=max_bytes)
        if blob is not None and blob.content_type not in PARQUET_MIME_TYPES:
            raise UnsupportedMediaType(f"{key} is {blob.content_type}, not one of {PARQUET_MIME_TYPES}")
        return blob

    async def _download(self, target: str) -> AsyncGenerator[FileInfo | bytes]:
        """Yield the metadata of a file, then its bytes; nothing if none is stored."""
        # Compressed on the way, a file would lose the ETag by which a pull goes on.
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        progress: ResumableDownload | None = None
        failures = 0
        while True:
            sent = headers if progress is None else headers | progress.headers()
            try:
                async with self._send(
                    self._session, "GET", target, b"", sent, self._file_timeout
                ) as response:
                    if progress is None:
                        begun = await start_download(response)
                        if begun is None:
                            return
                        progress, first = begun
                        yield progress.head
                        if first:
                            yield progress.consume(first)
                    else:
                        await progress.resume(response)
                    async for chunk in response.content.iter_any():
                        if fresh := progress.consume(chunk):
                            failures = 0
                            yield fresh
                break
            except FileChanged:
                raise
            except RETRYABLE as error:
                if progress is not None and not progress.can_resume:
                    raise
                failures += 1
                await self._wait(failures, error)
        progress.verify()


async def _bytes_of(chunks: AsyncIterator[FileInfo | bytes]) -> AsyncIterator[bytes]:
    async for part in chunks:
        if isinstance(part, bytes):
            yield part


def check_size(size: int, max_bytes: int | None) -> None:
    """Raise FileTooLarge if `size` is above `max_bytes`; None allows any size."""
    if max_bytes is not None and size > max_bytes:
        raise FileTooLarge(f"the file has more than {max_bytes} bytes")
