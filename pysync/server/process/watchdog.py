"""Measures how late the event loop is, and notices one that no longer answers where no supervisor does."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

from pysync.model import Observe
from pysync.server.process.systemd import sd_notify
from pysync.server.process.worker import ROUNDS, STALL_S

TURN_EVERY_S: Final = 0.25
"""Seconds between two turns that the event loop records, and between two searches of a server for connections
that must end."""

log = logging.getLogger("pysync.server")


class LoopMonitor:
    """Measures how late the running event loop is, so that other threads find out how long it has been
    blocked. `observe` gets each measurement. `now` is a clock in seconds."""

    def __init__(self, observe: Observe, now: Callable[[], float] = time.monotonic) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self._observe = observe
        self._now = now
        self._turned_at = now()

    @property
    def blocked_s(self) -> float:
        """Seconds that the event loop is late."""
        return max(0.0, self._now() - self._turned_at - TURN_EVERY_S)

    async def run(self) -> None:
        """Measure every `TURN_EVERY_S`, until cancelled."""
        while True:
            self._turned_at = self._now()
            await asyncio.sleep(TURN_EVERY_S)
            self._observe("pysync_event_loop_delay_seconds", self.blocked_s)


class LoopWatchdog(AbstractAsyncContextManager["LoopWatchdog"]):
    """Tells systemd that the event loop runs, and logs in a thread the stacks of all threads once if it does
    not for `stall_s`. It ends nothing: systemd does, if it started the process and so can replace it.

    It counts rounds of its own rather than time, so that a machine that was suspended looks like one round.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._silent_rounds = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._reset()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._timer.cancel()
        self._thread.join()

    def _reset(self) -> None:
        if self._silent_rounds >= ROUNDS:
            log.warning("the event loop answers again")
        self._silent_rounds = 0
        sd_notify("WATCHDOG=1")
        self._timer = self._loop.call_later(self._stall_s / ROUNDS, self._reset)

    def _watch(self) -> None:
        while not self._closing.wait(self._stall_s / ROUNDS):
            self._silent_rounds += 1
            if self._silent_rounds == ROUNDS:
                log.error(
                    "the event loop has not answered for %g s: its stacks are\n%s",
                    self._stall_s,
                    _stacks(first=self._thread_id),
                )


def _stacks(first: int) -> str:
    """Return the stacks of all threads, as text that begins with the thread `first`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda found: found[0] != first)
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
