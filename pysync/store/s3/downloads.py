"""Files on their way out: streamed, and gone on with where a connection breaks."""

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final, Self

import aiohttp
from aiohttp import ClientResponse

from pysync.errors import StoreUnavailable
from pysync.store import File, FileStat, Pace, within
from pysync.store.s3.bucket import Bucket
from pysync.store.s3.requests import Answer, Attempts, Call, Refused, Requests
from pysync.store.s3.versions import Version, plain_etag

MAX_HASHES: Final = 1_024
"""Hashes remembered of files that others wrote, which do not carry them."""


class Downloads:
    """Opens the files of one bucket."""

    def __init__(self, requests: Requests, bucket: Bucket) -> None:
        self._requests = requests
        self._bucket = bucket
        self._hashes: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def open(self, key: str, start: int, end: int | None) -> File | None:
        """As `Store.open`, whatever is known of the file."""
        if end is not None and end <= start >= 0:
            return await self._opened_empty(key)
        ranged = {"Range": _range(start, end)} if start or end is not None else {}
        got = await self._requests.stream(Call("GET", key, ranged), 404, 416)
        if isinstance(got, Answer):
            return None if got.status == 404 else await self._opened_empty(key)
        try:
            version = Version.of(got.headers)
            if not version.is_file:
                got.close()
                return None
            size = _size(got)
            if ranged and got.status != 206 and size:  # of an empty object some answer all
                raise StoreUnavailable from Refused(Answer(got.status, got.headers, b""))
            begin, finish = within(size, start, end)
            chunks = Download(self._requests, key, version.etag, self._bucket, begin, finish)
            chunks.response = got
            return await self._file(key, version, size, chunks, begin, finish)
        except BaseException:
            got.close()
            raise

    async def digest(self, key: str, pace: Pace) -> tuple[FileStat, str] | None:
        """Return the metadata of the file at `key`, and the sha256 (hex) of its bytes; None if there is
        none."""
        file = await self.open(key, 0, None)
        if file is None:
            return None
        digest = hashlib.sha256()
        try:
            async for chunk in file.chunks:
                await asyncio.to_thread(digest.update, chunk)
                await pace(len(chunk))
        finally:
            await file.chunks.aclose()
        return file.stat, digest.hexdigest()

    async def _opened_empty(self, key: str) -> File | None:
        """The file at `key`, of which no bytes are wanted."""
        answer = await self._requests.send(Call("HEAD", key), 404)
        if answer.status == 404:
            return None
        version = Version.of(answer.headers)
        size = int(answer.headers["Content-Length"])
        chunks = Download(self._requests, key, version.etag, self._bucket, size, size)
        return await self._file(key, version, size, chunks, size, size) if version.is_file else None

    async def _file(
        self, key: str, version: Version, size: int, chunks: "Download", begin: int, finish: int
    ) -> File:
        sha256 = version.sha256 or await self._hash(key, version.etag, size)
        return File(
            size, sha256, version.content_type, version.modified_ms, begin, finish, chunks, etag=version.etag
        )

    async def _hash(self, key: str, etag: str, size: int) -> str:
        """The sha256 (hex) of a file that others wrote, found by reading it."""
        known = self._hashes.get((key, etag))
        if known is None:
            digest = hashlib.sha256()
            async for chunk in Download(self._requests, key, etag, self._bucket, 0, size):
                digest.update(chunk)
            known = self._hashes[key, etag] = digest.hexdigest()
            if len(self._hashes) > MAX_HASHES:
                self._hashes.popitem(last=False)
        return known


class Download:
    """The bytes [at, end) of one version of a file, piece by piece; `response`, where there is one, begins
    with them. Exhaust it or `aclose` it. Raises StoreUnavailable where that version cannot be had any
    more."""

    def __init__(self, requests: Requests, key: str, etag: str, bucket: Bucket, at: int, end: int) -> None:
        self.response: ClientResponse | None = None
        self._requests = requests
        self._key = key
        self._etag = etag
        self._condition = bucket.condition(etag)
        self._at, self._end = at, end
        self._attempts: Attempts | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._at < self._end:
            if self.response is None:
                self.response = await self._begin()
            try:
                chunk = await self.response.content.readany()
                if not chunk:
                    raise aiohttp.ClientPayloadError("the answer is too short")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await self.aclose()
                self._attempts = self._attempts or self._requests.attempts()
                if not await self._attempts.again():
                    raise StoreUnavailable from error
            else:
                self._attempts = None
                chunk = chunk[: self._end - self._at]
                self._at += len(chunk)
                return chunk
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self.response is not None:
            self.response.close()
            self.response = None

    async def _begin(self) -> ClientResponse:
        headers = {"Range": _range(self._at, self._end), "If-Match": self._condition}
        got = await self._requests.stream(Call("GET", self._key, headers), 404, 412, 416)
        if isinstance(got, Answer):
            raise StoreUnavailable from Refused(got)
        if got.status != 206 or plain_etag(got.headers.get("ETag", "")) != self._etag:
            got.close()
            raise StoreUnavailable from Refused(Answer(got.status, got.headers, b""))
        return got


def _range(start: int, end: int | None) -> str:
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-{'' if end is None else end - 1}"


def _size(response: ClientResponse) -> int:
    """Of the whole file."""
    if response.status == 206:
        return int(response.headers["Content-Range"].rpartition("/")[2])
    return int(response.headers["Content-Length"])
