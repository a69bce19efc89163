"""The time of the running event loop, as a test lets it pass."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class LoopTime:
    """Timers of the event loop are due when `now_s` says so. It stands still unless a test moves it."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    async def pass_until(self, ending: "asyncio.Future[T]", step_s: float) -> T:
        """Let `step_s` pass with each turn of the event loop until `ending` is done. Return its result."""
        while not ending.done():
            self.now_s += step_s
            await asyncio.sleep(0)
        return await ending


@contextmanager
def loop_time() -> Iterator[LoopTime]:
    """Stop the time of the running event loop, which must be one of asyncio's own."""
    loop = asyncio.get_running_loop()
    time = LoopTime(loop.time())
    loop.time = time  # type: ignore[method-assign]
    try:
        yield time
    finally:
        del loop.time
