"""The coordinator of a single process: its memory ends with it."""

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Final

from pysync._core import ReplayWindow
from pysync.clock import wall_clock_ms
from pysync.coordinator import (
    CHANGES_KEPT,
    EPOCHS_KEPT,
    MAX_LIVE_NONCES,
    Window,
    nonce_epoch,
    window_end_ms,
)
from pysync.errors import CoordinatorUnavailable

MAX_ENTRIES: Final = 1_000_000
"""Counters, and claims, at one time; beyond it new ones are refused."""

SWEEP_MS: Final = 10_000
"""How often what has expired is dropped."""


class MemoryCoordinator:
    """A `Coordinator` for one process."""

    def __init__(
        self,
        now_ms: Callable[[], int] = wall_clock_ms,
        max_live_nonces: int = MAX_LIVE_NONCES,
        changes_kept: int = CHANGES_KEPT,
    ) -> None:
        self._now_ms = now_ms
        self._max_live_nonces = max_live_nonces
        self._seen: dict[int, ReplayWindow] = {}
        self._epoch = -1
        self._counters: dict[tuple[str, int], tuple[int, int]] = {}
        self._claims: dict[str, tuple[int, bytes]] = {}
        self._sweep_at_ms = 0
        self._changes: deque[tuple[str, bytes]] = deque(maxlen=changes_kept)
        # From the microsecond on: no id of an earlier process is taken for one of this.
        self._announced = now_ms() * 1000

    async def remember_nonce(self, presenter: str, nonce: str, signed_ms: int) -> bool:
        epoch = nonce_epoch(self._now_ms())
        if epoch > self._epoch:
            self._seen = {e: seen for e, seen in self._seen.items() if e > epoch - EPOCHS_KEPT}
            self._seen[epoch] = ReplayWindow()
            self._epoch = epoch
        digest = ReplayWindow.digest(presenter, nonce)
        if any(digest in seen for seen in self._seen.values()):
            return False
        if sum(map(len, self._seen.values())) >= self._max_live_nonces:
            raise CoordinatorUnavailable()
        return self._seen[self._epoch].add(digest)

    async def count(self, bucket: str, window_ms: int) -> Window:
        now_ms = self._now_ms()
        self._sweep(now_ms)
        ends_ms = window_end_ms(now_ms, window_ms)
        known_ends_ms, count = self._counters.get((bucket, window_ms), (ends_ms, 0))
        if known_ends_ms != ends_ms:
            count = 0
        elif not count and len(self._counters) >= MAX_ENTRIES:
            raise CoordinatorUnavailable()
        self._counters[bucket, window_ms] = (ends_ms, count + 1)
        return Window(count + 1, ends_ms - now_ms)

    async def claim(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        now_ms = self._now_ms()
        self._sweep(now_ms)
        expires_ms, held = self._claims.get(key, (0, b""))
        if expires_ms > now_ms:
            return held
        if key not in self._claims and len(self._claims) >= MAX_ENTRIES:
            raise CoordinatorUnavailable()
        self._claims[key] = (now_ms + ttl_ms, value)
        return value

    async def announce(self, change: bytes) -> str:
        self._announced += 1
        self._changes.append((f"{self._announced:017d}", change))
        return self._changes[-1][0]

    async def changes(self, after: str, limit: int) -> list[tuple[str, bytes]] | None:
        kept = self._changes
        if after and not (kept and kept[0][0] <= after <= kept[-1][0]):
            return None
        newer = list(takewhile(lambda found: found[0] > after, reversed(kept)))
        return newer[::-1][:limit]

    async def close(self) -> None:
        self._seen.clear()
        self._counters.clear()
        self._claims.clear()

    def _sweep(self, now_ms: int) -> None:
        if now_ms < self._sweep_at_ms:
            return
        self._sweep_at_ms = now_ms + SWEEP_MS
        self._counters = {k: held for k, held in self._counters.items() if held[0] > now_ms}
        self._claims = {k: held for k, held in self._claims.items() if held[0] > now_ms}
