"""Overload: what the server leaves undone when requests arrive faster than it can answer them.

A request that has waited longer than `server.maxQueueMs` is refused (503 `overloaded`), because its client
may have given up. To refuse everything that is too much would take more time than the processor has, so the
server also stops reading from some connections, and their requests wait in the kernel. It goes on reading
from connections that it has served before, and from addresses that use no more than their share; of the
others it prefers the newest. So what is answered is answered soon.

The wait of a request is measured from the arrival of its bytes in the kernel.
"""

import asyncio
import logging
import resource
import sys
from collections.abc import Callable, Iterable
from itertools import islice, repeat
from math import inf
from time import perf_counter, thread_time
from typing import Final, NamedTuple, Protocol

from pysync.auth.admission import network_of
from pysync.server.metrics import Counters

TICK_S: Final = 0.05
TARGET: Final = 0.4
"""The mean wait that an overloaded server aims at, as a share of the longest."""
OVERLOADED_AFTER_S: Final = 0.1
"""How long all waits must have been longer than that before requests are refused for it."""
RESERVED_DESCRIPTORS: Final = 256
FEW_CONNECTIONS: Final = 16
"""Connections that every address may have while there is room."""
MANY_REQUESTS: Final = 16
"""Requests between two ticks that must have waited long before the server is overloaded. A busy machine lets
a few wait long, and refusing them would help nobody."""
CALM_TICKS: Final = 10
"""Ticks with short waits, and no connection paused, after which an overload is over."""
ACTIVE_TICKS: Final = 5
"""Ticks for which a connection counts as active after it sent something."""
FAIR_USE: Final = 1.5
"""Multiple of the mean use of all addresses above which an address uses more than its share."""
REQUEST_S: Final = 0.0004
"""Assumed cost of a request. As many connections are read again as could have been served in idle time."""
USE_KEPT_PER_TICK: Final = 0.9
NEWEST_PER_TICK: Final = 40
OLDEST_PER_TICK: Final = 10
"""Unread connections that are read in each tick: the newest, of which one may be a health probe, and those
that have waited longest, to refuse what they ask."""

log = logging.getLogger("pysync.server")


