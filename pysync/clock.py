"""Clocks. Code that depends on time takes a clock as an argument.

`wall_clock_ms` is the time of day of the machine, which steps when it is set. Code that must not be affected
by steps uses `elapsed_of(clock)`, which measures elapsed time only, or a `SteadyClock`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

CLOCK_TOLERANCE_MS: Final = 60_000
"""How far clocks may be apart. Those of servers that are further apart give a warning, and a larger
correction of one clock counts as a step."""

STEP_GRACE_MS: Final = 600_000
"""Milliseconds after a step during which it is ignored and nothing is deleted for its age."""

MAX_COUNTER: Final = 999_999
"""Largest counter within one millisecond. With six digits, counters sort as text as numbers do."""


BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
"""The file that holds the boot id of the machine. It exists only on Linux."""


class HybridTimestamp(NamedTuple):
    """A position in an order of events: milliseconds since the epoch, and a counter within each."""

    ms: int
    counter: int

    def next(self, now_ms: int) -> "HybridTimestamp":
        """Return the first timestamp after this one and not before `now_ms`, even after a step back."""
        if now_ms > self.ms:
            return HybridTimestamp(now_ms, 0)
        if self.counter >= MAX_COUNTER:
            return HybridTimestamp(self.ms + 1, 0)
        return HybridTimestamp(self.ms, self.counter + 1)


FIRST_TIMESTAMP = HybridTimestamp(0, 0)


def wall_clock_ms() -> int:
    """Return milliseconds since the epoch. Successive values may decrease."""
    return time.time_ns() // 1_000_000


def boot_clock_ms() -> int:
    """Return milliseconds since boot, including sleep, unaffected by steps of the clock."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


# CLOCK_BOOTTIME exists only on Linux.
_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_id() -> str:
    """Return the boot id of the machine; `""` if it has none."""
    return BOOT_ID_PATH.read_text().strip() if BOOT_ID_PATH.exists() else ""


def read_saved_number(path: Path, boot: str) -> int | None:
    """Return the number that a process saved at `path` since the boot with id `boot`; None if there is none,
    or if the file is unreadable or of another boot."""
    try:
        saved_boot, number = path.read_text().split()
        return int(number) if saved_boot == boot else None
    except (OSError, ValueError):
        return None


def save_number(path: Path, boot: str, number: int) -> None:
    """Save a number at `path` for `read_saved_number`. Raises OSError."""
    temporary = path.with_name(f"{path.name}~{os.getpid()}")
    temporary.touch(0o600)
    temporary.write_text(f"{boot} {number}\n")
    temporary.replace(path)


def elapsed_of(clock: Callable[[], int]) -> Callable[[], int]:
    """Return the clock that measures the elapsed time of `clock`, unaffected by steps: its `elapsed_ms`. A
    clock without one is assumed never to step, and is returned itself."""
    if clock is wall_clock_ms:
        return boot_clock_ms
    elapsed: Callable[[], int] = getattr(clock, "elapsed_ms", clock)
    return elapsed


def is_stable(clock: Callable[[], int]) -> bool:
    """Return True if data that has expired may be deleted: not for ten minutes after a step."""
    clock()  # a clock notices a step only when it is read
    stable: bool = getattr(clock, "is_stable", True)
    return stable


class SteadyClock:
    """A clock that ignores steps of `wall_ms` of more than a minute. For ten minutes after a step it
    continues at its old time, and then adopts the step if it lasts. It logs steps. It is thread-safe."""

    def __init__(self, wall_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.wall_ms = wall_ms
        self.elapsed_ms = elapsed_of(wall_ms)
        self.is_stable = True
        """False for ten minutes after a step, as of the last call."""
        self._ahead_ms = wall_ms() - self.elapsed_ms()
        self._step_ms = 0
        self._stepped_at_ms = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return the time in milliseconds since the epoch."""
        elapsed_ms = self.elapsed_ms()
        ahead_ms = self.wall_ms() - elapsed_ms
        if self.is_stable and -CLOCK_TOLERANCE_MS <= ahead_ms - self._ahead_ms <= CLOCK_TOLERANCE_MS:
            self._ahead_ms = ahead_ms
            return elapsed_ms + ahead_ms
        with self._lock:
            self._handle_step(ahead_ms, elapsed_ms)
            return elapsed_ms + self._ahead_ms

    def _handle_step(self, ahead_ms: int, elapsed_ms: int) -> None:
        """Update the state for a step that begins, continues or ends."""
        step_ms = ahead_ms - self._ahead_ms
        if abs(step_ms - self._step_ms) > CLOCK_TOLERANCE_MS:
            log.warning(
                "the clock stepped by %+d s: ignored for %s minutes, and nothing is deleted for its age",
                round((step_ms - self._step_ms) / 1000),
                STEP_GRACE_MS // 60_000,
            )
            self._step_ms, self._stepped_at_ms, self.is_stable = step_ms, elapsed_ms, False
        elif elapsed_ms - self._stepped_at_ms >= STEP_GRACE_MS:
            self._step_ms, self._ahead_ms, self.is_stable = 0, ahead_ms, True
