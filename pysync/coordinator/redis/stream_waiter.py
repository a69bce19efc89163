"""Waits for new entries of a stream, on a connection of its own."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from redis.asyncio import Connection

from pysync.coordinator.redis.connection import Execute, PipelinedConnection, ReplyError
from pysync.errors import CoordinatorUnavailable

WAIT_S: Final = 1.0
"""Maximum seconds that `StreamWaiter.wait` waits."""

_silent_logger = logging.Logger("quiet", logging.CRITICAL)
"""Silent, because the other connection logs the failures of Redis."""


class StreamWaiter:
    """Waits for entries of the stream at `key`. Ids of entries increase, compared as text."""

    def __init__(self, connection: Connection, key: str) -> None:
        self._connection = PipelinedConnection(connection, _accept_any, log=_silent_logger)
        self._is_open = False
        self._key = key
        self._newest = ""
        self._news = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    def observe(self, id_: str) -> None:
        """Note that there is an entry with this id. Callers that wait for one after an earlier id return."""
        if id_ > self._newest:
            self._newest = id_
            self._news.set()

    async def wait(self, after: str, entry_id: str) -> None:
        """Return when there may be an entry after the id `after`, which is at `entry_id`: at once if this
        process knows of one, as soon as Redis reports one from another process, and after a second in any
        case."""
        if after < self._newest:
            return
        self._news.clear()
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(entry_id))
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._news.wait()

    async def close(self) -> None:
        """See `Coordinator.close`."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        await self._connection.close()

    async def _listen(self, entry_id: str) -> None:
        """Wait in Redis for an entry after `entry_id`, and wake the waiting callers."""
        block_ms = int(WAIT_S * 1000)
        try:
            if not self._is_open:
                await self._connection.open()
                self._is_open = True
            (reply,) = await self._connection.execute(
                ("XREAD", "BLOCK", block_ms, "COUNT", 1, "STREAMS", self._key, entry_id)
            )
            if not isinstance(reply, ReplyError):
                self._news.set()
        except CoordinatorUnavailable:
            pass
        finally:
            self._listening = None


async def _accept_any(ask: Execute) -> None:
    """Accept any connection, without checking the epoch on the other side."""
