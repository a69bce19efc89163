"""Rate limits: fixed windows of requests per identity, per address or per both.

Each process counts in memory. It shares its counts through the coordinator, once a second for each bucket in
use, so a limit that is reached is reached everywhere a second later. One process never allows more than the
limit. Several together may allow more, by what they received within that second.

A bucket names an identity by a digest, so counts that are shared after its erasure name nobody.

See docs/reference/protocol.md#rate-limits.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import inf
from typing import Final, NamedTuple

from pysync.auth.policy import AccessPolicy
from pysync.cache import BoundedCache
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.config import Limit
from pysync.coordinator import Coordinator, window_end_ms
from pysync.errors import CoordinatorUnavailable, RateLimited

SHARE_EVERY_S: Final = 1.0
"""Seconds after which the counts of a process are shared."""


class Counter(NamedTuple):
    """A limit, and the name of the bucket in which requests are counted against it."""

    limit: Limit
    bucket: str


class RateLimiter:
    """The rate limits of one service. `now_ms` is the clock of its coordinator."""

    def __init__(self, coordinator: Coordinator, now_ms: Callable[[], int]) -> None:
        self._coordinator = coordinator
        self._now_ms = now_ms
        self._windows = BoundedCache[tuple[str, int], _Window]()
        self._unshared: set[_Window] = set()
        self._sharing: asyncio.Task[None] | None = None

    async def enforce(self, counters: Iterable[Counter]) -> None:
        """Count a request against these limits. Raises RateLimited above one of them, and
        CoordinatorUnavailable."""
        for limit, bucket in counters:
            now_ms = self._now_ms()
            window = self._window(bucket, limit.window_ms, now_ms)
            count = window.count
            if count <= limit.max_requests:
                window.unshared += 1
                window.count = count = count + 1
                if not 0 <= now_ms - window.shared_ms < SHARE_EVERY_S * 1000:
                    count = await self._share(window, now_ms)
                else:
                    self._share_later(window)
            if count > limit.max_requests:
                raise _rate_limited(limit, window.ends_ms - now_ms)

    async def close(self) -> None:
        """Share the last counts."""
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.wait({self._sharing})
        await self._share_all()

    def _window(self, bucket: str, window_ms: int, now_ms: int) -> "_Window":
        """Return the current window of a bucket."""
        key, ends_ms = (bucket, window_ms), window_end_ms(now_ms, window_ms)
        window = self._windows.get(key)
        if window is None or window.ends_ms != ends_ms:
            window = _Window(bucket, window_ms, ends_ms)
            self._windows.put(key, window)
        return window

    async def _share(self, window: "_Window", now_ms: int) -> int:
        """Add what is not shared of a window to the coordinator's count, and return that."""
        added, window.unshared = window.unshared, 0
        window.shared_ms = now_ms
        try:
            count = await self._coordinator.increment(window.bucket, window.window_ms, added)
        except CoordinatorUnavailable:
            self._windows.evict((window.bucket, window.window_ms))
            raise
        window.count = count + window.unshared
        return count

    def _share_later(self, window: "_Window") -> None:
        self._unshared.add(window)
        if self._sharing is None or self._sharing.done():
            self._sharing = asyncio.get_running_loop().create_task(self._share_soon())

    async def _share_soon(self) -> None:
        while self._unshared:
            await asyncio.sleep(SHARE_EVERY_S)
            await self._share_all()

    async def _share_all(self) -> None:
        """Share the counts of all windows, unless the coordinator cannot be reached."""
        now_ms = self._now_ms()
        unshared, self._unshared = self._unshared, set()
        current = [each for each in unshared if each.unshared and now_ms < each.ends_ms]
        with suppress(CoordinatorUnavailable):
            await gather_bounded(CONCURRENT, current, lambda each: self._share(each, now_ms))


class _Window:
    """The current window of a counter. `count` is the coordinator's, of all processes, and what this process
    counted since: `unshared`."""

    __slots__ = ("bucket", "count", "ends_ms", "shared_ms", "unshared", "window_ms")

    def __init__(self, bucket: str, window_ms: int, ends_ms: int) -> None:
        self.bucket = bucket
        self.window_ms = window_ms
        self.ends_ms = ends_ms
        self.count = self.unshared = 0
        self.shared_ms = -inf


def counters(
    policies: Iterable[AccessPolicy], identity: str, client_ip: Callable[[], str]
) -> Iterator[Counter]:
    """Yield the limits that apply to a request, each with the bucket in which it counts."""
    for policy in policies:
        for limit, prefix, kind in policy.counters:
            if kind == "identity" and identity:
                yield Counter(limit, prefix + identity_name(identity))
                continue
            ip = f"ip={client_ip()}"
            if kind == "identity+ip":
                ip = f"{identity_name(identity)},{ip}" if identity else f"{ip},{ip}"
            yield Counter(limit, prefix + ip)


def identity_name(identity: str) -> str:
    """Return the name of an identity in buckets."""
    return f"identity={hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"


def _rate_limited(limit: Limit, resets_in_ms: int) -> RateLimited:
    wait_s = max(1, -(-resets_in_ms // 1000))
    window_s = max(1, -(-limit.window_ms // 1000))
    return RateLimited(
        headers={
            "Retry-After": str(wait_s),
            "RateLimit": f'"default";r=0;t={wait_s}',
            "RateLimit-Policy": f'"default";q={limit.max_requests};w={window_s}',
        }
    )
