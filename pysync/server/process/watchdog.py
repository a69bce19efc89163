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
from typing import Self

from pysync.model import Observe
from pysync.server.process.admin_pages import TURN_EVERY_S
from pysync.server.process.systemd import sd_notify
from pysync.server.process.worker import ROUNDS, STALL_S

log = logging.getLogger("pysync.server")


async def observe_delays(observe: Observe, now: Callable[[], float] = time.monotonic) -> None:
    """Observe four times a second how late the event loop is, until cancelled."""
    while True:
        due_at = now() + TURN_EVERY_S
        await asyncio.sleep(TURN_EVERY_S)
        observe("pysync_event_loop_delay_seconds", max(0.0, now() - due_at))


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
