"""Waits for what comes new into a stream of Redis, on a connection of its own, opened when somebody waits."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from redis.asyncio import Connection

from pysync.coordinator.redis_link import Ask, Link, ReplyError
from pysync.errors import CoordinatorUnavailable

WAIT_S: Final = 1.0
"""How long `Arrivals.wait` waits at most."""

_quiet = logging.Logger("quiet", logging.CRITICAL)
"""The other connection tells what befalls Redis."""


class Arrivals:
    """The arrivals in the stream at `key`. Places are those of its entries; who gives them as text, with
    whatever comes before the place, sees to it that it grows."""

    def __init__(self, connection: Connection, key: str) -> None:
        self._link = Link(connection, _accept, log=_quiet)
        self._is_open = False
        self._key = key
        self._newest = ""
        self._news = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    def know(self, id_: str) -> None:
        """There is an entry with this id: who waits for one after an earlier id returns."""
        if id_ > self._newest:
            self._newest = id_
            self._news.set()

    async def wait(self, after: str, place: str) -> None:
        """Return when there may be an entry after the one with the id `after`, which is at `place`: at once
        where this process knows one, as soon as Redis tells where another has added it, and after a second in
        any case."""
        if after < self._newest:
            return
        self._news.clear()
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(place))
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._news.wait()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        await self._link.close()

    async def _listen(self, place: str) -> None:
        """Have Redis tell when there is something after `place`; who waits meanwhile asks again then, and
        when nothing has come for long enough. Without Redis they wait in vain for their second."""
        block_ms = int(WAIT_S * 1000)
        try:
            if not self._is_open:
                await self._link.open()
                self._is_open = True
            (told,) = await self._link.ask(
                ("XREAD", "BLOCK", block_ms, "COUNT", 1, "STREAMS", self._key, place)
            )
            if not isinstance(told, ReplyError):
                self._news.set()
        except CoordinatorUnavailable:
            pass
        finally:
            self._listening = None


async def _accept(ask: Ask) -> None:
    """Take any connection: what is remembered on the other side is not asked here."""
