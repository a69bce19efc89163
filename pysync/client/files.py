"""Files: bytes pushed and pulled as they are, streamed both ways (clients-and-crypto 6.2, wire section 8).

Files on their way to a server: whole in memory, in a file, or as they are made.

Files on their way from a server: what is told of them first, and their bytes across cuts.
"""

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import orjson

from pysync.client.models import PushResult, file_result
from pysync.client.transport import RETRYABLE, Transport, Unreachable, response_error
from pysync.errors import UnsupportedMediaType
from pysync.protocol import JSON_TYPE, OCTET_STREAM, PARQUET_MIME_TYPES, PARQUET_TYPE

UploadSource = bytes | Path | AsyncIterable[bytes]
"""The bytes of a file, where they lie, or chunks that can be had once."""

CHUNK_BYTES: Final = 1 << 18

OnProgress = Callable[[int, int | None], None]
"""Called with the number of bytes transferred so far and of all, None if that is unknown."""


def _ignore(done: int, size: int | None) -> None:
    pass


class UploadBody:
    """One attempt to send a `source`. It may take any time, but not wait longer than `idle_s` for the server
    to take a chunk: `stall_timeout` is then over."""

    def __init__(self, source: UploadSource, idle_s: float | None, on_progress: OnProgress = _ignore) -> None:
        """Raises OSError where a file is not there, and ValueError for a pipe, or a device: nobody knows how
        much comes of it, nor whether it comes again. Of a file that grows, what there is now is sent."""
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
        """How many bytes it is; None where that is known only at its end."""
        self._chunks = chunks
        self._on_progress = on_progress
        self._idle_s = idle_s
        self.stall_timeout = asyncio.timeout(None)
        """To send it within."""
        self.failure: Exception | None = None
        """What the source itself raised."""

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
    """The file as it was when it `initial_stat` to be sent. Raises ValueError, before the last chunk, where
    it is another by then."""
    left = initial_stat.st_size
    with await asyncio.to_thread(path.open, "rb") as file:
        while left:
            chunk = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
            left -= len(chunk)
            if not chunk or (not left and _has_changed(initial_stat, os.fstat(file.fileno()))):
                raise ValueError(f"{path} changed while it was sent")
            yield chunk


def _has_changed(initial_stat: os.stat_result, now: os.stat_result) -> bool:
    """Whether anything but what may have been added at its end is other than it was."""
    if (initial_stat.st_dev, initial_stat.st_ino) != (
        now.st_dev,
        now.st_ino,
    ) or now.st_size < initial_stat.st_size:
        return True
    return now.st_size == initial_stat.st_size and now.st_mtime_ns != initial_stat.st_mtime_ns


async def _slices(source: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(source), CHUNK_BYTES):
        yield source[start : start + CHUNK_BYTES]


_EMPTY_DOCUMENT_BYTES: Final = 256
"""The answer where nothing is stored is shorter."""
_is_sha256 = re.compile("[0-9a-f]{64}").fullmatch
_content_range = re.compile(r"bytes ([0-9]+)-[0-9]+/(?:[0-9]+|\*)").fullmatch


class FileChanged(Unreachable):
    """A pull was cut, and when it went on the file was another."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a server tells of a file before its bytes. `hash` is their SHA-256, in hex (another server's own
    version of them; None: it tells none), `size` their number, where it is told."""

    content_type: str
    hash: str | None
    size: int | None


