"""The store in a bucket of S3 or of a compatible server."""

import asyncio
import builtins
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from math import inf
from typing import Any, ClassVar, Final, Self

from pysync._core import split_key
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.model import Diagnosis, Observe, unobserved
from pysync.protocol import JSON_TYPE
from pysync.store import merge_journal
from pysync.store.protocol import get_many_concurrently
from pysync.store.s3.conditional_writes import ConditionalWriter
from pysync.store.s3.credentials import S3Client, translate_errors
from pysync.store.s3.damaged_files import DamagedFiles
from pysync.store.s3.http import RetryPolicy, S3Request, S3RequestSender
from pysync.store.s3.probe import PROBES, probe_bucket
from pysync.store.s3.transfers import Downloads, Uploads
from pysync.store.s3.versions import TOMBSTONE, BucketCapabilities, Version, VersionCache, unquote_etag
from pysync.store.types import (
    ANY,
    DAMAGED_REASON,
    NOT_MODIFIED,
    PAGE,
    DamagedFile,
    FileStat,
    Leftover,
    ListEntry,
    MergeRecord,
    NotModified,
    ObjectInfo,
    OnReceived,
    OpenFile,
    Pace,
    Precondition,
    StoredObject,
    no_pace,
)
from pysync.write_ids import WRITE_ID_BYTES, strip_write_id

_TOMBSTONE_ETAG: Final = hashlib.md5(TOMBSTONE, usedforsecurity=False).hexdigest()


