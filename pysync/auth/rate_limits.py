"""Rate limits: fixed windows of requests per identity, per address or per both.

The coordinator counts, so that a limit applies across processes. To ask it for each request would cost more
than most requests do, so a process that serves many requests of one bucket counts several ahead (`reserves`
them), and gives back within five seconds those that it did not need. All processes together never allow more
requests than the limit. Once the coordinator has said that a limit is reached, requests are refused until the
window ends without asking again.

See docs/reference/protocol.md#rate-limits.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from pysync.auth.policy import AccessPolicy
from pysync.config import Limit
from pysync.coordinator import Coordinator, Window
from pysync.errors import CoordinatorUnavailable, RateLimited

MAX_COUNTERS: Final = 20_000
"""Counters that are remembered, each in about 500 bytes. The coordinator is asked about all others."""
MAX_RESERVED: Final = 256
"""Requests that are reserved at one time."""
RESERVED_SHARE: Final = 8
"""At most one request of this many that are left is reserved."""
RESERVED_S: Final = 5.0
"""Seconds after which reserved requests are given back."""


class Counter(NamedTuple):
    """A limit, and the name of the bucket in which requests are counted against it."""

    limit: Limit
    bucket: str


class RateLimiter:
    """The rate limits of one service. `now_ms` is the clock of its coordinator."""

    def __init__(self, coordinator: Coordinator, now_ms: Callable[[], int]) -> None:
        self._coordinator = coordinator
        self._now_ms = now_ms
        self._known: dict[tuple[str, int], _KnownWindow] = {}
        self._releasing = set[asyncio.Task[None]]()

    def check(self, counters: Iterable[Counter]) -> None:
        """Raise RateLimited if one of these limits is known to be reached. Counts nothing and asks nobody."""
        now_ms = self._now_ms()
        for limit, bucket in counters:
            known = self._known.get((bucket, limit.window_ms))
            if known is not None and known.is_over(limit, now_ms):
                raise _rate_limited(limit, known.until_ms - now_ms)

    async def enforce(self, counters: Iterable[Counter]) -> None:
        """Count a request against these limits. Raises RateLimited and CoordinatorUnavailable."""
        for counter in counters:
            if not self.counts_reserved(counter):
                await self.count(counter)

    def counts_reserved(self, counter: Counter) -> bool:
        """Count one request and return True, if one is reserved."""
        known = self._known.get((counter.bucket, counter.limit.window_ms))
        if known is None or not known.reserved or not known.is_current(self._now_ms()):
            return False
        known.reserved -= 1
        known.used += 1
        return True

    async def count(self, counter: Counter) -> None:
        """Count one request. Raises RateLimited above the limit, and CoordinatorUnavailable."""
        if self.counts_reserved(counter):
            return
        limit, bucket = counter
        key = bucket, limit.window_ms
        asked_ms = self._now_ms()
        known = self._known.get(key)
        if known is not None and known.is_current(asked_ms):
            if known.count > limit.max_requests:
                raise _rate_limited(limit, known.until_ms - asked_ms)
            ahead = known.ahead(limit, asked_ms)
        else:
            known, ahead = None, 0
        try:
            window = await self._coordinator.increment(bucket, limit.window_ms, 1 + ahead)
        except CoordinatorUnavailable:
            self._known.pop(key, None)
            raise
        granted = limit.max_requests - (window.count - 1 - ahead)
        self._note(key, known, window, asked_ms, min(granted, 1 + ahead) - 1)
        if granted <= 0:
            raise _rate_limited(limit, window.resets_in_ms)

    async def close(self) -> None:
        """Give back what is reserved."""
        for key, known in self._known.items():
            if known.timer is not None:
                known.timer.cancel()
            self._release(key, known)
        self._known.clear()
        while self._releasing:
            await asyncio.wait(self._releasing)

    def _note(
        self,
        key: tuple[str, int],
        known: "_KnownWindow | None",
        window: Window,
        asked_ms: int,
        reserved: int,
    ) -> None:
        """Note what the coordinator answered, with the number of requests that this reserved."""
        if known is None or known.ends_ms != window.ends_ms:
            known = self._known.pop(key, None)
            if known is None or known.ends_ms != window.ends_ms:
                known = _KnownWindow(asked_ms, window)
            self._known[key] = known
            if len(self._known) > MAX_COUNTERS:
                oldest = next(iter(self._known))
                self._release(oldest, self._known.pop(oldest))
        known.count = max(known.count, window.count)
        known.asked_ms, known.used, known.is_asking = asked_ms, 1, False
        if reserved > 0:
            known.reserved += reserved
            if known.timer is None:
                known.timer = asyncio.get_running_loop().call_later(RESERVED_S, self._on_time, key, known)

    def _on_time(self, key: tuple[str, int], known: "_KnownWindow") -> None:
        known.timer = None
        self._release(key, known)

    def _release(self, key: tuple[str, int], known: "_KnownWindow") -> None:
        """Give back what is reserved of a window."""
        if known.reserved and self._now_ms() < known.until_ms:
            task = asyncio.get_running_loop().create_task(
                self._give_back(*key, known.ends_ms, known.reserved)
            )
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)
            known.count -= known.reserved
        known.reserved = 0

    async def _give_back(self, bucket: str, window_ms: int, ends_ms: int, count: int) -> None:
        # Without an answer they stay counted, and the limit is reached a little early.
        with suppress(CoordinatorUnavailable):
            await self._coordinator.decrement(bucket, window_ms, ends_ms, count)


class _KnownWindow:
    """The window of a counter, as the coordinator described it. `count` includes the requests of all
    processes and those that they reserved; `reserved` are those of this process. `used` is the number of
    requests since the coordinator was asked last, at `asked_ms`."""

    __slots__ = ("asked_ms", "count", "ends_ms", "is_asking", "reserved", "timer", "until_ms", "used")

    def __init__(self, asked_ms: int, window: Window) -> None:
        self.asked_ms = asked_ms
        self.ends_ms = window.ends_ms
        self.until_ms = asked_ms + window.resets_in_ms
        self.count = self.reserved = self.used = 0
        self.is_asking = False
        self.timer: asyncio.TimerHandle | None = None

    def is_current(self, now_ms: int) -> bool:
        """Return True if the window has not ended. A clock that was set back leaves it, too."""
        return self.asked_ms <= now_ms < self.until_ms

    def is_over(self, limit: Limit, now_ms: int) -> bool:
        """Return True if the limit is reached, and nothing is reserved."""
        return self.count > limit.max_requests and not self.reserved and self.is_current(now_ms)

    def ahead(self, limit: Limit, now_ms: int) -> int:
        """Return the number of requests to reserve: those that will come within `RESERVED_S` at the present
        rate, unless they are many of those that are left. Of requests at one time only one reserves."""
        if self.is_asking:
            return 0
        self.is_asking = True
        expected = int(self.used * RESERVED_S * 1000) // max(1, now_ms - self.asked_ms)
        left = (limit.max_requests - self.count) // RESERVED_SHARE
        return max(0, min(expected - 1, left, self.count // 2, MAX_RESERVED))


def counters(
    policies: Iterable[AccessPolicy], identity: str, client_ip: Callable[[], str]
) -> Iterator[Counter]:
    """Yield the limits that apply to a request, each with the bucket in which it counts."""
    for policy in policies:
        for limit, prefix, kind in policy.counters:
            if kind == "identity" and identity:
                yield Counter(limit, f"{prefix}identity={identity}")
                continue
            ip = f"ip={client_ip()}"
            if kind == "identity+ip":
                ip = f"identity={identity},{ip}" if identity else f"{ip},{ip}"
            yield Counter(limit, prefix + ip)


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
