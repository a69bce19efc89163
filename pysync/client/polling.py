"""When to look again at a document or a log: when the change stream tells, else now and then."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, NamedTuple, Self, TypeVar

from pysync.client.client import Client, ParamSet
from pysync.client.transport import Unreachable, document_key, retry_after_s
from pysync.client.watch import Change, is_passing
from pysync.errors import BadRequest, PysyncError, RateLimited, Unavailable

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
Look = Callable[[], Awaitable[tuple[T | None, bool]]]
"""Gives what it found, None for nothing, and whether to look again at once."""

AGAIN_S: Final = 30.0
"""How long a stream that could not be had, for a reason that may pass, is not asked for again."""


class Where(NamedTuple):
    """The document at `key`, and what narrows the stream to it: its collection, and the values of its path's
    parameters. None: all that the caller may read is told, and what may be meant is picked here."""

    key: str
    collection: str | None = None
    params: ParamSet | None = None

    def may_be(self, change: Change) -> bool:
        """Whether the change may be the document's: a parameter's value is a whole segment of a key."""
        return set(change.params.values()) <= set(document_key(self.key).split("/"))


class Lookout:
    """Tells when to look again. An async context manager, inside which it listens to the server's change
    stream; where there is none, or it is refused, the time tells. For one task.

    `is_news` says whether a change is of something that the caller has not got yet. It is asked while the
    caller waits; what is told while the caller looks is always taken for news, for the look may have come
    before it.
    """

    def __init__(self, client: Client, where: Where, is_news: Callable[[Change], bool], sleep: Sleep) -> None:
        self._client = client
        self._where = where
        self._is_news = is_news
        self._sleep = sleep
        self._is_live = False
        self._is_waiting = False
        self._has_news = False
        self._rung: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._listening = asyncio.ensure_future(self._listen())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def wait(self, wait_s: float) -> None:
        """Return when it is time to look again: while the stream is live, when it tells something new; else
        after `wait_s` at the latest. Raises BadRequest where the server does not know what narrows it."""
        sleeping: asyncio.Future[None] | None = None
        self._is_waiting = True
        try:
            while not self._has_news:
                if self._listening.done():
                    self._listening.result()
                self._rung = asyncio.get_running_loop().create_future()
                if self._is_live:
                    await self._rung
                    continue
                sleeping = sleeping or asyncio.ensure_future(self._sleep(wait_s))
                await asyncio.wait((sleeping, self._rung), return_when=asyncio.FIRST_COMPLETED)
                if sleeping.done():
                    return sleeping.result()
        finally:
            if sleeping is not None:
                sleeping.cancel()
            self._is_waiting = self._has_news = False

    async def _listen(self) -> None:
        """Hear the stream, for good; end where it is refused. Raises BadRequest: what narrows it is wrong."""
        narrow = self._where.collection
        collections = None if narrow is None else [narrow]
        params = None if narrow is None or self._where.params is None else {narrow: self._where.params}
        try:
            while True:
                try:
                    watch = self._client.watch(collections, params, lost=self._lost, live=self._live)
                    async for told in watch:
                        if not isinstance(told, Change) or self._concerns(told):
                            self._ring()
                except (PysyncError, Unreachable) as error:
                    if isinstance(error, BadRequest) and narrow is not None:
                        raise
                    if not is_passing(error):
                        return
                    self._lost(error)
                    await self._sleep(AGAIN_S)
        finally:
            self._lost(None)

    def _concerns(self, change: Change) -> bool:
        return self._where.may_be(change) and (not self._is_waiting or self._is_news(change))

    def _live(self) -> None:
        self._is_live = True
        self._ring()  # nobody has told of what was written before

    def _lost(self, error: Exception | None) -> None:
        self._is_live = False
        self._wake()

    def _ring(self) -> None:
        self._has_news = True
        self._wake()

    def _wake(self) -> None:
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)


async def follow(
    client: Client,
    where: Where,
    look: Look[T],
    is_news: Callable[[Change], bool],
    *,
    began: bool,
    first_s: float,
    most_s: float,
    lost: Callable[[Exception], None],
    sleep: Sleep,
) -> AsyncGenerator[T]:
    """What each look finds, without end. Where no stream tells when to look, the wait is `first_s`, doubling
    up to `most_s` while nothing is found. When the server is out of reach or busy, `lost` is told once of
    what failed; unless the caller `began` before, that of the first look is raised."""
    wait_s, failed = first_s, False
    async with Lookout(client, where, is_news, sleep) as lookout:
        while True:
            try:
                found, again = await look()
            except (Unreachable, RateLimited, Unavailable) as error:
                if not began:
                    raise
                if not failed:
                    lost(error)
                failed = True
                await sleep(max(wait_s, retry_after_s(error)))
            else:
                began, failed = True, False
                if found is not None:
                    yield found
                if again or found is not None:
                    wait_s = first_s
                if again:
                    continue
                await lookout.wait(wait_s)
            wait_s = min(wait_s * 2, most_s)
