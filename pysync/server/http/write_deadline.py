"""The time limit of writes. A disk or a bucket that hangs must not keep callers waiting for ever."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from pysync.errors import StoreUnavailable

log = logging.getLogger("pysync.server")

T = TypeVar("T")


class WriteDeadline:
    """Raises StoreUnavailable for a write that takes longer than `timeout_s`, and calls `on_timeout`.

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
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def run(self, write: Coroutine[Any, Any, T]) -> T:
        """Return the result of `write`. Raises its errors, and StoreUnavailable once the time is up.
        Cancelling this cancels the write."""
        waiting = _Waiting(write)
        waiting.end_in(self._timeout_s)
        return await self._result(waiting)

    async def run_upload(
        self,
        chunks: AsyncIterable[bytes],
        write: Callable[[AsyncIterable[bytes]], Coroutine[Any, Any, T]],
    ) -> T:
        """Do as `run` for `write(chunks)`. The time begins when all chunks have arrived: an upload takes as
        long as its sender needs."""

        async def timed() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
            waiting.end_in(self._timeout_s)

        waiting = _Waiting(write(timed()))
        try:
            return await self._result(waiting)
        finally:
            if self._cancels_uploads and not waiting.task.done():
                waiting.task.cancel()
                await asyncio.sleep(0)  # the write learns it before the client does

    async def _result(self, waiting: "_Waiting[T]") -> T:
        task = waiting.task
        await waiting.ended()
        if task.done():
            return task.result()
        self._unfinished.add(task)
        task.add_done_callback(self._finish)
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
