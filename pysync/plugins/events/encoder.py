"""The thread that makes Parquet files of batches."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pysync.errors import Unavailable

MAX_WAITING_BYTES: Final = 33_554_432
"""Batches that may wait for the thread, in bytes of JSON: half a second's work. One batch may always."""


class Encoder:
    """Makes one file after another while the event loop goes on."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._thread = ThreadPoolExecutor(1, "event-encoder")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def open(self) -> None:
        """Import what is needed, so that no push has to wait for that."""
        await asyncio.get_running_loop().run_in_executor(self._thread, _import)

    async def encode(self, data: bytes, received_at: str, repeatable_until_ms: int | None) -> bytes:
        """`pysync.parquet.events.encode`. Raises as that does, and Unavailable where too much waits."""
        if self._waiting_bytes and self._waiting_bytes + len(data) > self._max_waiting_bytes:
            raise Unavailable
        from pysync.parquet.events import encode

        self._waiting_bytes += len(data)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, encode, data, received_at, repeatable_until_ms
            )
        finally:
            self._waiting_bytes -= len(data)

    async def close(self) -> None:
        """End the thread, after what it is at."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


def _import() -> None:
    import pysync.parquet.events  # noqa: F401
