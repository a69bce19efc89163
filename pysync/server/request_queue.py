"""The queue of requests that have been read and that the event loop has not begun to handle.

A tick of the event loop reads whatever is ready, and would begin all of it. Under load such a tick takes
very long, and a request that needs several ticks (for its signature, for its nonce) waits for each of them.
So each tick begins a few requests, and the others wait here: connections, with bytes that nobody has parsed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

REQUESTS_PER_TICK: Final = 32
"""Requests that one tick of the event loop begins to handle."""
OTHERS_EVERY: Final = 8
"""Of so many requests, one is of a connection that is not preferred, if one waits."""
OTHERS_WAITING: Final = 64
"""Connections that are not preferred that may wait while the server is overloaded."""
GIVE_UPS_PER_TICK: Final = 16
"""Connections of each kind that one tick gives up."""


class Waiting(Protocol):
    """A connection with a request that waits."""

    def go_on(self) -> None:
        """Begin to handle the request."""

    def give_up(self) -> None:
        """Refuse the request, which has waited too long."""


class RequestQueue:
    """The connections whose requests wait. Those that are preferred come first, and of these the oldest.
    While the server is overloaded, the newest come first, and what has waited for `max_wait_s` is given up.
    `now` is the clock, in seconds."""

    def __init__(self, max_wait_s: float, now: Callable[[], float]) -> None:
        self._max_wait_s = max_wait_s
        self._now = now
        self.is_newest_first = False
        """True while the server is overloaded: the clients of what came last are still waiting for it."""
        self.kept_bytes = 0
        """Bytes of the requests of all connections that wait."""
        self._starting = set[object]()
        self._preferred = OrderedDict[object, tuple[float, Waiting]]()
        self._others = OrderedDict[object, tuple[float, Waiting]]()
        self._begun = 0
        self._is_scheduled = False

    @property
    def is_full(self) -> bool:
        """True if the next tick has enough to begin."""
        return len(self._starting) >= REQUESTS_PER_TICK or not self.is_empty

    @property
    def is_empty(self) -> bool:
        """True if no request waits."""
        return not (self._preferred or self._others)

    def oldest(self) -> float:
        """Return when the request arrived that has waited longest; `inf` if none waits."""
        return min(next(iter(waiting.values()), (inf,))[0] for waiting in (self._preferred, self._others))

    @property
    def has_room_for_others(self) -> bool:
        """True if a connection that is not preferred may wait."""
        return not self.is_newest_first or len(self._others) < OTHERS_WAITING

    def will_start(self, connection: object) -> None:
        """Note that the next tick is about to begin a request of `connection`."""
        self._starting.add(connection)

    def has_started(self, connection: object) -> None:
        """Note that the request has begun, or will never begin."""
        self._starting.discard(connection)

    def remove(self, connection: object) -> None:
        """Forget a connection, which is closed."""
        self._starting.discard(connection)
        self._preferred.pop(connection, None)
        self._others.pop(connection, None)

    def has_unstarted(self) -> bool:
        """Return True if the tick is about to begin further requests."""
        return bool(self._starting)

    def add(self, connection: Waiting, since: float, *, is_preferred: bool) -> None:
        """Let `connection` wait for its turn. Its request arrived at the time `since`."""
        waiting = self._preferred if is_preferred else self._others
        waiting[connection] = (since, connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        self._is_scheduled = False
        try:
            if self.is_newest_first:
                self._give_up_stale()
            tries = 2 * REQUESTS_PER_TICK  # not each begins a request
            while tries and len(self._starting) < REQUESTS_PER_TICK and not self.is_empty:
                tries -= 1
                self._next().go_on()
        finally:
            if not self.is_empty:
                self._schedule()

    def _next(self) -> Waiting:
        self._begun += 1
        takes_other = not self._preferred or (self._others and self._begun % OTHERS_EVERY == 0)
        waiting = self._others if takes_other else self._preferred
        _, (_, connection) = waiting.popitem(last=self.is_newest_first)
        return connection

    def _give_up_stale(self) -> None:
        latest = self._now() - self._max_wait_s
        for waiting in (self._preferred, self._others):
            for _ in range(GIVE_UPS_PER_TICK):
                since, connection = next(iter(waiting.values()), (inf, None))
                if connection is None or since > latest:
                    break
                waiting.popitem(last=False)
                connection.give_up()