class S3Store:
    """A `Store` in a bucket of S3 or of a compatible server. Create one with `connect`. `bucket` has the
    capabilities that the probe at start found."""

    transactional: ClassVar[None] = None
    counting: ClassVar[None] = None
    is_remote: ClassVar[bool] = True
    time_index: ClassVar[None] = None
    # Hashing and sending this much costs about as much as the rest of a request.
    cheap_put_bytes: ClassVar[int] = 32_768
    added_bytes: ClassVar[int] = WRITE_ID_BYTES

    def __init__(
        self,
        account: S3Client,
        requests: S3RequestSender,
        name: str,
        bucket: BucketCapabilities,
        now_ms: Callable[[], int],
    ) -> None:
        self.bucket = bucket
        self._now_ms = now_ms
        self._account = account
        self._name = name
        self._requests = requests
        self._cache = VersionCache()
        self._writes = ConditionalWriter(requests, self._cache, bucket, now_ms)
        self._uploads = Uploads(account, name, requests, self._writes, now_ms)
        self._downloads = Downloads(requests, bucket)
        self._damaged = DamagedFiles(self)
        self._in_flight = InFlight()

    @classmethod
    async def connect(
        cls,
        config: StoreConfig,
        now_ms: Callable[[], int] = wall_clock_ms,
        *,
        shared: bool = False,
        retry_policy: RetryPolicy | None = None,
        bucket: BucketCapabilities | None = None,
        observe: Observe = unobserved,
    ) -> Self:
        """Connect to the bucket that `config` names. `shared` as in `open_store`. The bucket is probed,
        unless `bucket` passes the result of an earlier probe.

        Raises ValueError for an invalid URL or a bucket that several processes cannot share, StoreUnavailable
        if the bucket cannot be used. The message of both says what to do.
        """
        location = config.s3_location()
        async with AsyncExitStack() as opened:
            account = await S3Client.open(config, location)
            opened.push_async_callback(account.close)
            root = f"{location.prefix}/" if location.prefix else ""
            policy = retry_policy or RetryPolicy()
            requests = S3RequestSender(
                account, root, config.timeout_ms, config.max_connections, policy, observe
            )
            opened.push_async_callback(requests.close)
            if bucket is None:
                bucket = await probe_bucket(account, requests, location, shared)
            store = cls(account, requests, location.bucket, bucket, now_ms)
            await store._damaged.load()
            opened.pop_all()
        return store

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """See `Store.get`."""
        split_key(key)
        kept = self._cache.get(key)
        known = if_none_match if kept is None else kept.etag
        condition = {} if known is None else {"If-None-Match": self.bucket.condition(known)}
        self._in_flight.check()
        request = S3Request("GET", key, condition, wants_body=_is_document)
        response = await self._requests.send(request, 304, 404)
        if response.status == 304:
            return NOT_MODIFIED if kept is None or kept.etag == if_none_match else kept
        version = None if response.status == 404 else Version.of(response.headers)
        if version is None or not version.is_document:
            self._cache.evict(key)
            return None
        body = strip_write_id(response.body)
        found = StoredObject(body, version.etag, version.content_type, version.modified_ms)
        self._cache.put(key, found, version.ids)
        return NOT_MODIFIED if version.etag == if_none_match else found

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        """See `Store.get_many`."""
        return await get_many_concurrently(self, keys, max_bytes)

    async def info_many(self, keys: Sequence[str]) -> dict[str, StoredObject | ObjectInfo | None] | None:
        """See `Store.info_many`."""
        return None

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """See `Store.put`."""
        split_key(key)
        with self._in_flight.write():
            return await self._writes.put(key, bytes(body), content_type, expect)

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """See `Store.open`."""
        split_key(key)
        self._in_flight.check()
        file = await self._downloads.open(key, start, end)
        if file is not None and await self._damaged.contains(key, file):
            await file.chunks.aclose()
            raise DamagedFile(DAMAGED_REASON, file.etag)
        return file

    async def stat(self, key: str) -> FileStat | None:
        """See `Store.stat`."""
        file = await self.open(key, 0, 0)
        return file and file.stat

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """See `Store.verify`."""
        split_key(key)
        self._in_flight.check()
        found = await self._downloads.digest(key, pace)
        if found is None:
            return None
        stat, sha256 = found
        is_damaged = sha256 != stat.sha256
        await self._damaged.record(key, stat, is_damaged=is_damaged)
        if is_damaged:
            raise DamagedFile(f"its sha256 is {sha256} and should be {stat.sha256}", stat.etag)
        return stat

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
    ) -> str:
        """See `Store.write`."""
        split_key(key)
        with self._in_flight.write():
            return await self._uploads.write(key, chunks, content_type, received)

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """See `Store.merge`."""
        return await merge_journal.merge(self, key, chunks, content_type, merged, self._now_ms)

    async def pending_merges(self) -> builtins.list[MergeRecord]:
        """See `Store.pending_merges`."""
        return await merge_journal.pending_merges(self)

    async def recover_merges(self) -> None:
        """See `Store.recover_merges`."""
        await merge_journal.recover(self, self._now_ms)

    async def list(self, prefix: str, after: str | None, limit: int) -> builtins.list[str]:
        """See `Store.list`."""
        if prefix:
            split_key(prefix)
        below = prefix and prefix + "/"
        names: builtins.list[str] = []
        # A document often has keys below it, which count as one more entry.
        parameters: dict[str, Any] = {"Delimiter": "/", "MaxKeys": min(PAGE, 2 * limit)}
        if after:
            parameters["StartAfter"] = self._requests.root + below + after
        self._in_flight.check()
        if limit == 0:
            return names
        async for key, _ in self._entries(below, parameters):
            names.append(key[len(below) :])
            if len(names) == limit:
                break
        return names

    async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""
        if prefix:
            split_key(prefix)
        self._in_flight.check()
        parameters = {} if after is None else {"StartAfter": self._requests.root + after}
        async for key, entry in self._entries(prefix and prefix + "/", parameters):
            modified_ms = _modified_ms(entry["LastModified"])
            yield ListEntry(key, unquote_etag(entry["ETag"]), modified_ms, entry["Size"])

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        split_key(key)
        with self._in_flight.write():
            await self._writes.delete(key, expect)

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool = False) -> builtins.list[Leftover]:
        """See `Store.remove_leftovers`."""
        uploads = await self._uploads.remove_leftovers(before_ms, dry_run=dry_run)
        journals = await merge_journal.remove_leftovers(self, self._now_ms, before_ms, dry_run=dry_run)
        return [*uploads, *journals]

    async def purge_deleted(self) -> None:
        """See `Store.purge_deleted`: a deleted object leaves nothing, unless the bucket keeps versions."""

    async def probe(self) -> None:
        """See `Store.probe`."""
        with self._in_flight.write():
            await self._requests.send(S3Request("PUT", PROBES, {"Content-Type": "text/plain"}, b"ready\n"))

    async def diagnose(self) -> Diagnosis:
        """See `Store.diagnose`."""
        return Diagnosis(self.bucket.ignored_conditions, self.bucket.skew_ms)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._in_flight.drain()
        await self._requests.close()
        await self._account.close()

    async def _entries(
        self, below: str, parameters: dict[str, Any]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the keys and entries of the visible objects that begin with `below`, page by page."""
        while True:
            with translate_errors():
                page = await self._account.client.list_objects_v2(
                    Bucket=self._name, Prefix=self._requests.root + below, **parameters
                )
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._requests.root)
                if _is_key(key) and not await self._is_tombstone(key, entry):
                    yield key, entry
            if not page.get("IsTruncated"):
                return
            parameters = {**parameters, "ContinuationToken": page["NextContinuationToken"]}

    async def _is_tombstone(self, key: str, entry: dict[str, Any]) -> bool:
        if entry["Size"] != len(TOMBSTONE):
            return False
        if unquote_etag(entry["ETag"]) == _TOMBSTONE_ETAG:
            return True
        # If the server encrypts objects, an etag is not an MD5 hash.
        found = await self._writes.find(key)
        return found is not None and found.is_tombstone


class InFlight:
    """Tracks the operations of the store. After `drain`, none can start."""

    def __init__(self) -> None:
        self._writes = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self) -> None:
        """Raise StoreUnavailable after `drain`."""
        if self._is_closed:
            raise StoreUnavailable

    @contextmanager
    def write(self) -> Iterator[None]:
        """Enclose a write, which `drain` waits for. Raises StoreUnavailable after `drain`."""
        self.check()
        self._writes += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._idle.set()

    async def drain(self) -> None:
        """Reject new operations, and return once all writes are finished."""
        self._is_closed = True
        await self._idle.wait()


def _is_document(headers: Mapping[str, str]) -> bool:
    return Version.of(headers).is_document


def _is_key(key: str) -> bool:
    """Return True for a valid key, unless it belongs to a probe."""
    try:
        split_key(key)
    except ValueError:
        return False
    return key != PROBES and not key.startswith(PROBES + "/")


def _modified_ms(text: datetime) -> int:
    """Return the time in milliseconds. Whole seconds are rounded up, so that objects never expire too
    early."""
    modified_ms = round(text.timestamp() * 1000)
    return modified_ms if modified_ms % 1000 else modified_ms + 999
