"""Overload: what the server leaves undone when requests arrive faster than it can answer them.

Requests wait in a queue (`request_queue.py`). One that has waited longer than `server.maxQueueMs` is refused
(503 `overloaded`), because its client may have given up. To refuse everything that is too much would take
more time than the processor has, so the server also stops reading from some connections, and their requests
wait in the kernel. It prefers connections and addresses that it has served before, unless an address uses
more than its share, and the newest. So what is answered is answered soon.

The wait of a request is measured from the arrival of its bytes in the kernel.
"""

import asyncio
import logging
import resource
import socket
import struct
import sys
from collections.abc import Callable
from itertools import islice
from math import inf
from time import perf_counter
from typing import Final, Protocol

from pysync.auth.addresses import network_of
from pysync.server.metrics import Counters
from pysync.server.request_queue import RequestQueue

TICK_S: Final = 0.05
LONG_WAIT: Final = 0.4
"""The share of the longest wait above which a wait is long."""
OVERLOADED_AFTER_S: Final = 0.1
"""How long all waits must have been long before requests are refused for it."""
RESERVED_DESCRIPTORS: Final = 256
FEW_CONNECTIONS: Final = 16
"""Connections that every address may have while there is room."""
MANY_REQUESTS: Final = 16
"""Requests between two ticks that must have waited long before the server is overloaded. A busy machine lets
a few wait long, and refusing them would help nobody."""
CALM_TICKS: Final = 10
"""Ticks that found no request in the queue and no connection paused, after which an overload is over."""
FAIR_USE: Final = 1.5
"""Multiple of the mean use of all addresses above which an address uses more than its share."""
USE_KEPT_PER_TICK: Final = 0.9
NEWEST_PER_TICK: Final = 40
NEWEST_PER_BUSY_TICK: Final = 8
OLDEST_PER_TICK: Final = 10
"""Unread connections that are read in each tick: the newest, fewer of them while requests wait, and those
that have waited longest, to refuse what they ask."""
MOST_PER_TICK: Final = 256
"""Unread connections that are read in a tick if no request waits: twice as many as in the tick before, up to
so many."""

_TCP_INFO: Final = struct.Struct("=B51xI")
"""Of Linux's `struct tcp_info`: the state, and `tcpi_last_data_recv` in milliseconds."""
_ESTABLISHED: Final = 1

log = logging.getLogger("pysync.server")


