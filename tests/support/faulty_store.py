"""A store that fails on demand."""

import asyncio
import builtins
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import ClassVar, Literal, NamedTuple, TypeVar

from pysync.clock import wall_clock_ms
from pysync.errors import StoreUnavailable
from pysync.model import Diagnosis
from pysync.protocol import JSON_TYPE
from pysync.store import (
    ANY,
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
    Store,
    StoredObject,
    get_many_concurrently,
    merge_journal,
    no_pace,
)

T = TypeVar("T")

Verb = Literal["get", "put", "stat", "open", "write", "merge", "list", "walk", "delete", "probe"]
_READS = ("get", "stat", "open", "list", "walk")
_WRITES = ("put", "write", "delete")


class _Delay(NamedTuple):
    arrived: asyncio.Event
    release: asyncio.Event
    of_reply: bool


Fault = Literal["fail", "lose_reply", "tear", "none"] | _Delay


class FaultyStore:
    """A wrapper of `store` that fails on demand. Each fault hits one call of its method, in the order in
    which the faults were requested. A merge consists of calls of other methods, as in a bucket, and each of
    those may fail.

    `calls` counts the calls of each method; `max_concurrent_reads` is the highest number of overlapping calls
    of get, stat, open, list and walk.
    """

    time_index: ClassVar[None] = None
    transactional: ClassVar[None] = None
    counting: ClassVar[None] = None
    is_remote: ClassVar[bool] = True
    cheap_put_bytes: ClassVar[int] = 4_096
    added_bytes: ClassVar[int] = 0

    def __init__(self, store: Store, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._store = store
        self._now_ms = now_ms
        self._faults: defaultdict[Verb, deque[Fault]] = defaultdict(deque)
        self._writes_left: int | None = None
        self._does_last = False
        self._reading = 0
        self.calls: Counter[Verb] = Counter()
        self.max_concurrent_reads = 0

    def fail(self, *verbs: Verb, times: int = 1, after: int = 0) -> None:
        """Raise StoreUnavailable without doing anything, after `after` successful calls. A `write` has then
        read all chunks and called `received`."""
        self._add_faults("fail", verbs, times, after)

    def lose_reply(self, *verbs: Verb, times: int = 1, after: int = 0) -> None:
        """Execute the call, but raise StoreUnavailable, after `after` successful calls."""
        self._add_faults("lose_reply", verbs, times, after)

    def reset(self) -> None:
        """Discard the faults that no call has hit yet."""
        self._faults.clear()

    def crash(self, after: int, *, done: bool) -> None:
        """Simulate a process that is killed at a write (put, write, delete), after `after` further writes.
        This write is executed if `done`, later calls are not; it and they raise StoreUnavailable."""
        self._writes_left, self._does_last = after, done

    @property
    def is_to_crash(self) -> bool:
        """True once `crash` was called."""
        return self._writes_left is not None

    @property
    def has_crashed(self) -> bool:
        """True once a write has crashed the process."""
        return self._writes_left is not None and self._writes_left < 0

    def truncate_next_get(self, times: int = 1) -> None:
        """Return only the first half of the body from the next `times` calls of `get`."""
        self._add_faults("tear", ["get"], times)

    def delay(
        self, verb: Verb, release: asyncio.Event, after: int = 0, *, of_reply: bool = False
    ) -> asyncio.Event:
        """Block a call, after `after` others, until `release` is set: before it is executed or, with
        `of_reply`, after that. Return an event of its start."""
        arrived = asyncio.Event()
        self._add_faults(_Delay(arrived, release, of_reply), [verb], after=after)
        return arrived

    def _add_faults(self, fault: Fault, verbs: Sequence[Verb], times: int = 1, after: int = 0) -> None:
        for verb in verbs:
            self._faults[verb].extend(itertools.repeat("none", after))
            self._faults[verb].extend(itertools.repeat(fault, times))

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """See `Store.get`."""
        return await self._call("get", lambda: self._store.get(key, if_none_match))

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        """See `Store.get_many`."""
        return await get_many_concurrently(self, keys, max_bytes)

    async def info_many(self, keys: Sequence[str]) -> dict[str, StoredObject | ObjectInfo | None] | None:
        """See `Store.info_many`."""
        return await self._store.info_many(keys)

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """See `Store.put`."""
        return await self._call("put", lambda: self._store.put(key, body, content_type, expect))

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """See `Store.open`."""
        return await self._call("open", lambda: self._store.open(key, start, end))

    async def stat(self, key: str) -> FileStat | None:
        """See `Store.stat`."""
        return await self._call("stat", lambda: self._store.stat(key))

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """See `Store.verify`."""
        return await self._call("open", lambda: self._store.verify(key, pace))

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
    ) -> str:
        """See `Store.write`."""

        async def reject(sha256: str) -> None:
            if received is not None:
                await received(sha256)
            raise StoreUnavailable

        return await self._call(
            "write",
            lambda: self._store.write(key, chunks, content_type, received),
            lambda: self._store.write(key, chunks, content_type, reject),
        )

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """See `Store.merge`."""
        return await self._call(
            "merge", lambda: merge_journal.merge(self, key, chunks, content_type, merged, self._now_ms)
        )

    async def pending_merges(self) -> list[MergeRecord]:
        """See `Store.pending_merges`."""
        return await merge_journal.pending_merges(self)

    async def recover_merges(self) -> None:
        """See `Store.recover_merges`."""
        await merge_journal.recover(self, self._now_ms)

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `Store.list`."""
        return await self._call("list", lambda: self._store.list(prefix, after, limit))

    async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""

        async def found() -> list[ListEntry]:
            return [listed async for listed in self._store.walk(prefix, after)]

        for listed in await self._call("walk", found):
            yield listed

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        await self._call("delete", lambda: self._store.delete(key, expect))

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool = False) -> builtins.list[Leftover]:
        """See `Store.remove_leftovers`."""
        journals = await merge_journal.remove_leftovers(self, self._now_ms, before_ms, dry_run=dry_run)
        return [*journals, *await self._store.remove_leftovers(before_ms, dry_run=dry_run)]

    async def purge_deleted(self) -> None:
        """See `Store.purge_deleted`."""
        await self._store.purge_deleted()

    async def probe(self) -> None:
        """See `Store.probe`."""
        await self._call("probe", self._store.probe)

    async def diagnose(self) -> Diagnosis:
        """See `Store.diagnose`."""
        return await self._store.diagnose()

    async def close(self) -> None:
        """See `Store.close`."""
        await self._store.close()

    async def _call(
        self,
        verb: Verb,
        call: Callable[[], Awaitable[T]],
        call_in_vain: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        self.calls[verb] += 1
        fault = self._faults[verb].popleft() if self._faults[verb] else None
        if self._writes_left is not None:
            if self._writes_left < 0:
                raise StoreUnavailable()
            if verb in _WRITES:
                if self._writes_left == 0:
                    fault = "lose_reply" if self._does_last else "fail"
                self._writes_left -= 1
        reads = verb in _READS
        self._reading += reads
        self.max_concurrent_reads = max(self.max_concurrent_reads, self._reading)
        try:
            if fault == "fail":
                if call_in_vain is not None:
                    await call_in_vain()
                raise StoreUnavailable()
            if isinstance(fault, _Delay) and not fault.of_reply:
                fault.arrived.set()
                await fault.release.wait()
            result = await call()
            if isinstance(fault, _Delay) and fault.of_reply:
                fault.arrived.set()
                await fault.release.wait()
            if fault == "lose_reply":
                raise StoreUnavailable()
            if fault == "tear" and isinstance(result, StoredObject):
                result = result._replace(body=result.body[: len(result.body) // 2])
            return result
        finally:
            self._reading -= reads