class ResumableDownload:
    """How much of a file has come, to go on after a cut. `etag` is as it came."""

    def __init__(self, head: FileInfo, etag: str) -> None:
        self.head = head
        self._etag = etag
        self._received = 0
        self._already_received = 0
        self._digest = hashlib.sha256()

    @property
    def can_resume(self) -> bool:
        """Whether it can be told later that the file is still the same."""
        return self._etag.startswith('"')

    def headers(self) -> dict[str, str]:
        """What asks for the rest."""
        return {"Range": f"bytes={self._received}-", "If-Range": self._etag}

    async def resume(self, response: aiohttp.ClientResponse) -> None:
        """Take the answer for the rest, or for all of it once more. Raises FileChanged, and the refusal that
        other answers are."""
        if response.status not in (200, 206, 404, 416):
            raise response_error(response, await response.read())
        begins = _content_range(response.headers.get("Content-Range", ""))
        is_rest = response.status == 206 and begins is not None and int(begins[1]) == self._received
        is_whole = response.status == 200
        if not (is_rest or is_whole) or response.headers.get("ETag") != self._etag:
            raise FileChanged("the file is another since the pull was cut")
        self._already_received = self._received if is_whole else 0

    def consume(self, chunk: bytes) -> bytes:
        """What of `chunk` has not come before."""
        fresh, self._already_received = (
            chunk[self._already_received :],
            max(0, self._already_received - len(chunk)),
        )
        self._digest.update(fresh)
        self._received += len(fresh)
        return fresh

    def verify(self) -> None:
        """Raises Unreachable where what came is not what the server has, and ValueError where that is no
        file."""
        if self.head.hash is None or not _is_sha256(self.head.hash):
            return
        if self._digest.hexdigest() != self.head.hash:
            if self.head.content_type.startswith(JSON_TYPE):
                raise ValueError("what is stored is a document, not a file")
            raise Unreachable("the file was damaged on its way: its hash is another")


async def start_download(response: aiohttp.ClientResponse) -> tuple[ResumableDownload, bytes] | None:
    """What the first answer tells, and the first of its bytes; None where nothing is stored: `404` without a
    body, or the empty document, which has no ETag. Raises the refusal that other answers are."""
    if response.status != 200:
        answer = await response.read()
        if response.status == 404 and not answer:
            return None
        raise response_error(response, answer)
    headers = response.headers
    content_type, etag = headers.get("Content-Type", OCTET_STREAM), headers.get("ETag", "")
    first = b""
    if not etag and response.content_type == JSON_TYPE:
        first = await _first(response)
        if _is_empty_document(first):
            return None
    head = FileInfo(content_type, etag.removeprefix("W/").strip('"') or None, _size(headers))
    return ResumableDownload(head, etag), first


async def _first(response: aiohttp.ClientResponse) -> bytes:
    first = b""
    async for chunk in response.content.iter_any():
        first += chunk
        if len(first) > _EMPTY_DOCUMENT_BYTES:
            break
    return first


def _is_empty_document(answer: bytes) -> bool:
    try:
        members = orjson.loads(answer)
    except ValueError:
        return False
    return isinstance(members, dict) and members.get("data") == {} and members.get("hash") == ""


def _size(headers: Mapping[str, str]) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


class FileTooLarge(ValueError):
    """A file has more bytes than the caller allows."""


class File(NamedTuple):
    """A file. `hash` is the SHA-256 of `data`, in hex (another server's own version of it; None: it tells
    none)."""

    data: bytes
    content_type: str
    hash: str | None


class FileStream(NamedTuple):
    """A file that is being pulled: `chunks` are its bytes, once."""

    head: FileInfo
    chunks: AsyncIterator[bytes]


