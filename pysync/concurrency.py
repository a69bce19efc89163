"""Bounded concurrency, groups of writes, background jobs, and resources that are closed in the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

from pysync._core import PanicException
from pysync.errors import PysyncError, Unavailable

T = TypeVar("T")
R = TypeVar("R")


GATHER_S: Final = 0.004
"""Seconds that a group of writes waits for others at most, about as long as a commit takes."""
QUIET_TICKS: Final = 2
"""Ticks of the event loop without another write after which a group is complete. What is read from a
connection in one tick is submitted in the next."""


class Closable(Protocol):
    """A resource, such as a store or a coordinator, that its owner closes."""

    async def close(self) -> None:
        """Release the resource."""


C = TypeVar("C", bound=Closable)


@asynccontextmanager
async def closing(opening: Awaitable[C]) -> AsyncIterator[C]:
    """Yield the resource that `opening` opens, and close it at the end of the block."""
    resource = await opening
    try:
        yield resource
    finally:
        await resource.close()


async def gather_bounded(
    limit: int, items: Collection[T], work: Callable[[T], Awaitable[R]], max_errors: int = 1
) -> list[R]:
    """Return `await work(item)` for each of `items`, in their order, with at most `limit` calls running
    concurrently.

    After `max_errors` errors no further call starts. The first error is raised once all running calls have
    ended, so that their outcomes are known. Cancellation cancels the running calls and waits for their end.
    """
    results: dict[int, R] = {}
    waiting = enumerate(items)
    errors: list[BaseException] = []

    async def work_on() -> None:
        for at, item in waiting:
            if len(errors) >= max_errors:
                return
            try:
                results[at] = await work(item)
            except BaseException as error:
                errors.append(error)
                if not isinstance(error, Exception):
                    raise

    workers = [work_on() for _ in range(min(limit, len(items)))]
    await asyncio.gather(*workers, return_exceptions=True)
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(results))]


class GroupSize:
    """Decides when a group of writes is complete, which then share a commit.

    Clients that wait for one commit send their next writes together, but these arrive in several ticks of the
    event loop. The first of them would be committed alone, and all others would wait for that. So a group
    waits while it grows and is smaller than the last ones, for `GATHER_S` at most. A write that is alone, as
    the last ones were, does not wait.
    """

    __slots__ = ("_expected", "_now", "_quiet_ticks", "_size", "_until")

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._expected = self._size = self._quiet_ticks = 0
        self._until = 0.0

    def is_complete(self, size: int) -> bool:
        """Return True if a group that has this size now need not wait. Call it in each tick until then."""
        if size < self._expected:
            if not self._size:
                self._until = self._now() + GATHER_S
            self._quiet_ticks = 0 if size > self._size else self._quiet_ticks + 1
            self._size = size
            if self._quiet_ticks < QUIET_TICKS and self._now() < self._until:
                return False
        self._expected = max(size, self._expected * 7 // 8)
        self._size = self._quiet_ticks = 0
        return True


async def every(
    seconds: float,
    work: Callable[[], Awaitable[object]],
    failed: str,
    log: logging.Logger,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Await `work()` every `seconds`, until cancelled. Errors are logged as `failed`, and do not end it."""
    while True:
        await sleep(seconds)
        try:
            await work()
        except PysyncError as error:
            log.warning("%s: %s", failed, error.detail if isinstance(error, Unavailable) else error)
        except (Exception, PanicException):
            log.exception("%s; will retry", failed)


class Job:
    """Work in the background. `run` works until it is cancelled, or ends by itself."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._run = run
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Needs a running loop."""
        self._task = asyncio.create_task(self._run())

    async def wait(self) -> None:
        """Return once the work has ended by itself."""
        assert self._task is not None, "it was started"
        await self._task

    async def close(self) -> None:
        """Cancel the work, and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
