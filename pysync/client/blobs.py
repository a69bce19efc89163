"""Files: bytes pushed and pulled as they are, streamed both ways (clients-and-crypto 6.2, wire section 8)."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp

from pysync.client import downloads
from pysync.client.connection import PASSING, Connection, Unreachable
from pysync.client.downloads import FileChanged, FileHead, Progress
from pysync.client.results import PushResult, blob_result
from pysync.client.uploads import Source, Upload
from pysync.errors import UnsupportedMediaType
from pysync.protocol import JSON_TYPE, PARQUET_MIME_TYPES, PARQUET_TYPE


class BlobTooLarge(ValueError):
    """A file has more bytes than the caller allows."""


class Blob(NamedTuple):
    """A file. `hash` is the SHA-256 of `data`, in hex (another server's own version of it; None: it tells
    none)."""

    data: bytes
    content_type: str
    hash: str | None


class BlobStream(NamedTuple):
    """A file that is being pulled: `chunks` are its bytes, once."""

    head: FileHead
    chunks: AsyncIterator[bytes]


class Blobs(Connection):
    """The calls of a client that are about files. None of them holds a file in memory, but for the bytes that
    it is given or returns."""

    async def push_blob(
        self, key: str, source: Source, content_type: str, *, idempotency_key: str | None = None
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
            return await self._upload(self._target("push", key), source, signed, headers)

        if isinstance(source, bytes | Path):
            return await self._again(attempt, PASSING)
        return await attempt()

    async def pull_blob(self, key: str, *, max_bytes: int | None = None) -> Blob | None:
        """The file at `key`; None where nothing is stored. Raises BlobTooLarge where it has more than
        `max_bytes`, ValueError where a document is stored there, and as `open_blob`."""

        async def attempt() -> Blob | None:
            async with self.open_blob(key) as stream:
                if stream is None:
                    return None
                check_size(stream.head.size or 0, max_bytes)
                data = bytearray()
                async for chunk in stream.chunks:
                    data += chunk
                    check_size(len(data), max_bytes)
            return Blob(bytes(data), stream.head.content_type, stream.head.hash)

        return await self._again(attempt, (FileChanged,))

    async def pull_blob_to(self, key: str, path: Path) -> FileHead | None:
        """Have the file at `key` written to `path`, in the place of what is there: all of it, or nothing.
        None where nothing is stored, and nothing is written. Raises OSError, and as `pull_blob`."""

        part = path.with_name(f".{self._random(8).hex()}.part")

        async def attempt() -> FileHead | None:
            async with self.open_blob(key) as stream:
                if stream is None:
                    return None
                # Not in a thread: it would go on when this is cancelled, and leave the file behind.
                with part.open("wb") as file:
                    async for chunk in stream.chunks:
                        await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(os.replace, part, path)
            return stream.head

        try:
            return await self._again(attempt, (FileChanged,))
        finally:
            part.unlink(missing_ok=True)

    @asynccontextmanager
    async def open_blob(self, key: str) -> AsyncIterator[BlobStream | None]:
        """The file at `key` with its bytes as they come; None where nothing is stored.

        When the connection is cut the pull goes on where it was. The chunks raise FileChanged where the file
        is another by then, Unreachable where it does not go on, or where what came is not what was stored,
        and ValueError where that is a document: only after the last chunk the bytes are known to be good.
        """
        async with aclosing(self._download(self._target("pull", key))) as parts:
            head = await anext(parts, None)
            yield BlobStream(head, _bytes_of(parts)) if isinstance(head, FileHead) else None

    async def push_parquet(
        self, key: str, source: Source, *, idempotency_key: str | None = None
    ) -> PushResult:
        """`push_blob` of a Parquet file."""
        return await self.push_blob(key, source, PARQUET_TYPE, idempotency_key=idempotency_key)

    async def pull_parquet(self, key: str, *, max_bytes: int | None = None) -> Blob | None:
        """`pull_blob` of a Parquet file. Raises UnsupportedMediaType where the file at `key` is none by its
        type, which must be exactly one of PARQUET_MIME_TYPES."""
        blob = await self.pull_blob(key, max_bytes=max_bytes)
        if blob is not None and blob.content_type not in PARQUET_MIME_TYPES:
            raise UnsupportedMediaType(f"{key} is {blob.content_type}, not one of {PARQUET_MIME_TYPES}")
        return blob

    async def _upload(
        self, target: str, source: Source, signed: bytes, headers: dict[str, str]
    ) -> PushResult:
        idle_s = self._timeout.total
        upload = Upload(source, idle_s)
        if upload.size is not None:
            headers = headers | {"Content-Length": str(upload.size)}
        limits = aiohttp.ClientTimeout(total=None, connect=idle_s, sock_read=idle_s)
        sending = self._send(self._session, "POST", target, signed, headers, limits, upload=upload)
        try:
            async with upload.limit, sending as response:
                return await self._read(response, blob_result)
        except TimeoutError:
            raise Unreachable(f"{self._base}: the file is not taken") from None
        except Unreachable:
            if upload.failure is not None:
                raise upload.failure from None
            raise

    async def _download(self, target: str) -> AsyncGenerator[FileHead | bytes]:
        """The head of a file, then its bytes; nothing where none is stored."""
        idle_s = self._timeout.total
        limits = aiohttp.ClientTimeout(total=None, connect=idle_s, sock_read=idle_s)
        # Compressed on the way, a file would lose the ETag by which a pull goes on.
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        progress: Progress | None = None
        failures = 0
        while True:
            asked = headers if progress is None else headers | progress.headers()
            try:
                async with self._send(self._session, "GET", target, b"", asked, limits) as response:
                    if progress is None:
                        begun = await downloads.begin(response)
                        if begun is None:
                            return
                        progress, first = begun
                        yield progress.head
                        if first:
                            yield progress.take(first)
                    else:
                        await progress.resume(response)
                    async for chunk in response.content.iter_any():
                        if fresh := progress.take(chunk):
                            failures = 0
                            yield fresh
                break
            except FileChanged:
                raise
            except PASSING as error:
                if progress is not None and not progress.can_resume:
                    raise
                failures += 1
                await self._wait(failures, error)
        progress.end()


async def _bytes_of(parts: AsyncIterator[FileHead | bytes]) -> AsyncIterator[bytes]:
    async for part in parts:
        if isinstance(part, bytes):
            yield part


def check_size(size: int, max_bytes: int | None) -> None:
    """Raises BlobTooLarge for more bytes than the caller allows; None: any number."""
    if max_bytes is not None and size > max_bytes:
        raise BlobTooLarge(f"the file has more than {max_bytes} bytes")
