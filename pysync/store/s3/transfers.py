"""Uploads and downloads of files.

An upload is spooled to disk first, so that a failed one leaves nothing behind, and lost requests can be sent
again. A download is streamed, and resumed if the connection breaks.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import IO, Any, Final, Self
from urllib.parse import quote

import aiohttp
from aiohttp import ClientResponse

from pysync.cache import BoundedCache
from pysync.concurrency import gather_bounded
from pysync.errors import StoreUnavailable
from pysync.protocol import CHUNK_BYTES
from pysync.store.local.disk import in_thread
from pysync.store.s3.conditional_writes import ConditionalWriter, before_writing
from pysync.store.s3.credentials import S3Client, translate_errors
from pysync.store.s3.http import (
    RetryState,
    S3Error,
    S3Request,
    S3RequestSender,
    S3Response,
    StreamedBody,
)
from pysync.store.s3.versions import LINEAGE, SHA256, BucketCapabilities, Lineage, Version, unquote_etag
from pysync.store.types import FileStat, Leftover, OnReceived, OpenFile, Pace, clamp_range, no_pace
from pysync.write_ids import new_write_id

PART_BYTES: Final = 8 * 1024 * 1024
MIN_PART_BYTES: Final = 5 * 1024 * 1024
"""Minimum size of all parts but the last."""
SINGLE_PUT_BYTES: Final = 2 * 1024 * 1024
"""Size above which a file is sent in parts. The request that makes it visible is then as short as any other,
and has succeeded or never will once `SETTLED_MS` have passed since the call of
`received`."""
_VISIBLE_WITHIN_S: Final = 25.0
"""Seconds from the call of `received` until the upload is aborted."""
_MAX_CONCURRENT_PARTS: Final = 2
_MAX_PARTS: Final = 10_000


class Spool:
    """An unnamed temporary file. Call its methods in a thread; `size` needs none."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self.size = 0

    def append(self, chunk: bytes | bytearray) -> None:
        """Append a chunk."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close
        self._hash.update(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.size += len(chunk)

    def sha256(self) -> str:
        """Return the hex digest of all appended bytes."""
        return self._hash.hexdigest()

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on."""
        with self._lock:  # a cancelled request may still read when the file is closed
            assert self._file is not None
            return os.pread(self._file.fileno(), size, start)

    def sha256_of(self, start: int, end: int) -> str:
        """Return the hex digest of the bytes [start, end)."""
        digest = hashlib.sha256()
        for at in range(start, end, CHUNK_BYTES):
            digest.update(self.read(at, min(CHUNK_BYTES, end - at)))
        return digest.hexdigest()

    def close(self) -> None:
        """Remove the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class Uploads:
    """Writes the files of one bucket."""

    def __init__(
        self,
        account: S3Client,
        bucket: str,
        requests: S3RequestSender,
        writes: ConditionalWriter,
        now_ms: Callable[[], int],
    ) -> None:
        self._account = account
        self._bucket = bucket
        self._requests = requests
        self._writes = writes
        self._now_ms = now_ms

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None,
    ) -> str:
        """See `Store.write`."""
        spool = Spool()
        try:
            gathered = bytearray()
            async for chunk in chunks:
                gathered += chunk
                if len(gathered) >= CHUNK_BYTES:
                    await in_thread(spool.append, gathered)
                    gathered = bytearray()
            await in_thread(spool.append, gathered)
            sha256 = spool.sha256()
            is_small = spool.size <= SINGLE_PUT_BYTES
            part_bytes = None if is_small else await self._part_bytes(key, spool.size, sha256)
            if part_bytes is not None:
                await self._send_parts(key, spool, content_type, received, part_bytes)
            else:
                body = await in_thread(spool.read, 0, spool.size)
                if received is not None:
                    await received(sha256)
                with translate_errors():
                    async with asyncio.timeout(_VISIBLE_WITHIN_S):
                        if not await self._writes.put_file(key, body, content_type, sha256):
                            await self._send_parts(key, spool, content_type, None, PART_BYTES)
        finally:
            spool.close()
        return sha256

    async def _part_bytes(self, key: str, size: int, sha256: str) -> int | None:
        """Return the size of the parts of a file; None to send it as a whole. If the same bytes are stored,
        they get another ETag, which follows from the parts: a delete of the earlier version deletes no later
        one."""
        least = -(-size // _MAX_PARTS)
        with before_writing():
            found = await self._writes.find(key)
        if found is None or found.sha256 != sha256:
            return max(PART_BYTES, least)
        if size > PART_BYTES:
            return max(MIN_PART_BYTES, least) + secrets.randbelow(PART_BYTES - MIN_PART_BYTES)
        if found.parts != 1:
            return PART_BYTES
        return MIN_PART_BYTES if size > MIN_PART_BYTES else None

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool) -> list[Leftover]:
        """See `Store.remove_leftovers`: parts of uploads to which nobody has added any since."""
        found = []
        client, bucket = self._account.client, self._bucket
        with translate_errors():
            pages = client.get_paginator("list_multipart_uploads")
            async for page in pages.paginate(Bucket=bucket, Prefix=self._requests.root):
                for upload in page.get("Uploads", ()):
                    at = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    parts = [
                        part
                        async for listed in client.get_paginator("list_parts").paginate(**at)
                        for part in listed.get("Parts", ())
                    ]
                    newest = max([upload["Initiated"], *(part["LastModified"] for part in parts)])
                    if newest.timestamp() * 1000 >= before_ms:
                        continue
                    key = upload["Key"].removeprefix(self._requests.root)
                    found.append(Leftover("uploads", key, sum(part["Size"] for part in parts)))
                    if not dry_run:
                        await client.abort_multipart_upload(**at)
        return found

    async def _send_parts(
        self, key: str, spool: Spool, content_type: str, received: OnReceived | None, part_bytes: int
    ) -> None:
        id_, sha256 = new_write_id(), spool.sha256()
        at: dict[str, Any] = {"Bucket": self._bucket, "Key": self._requests.root + key}
        metadata = {LINEAGE: Lineage(self._now_ms(), (id_,)).header(), SHA256: sha256}
        with before_writing(), translate_errors():
            begun = await self._account.client.create_multipart_upload(
                **at,
                ContentType=content_type,
                Metadata={name.removeprefix("x-amz-meta-"): value for name, value in metadata.items()},
            )
        upload_id = begun["UploadId"]
        try:
            with before_writing():
                etags = await self._upload_parts(key, spool, upload_id, part_bytes)
            if received is not None:
                await received(sha256)
            async with self._writes.exclusive(key):
                await self._complete(key, at, upload_id, etags, id_)
        except BaseException:
            await asyncio.shield(self._abort(at, upload_id))
            raise

    async def _upload_parts(self, key: str, spool: Spool, upload_id: str, size: int) -> list[str]:
        """Send parts of this size, some concurrently, and return their etags in order."""

        async def send(start: int) -> str:
            end = min(start + size, spool.size)
            part = _streamed_body(spool, start, end, await in_thread(spool.sha256_of, start, end))
            query = f"partNumber={start // size + 1}&uploadId={quote(upload_id, safe='-_.~')}"
            response = await self._requests.send(S3Request("PUT", key, {}, part, query))
            return response.headers["ETag"]

        return await gather_bounded(_MAX_CONCURRENT_PARTS, range(0, max(1, spool.size), size), send)

    async def _complete(
        self, key: str, at: dict[str, Any], upload_id: str, etags: list[str], id_: str
    ) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            with translate_errors():
                async with asyncio.timeout(_VISIBLE_WITHIN_S):
                    await self._account.client.complete_multipart_upload(
                        **at, UploadId=upload_id, MultipartUpload={"Parts": parts}
                    )
        except StoreUnavailable:
            # The response may have been lost, and a retry no longer finds the upload.
            found = await self._writes.find(key)
            if found is None or found.ids[:1] != (id_,):
                raise

    async def _abort(self, at: dict[str, Any], upload_id: str) -> None:
        """Ask the server to discard the parts. If that fails, the bucket's rule for incomplete uploads
        removes them."""
        with contextlib.suppress(StoreUnavailable), translate_errors():
            await self._account.client.abort_multipart_upload(**at, UploadId=upload_id)


def _streamed_body(spool: Spool, start: int, end: int, sha256: str) -> StreamedBody:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(start, end, CHUNK_BYTES):
            yield await in_thread(spool.read, at, min(CHUNK_BYTES, end - at))

    return StreamedBody(end - start, sha256, chunks)


class Downloads:
    """Opens the files of one bucket."""

    def __init__(self, requests: S3RequestSender, bucket: BucketCapabilities) -> None:
        self._requests = requests
        self._bucket = bucket
        # Of files that other programs wrote, whose metadata lack a hash.
        self._hashes = BoundedCache[tuple[str, str], str]()

    async def open(self, key: str, start: int, end: int | None) -> OpenFile | None:
        """Open a file as `Store.open` does, even if it is known to be damaged."""
        if end is not None and end <= start >= 0:
            return await self._open_empty(key)
        ranged = {"Range": _range(start, end)} if start or end is not None else {}
        got = await self._requests.stream(S3Request("GET", key, ranged), 404, 416)
        if isinstance(got, S3Response):
            return None if got.status == 404 else await self._open_empty(key)
        try:
            version = Version.of(got.headers)
            if not version.is_file:
                got.close()
                return None
            size = _size(got)
            if ranged and got.status != 206 and size:  # some servers ignore the range for an empty object
                raise StoreUnavailable from S3Error(S3Response(got.status, got.headers, b""))
            return await self._file(key, version, size, *clamp_range(size, start, end), got)
        except BaseException:
            got.close()
            raise

    async def digest(self, key: str, pace: Pace) -> tuple[FileStat, str] | None:
        """Return the metadata of the file at `key`, and the sha256 (hex) of its bytes; None if there is
        none."""
        file = await self.open(key, 0, None)
        if file is None:
            return None
        try:
            return file.stat, await _sha256(file.chunks, pace)
        finally:
            await file.chunks.aclose()

    async def _open_empty(self, key: str) -> OpenFile | None:
        """Open the file at `key` without any bytes."""
        response = await self._requests.send(S3Request("HEAD", key), 404)
        if response.status == 404:
            return None
        version = Version.of(response.headers)
        size = int(response.headers["Content-Length"])
        return await self._file(key, version, size, size, size, None) if version.is_file else None

    async def _file(
        self, key: str, version: Version, size: int, start: int, end: int, response: ClientResponse | None
    ) -> OpenFile:
        etag, content_type, modified_ms = version.etag, version.content_type, version.modified_ms
        chunks = DownloadStream(self._requests, key, etag, self._bucket, start, end)
        chunks.response = response
        sha256 = version.sha256 or await self._hash(key, etag, size)
        return OpenFile(size, sha256, content_type, modified_ms, start, end, chunks, etag=etag)

    async def _hash(self, key: str, etag: str, size: int) -> str:
        """Return the sha256 (hex) of a file that another program wrote, by reading it."""
        known = self._hashes.get((key, etag))
        if known is None:
            known = await _sha256(DownloadStream(self._requests, key, etag, self._bucket, 0, size), no_pace)
            self._hashes.put((key, etag), known)
        return known


class DownloadStream:
    """The bytes [at, end) of one version of a file, in chunks. If `response` is set, its body begins with
    them. Iterate to the end, or call `aclose`. Raises StoreUnavailable if that version is no longer
    available."""

    def __init__(
        self, requests: S3RequestSender, key: str, etag: str, bucket: BucketCapabilities, at: int, end: int
    ) -> None:
        self.response: ClientResponse | None = None
        self._requests = requests
        self._key = key
        self._etag = etag
        self._condition = bucket.condition(etag)
        self._at, self._end = at, end
        self._attempts: RetryState | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._at < self._end:
            if self.response is None:
                self.response = await self._begin()
            try:
                chunk = await self.response.content.readany()
                if not chunk:
                    raise aiohttp.ClientPayloadError("the response is too short")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await self.aclose()
                self._attempts = self._attempts or self._requests.retry_state()
                if not await self._attempts.next_attempt():
                    raise StoreUnavailable from error
            else:
                self._attempts = None
                chunk = chunk[: self._end - self._at]
                self._at += len(chunk)
                return chunk
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the connection."""
        if self.response is not None:
            self.response.close()
            self.response = None

    async def _begin(self) -> ClientResponse:
        headers = {"Range": _range(self._at, self._end), "If-Match": self._condition}
        got = await self._requests.stream(S3Request("GET", self._key, headers), 404, 412, 416)
        if isinstance(got, S3Response):
            raise StoreUnavailable from S3Error(got)
        if got.status != 206 or unquote_etag(got.headers.get("ETag", "")) != self._etag:
            got.close()
            raise StoreUnavailable from S3Error(S3Response(got.status, got.headers, b""))
        return got


async def _sha256(chunks: AsyncIterable[bytes], pace: Pace) -> str:
    """Return the sha256 (hex) of the chunks."""
    digest = hashlib.sha256()
    async for chunk in chunks:
        await asyncio.to_thread(digest.update, chunk)
        await pace(len(chunk))
    return digest.hexdigest()


def _range(start: int, end: int | None) -> str:
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-{'' if end is None else end - 1}"


def _size(response: ClientResponse) -> int:
    """Return the size of the whole file."""
    if response.status == 206:
        return int(response.headers["Content-Range"].rpartition("/")[2])
    return int(response.headers["Content-Length"])
