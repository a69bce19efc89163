"""The store in a bucket."""

import asyncio
import builtins
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import ClassVar, Self

from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig, s3_place
from pysync.errors import StoreUnavailable
from pysync.store import merge_journal
from pysync.store.base import (
    ANY,
    JSON_TYPE,
    NOT_MODIFIED,
    ROTTEN,
    DamagedFile,
    Expect,
    File,
    FileStat,
    Listed,
    NotModified,
    Object,
    ObjectInfo,
    Pace,
    Received,
    get_each,
    no_pace,
    split_key,
)
from pysync.store.s3.cache import Recent
from pysync.store.s3.conditional_writes import Writes
from pysync.store.s3.credentials import Account
from pysync.store.s3.damaged_files import DamagedFiles
from pysync.store.s3.http import Call, Patience, Requests
from pysync.store.s3.listing import PROBES, Listings
from pysync.store.s3.probe import examine
from pysync.store.s3.transfers import Downloads, Uploads
from pysync.store.s3.versions import Bucket, Version
from pysync.write_ids import unmarked


class S3Store:
    """A `Store` in a bucket of S3, or of a server that speaks it. Make one with `at`. `bucket` says what the
    probe at start found."""

    change_log: ClassVar[None] = None
    reads_wait: ClassVar[bool] = True
    # To hash and send as much costs about what else there is to a request.
    light_put_bytes: ClassVar[int] = 32_768

    def __init__(
        self,
        account: Account,
        requests: Requests,
        name: str,
        bucket: Bucket,
        now_ms: Callable[[], int],
    ) -> None:
        self.bucket = bucket
        self._now_ms = now_ms
        self._account = account
        self._requests = requests
        self._recent = Recent()
        self._writes = Writes(requests, self._recent, bucket, now_ms)
        self._listings = Listings(account, name, requests.root, self._writes)
        self._uploads = Uploads(account, name, requests, self._writes, now_ms)
        self._downloads = Downloads(requests, bucket)
        self._damaged = DamagedFiles(self)
        self._under_way = UnderWay()

    @classmethod
    async def at(
        cls,
        config: StoreConfig,
        now_ms: Callable[[], int] = wall_clock_ms,
        *,
        shared: bool = False,
        patience: Patience | None = None,
    ) -> Self:
        """The store that `config` names, its bucket examined. `shared` as in `open_store`.

        Raises ValueError for a URL that says what none may, or a bucket that several processes cannot share,
        StoreUnavailable where the bucket cannot be used; both say what is to be done.
        """
        place = s3_place(config)
        async with AsyncExitStack() as opened:
            account = await Account.open(config, place)
            opened.push_async_callback(account.close)
            root = f"{place.prefix}/" if place.prefix else ""
            requests = Requests(
                account, root, config.timeout_ms, config.max_connections, patience or Patience()
            )
            opened.push_async_callback(requests.close)
            bucket = await examine(account, requests, place, shared)
            store = cls(account, requests, place.bucket, bucket, now_ms)
            await store._damaged.load()
            opened.pop_all()
        return store

    async def get(self, key: str, if_none_match: str | None = None) -> Object | NotModified | None:
        split_key(key)
        kept = self._recent.object(key)
        known = if_none_match if kept is None else kept.etag
        condition = {} if known is None else {"If-None-Match": self.bucket.condition(known)}
        with self._under_way.read():
            answer = await self._requests.send(Call("GET", key, condition, is_wanted=_is_document), 304, 404)
        if answer.status == 304:
            return NOT_MODIFIED if kept is None or kept.etag == if_none_match else kept
        version = None if answer.status == 404 else Version.of(answer.headers)
        if version is None or not version.is_document:
            self._recent.forget(key)
            return None
        body = unmarked(answer.body)
        found = Object(body, version.etag, version.content_type, version.modified_ms)
        self._recent.keep(key, found, version.ids)
        return NOT_MODIFIED if version.etag == if_none_match else found

    async def get_many(self, keys: Sequence[str]) -> builtins.list[Object | None]:
        return await get_each(self, keys)

    async def info_many(self, keys: Sequence[str]) -> builtins.list[ObjectInfo | None] | None:
        return None

    async def put(self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Expect = ANY) -> str:
        split_key(key)
        with self._under_way.write():
            return await self._writes.put(key, bytes(body), content_type, expect)

    async def open(self, key: str, start: int = 0, end: int | None = None) -> File | None:
        split_key(key)
        with self._under_way.read():
            file = await self._downloads.open(key, start, end)
            if file is not None and await self._damaged.holds(key, file):
                await file.chunks.aclose()
                raise DamagedFile(ROTTEN, file.etag)
            return file

    async def stat(self, key: str) -> FileStat | None:
        file = await self.open(key, 0, 0)
        return file and file.stat

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        split_key(key)
        with self._under_way.read():
            found = await self._downloads.digest(key, pace)
        if found is None:
            return None
        stat, sha256 = found
        is_damaged = sha256 != stat.sha256
        await self._damaged.note(key, stat, is_damaged=is_damaged)
        if is_damaged:
            raise DamagedFile(f"its sha256 is {sha256} and should be {stat.sha256}", stat.etag)
        return stat

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: Received | None = None,
    ) -> str:
        split_key(key)
        with self._under_way.write():
            return await self._uploads.write(key, chunks, content_type, received)

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        return await merge_journal.merge(self, key, chunks, content_type, merged, self._now_ms)

    async def settle_merges(self) -> None:
        await merge_journal.settle(self, self._now_ms)

    async def list(self, prefix: str, after: str | None, limit: int) -> builtins.list[str]:
        if prefix:
            split_key(prefix)
        with self._under_way.read():
            return await self._listings.names(prefix, after, limit)

    async def walk(self, prefix: str) -> AsyncIterator[Listed]:
        if prefix:
            split_key(prefix)
        with self._under_way.read():
            async for listed in self._listings.walk(prefix):
                yield listed

    async def delete(self, key: str, expect: Expect = ANY) -> None:
        split_key(key)
        with self._under_way.write():
            await self._writes.delete(key, expect)

    async def probe(self) -> None:
        with self._under_way.write():
            await self._requests.send(Call("PUT", PROBES, {"Content-Type": "text/plain"}, b"ready\n"))

    async def close(self) -> None:
        await self._under_way.end()
        await self._requests.close()
        await self._account.close()


class UnderWay:
    """Who uses the store. After `end`, nobody begins."""

    def __init__(self) -> None:
        self._writes = 0
        self._has_ended = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def read(self) -> Iterator[None]:
        """Raises StoreUnavailable after the end."""
        if self._has_ended:
            raise StoreUnavailable
        yield

    @contextmanager
    def write(self) -> Iterator[None]:
        """Likewise; the end waits for it."""
        if self._has_ended:
            raise StoreUnavailable
        self._writes += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._idle.set()

    async def end(self) -> None:
        """Return when the writes under way are done."""
        self._has_ended = True
        await self._idle.wait()


def _is_document(headers: Mapping[str, str]) -> bool:
    return Version.of(headers).is_document
