"""The time limit of writes. A disk or a bucket that hangs must not keep callers waiting for ever."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pysync.errors import StoreUnavailable

log = logging.getLogger("pysync.server")

T = TypeVar("T")


class WriteDeadline:
    """Answers a write that takes longer than `timeout_s` with StoreUnavailable, and calls `on_timeout`.

    The write itself goes on, because nobody can take back what a disk or a bucket was given to write. So its
    outcome is unknown to the caller, as after a lost response: a repetition with the same `Idempotency-Key`
    or the same base hash finds it.

    An upload has no base. If it went on, it could replace a file that was acknowledged after this answer. So
    it is cancelled if `cancels_uploads` is set: the store then makes it before the answer or never.
    """

    def __init__(
        self, timeout_s: float, on_timeout: Callable[[], None], *, cancels_uploads: bool = False
    ) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._cancels_uploads = cancels_uploads
        self._ends_at: dict[asyncio.Future[None], float] = {}
        """When the time of each write is up, the earliest first. One timer watches over all of them,
        because a timer for each write would cost several times as much."""
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()

    def run(self, write: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return the result of `write`. Raises its errors, and StoreUnavailable once the time is up.
        Cancelling this cancels the write."""
        is_over = asyncio.get_running_loop().create_future()
        self._begin(is_over)
        return self._run(write, is_over)

    async def run_upload(
        self,
        chunks: AsyncIterable[bytes],
        write: Callable[[AsyncIterable[bytes]], Coroutine[Any, Any, T]],
    ) -> T:
        """Do as `run` with `write(chunks)`. The time begins when all chunks have arrived: an upload takes as
        long as its sender needs."""
        is_over = asyncio.get_running_loop().create_future()

        async def counted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
            self._begin(is_over)

        return await self._run(write(counted()), is_over, cancels=self._cancels_uploads)

    async def _run(
        self, write: Coroutine[Any, Any, T], is_over: asyncio.Future[None], *, cancels: bool = False
    ) -> T:
        task = asyncio.get_running_loop().create_task(write)
        task.add_done_callback(partial(_end, is_over))
        try:
            await is_over
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._ends_at.pop(is_over, None)
        if task.done():
            return task.result()
        self._unfinished.add(task)
        task.add_done_callback(self._finish)
        self._on_timeout()
        if cancels:
            task.cancel()
            await asyncio.sleep(0)  # the write learns it before the client does
        raise StoreUnavailable(f"a write takes longer than {self._timeout_s:g} s")

    def _begin(self, is_over: asyncio.Future[None]) -> None:
        """Let the time of a write begin."""
        loop = asyncio.get_running_loop()
        self._ends_at[is_over] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._end_late, loop)

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waiting for all writes whose time is up."""
        self._timer = None
        for is_over, ends_at in list(self._ends_at.items()):
            if ends_at > loop.time():
                self._timer = loop.call_at(ends_at, self._end_late, loop)
                break
            del self._ends_at[is_over]
            _end(is_over)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a write succeeded after its time was up", extra={"repeats": "late write"})


def _end(is_over: asyncio.Future[None], task: asyncio.Task[Any] | None = None) -> None:
    if not is_over.done():
        is_over.set_result(None)
