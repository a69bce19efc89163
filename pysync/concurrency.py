"""Work that runs beside other work: bounded in number or in time, in groups, in a thread or in the
background. Also resources that are closed in the end."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from pysync._core import PanicException
from pysync.errors import PysyncError, StoreUnavailable, Unavailable

log = logging.getLogger("pysync.server")

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


CONCURRENT: Final = 16
"""Calls of a store that one piece of work in the background makes concurrently."""
ATTEMPTS: Final = 8
"""Attempts at what several try at the same time, and one of them achieves each time."""
GATHER_S: Final = 0.004
"""Seconds that a group of writes waits for others at most, about as long as a commit takes."""
MAX_WAITING: Final = 4_096
"""The number of writes, appends or commands that may wait for one queue. One more is rejected."""
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""The size of their bodies in all, unless there is only one."""
QUIET_TICKS: Final = 2
"""Ticks of the event loop without another write after which a group is complete. What is read from a
connection in one tick is submitted in the next."""
PYTHON_IN_THREAD_ABOVE: Final = 64 * 1024
"""Bytes above which Python inflates, checks, redacts or folds in a thread. As many take about 1 ms."""
CORE_IN_THREAD_ABOVE: Final = 256 * 1024
"""Bytes above which the core hashes, decodes or encodes in a thread. As many take up to 1 ms."""
NICENESS: Final = 5
"""Niceness of a thread for heavy work, added to that of the process."""


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


class KeyLocks:
    """A lock for each key, as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    def __getitem__(self, key: str) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


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


OnLate = Callable[[asyncio.Task[Any]], None]


class WriteDeadline:
    """Raises StoreUnavailable for a write that takes longer than `timeout_s`, and calls `on_timeout`: a disk
    or a bucket that hangs must not keep callers waiting for ever.

    The write itself goes on, because nobody can take back what a disk or a bucket was given to write. So its
    outcome is unknown to the caller, as after a lost response: a repetition with the same `Idempotency-Key`
    or the same base hash finds it.

    An upload has no base. If it went on, it could replace a file that was acknowledged after this answer. So
    it is cancelled if `cancels_uploads` is set: the store then makes it before the answer or never.

    `on_late` is called with the task of a write that goes on.
    """

    def __init__(
        self, timeout_s: float, on_timeout: Callable[[], None], *, cancels_uploads: bool = False
    ) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._cancels_uploads = cancels_uploads
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def run(self, write: Coroutine[Any, Any, T], on_late: OnLate | None = None) -> T:
        """Return the result of `write`. Raises its errors, and StoreUnavailable once the time is up.
        Cancelling this cancels the write."""
        waiting = _Waiting(write)
        waiting.end_in(self._timeout_s)
        try:
            return await self._result(waiting, on_late)
        finally:
            del waiting  # as in `_result`

    async def run_upload(
        self,
        chunks: AsyncIterable[bytes],
        write: Callable[[AsyncIterable[bytes]], Coroutine[Any, Any, T]],
        on_late: OnLate | None = None,
    ) -> T:
        """Do as `run` for `write(chunks)`. The time begins when all chunks have arrived: an upload takes as
        long as its sender needs."""

        async def timed() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
            waiting.end_in(self._timeout_s)

        waiting = _Waiting(write(timed()))
        try:
            return await self._result(waiting, on_late)
        finally:
            if self._cancels_uploads and not waiting.task.done():
                waiting.task.cancel()
                await asyncio.sleep(0)  # the write learns it before the client does

    async def _result(self, waiting: "_Waiting[T]", on_late: OnLate | None) -> T:
        task = waiting.task
        await waiting.ended()
        if task.done():
            try:
                return task.result()
            finally:
                del task, waiting  # an error leads to this frame, and the task to the error
        self._unfinished.add(task)
        task.add_done_callback(self._finish)
        if on_late is not None:
            on_late(task)
        self._on_timeout()
        raise StoreUnavailable(f"a write takes longer than {self._timeout_s:g} s")

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a write succeeded after its time was up")


class _Waiting(Generic[T]):
    """Waiting for `write`, which runs in a task, until it ends or its time is up. It costs half of what
    `asyncio.timeout` and `asyncio.wait` do: a tenth of a push."""

    def __init__(self, write: Coroutine[Any, Any, T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_over = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self.task = self._loop.create_task(write)
        self.task.add_done_callback(self._end)

    def end_in(self, seconds: float) -> None:
        """Wait for these seconds at most."""
        self._timer = self._loop.call_later(seconds, self._end)

    async def ended(self) -> None:
        """Wait. Cancelling this cancels the write."""
        try:
            await self._is_over
        except asyncio.CancelledError:
            self.task.cancel()
            await asyncio.wait((self.task,))
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _end(self, task: asyncio.Task[T] | None = None) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)


def lower_priority() -> None:
    """Let the event loop go before this thread on a busy core. It does so on Linux, where threads differ."""
    if sys.platform == "linux":
        os.nice(NICENESS)


_thread: Final = ThreadPoolExecutor(1, "heavy-work", lower_priority)


async def run_heavy(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of `work`, which runs in a thread after the heavy work that was begun before.

    Decoding a large body takes a core for tens of milliseconds. In the default thread pool, several such
    bodies would take most of the core from the event loop; here they are decoded one after another, and the
    loop goes first.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(work, *args, **options))


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
