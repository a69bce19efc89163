"""When to fetch a document or log again: on a change, or else periodically."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, NamedTuple, Self, TypeVar

from pysync.client.client import Client
from pysync.client.models import ParamSet
from pysync.client.transport import Unreachable, document_key, retry_after_s
from pysync.client.watch import ChangeEvent, is_retryable
from pysync.errors import BadRequest, PysyncError, RateLimited, Unavailable

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
Fetch = Callable[[], Awaitable[tuple[T | None, bool]]]
"""Returns the result, None for nothing, and whether to fetch again at once."""

RESUBSCRIBE_S: Final = 30.0
"""Seconds before a stream that was temporarily unavailable is requested again."""


class WatchTarget(NamedTuple):
    """The document at `key`, and the filter of its stream: its collection and path parameters. Without them
    the server sends all that the caller may read, and the client filters."""

    key: str
    collection: str | None = None
    params: ParamSet | None = None

    def might_match(self, change: ChangeEvent) -> bool:
        """Return True if the change may belong to the document: a parameter value is a whole segment of a
        key."""
        return set(change.params.values()) <= set(document_key(self.key).split("/"))


class ChangeNotifier:
    """Signals when to fetch again. An async context manager that listens to the server's change stream;
    without a stream it relies on time alone. For one task.

    `is_unseen` decides whether a change is new to the caller. It is called while the caller waits; a change
    that arrives during a fetch always counts as new, because the fetch may have preceded it.
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
        """Return when it is time to fetch again: on a new change while the stream is live, else after
        `wait_s`. Raises BadRequest if the server rejects the filter."""
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
        """Listen to the change stream until cancelled. Returns if the server refuses the stream; raises
        BadRequest if the collection or parameters are invalid."""
        narrow = self._target.collection
        collections = None if narrow is None else [narrow]
        params = None if narrow is None or self._target.params is None else {narrow: self._target.params}
        try:
            while True:
                try:
                    watch = self._client.watch(
                        collections, params, on_disconnect=self._on_disconnect, on_connect=self._on_connect
                    )
                    async for event in watch:
                        if not isinstance(event, ChangeEvent) or self._matches(event):
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
        self._notify()  # earlier writes were not announced

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
    """Yield the result of each fetch that finds something, without an end. Without a stream, the wait is
    `initial_s`, doubling up to `max_s` while nothing is found. If the server is unreachable or busy,
    `on_disconnect` is called once with the error. The error of the first fetch is raised unless the caller
    `has_started` before."""
    wait_s, failed = initial_s, False
    async with ChangeNotifier(client, target, is_unseen, sleep) as notifier:
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
                await notifier.wait(wait_s)
            wait_s = min(wait_s * 2, max_s)
