"""The store in memory, for tests: the contract of `Store` within one process, and no persistence."""

import bisect
import builtins
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from pysync._core import split_key
from pysync.clock import wall_clock_ms
from pysync.model import Diagnosis
from pysync.protocol import JSON_TYPE
from pysync.store.protocol import get_many_concurrently
from pysync.store.types import (
    ANY,
    NOT_MODIFIED,
    EtagMismatch,
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
    check_mergeable,
    check_precondition,
    clamp_range,
    no_pace,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    object: StoredObject
    sha256: str | None


class MemoryStore:
    """A `Store` that loses its objects with the process. Document keys and file keys never conflict."""

    transactional: ClassVar[None] = None
    counting: ClassVar[None] = None
    is_remote: ClassVar[bool] = False
    time_index: ClassVar[None] = None
    cheap_put_bytes: ClassVar[int] = 4_096
    added_bytes: ClassVar[int] = 0

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._now_ms = now_ms
        self._stored: dict[str, _Stored] = {}
        self._names: dict[str, list[str]] = {}
        self._writes = itertools.count(1)

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """See `Store.get`."""
        split_key(key)
        stored = self._stored.get(key)
        if stored is None or stored.sha256 is not None:
            return None
        return NOT_MODIFIED if stored.object.etag == if_none_match else stored.object

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        """See `Store.get_many`."""
        return await get_many_concurrently(self, keys, max_bytes)

    async def info_many(self, keys: Sequence[str]) -> dict[str, StoredObject | ObjectInfo | None] | None:
        """See `Store.info_many`."""
        stored = {key: self._stored.get(key) for key in keys}
        return {
            key: each.object if each is not None and each.sha256 is None else None
            for key, each in stored.items()
        }

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """See `Store.put`."""
        return self._put(key, bytes(body), content_type, expect, None)

    async def stat(self, key: str) -> FileStat | None:
        """See `Store.stat`."""
        file = await self.open(key)
        return file and file.stat

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """See `Store.open`."""
        split_key(key)
        stored = self._stored.get(key)
        if stored is None or stored.sha256 is None:
            return None
        found, size = stored.object, len(stored.object.body)
        begin, finish = clamp_range(size, start, end)
        chunks = _chunks(found.body[begin:finish])
        return OpenFile(
            size, stored.sha256, found.content_type, found.modified_ms, begin, finish, chunks, etag=found.etag
        )

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """See `Store.verify`."""
        stat = await self.stat(key)
        if stat is not None:
            await pace(stat.size)
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
        body = b"".join([chunk async for chunk in chunks])
        sha256 = hashlib.sha256(body).hexdigest()
        if received is not None:
            await received(sha256)
        self._put(key, body, content_type, ANY, sha256)
        return sha256

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """See `Store.merge`."""
        check_mergeable(key, merged)

        async def check(sha256: str) -> None:
            found = [self._stored.get(other) for other in merged]
            if [stored and stored.sha256 for stored in found] != [*merged.values()] or key in self._stored:
                raise EtagMismatch

        sha256 = await self.write(key, chunks, content_type, check)
        for other in merged:
            await self.delete(other)
        return sha256

    async def pending_merges(self) -> builtins.list[MergeRecord]:
        """See `Store.pending_merges`."""
        return []

    async def recover_merges(self) -> None:
        """See `Store.recover_merges`."""
        return

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `Store.list`."""
        if prefix:
            split_key(prefix)
        names = self._names.get(prefix, [])
        start = bisect.bisect_right(names, after or "")
        return names[start : start + limit]

    async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""
        if prefix:
            split_key(prefix)
        below = prefix and prefix + "/"
        for key, stored in sorted(self._stored.items()):
            if key.startswith(below) and key > (after or ""):
                yield ListEntry(key, stored.object.etag, stored.object.modified_ms, stored.object.size)

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        parent, name = split_key(key)
        stored = self._stored.get(key)
        check_precondition(expect, stored.object.etag if stored else None)
        if stored is None:
            return
        del self._stored[key]
        names = self._names[parent]
        del names[bisect.bisect_left(names, name)]

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool = False) -> builtins.list[Leftover]:
        """See `Store.remove_leftovers`: there are none."""
        return []

    async def purge_deleted(self) -> None:
        """See `Store.purge_deleted`: there are no files."""

    async def probe(self) -> None:
        """See `Store.probe`."""
        return

    async def diagnose(self) -> Diagnosis:
        """See `Store.diagnose`."""
        return Diagnosis()

    async def close(self) -> None:
        """See `Store.close`."""
        self._stored.clear()
        self._names.clear()

    def _put(self, key: str, body: bytes, content_type: str, expect: Precondition, sha256: str | None) -> str:
        parent, name = split_key(key)
        stored = self._stored.get(key)
        check_precondition(expect, stored.object.etag if stored else None)
        etag = f"{next(self._writes):x}"
        self._stored[key] = _Stored(StoredObject(body, etag, content_type, self._now_ms()), sha256)
        if stored is None:
            bisect.insort(self._names.setdefault(parent, []), name)
        return etag


async def _chunks(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), 262_144):
        yield body[start : start + 262_144]