class FileMethods(Transport):
    """The calls of a client that are about files. None of them holds a file in memory, but for the bytes that
    it is given or returns."""

    async def push_blob(
        self,
        key: str,
        source: UploadSource,
        content_type: str,
        *,
        idempotency_key: str | None = None,
        on_progress: OnProgress = _ignore,
    ) -> PushResult:
        """Store a file at `key`, whatever is there: the last write wins. `source` is its bytes, the path of a
        file, or chunks of bytes; a push of chunks, which can be had once, is not repeated when it fails.

        The signature covers no byte of the file, except where `content_type` is JSON: of that, `source` must
        be the bytes (else ValueError). Raises UnsupportedMediaType, PayloadTooLarge, KeyConflict, and what
        `source` itself raises.
        """
        is_json = content_type.partition(";")[0].strip().lower() == JSON_TYPE
        if is_json and not isinstance(source, bytes):
            raise ValueError("a file of JSON is signed whole: pass its bytes")
        signed = source if is_json and isinstance(source, bytes) else b""
        headers = self._write_headers(idempotency_key, content_type)

        async def attempt() -> PushResult:
            return await self._upload(self._target("push", key), source, signed, headers, on_progress)

        if isinstance(source, bytes | Path):
            return await self._retry(attempt, RETRYABLE)
        return await attempt()

    async def pull_blob(self, key: str, *, max_bytes: int | None = None) -> File | None:
        """The file at `key`; None where nothing is stored. Raises FileTooLarge where it has more than
        `max_bytes`, ValueError where a document is stored there, and as `open_blob`."""

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
        """Have the file at `key` written to `path`, in the place of what is there: all of it, or nothing.
        None where nothing is stored, and nothing is written. Raises OSError, and as `pull_blob`."""

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
        """The file at `key` with its bytes as they come; None where nothing is stored.

        When the connection is cut the pull goes on where it was. The chunks raise FileChanged where the file
        is another by then, Unreachable where it does not go on, or where what came is not what was stored,
        and ValueError where that is a document: only after the last chunk the bytes are known to be good.
        """
        async with aclosing(self._download(self._target("pull", key))) as parts:
            head = await anext(parts, None)
            yield FileStream(head, _bytes_of(parts)) if isinstance(head, FileInfo) else None

    async def push_parquet(
        self, key: str, source: UploadSource, *, idempotency_key: str | None = None
    ) -> PushResult:
        """`push_blob` of a Parquet file."""
        return await self.push_blob(key, source, PARQUET_TYPE, idempotency_key=idempotency_key)

    async def pull_parquet(self, key: str, *, max_bytes: int | None = None) -> File | None:
        """`pull_blob` of a Parquet file. Raises UnsupportedMediaType where the file at `key` is none by its
        type, which must be exactly one of PARQUET_MIME_TYPES."""
        blob = await self.pull_blob(key, max_bytes=max_bytes)
        if blob is not None and blob.content_type not in PARQUET_MIME_TYPES:
            raise UnsupportedMediaType(f"{key} is {blob.content_type}, not one of {PARQUET_MIME_TYPES}")
        return blob

    async def _upload(
        self,
        target: str,
        source: UploadSource,
        signed: bytes,
        headers: dict[str, str],
        on_progress: OnProgress,
    ) -> PushResult:
        idle_s = self._timeout.total
        upload = UploadBody(source, idle_s, on_progress)
        if upload.size is not None:
            headers = headers | {"Content-Length": str(upload.size)}
        limits = aiohttp.ClientTimeout(total=None, connect=idle_s, sock_read=idle_s)
        sending = self._send(self._session, "POST", target, signed, headers, limits, upload=upload)
        try:
            async with upload.stall_timeout, sending as response:
                return await self._read(response, file_result)
        except TimeoutError:
            raise Unreachable(f"{self._base}: the file is not taken") from None
        except Unreachable:
            if upload.failure is not None:
                raise upload.failure from None
            raise

    async def _download(self, target: str) -> AsyncGenerator[FileInfo | bytes]:
        """The head of a file, then its bytes; nothing where none is stored."""
        idle_s = self._timeout.total
        limits = aiohttp.ClientTimeout(total=None, connect=idle_s, sock_read=idle_s)
        # Compressed on the way, a file would lose the ETag by which a pull goes on.
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        progress: ResumableDownload | None = None
        failures = 0
        while True:
            asked = headers if progress is None else headers | progress.headers()
            try:
                async with self._send(self._session, "GET", target, b"", asked, limits) as response:
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
    """Raises FileTooLarge for more bytes than the caller allows; None: any number."""
    if max_bytes is not None and size > max_bytes:
        raise FileTooLarge(f"the file has more than {max_bytes} bytes")
