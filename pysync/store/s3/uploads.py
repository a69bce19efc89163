"""Files on their way in: spooled to disk first, so that one that fails half-way leaves nothing behind, and
what the network loses can be sent again."""

import asyncio
import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import IO, Any, Final
from urllib.parse import quote

from pysync.errors import StoreUnavailable
from pysync.store import Received
from pysync.store.files import in_thread
from pysync.store.s3.account import Account, asking
from pysync.store.s3.requests import READ_BYTES, Call, Requests, Upload
from pysync.store.s3.versions import LINEAGE, SHA256, Lineage
from pysync.store.s3.writes import Writes
from pysync.write_ids import new_mark

PART_BYTES: Final = 8 * 1024 * 1024
WHOLE_BYTES: Final = 2 * 1024 * 1024
"""A larger file is sent in parts: then the request that makes it visible takes no longer than any other, and
is made or never will be when `SETTLED_MS` of the outbox have passed since `received` was told."""
_VISIBLE_WITHIN_S: Final = 25.0
"""From then on. What has not succeeded in that time is given up."""
_PARTS_AT_ONCE: Final = 2
_MOST_PARTS: Final = 10_000


class Spool:
    """A file without a name in the folder for temporary files. Its methods are for a thread, but `size`."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self.size = 0

    def append(self, chunk: bytes | bytearray) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close
        self._hash.update(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.size += len(chunk)

    def sha256(self) -> str:
        """Hex digest of all that was appended."""
        return self._hash.hexdigest()

    def read(self, start: int, size: int) -> bytes:
        with self._lock:  # a cancelled request may still read when the file is closed
            assert self._file is not None
            return os.pread(self._file.fileno(), size, start)

    def sha256_of(self, start: int, end: int) -> str:
        digest = hashlib.sha256()
        for at in range(start, end, READ_BYTES):
            digest.update(self.read(at, min(READ_BYTES, end - at)))
        return digest.hexdigest()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class Uploads:
    """Writes the files of one bucket. `root` as in `Requests`."""

    def __init__(
        self,
        account: Account,
        bucket: str,
        requests: Requests,
        writes: Writes,
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
        received: Received | None,
    ) -> str:
        """As `Store.write`."""
        spool = Spool()
        try:
            gathered = bytearray()
            async for chunk in chunks:
                gathered += chunk
                if len(gathered) >= READ_BYTES:
                    await in_thread(spool.append, gathered)
                    gathered = bytearray()
            await in_thread(spool.append, gathered)
            sha256 = spool.sha256()
            if spool.size > WHOLE_BYTES:
                await self._send_parts(key, spool, content_type, sha256, received)
            else:
                body = await in_thread(spool.read, 0, spool.size)
                if received is not None:
                    await received(sha256)
                with asking():
                    async with asyncio.timeout(_VISIBLE_WITHIN_S):
                        await self._writes.put_file(key, body, content_type, sha256)
        finally:
            spool.close()
        return sha256

    async def _send_parts(
        self, key: str, spool: Spool, content_type: str, sha256: str, received: Received | None
    ) -> None:
        id_ = new_mark()
        at: dict[str, Any] = {"Bucket": self._bucket, "Key": self._requests.root + key}
        metadata = {LINEAGE: Lineage(self._now_ms(), (id_,)).header(), SHA256: sha256}
        with asking():
            begun = await self._account.client.create_multipart_upload(
                **at,
                ContentType=content_type,
                Metadata={name.removeprefix("x-amz-meta-"): value for name, value in metadata.items()},
            )
        upload_id = begun["UploadId"]
        try:
            etags = await self._each_part(key, spool, upload_id)
            if received is not None:
                await received(sha256)
            async with self._writes.alone(key):
                await self._complete(key, at, upload_id, etags, id_)
        except BaseException:
            await asyncio.shield(self._abort(at, upload_id))
            raise

    async def _each_part(self, key: str, spool: Spool, upload_id: str) -> list[str]:
        """Send the parts, some at once; their etags in order."""
        size = max(PART_BYTES, -(-spool.size // _MOST_PARTS))
        starts = range(0, spool.size, size)
        etags = [""] * len(starts)
        waiting = iter(enumerate(starts))

        async def send_on() -> None:
            for at, start in waiting:
                end = min(start + size, spool.size)
                part = _upload(spool, start, end, await in_thread(spool.sha256_of, start, end))
                query = f"partNumber={at + 1}&uploadId={quote(upload_id, safe='-_.~')}"
                answer = await self._requests.send(Call("PUT", key, {}, part, query))
                etags[at] = answer.headers["ETag"]

        senders = [asyncio.ensure_future(send_on()) for _ in range(_PARTS_AT_ONCE)]
        try:
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()
        return etags

    async def _complete(
        self, key: str, at: dict[str, Any], upload_id: str, etags: list[str], id_: str
    ) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            with asking():
                async with asyncio.timeout(_VISIBLE_WITHIN_S):
                    await self._account.client.complete_multipart_upload(
                        **at, UploadId=upload_id, MultipartUpload={"Parts": parts}
                    )
        except StoreUnavailable:
            # Its answer may have been lost, and a second try finds no upload any more.
            found = await self._writes.find(key)
            if found is None or found.ids[:1] != (id_,):
                raise

    async def _abort(self, at: dict[str, Any], upload_id: str) -> None:
        """Have the server let go of the parts; where it does not, its own rules for abandoned uploads
        will."""
        with contextlib.suppress(StoreUnavailable), asking():
            await self._account.client.abort_multipart_upload(**at, UploadId=upload_id)


def _upload(spool: Spool, start: int, end: int, sha256: str) -> Upload:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(start, end, READ_BYTES):
            yield await in_thread(spool.read, at, min(READ_BYTES, end - at))

    return Upload(end - start, sha256, chunks)
