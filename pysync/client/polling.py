"""When to look again at a document or a log: when the change stream tells, else now and then."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, NamedTuple, Self, TypeVar

from pysync.client.client import Client, ParamSet
from pysync.client.transport import Unreachable, document_key, retry_after_s
from pysync.client.watch import ChangeEvent, is_retryable
from pysync.errors import BadRequest, PysyncError, RateLimited, Unavailable

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
Fetch = Callable[[], Awaitable[tuple[T | None, bool]]]
"""Gives what it found, None for nothing, and whether to look again at once."""

RESUBSCRIBE_S: Final = 30.0
"""How long a stream that could not be had, for a reason that may pass, is not asked for again."""


class WatchTarget(NamedTuple):
    """The document at `key`, and what narrows the stream to it: its collection, and the values of its path's
    parameters. None: all that the caller may read is told, and what may be meant is picked here."""

    key: str
    collection: str | None = None
    params: ParamSet | None = None

    def might_match(self, change: ChangeEvent) -> bool:
        """Whether the change may be the document's: a parameter's value is a whole segment of a key."""
        return set(change.params.values()) <= set(document_key(self.key).split("/"))


class ChangeNotifier:
    """Tells when to look again. An async context manager, inside which it listens to the server's change
    stream; where there is none, or it is refused, the time tells. For one task.

    `is_unseen` says whether a change is of something that the caller has not got yet. It is asked while the
    caller waits; what is told while the caller looks is always taken for news, for the look may have come
    before it.
    """

    def __init__(
        self, client: Client, target: WatchTarget, is_unseen: Callable[[ChangeEvent], bool], sleep: Sleep
    ) -> None:
        self._client = client
        self._target = target
        self._is_unseen = is_unseen
        self._sleep = sleep
        self._is_live = False
        self._is_waiting = False
        self._is_notified = False
        self._signal: asyncio.Future[None] | None = None

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
            while not self._is_notified:
                if self._listening.done():
                    self._listening.result()
                self._signal = asyncio.get_running_loop().create_future()
                if self._is_live:
                    await self._signal
                    continue
                sleeping = sleeping or asyncio.ensure_future(self._sleep(wait_s))
                await asyncio.wait((sleeping, self._signal), return_when=asyncio.FIRST_COMPLETED)
                if sleeping.done():
                    return sleeping.result()
        finally:
            if sleeping is not None:
                sleeping.cancel()
            self._is_waiting = self._is_notified = False

    async def _listen(self) -> None:
        """Hear the stream, for good; end where it is refused. Raises BadRequest: what narrows it is wrong."""
        narrow = self._target.collection
        collections = None if narrow is None else [narrow]
        params = None if narrow is None or self._target.params is None else {narrow: self._target.params}
        try:
            while True:
                try:
                    watch = self._client.watch(
                        collections, params, on_disconnect=self._on_disconnect, on_connect=self._on_connect
                    )
                    async for told in watch:
                        if not isinstance(told, ChangeEvent) or self._matches(told):
                            self._notify()
                except (PysyncError, Unreachable) as error:
                    if isinstance(error, BadRequest) and narrow is not None:
                        raise
                    if not is_retryable(error):
                        return
                    self._on_disconnect(error)
                    await self._sleep(RESUBSCRIBE_S)
        finally:
            self._on_disconnect(None)

    def _matches(self, change: ChangeEvent) -> bool:
        return self._target.might_match(change) and (not self._is_waiting or self._is_unseen(change))

    def _on_connect(self) -> None:
        self._is_live = True
        self._notify()  # nobody has told of what was written before

    def _on_disconnect(self, error: Exception | None) -> None:
        self._is_live = False
        self._wake()

    def _notify(self) -> None:
        self._is_notified = True
        self._wake()

    def _wake(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)


async def follow(
    client: Client,
    target: WatchTarget,
    fetch: Fetch[T],
    is_unseen: Callable[[ChangeEvent], bool],
    *,
    has_started: bool,
    initial_s: float,
    max_s: float,
    on_disconnect: Callable[[Exception], None],
    sleep: Sleep,
) -> AsyncGenerator[T]:
    """What each look finds, without end. Where no stream tells when to look, the wait is `initial_s`,
    doubling up to `max_s` while nothing is found. When the server is out of reach or busy, `on_disconnect` is
    told once of what failed; unless the caller `has_started` before, that of the first look is raised."""
    wait_s, failed = initial_s, False
    async with ChangeNotifier(client, target, is_unseen, sleep) as lookout:
        while True:
            try:
                found, again = await fetch()
            except (Unreachable, RateLimited, Unavailable) as error:
                if not has_started:
                    raise
                if not failed:
                    on_disconnect(error)
                failed = True
                await sleep(max(wait_s, retry_after_s(error)))
            else:
                has_started, failed = True, False
                if found is not None:
                    yield found
                if again or found is not None:
                    wait_s = initial_s
                if again:
                    continue
                await lookout.wait(wait_s)
            wait_s = min(wait_s * 2, max_s)
