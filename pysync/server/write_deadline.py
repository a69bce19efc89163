"""The time limit of writes. A disk or a bucket that hangs must not keep callers waiting for ever."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
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
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def run(self, write: Coroutine[Any, Any, T]) -> T:
        """Return the result of `write`. Raises its errors, and StoreUnavailable once the time is up.
        Cancelling this cancels the write."""
        loop = asyncio.get_running_loop()
        is_over = loop.create_future()
        timer = loop.call_later(self._timeout_s, _end, is_over)
        try:
            return await self._run(write, is_over)
        finally:
            timer.cancel()

    async def run_upload(
        self,
        chunks: AsyncIterable[bytes],
        write: Callable[[AsyncIterable[bytes]], Coroutine[Any, Any, T]],
    ) -> T:
        """Do as `run` with `write(chunks)`. The time begins when all chunks have arrived: an upload takes as
        long as its sender needs."""
        loop = asyncio.get_running_loop()
        is_over = loop.create_future()
        timer: asyncio.TimerHandle | None = None

        async def counted() -> AsyncIterator[bytes]:
            nonlocal timer
            async for chunk in chunks:
                yield chunk
            timer = loop.call_later(self._timeout_s, _end, is_over)

        try:
            return await self._run(write(counted()), is_over, cancels=self._cancels_uploads)
        finally:
            if timer is not None:
                timer.cancel()

    async def _run(
        self, write: Coroutine[Any, Any, T], is_over: asyncio.Future[None], *, cancels: bool = False
    ) -> T:
        task = asyncio.get_running_loop().create_task(write)
        task.add_done_callback(lambda task: _end(is_over))
        try:
            await is_over
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.done():
            return task.result()
        self._unfinished.add(task)
        task.add_done_callback(self._finish)
        self._on_timeout()
        if cancels:
            task.cancel()
            await asyncio.sleep(0)  # the write learns it before the client does
        raise StoreUnavailable(f"a write takes longer than {self._timeout_s:g} s")

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a write succeeded after its time was up", extra={"repeats": "late write"})


def _end(is_over: asyncio.Future[None]) -> None:
    if not is_over.done():
        is_over.set_result(None)