def connection_limit(wanted: int) -> int:
    """Return how many connections this process may open, if `wanted` is the most. Of the descriptors that the
    system allows, the store and all others that open files keep some."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, max(allowed - RESERVED_DESCRIPTORS, allowed // 2))


class Address:
    """The use that one client address made of the server lately. `use` is a decaying number of requests,
    `connections` the number of open connections, and `was_served` True if a request was answered."""

    __slots__ = ("connections", "use", "was_served")

    def __init__(self) -> None:
        self.connections = 0
        self.use = 0.0
        self.was_served = False


# Plain tuples, because each request makes both, and a named one takes several times as long to make.
Arrival = tuple[float, float]
"""When a request arrived in the kernel, and when the server read it."""
Arrivals = tuple[float, float, float]
"""When the first and the last of some requests arrived in the kernel, and when the server read them."""


def spread(arrivals: Arrivals, count: int) -> list[Arrival]:
    """Return the arrival of each of `count` requests, as if they had arrived at even intervals."""
    first, last, read_at = arrivals
    step = (last - first) / max(1, count - 1)
    return [(last - step * n, read_at) for n in range(count - 1, -1, -1)]


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
    proxy: then only requests are refused, because a connection carries those of many clients. `now` is the
    clock, in seconds."""

    def __init__(
        self,
        max_wait_s: float,
        max_connections: int = sys.maxsize,
        *,
        shares_connections: bool = False,
        counters: Counters | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.max_connections: Final = max_connections
        self._shares_connections = shares_connections
        self.connections = 0
        """Number of open connections."""
        self._counters = counters or Counters()
        self.max_wait_s: Final = max_wait_s
        self.is_overloaded = False
        self.queue: Final = RequestQueue(max_wait_s, now)
        """The requests that wait."""
        self._now = now
        self._long_wait_s = max_wait_s * LONG_WAIT
        self._begun = 0
        self._long_since = inf
        self._calm_ticks = 0
        self._to_resume = 1
        self._is_late = False
        self._fair_use = inf
        self._paused: dict[Readable, float] = {}
        self._unread: dict[Readable, float] = {}
        self._new: dict[Readable, None] = {}
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
        self.is_overloaded = self.queue.is_newest_first = False
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
        has_room = not self.is_overloaded or (self.queue.is_empty and not self._paused)
        return not (has_room or self._shares_connections)

    def defer(self, connection: Readable) -> None:
        """Do not read from a new connection yet."""
        self.pause(connection)
        self._new[connection] = None

    def closed(self, connection: Readable) -> None:
        """Forget a connection that was opened."""
        for noted in (self._paused, self._unread, self._new):
            noted.pop(connection, None)
        self.queue.remove(connection)
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

    def arrivals(self, connection: Readable) -> Arrivals:
        """Return the arrivals of what `connection` has just read."""
        now = self._now()
        first = self._unread.pop(connection, None)
        if first is None and not (self.is_overloaded or self._is_late):
            return now, now, now
        last = now - (connection.kernel_wait_s() or 0.0)
        return (last if first is None else min(first, last)), last, now

    def stale_since(self) -> float:
        """Return the time before which a request arrived that has waited too long."""
        return self._now() - self.max_wait_s

    def prefers(self, connection: Readable, address: Address | None) -> bool:
        """Return True if a request of `connection` from `address` comes first: one of them was served before,
        and the address uses no more than its share."""
        if address is None or address.use > self._fair_use:
            return False
        return connection.was_served or address.was_served or self._shares_connections

    def count_rejections(self, address: Address | None, count: int) -> None:
        """Count requests from `address` that are refused before they are parsed."""
        if address is not None:
            address.use += count
        self._counters.count("pysync_overload_refusals", by=count)

    def refuses(self, connection: Readable, address: Address, arrival: Arrival) -> bool:
        """Return True if a request from `address`, whose turn has come, has to be refused. Called once for
        each request."""
        self.queue.has_started(connection)
        now = self._now()
        arrived_at, read_at = arrival
        wait_s = now - (read_at if self.queue.is_empty else min(read_at, self.queue.oldest()))
        address.use += 1.0
        if wait_s <= self._long_wait_s:
            self._long_since = inf
        elif self._long_since == inf:
            self._long_since = now
        elif self._begun >= MANY_REQUESTS and now - self._long_since > OVERLOADED_AFTER_S:
            self._begin()
        if self.is_overloaded and (
            now - arrived_at > self.max_wait_s
            or not (self.queue.has_room_for_others or self.prefers(connection, address))
        ):
            self._counters.count("pysync_overload_refusals")
            return True
        self._begun += 1
        connection.was_served = address.was_served = True
        return False

    def tick(self, late_s: float) -> None:
        """Adapt to what has happened since the last tick, which comes `late_s` after it was due."""
        now = self._now()
        if not self._begun:
            self._long_since = inf
        self._begun = 0
        self._is_late = late_s > TICK_S / 4
        self._share_out()
        is_busy = not self.queue.is_empty
        if self.is_overloaded:
            self._to_resume = 1 if is_busy else min(2 * self._to_resume, MOST_PER_TICK)
            if not is_busy:
                self._resume(self._ranked(), self._to_resume)
            self._end_if_calm()
        newest_first = list(self._new)[::-1]
        self._resume(sorted(newest_first, key=_use), NEWEST_PER_BUSY_TICK if is_busy else NEWEST_PER_TICK)
        oldest = [
            each
            for each, since in islice(self._paused.items(), OLDEST_PER_TICK)
            if since < now - self.max_wait_s
        ]
        self._resume(oldest, OLDEST_PER_TICK)
        self._counters.gauges["pysync_connections"] = self.connections
        self._counters.gauges["pysync_unread_connections"] = len(self._paused)

    def _begin(self) -> None:
        if not self.is_overloaded and not self._is_closed:
            self.is_overloaded = self.queue.is_newest_first = True
            log.warning("overloaded: requests wait too long, so some are refused")

    def _end_if_calm(self) -> None:
        self._calm_ticks = 0 if self._paused or not self.queue.is_empty else self._calm_ticks + 1
        if self._calm_ticks >= CALM_TICKS:
            self.is_overloaded = self.queue.is_newest_first = False
            log.info("no longer overloaded")

    def pause(self, connection: Readable) -> None:
        """Stop reading from a connection, unless the rest of a request is still to come."""
        if self._shares_connections or connection in self._paused:
            return
        if connection.stop_reading():
            self._paused[connection] = self._now()

    def pause_if_busy(self, connection: Readable) -> None:
        """Stop reading from a connection if requests of others wait."""
        if not self.queue.is_empty:
            self.pause(connection)

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
        return sorted(newest_first, key=lambda each: self.prefers(each, each.address), reverse=True)

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


def kernel_wait_s(sock: socket.socket) -> float | None:
    """Return how long ago the kernel received the last bytes of a connection, 0.0 if that is unknown; None if
    the client has closed it."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):  # not TCP, or not Linux
        return 0.0
    state, wait_ms = _TCP_INFO.unpack(info)
    return wait_ms / 1000 if state == _ESTABLISHED else None
