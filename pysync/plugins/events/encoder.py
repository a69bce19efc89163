"""The thread that makes Parquet files of batches."""

import asyncio
import os
import sys
import threading
from queue import SimpleQueue
from typing import Final, NamedTuple

from pysync.errors import Unavailable

MAX_WAITING_BYTES: Final = 33_554_432
"""Batches that may wait for the thread, in bytes of JSON: a second's work. One batch may, however long."""


NICENESS: Final = 5
"""Of the thread, beyond that of the process: where a core is busy the event loop goes first. Otherwise it is
kept waiting, for 20 ms at times (32 clients, one core)."""


class _Job(NamedTuple):
    future: asyncio.Future[bytes]
    data: bytes
    received_at: str
    repeatable_until_ms: int | None


class Encoder:
    """Makes one file after another while the event loop goes on."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="event-encoder", daemon=True)

    async def open(self) -> None:
        """Begin. What is needed is imported first: no push has to wait for that. Raises ImportError."""
        self._thread.start()
        await self._ready

    async def encode(self, data: bytes, received_at: str, repeatable_until_ms: int | None) -> bytes:
        """`pysync.parquet.events.encode`. Raises as that does, and Unavailable where too much waits."""
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Unavailable
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting_bytes += len(data)
        self._jobs.put(_Job(future, data, received_at, repeatable_until_ms))
        return await future

    async def close(self) -> None:
        """End, after what waits."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if sys.platform == "linux":
            os.nice(NICENESS)  # of this thread alone, there
        try:
            from pysync.parquet.events import encode
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._ready.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._ready.set_result, None)
        while (job := self._jobs.get()) is not None:
            made: bytes | BaseException
            try:
                made = b"" if job.future.cancelled() else encode(*job[1:])
            except BaseException as error:  # a panic of the core is no Exception
                made = error
            self._loop.call_soon_threadsafe(self._end, job, made)

    def _end(self, job: _Job, made: bytes | BaseException) -> None:
        self._waiting_bytes -= len(job.data)
        if job.future.done():
            return  # nobody waits for it any more
        if isinstance(made, BaseException):
            job.future.set_exception(made)
        else:
            job.future.set_result(made)
