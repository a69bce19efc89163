"""The clocks of the machine. Code that depends on time takes a clock as an argument.

`wall_clock_ms` is the machine's idea of the time. It steps when somebody sets it. Code that a step must not
affect uses `elapsed_of(clock)`, which only measures how much time has passed, or a `SteadyClock`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

STEP_THRESHOLD_MS: Final = 60_000
"""Larger corrections of a clock are steps."""

STEP_GRACE_MS: Final = 600_000
"""Time for which a step is ignored, and nothing is deleted for its age."""

MAX_COUNTER: Final = 999_999
"""Of the ticks of one millisecond. Written with six digits they have as text the order that they have."""


BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
"""The boot id of the machine. The file exists only on Linux."""


class HybridTimestamp(NamedTuple):
    """A place in an order of events: milliseconds since the epoch, and a number within the same one."""

    ms: int
    counter: int

    def next(self, now_ms: int) -> "HybridTimestamp":
        """The first tick later than this one that does not lie before `now_ms`, wherever the clock stands."""
        if now_ms > self.ms:
            return HybridTimestamp(now_ms, 0)
        return (
            HybridTimestamp(self.ms + 1, 0)
            if self.counter >= MAX_COUNTER
            else HybridTimestamp(self.ms, self.counter + 1)
        )


FIRST_TIMESTAMP = HybridTimestamp(0, 0)


def wall_clock_ms() -> int:
    """Milliseconds since the epoch. It may step back."""
    return time.time_ns() // 1_000_000


def boot_clock_ms() -> int:
    """Milliseconds since the machine was started, sleep included. No step moves it; another start does."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the former on Linux alone


def boot_id() -> str:
    """The boot id of the machine; empty if it has none."""
    return BOOT_ID_PATH.read_text().strip() if BOOT_ID_PATH.exists() else ""


def read_saved_number(path: Path, boot: str) -> int | None:
    """Return the number that a process of this start of the machine, which `boot` names, keeps at `path`.
    Return None if there is none, or something else."""
    try:
        kept_by, number = path.read_text().split()
        return int(number) if kept_by == boot else None
    except (OSError, ValueError):
        return None


def elapsed_of(clock: Callable[[], int]) -> Callable[[], int]:
    """The clock beside `clock` that no step moves: its `elapsed_ms`. One without is believed not to step."""
    if clock is wall_clock_ms:
        return boot_clock_ms
    elapsed: Callable[[], int] = getattr(clock, "elapsed_ms", clock)
    return elapsed


def is_stable(clock: Callable[[], int]) -> bool:
    """True if data that is too old by this clock may be deleted."""
    clock()  # it sees a step when it is read
    settled: bool = getattr(clock, "is_stable", True)
    return settled


class SteadyClock:
    """A clock that ignores steps of `wall_ms` of more than a minute. For ten minutes after a step it
    continues as before, and then adopts the step if it lasts. It logs steps. Any thread may call it."""

    def __init__(self, wall_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.wall_ms = wall_ms
        self.elapsed_ms = elapsed_of(wall_ms)
        self.is_stable = True
        """False within ten minutes of a step, as of the last call."""
        self._ahead_ms = wall_ms() - self.elapsed_ms()
        self._step_ms = 0
        self._stepped_at_ms = 0
        self._lock = threading.Lock()
        self._saved_ms = self._ahead_ms
        self._save: Callable[[], None] = lambda: None

    def resume(self, path: Path, boot: str) -> None:
        """Continue from the state that other processes since the same boot keep at `path`, so that a process
        that starts after a step knows of it."""

        def keep() -> None:
            self._saved_ms = self._ahead_ms
            try:
                beside = path.with_name(f"{path.name}~{os.getpid()}")
                beside.touch(0o600)
                beside.write_text(f"{boot} {self._ahead_ms}\n")
                beside.replace(path)
            except OSError as error:
                log.warning("cannot keep the time at %s: %s", path, error)

        if (ahead_ms := read_saved_number(path, boot)) is not None:
            self._ahead_ms = ahead_ms
        self()
        self._save = keep
        keep()

    def __call__(self) -> int:
        elapsed_ms = self.elapsed_ms()
        ahead_ms = self.wall_ms() - elapsed_ms
        if self.is_stable and -STEP_THRESHOLD_MS <= ahead_ms - self._ahead_ms <= STEP_THRESHOLD_MS:
            self._ahead_ms = ahead_ms
            if abs(ahead_ms - self._saved_ms) > STEP_THRESHOLD_MS // 4:
                self._saved_ms = ahead_ms
                self._save()
            return elapsed_ms + ahead_ms
        with self._lock:
            self._handle_step(ahead_ms, elapsed_ms)
            return elapsed_ms + self._ahead_ms

    def _handle_step(self, ahead_ms: int, elapsed_ms: int) -> None:
        """Take a step, or its end, into account."""
        step_ms = ahead_ms - self._ahead_ms
        if abs(step_ms - self._step_ms) > STEP_THRESHOLD_MS:
            log.warning(
                "the clock stepped by %+d s: for %s minutes time goes on as before, and nothing is deleted "
                "because of its age",
                round((step_ms - self._step_ms) / 1000),
                STEP_GRACE_MS // 60_000,
            )
            self._step_ms, self._stepped_at_ms, self.is_stable = step_ms, elapsed_ms, False
        elif elapsed_ms - self._stepped_at_ms >= STEP_GRACE_MS:
            self._step_ms, self._ahead_ms, self.is_stable = 0, ahead_ms, True
            self._save()