def connection_limit(wanted: int) -> int:
    """Return how many connections this process may open, if `wanted` is the most. Of the descriptors that the
    system allows, the store and all others that open files keep some."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, max(allowed - RESERVED_DESCRIPTORS, allowed // 2))


class Address:
    """The use that one client address made of the server lately. `use` is a decaying number of requests, and
    `connections` is the number of open connections."""

    __slots__ = ("connections", "use")

    def __init__(self) -> None:
        self.connections = 0
        self.use = 0.0


class Arrival(NamedTuple):
    """When a request arrived in the kernel, and when the server read it. `is_admitted` is the decision of
    `LoadShedder.admits`, if it was asked."""

    at: float
    read_at: float
    is_admitted: bool = False


class Readable(Protocol):
    """A connection, as seen from here. `was_served` is True if a request was answered and not refused."""

    address: Address | None
    was_served: bool

    def stop_reading(self) -> bool:
        """Stop reading. Return False if the rest of a request is still to come, so that reading goes on."""

    def read_on(self, since: float) -> None:
        """Read again. Reading stopped at the time `since`."""

    def kernel_wait_s(self) -> float | None:
        """Return how long ago the kernel received the last bytes, 0.0 if that is unknown; None if the client
        has closed the connection."""

    def abort(self) -> None:
        """End the connection."""


class LoadShedder:
    """Watches how long requests wait, and refuses or defers some while they wait too long. `max_wait_s` is
    the longest wait, `max_connections` the number of connections. `shares_connections` is True behind a
    proxy: then only requests are refused, because a connection carries those of many clients. `now` and `cpu`
    are the clocks of the wall and of the loop's thread, in seconds."""

    def __init__(
        self,
        max_wait_s: float,
        max_connections: int = sys.maxsize,
        *,
        shares_connections: bool = False,
        counters: Counters | None = None,
        now: Callable[[], float] = perf_counter,
        cpu: Callable[[], float] = thread_time,
    ) -> None:
        self.max_connections: Final = max_connections
        self._shares_connections = shares_connections
        self.connections = 0
        """Number of open connections."""
        self._counters = counters or Counters()
        self.max_wait_s: Final = max_wait_s
        self.is_overloaded = False
        self._now = now
        self._cpu = cpu
        self._ticked_at, self._cpu_s = now(), cpu()
        self._target_s = max_wait_s * TARGET
        self._waits_s = 0.0
        self._begun = 0
        self._long_since = inf
        self._long_ticks = 0
        self._calm_ticks = 0
        self._is_late = False
        self._settled_at = 0.0
        self._admitted_share = 1.0
        self._credit = 0.0
        self._fair_use = inf
        self._active: dict[Readable, int] = {}
        self._tick = 0
        self._paused: dict[Readable, float] = {}
        self._unread: dict[Readable, float] = {}
        self._new: dict[Readable, None] = {}
        self._unstarted = set[Readable]()
        self._addresses: dict[str, Address] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._is_closed = False

    @property
    def paused(self) -> int:
        """Number of connections that are not being read."""
        return len(self._paused)

    def start(self) -> None:
        """Begin to watch the running event loop."""
        self._schedule(asyncio.get_running_loop())

    def close(self) -> None:
        """Stop watching, and read from all connections. From now on no request is refused."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_closed = True
        self.is_overloaded = False
        for connection in list(self._paused):
            self.resume(connection)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_at = self._now() + TICK_S
        self._timer = loop.call_later(TICK_S, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = self._now() - self._due_at
        self._schedule(loop)
        self.tick(late_s)

    def opened(self, ip: str) -> Address | None:
        """Count a new connection from `ip`, and return the address for which it counts. Return None if there
        are too many, in all or from its address: one address may have as many as are free for all others. The
        oldest connection that was never read gives way."""
        if self.connections >= self.max_connections and self._new:
            next(iter(self._new)).abort()
            self._counters.count("pysync_rejected_connections")
        address = self.address(ip)
        free = self.max_connections - self.connections
        has_its_share = address.connections >= max(FEW_CONNECTIONS, free)
        if free <= 0 or (has_its_share and not self._shares_connections):
            self._counters.count("pysync_rejected_connections")
            return None
        address.connections += 1
        self.connections += 1
        return address

    @property
    def defers_new(self) -> bool:
        """True if there is no room for what a new connection may ask."""
        has_room = not self.is_overloaded or (self._admitted_share == 1.0 and not self._paused)
        return not (has_room or self._shares_connections)

    def defer(self, connection: Readable) -> None:
        """Do not read from a new connection yet."""
        self.pause(connection)
        self._new[connection] = None

    def closed(self, connection: Readable) -> None:
        """Forget a connection that was opened."""
        for noted in (self._paused, self._unread, self._active, self._new):
            noted.pop(connection, None)
        self._unstarted.discard(connection)
        if connection.address is not None:
            self.uncount(connection.address)
            connection.address = None

    def uncount(self, address: Address) -> None:
        """Count a connection less that was opened for `address`."""
        address.connections -= 1
        self.connections -= 1

    def address(self, ip: str) -> Address:
        """Return the use of an address: of an IPv4 address or of the /64 network of an IPv6 address."""
        network = network_of(ip)
        return self._addresses.get(network) or self._addresses.setdefault(network, Address())

    def will_start(self, connection: Readable) -> None:
        """Note that the event loop is about to handle a request of `connection`."""
        self._unstarted.add(connection)

    def has_unstarted(self) -> bool:
        """Return True if the event loop is about to handle further requests."""
        return bool(self._unstarted)

    def arrivals(self, connection: Readable, count: int) -> Iterable[Arrival]:
        """Return the arrivals of `count` requests that `connection` has just read."""
        now = self._now()
        if not (self.is_overloaded or self._is_late):
            return repeat(Arrival(now, now), count)
        self._active[connection] = self._tick
        last = now - (connection.kernel_wait_s() or 0.0)
        first = min(self._unread.pop(connection, last), last)
        if count == 1:
            return (Arrival(last, now),)
        return (Arrival(last - (last - first) * n / count, now) for n in range(count, 0, -1))

    def admits(self, connection: Readable, address: Address, arrival: Arrival) -> bool:
        """Return True if an overloaded server has room for a request from `address` that has just been
        read."""
        address.use += 1.0
        if self._now() - arrival.at <= self.max_wait_s and self._has_room(connection, address):
            return True
        self._counters.count("pysync_overload_refusals")
        return False

    def refuses(self, connection: Readable, address: Address, arrival: Arrival) -> bool:
        """Return True if a request from `address`, whose turn has come, has to be refused. Called once for
        each request."""
        self._unstarted.discard(connection)
        now = self._now()
        wait_s = now - arrival.read_at
        if not arrival.is_admitted:
            address.use += 1.0
        if wait_s <= self._target_s:
            self._long_since = inf
        elif self._long_since == inf:
            self._long_since = now
        elif self._begun >= MANY_REQUESTS and now - self._long_since > OVERLOADED_AFTER_S:
            self._begin()
        if self.is_overloaded and (
            now - arrival.at > self.max_wait_s
            or not (arrival.is_admitted or self._has_room(connection, address))
        ):
            self._counters.count("pysync_overload_refusals")
            return True
        self._begun += 1
        self._waits_s += wait_s
        connection.was_served = True
        return False

    def _has_room(self, connection: Readable, address: Address) -> bool:
        is_known = connection.was_served or self._shares_connections
        return (is_known and address.use <= self._fair_use) or self._admits_other()

    def _is_preferred(self, connection: Readable) -> bool:
        address = connection.address
        return connection.was_served and address is not None and address.use <= self._fair_use

    def _admits_other(self) -> bool:
        """Return True for as many requests as there is room for, of connections that were not served before
        and of addresses that use more than their share."""
        self._credit += self._admitted_share
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def tick(self, late_s: float) -> None:
        """Adapt to the waits since the last tick, which comes `late_s` after it was due."""
        now = self._now()
        begun = self._begun
        wait_s = self._waits_s / begun if begun else 0.0
        if not begun:
            self._long_since = inf
        self._waits_s, self._begun = 0.0, 0
        idle_s = now - self._ticked_at - (self._cpu() - self._cpu_s)
        self._ticked_at, self._cpu_s = now, self._cpu()
        self._tick += 1
        self._is_late = late_s > TICK_S / 4
        self._share_out()
        is_long = wait_s > self._target_s
        self._long_ticks = self._long_ticks + 1 if is_long else 0
        if is_long and begun >= MANY_REQUESTS and self._long_ticks > 1:
            self._begin()
        if is_long and self.is_overloaded:
            self._calm_ticks = 0
            if now >= self._settled_at:
                self._settled_at = now + wait_s + TICK_S
                self._admitted_share = max(self._admitted_share / 2, 0.01)
                self._defer(max(0.25, self._target_s / wait_s))
        elif self.is_overloaded:
            if wait_s < self._target_s / 2 and now >= self._settled_at:
                self._admitted_share = min(self._admitted_share * 1.25 + 0.01, 1.0)
                self._resume(self._ranked(), 2 + int(idle_s / REQUEST_S))
            self._end_if_calm()
        newest_first = list(self._new)[::-1]
        self._resume(sorted(newest_first, key=_use), NEWEST_PER_TICK)
        longest_paused = islice(self._paused.items(), OLDEST_PER_TICK)
        self._resume(
            [each for each, since in longest_paused if since < now - self.max_wait_s], OLDEST_PER_TICK
        )
        self._counters.gauges["pysync_connections"] = self.connections
        self._counters.gauges["pysync_unread_connections"] = len(self._paused)
        if self.is_overloaded or self._active:
            latest = self._tick - ACTIVE_TICKS
            self._active = {each: tick for each, tick in self._active.items() if tick > latest}

    def _begin(self) -> None:
        if not self.is_overloaded and not self._is_closed:
            self.is_overloaded = True
            log.warning("overloaded: requests wait too long, so some are refused")

    def _end_if_calm(self) -> None:
        self._calm_ticks = 0 if self._paused or self._admitted_share < 1.0 else self._calm_ticks + 1
        if self._calm_ticks >= CALM_TICKS:
            self.is_overloaded = False
            log.info("no longer overloaded")

    def _defer(self, share: float) -> None:
        """Read only from this share of the connections that are active, the best of them."""
        ranked = sorted(self._active, key=self._is_preferred, reverse=True)
        for connection in ranked[int(len(ranked) * share) :]:
            self.pause(connection)

    def pause(self, connection: Readable) -> None:
        """Stop reading from a connection, unless the rest of a request is still to come."""
        if self._shares_connections or connection in self._paused:
            return
        if connection.stop_reading():
            self._paused[connection] = self._now()
            self._active.pop(connection, None)

    def resume(self, connection: Readable) -> None:
        """Read again from a connection, if reading was paused."""
        self._new.pop(connection, None)
        since = self._paused.pop(connection, None)
        if since is not None:
            connection.read_on(since)

    def read_again(self, connection: Readable, since: float) -> None:
        """Note that the first of the next requests of a connection arrived at the time `since`."""
        self._unread[connection] = since

    def _resume(self, connections: list[Readable], count: int) -> None:
        """Read again from the first `count` of these. End those that their clients have closed."""
        for connection in connections[: 10 * count]:
            if count == 0:
                return
            if connection.kernel_wait_s() is None:
                connection.abort()
            else:
                self.resume(connection)
                count -= 1

    def _ranked(self) -> list[Readable]:
        """Return the connections that are not being read: first those that were served before, then the
        newest."""
        newest_first = list(self._paused)[::-1]
        return sorted(newest_first, key=self._is_preferred, reverse=True)

    def _share_out(self) -> None:
        """Let the use of addresses decay, and find out how much of it is a fair share."""
        used = []
        for ip, address in list(self._addresses.items()):
            address.use *= USE_KEPT_PER_TICK
            if address.use >= 1.0:
                used.append(address.use)
            elif address.use < 0.01 and not address.connections:
                del self._addresses[ip]
        self._fair_use = FAIR_USE * sum(used) / len(used) if len(used) > 1 else inf


def _use(connection: Readable) -> float:
    return 0.0 if connection.address is None else connection.address.use
