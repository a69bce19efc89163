"""The time limit of writes. A disk or a bucket that hangs must not keep callers waiting for ever."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from pysync.errors import StoreUnavailable
from pysync.server.router import Match

log = logging.getLogger("pysync.server")

T = TypeVar("T")

Respond = Callable[[web.BaseRequest, Match, StoreUnavailable], None]


class WriteDeadline:
    """Answers a write that takes longer than `timeout_s` with StoreUnavailable, and calls `on_timeout`.

    The write itself goes on, because nobody can take back what a disk or a bucket was given to write. So its
    outcome is unknown to the caller, as after a lost response: a repetition with the same `Idempotency-Key`
    or the same base hash finds it.

    An upload has no base. If it went on, it could replace a file that was acknowledged after this answer. So
    it is cancelled if `cancels_uploads` is set: the store then makes it before the answer or never.
    """

    def __init__(
        self,
        timeout_s: float,
        on_timeout: Callable[[], None],
        respond: Respond,
        *,
        cancels_uploads: bool = False,
    ) -> None:
        """`respond` sends the error to a request, in its context, and closes its connection. Needs a running
        loop."""
        self._loop = asyncio.get_running_loop()  # to ask for it costs a system call
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._respond = respond
        self._cancels_uploads = cancels_uploads
        self._ends_at: dict[Callable[[], None], float] = {}
        """When the time of each write is up, and what to call then; the earliest first. One timer watches
        over all of them, because a timer for each write would cost several times as much."""
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def run(self, request: web.BaseRequest, match: Match, write: Coroutine[Any, Any, T]) -> T:
        """Return the result of `write`, which is that of `request`, or raise its errors. Once the time is up
        the request is answered; its handler goes on with the write, as if the client had disconnected.

        With a task of its own for each write the handler could end at that time, but each push would take
        7 % more instructions.
        """
        respond = partial(copy_context().run, self._respond_late, request, match)
        self._begin(respond)
        try:
            written = await write
        finally:
            is_late = self._ends_at.pop(respond, None) is None
        if is_late:
            _log_late_success()
        return written

    async def run_upload(
        self,
        chunks: AsyncIterable[bytes],
        write: Callable[[AsyncIterable[bytes]], Coroutine[Any, Any, T]],
    ) -> T:
        """Return the result of `write(chunks)`. Raises its errors, and StoreUnavailable once the time is up.
        The time begins when all chunks have arrived: an upload takes as long as its sender needs. Cancelling
        this cancels the write."""
        is_over = self._loop.create_future()
        end = partial(_end, is_over)

        async def counted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
            self._begin(end)

        task = self._loop.create_task(write(counted()))
        task.add_done_callback(end)
        try:
            await is_over
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._ends_at.pop(end, None)
        if task.done():
            return task.result()
        self._unfinished.add(task)
        task.add_done_callback(self._finish)
        self._on_timeout()
        if self._cancels_uploads:
            task.cancel()
            await asyncio.sleep(0)  # the write learns it before the client does
        raise self._error()

    def _respond_late(self, request: web.BaseRequest, match: Match) -> None:
        self._on_timeout()
        self._respond(request, match, self._error())

    def _error(self) -> StoreUnavailable:
        return StoreUnavailable(f"a write takes longer than {self._timeout_s:g} s")

    def _begin(self, end: Callable[[], None]) -> None:
        """Let the time of a write begin, at whose end `end` is called."""
        self._ends_at[end] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._end_late)

    def _end_late(self) -> None:
        """End the waiting for all writes whose time is up."""
        self._timer = None
        for end, ends_at in list(self._ends_at.items()):
            if ends_at > self._loop.time():
                self._timer = self._loop.call_at(ends_at, self._end_late)
                break
            del self._ends_at[end]
            end()

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and task.exception() is None:
            _log_late_success()


def _end(is_over: asyncio.Future[None], task: asyncio.Task[Any] | None = None) -> None:
    if not is_over.done():
        is_over.set_result(None)


def _log_late_success() -> None:
    log.info("a write succeeded after its time was up", extra={"repeats": "late write"})
