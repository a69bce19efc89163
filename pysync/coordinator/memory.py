"""The coordinator of a single process, which ends with the process."""

import asyncio
import itertools
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final

from pysync._core import ReplayWindow
from pysync.changelog import (
    WAIT_S,
    Change,
    ChangePage,
    Cursor,
    OriginFilter,
    Retention,
    change_id,
    split_id,
)
from pysync.clock import FIRST_TIMESTAMP, HybridTimestamp, elapsed_of, is_stable, wall_clock_ms
from pysync.coordinator.protocol import (
    AHEAD_MS,
    LIVE_EPOCHS,
    MAX_LIVE_NONCES,
    PreparedWrite,
    ReplayMemoryFull,
    Standing,
    nonce_epoch,
    window_end_ms,
)
from pysync.errors import CoordinatorUnavailable
from pysync.feed import ResetReason
from pysync.model import Diagnosis

MAX_ENTRIES: Final = 1_000_000
"""Maximum number of counters, and of claims, at one time."""

SWEEP_MS: Final = 10_000
"""Milliseconds between removals of expired entries."""

_Name = tuple[str, bytes]
"""The origin of a change, and the part of its text that says of which document it is."""


class MemoryCoordinator:
    """A `Coordinator` for one process."""

    def __init__(
        self,
        now_ms: Callable[[], int] = wall_clock_ms,
        max_live_nonces: int = MAX_LIVE_NONCES,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
    ) -> None:
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._max_live_nonces = max_live_nonces
        self._seen: dict[int, ReplayWindow] = {}
        self._epoch = -1
        self._counters: dict[tuple[str, int], tuple[int, int]] = {}
        self._values: dict[str, tuple[int, bytes]] = {}
        self._sweep_at_ms = 0
        self._retention = retention
        self._changes: dict[int, tuple[int, Change]] = {}
        self._by_origin: dict[str, deque[int]] = {}
        self.has_feed = False
        """True if the latest change of each document is kept, from now on, for `latest`."""
        self._latest: dict[_Name, tuple[int, int, Change]] = {}
        self._removed: dict[_Name, tuple[int, int, Change]] = {}
        self._forgotten = 0
        self._last_number = self._trimmed = now_ms() * 1000
        self._log_epoch = os.urandom(4).hex()
        self._appended = asyncio.Event()
        self._prepared: dict[str, tuple[int, list[Change]]] = {}
        self._prepared_ids = itertools.count()
        self._tick = FIRST_TIMESTAMP

    async def consume_nonce(
        self,
        presenter: str,
        nonce: str,
        signed_ms: int,
        standing: Standing = Standing.TRUSTED,
        *,
        is_read: bool = False,
    ) -> bool:
        """See `Coordinator.consume_nonce`."""
        epoch = nonce_epoch(self._elapsed_ms())
        if epoch > self._epoch:
            self._seen = {e: seen for e, seen in self._seen.items() if e > epoch - LIVE_EPOCHS}
            self._seen.setdefault(epoch, ReplayWindow())
            self._epoch = epoch
        digest = ReplayWindow.digest(presenter, nonce)
        if any(digest in seen for seen in self._seen.values()):
            return False
        if sum(map(len, self._seen.values())) * Standing.TRUSTED >= self._max_live_nonces * standing:
            raise ReplayMemoryFull
        if (ahead_ms := signed_ms - self._now_ms()) > AHEAD_MS:
            later = nonce_epoch(self._elapsed_ms() + ahead_ms)
            self._seen.setdefault(later, ReplayWindow()).add(digest)
        return self._seen[self._epoch].add(digest)

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> int:
        """See `Coordinator.increment`."""
        now_ms = self._now_ms()
        self._sweep(now_ms)
        ends_ms = window_end_ms(now_ms, window_ms)
        known_ends_ms, count = self._counters.get((bucket, window_ms), (ends_ms, 0))
        if known_ends_ms != ends_ms:
            count = 0
        elif not count and len(self._counters) >= MAX_ENTRIES:
            raise CoordinatorUnavailable()
        self._counters[bucket, window_ms] = (ends_ms, count + by)
        return count + by

    async def put_if_absent(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        """See `Coordinator.put_if_absent`."""
        now_ms = self._now_ms()
        self._sweep(now_ms)
        expires_ms, held = self._values.get(key, (0, b""))
        if expires_ms > now_ms:
            return held
        if key not in self._values and len(self._values) >= MAX_ENTRIES:
            raise CoordinatorUnavailable()
        self._values[key] = (now_ms + ttl_ms, value)
        return value

    async def compare_and_set(self, key: str, expected: bytes, value: bytes | None) -> bool:
        """See `Coordinator.compare_and_set`."""
        expires_ms, current = self._values.get(key, (0, b""))
        if expires_ms <= self._now_ms() or current != expected:
            return False
        if value is None:
            del self._values[key]
        else:
            self._values[key] = (expires_ms, value)
        return True

    async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
        """See `Coordinator.append`."""
        now_ms = self._now_ms()
        for change in changes:
            self._last_number += 1
            self._changes[self._last_number] = now_ms, change
            self._by_origin.setdefault(change.origin, deque()).append(self._last_number)
            if self.has_feed:
                self._keep_latest(now_ms, change)
        self._prepared.pop(prepared, None)
        self._trim(now_ms)
        self._appended.set()
        return self._id(self._last_number)

    def _keep_latest(self, now_ms: int, change: Change) -> None:
        name = change.origin, change.text.rpartition(b',"hash":')[0]
        for latest in (self._latest, self._removed):
            latest.pop(name, None)
        latest = self._removed if change.removed else self._latest
        latest[name] = self._last_number, now_ms, change._replace(identity="")

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        """See `ChangeLog.read`."""
        start = self._number_of(after)
        if start is None:
            return None
        return self._entries(range(start + 1, min(start + limit, self._last_number) + 1))

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        """See `ChangeLog.read_matching`."""
        start = self._number_of(after)
        if start is None:
            return None
        found = list[int]()
        for numbers in self._numbers(written_by):
            first = bisect_right(numbers, start)
            found += itertools.islice(numbers, first, first + limit)
        found = sorted(found)[:limit]
        is_end = len(found) < limit
        last = self._last_number if is_end else found[-1]
        return ChangePage(self._entries(found), self._id(last), is_end, len(found))

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        """See `ChangeLog.count_after`."""
        start = self._number_of(after)
        if start is None:
            return 0
        return sum(len(each) - bisect_right(each, start) for each in self._numbers(written_by))

    async def newest(self, limit: int) -> list[tuple[str, Change]]:
        """See `ChangeLog.newest`."""
        newest = self._entries(itertools.islice(reversed(self._changes), limit))
        return [entry for entry in newest if not entry[1].is_erased]

    async def last_id(self) -> str:
        """See `ChangeLog.last_id`."""
        return self._id(self._last_number)

    async def erase(self, changes: Mapping[str, Change]) -> None:
        """See `ChangeLog.erase`."""
        for id_, change in changes.items():
            if (number := split_id(id_)[0]) in self._changes:
                self._changes[number] = self._changes[number][0], change

    async def begin_epoch(self) -> None:
        """See `ChangeLog.begin_epoch`."""
        self._changes.clear()
        self._by_origin.clear()
        self._last_number += 1
        self._trimmed = self._last_number
        self._log_epoch = os.urandom(4).hex()
        self._appended.set()

    async def wait_for_change(self, after: str) -> None:
        """See `ChangeLog.wait_for_change`."""
        if after < self._id(self._last_number):
            return
        self._appended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._appended.wait()

    def latest(self, since: str, limit: int) -> tuple[list[tuple[str, Change]], bool, str, str] | ResetReason:
        """Return the latest changes of documents after the cursor `since`, at most `limit`, with their
        positions; and `is_end`, `cursor` and `run` of a `FeedPage`."""
        newest = self._id(self._last_number)
        cursor = Cursor.parse(since) if since else Cursor(f"{0:017d}", newest, newest)
        (read, epoch), (start, _) = split_id(cursor.latest), split_id(cursor.position)
        if epoch != self._log_epoch or max(read, start) > self._last_number:
            return ResetReason.OTHER_EPOCH
        # A reader that began without a cursor has no use for the removals of before.
        held = max(start, split_id(cursor.first)[0])
        if held < self._forgotten:
            return ResetReason.FORGOTTEN
        found = [
            *takewhile(lambda each: each[0] > start, reversed(self._latest.values())),
            *takewhile(lambda each: each[0] > held, reversed(self._removed.values())),
        ]
        page = [(f"{number:017d}", change) for number, _, change in sorted(found)[:limit]]
        is_end, run = len(page) == len(found), f"~{cursor.first}~{newest}"
        return page, is_end, newest if is_end else page[-1][0] + run, run

    def forget_latest(self, selects: Callable[[Change], bool]) -> None:
        """Forget the latest changes that this function selects."""
        for latest in (self._latest, self._removed):
            for name in [name for name, (_, _, change) in latest.items() if selects(change)]:
                del latest[name]

    async def prepare(self, changes: Sequence[Change]) -> str:
        """See `Coordinator.prepare`."""
        return self._prepare(changes)

    async def abort(self, name: str) -> None:
        """See `Coordinator.abort`."""
        self._prepared.pop(name, None)

    async def prepared(self, limit: int) -> list[PreparedWrite]:
        """See `Coordinator.prepared`."""
        now_ms, oldest = self._now_ms(), itertools.islice(self._prepared.items(), limit)
        return [PreparedWrite(name, now_ms - at_ms, changes) for name, (at_ms, changes) in oldest]

    async def next_timestamp(self) -> HybridTimestamp:
        """See `Coordinator.next_timestamp`."""
        self._tick = self._tick.next(self._now_ms())
        return self._tick

    async def forget(
        self, buckets: Callable[[str], bool], claims: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """See `Coordinator.forget`."""
        counters = [key for key in self._counters if buckets(key[0])]
        values = [key for key, (_, value) in self._values.items() if claims(value)]
        for counter in counters:
            del self._counters[counter]
        for key in values:
            del self._values[key]
        return len(counters), len(values)

    async def purge_deleted(self) -> None:
        """See `Coordinator.purge_deleted`: there are no files."""

    async def acquire_lease(self, name: str) -> bool:
        """See `Coordinator.acquire_lease`."""
        return True

    async def probe(self) -> None:
        """See `Coordinator.probe`."""
        await self.consume_nonce("", os.urandom(8).hex(), self._now_ms(), Standing.OWNER)

    async def diagnose(self) -> Diagnosis:
        """See `Coordinator.diagnose`."""
        return Diagnosis()

    async def close(self) -> None:
        """See `Coordinator.close`."""
        self._seen.clear()
        self._counters.clear()
        self._values.clear()

    def _prepare(self, changes: Sequence[Change]) -> str:
        name = f"{next(self._prepared_ids):x}"
        self._prepared[name] = (self._now_ms(), list(changes))
        return name

    def _number_of(self, after: str) -> int | None:
        """Return the number of the position of a cursor, None if changes after it are gone. Ids have no
        gaps."""
        if not after:
            return self._trimmed
        try:
            position, _, latest = Cursor.parse(after)
        except ValueError:
            return None
        start, (newest, epoch) = split_id(position)[0], split_id(latest)
        if epoch != self._log_epoch or newest > self._last_number:
            return None
        return start if self._trimmed <= start <= self._last_number else None

    def _id(self, number: int) -> str:
        return change_id(number, self._log_epoch)

    def _entries(self, numbers: Iterable[int]) -> list[tuple[str, Change]]:
        return [(self._id(number), self._changes[number][1]) for number in numbers]

    def _numbers(self, written_by: OriginFilter) -> list[deque[int]]:
        return [numbers for origin, numbers in self._by_origin.items() if written_by(origin)]

    def _trim(self, now_ms: int) -> None:
        kept, retention = self._changes, self._retention
        stable_ms = now_ms if is_stable(self._now_ms) else 0
        youngest_ms = stable_ms - retention.age_ms
        while self._removed and (found := next(iter(self._removed.items()))):
            name, (number, at_ms, _) = found
            if at_ms >= stable_ms - retention.removals_ms:
                break
            del self._removed[name]
            self._forgotten = number
        while kept:
            oldest = self._trimmed + 1
            at_ms, change = kept[oldest]
            if len(kept) <= retention.count and at_ms >= youngest_ms:
                break
            del kept[oldest]
            self._trimmed = oldest
            numbers = self._by_origin[change.origin]
            numbers.popleft()
            if not numbers:
                del self._by_origin[change.origin]

    def _sweep(self, now_ms: int) -> None:
        if now_ms < self._sweep_at_ms:
            return
        self._sweep_at_ms = now_ms + SWEEP_MS
        self._counters = {k: held for k, held in self._counters.items() if held[0] > now_ms}
        self._values = {k: held for k, held in self._values.items() if held[0] > now_ms}
