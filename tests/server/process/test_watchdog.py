"""A process without a supervisor tells its operator where its event loop hangs."""

import asyncio
import logging
import threading

import pytest

from pysync.server.process import watchdog
from pysync.server.process.watchdog import LoopWatchdog


class EventStream(logging.Handler):
    """Sets `heard` once something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.signalled = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.signalled.set()


async def test_a_loop_that_hangs_is_logged_with_the_stacks_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = EventStream()

    def hang_here() -> None:
        assert handler.signalled.wait()

    watchdog.log.addHandler(handler)
    try:
        async with LoopWatchdog(stall_s=0.1):
            hang_here()
            handler.signalled.clear()
            while not handler.signalled.is_set():
                await asyncio.sleep(0)
    finally:
        watchdog.log.removeHandler(handler)
    stalled, again = [record.getMessage() for record in caplog.records][:2]
    assert stalled.startswith("the event loop has not answered for 0.1 s")
    assert "in hang_here" in stalled
    assert stalled.index("MainThread") < stalled.index("watchdog")
    assert again == "the event loop answers again"
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
