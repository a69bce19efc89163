"""Load: the connections of a process, and how long their requests wait.

The process accepts every client. When connections run out, one of the address that has most of them gives
way: the one that has been idle for longest. A request that has waited for too long is rejected (503
`overloaded`), so that its client may try again later.
"""

import asyncio
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Final, Protocol

from pysync.auth.addresses import network_of
from pysync.errors import Overloaded
from pysync.server.process.metrics import Counters

RESERVED_DESCRIPTORS: Final = 256
"""Descriptors that connections leave to the store and to all others that open files."""
REQUESTS_PER_TURN: Final = 32
"""Requests that one turn of the event loop begins, so that turns stay short."""


def connection_limit(wanted: int) -> int:
    """Return how many connections this process may open, if `wanted` is the most and the system allows it."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, max(allowed - RESERVED_DESCRIPTORS, allowed // 2))


class HeldConnection(Protocol):
    """A connection, and when its last request arrived."""

    address: "Address | None"
    waits_since: float

    def abort(self) -> None:
        """End the connection at once."""

    def time_out(self) -> None:
        """End the connection, whose head did not arrive in time."""


class Address:
    """The connections of one client address, in two parts: `idle` ones, of which the first has been idle for
    longest, and `busy` ones, whose request is being handled."""

    __slots__ = ("busy", "idle", "network")

    def __init__(self, network: str) -> None:
        self.network = network
        self.idle: dict[HeldConnection, None] = {}
        self.busy: dict[HeldConnection, None] = {}


class Load:
    """The connections of a process, `max_connections` at most. A request waits for `max_wait_s` at most.
    `now` is the clock, in seconds."""

    def __init__(
        self,
        max_wait_s: float = inf,
        max_connections: int = sys.maxsize,
        counters: Counters | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.max_wait_s = max_wait_s
        self.max_connections = max_connections
        self.now: Final = now
        self.draining = False
        """True once the process is about to stop: every response closes its connection."""
        self.connections = 0
        """Number of open connections."""
        self.heads: dict[HeldConnection, float] = {}
        """When each head that has not arrived completely, or whose request waits, began to arrive: the oldest
        first."""
        self._waiting = OrderedDict[HeldConnection, asyncio.Future[None]]()
        """The requests that wait for their turn."""
        self._starting: set[HeldConnection] = set()
        """Connections whose request is about to be handled in this turn of the event loop."""
        self._started = 0
        self._addresses: dict[str, Address] = {}
        self._by_size: dict[int, dict[Address, None]] = {}
        self._most = 0
        self._counters = counters or Counters()

    def opened(self, connection: HeldConnection, ip: str) -> bool:
        """Count a new connection from `ip`, an IPv4 address or an address of the same /64 as others. Another
        gives way if there are too many. Return False if its own address has most and none is idle."""
        network = network_of(ip)
        if self.connections >= self.max_connections and not self._make_room(self._addresses.get(network)):
            return False
        address = self._addresses.get(network)
        if address is None:
            address = self._addresses[network] = Address(network)
        connection.address = address
        address.idle[connection] = None
        self._resize(address, 1)
        self.heads[connection] = self.now()
        return True

    def closed(self, connection: HeldConnection) -> None:
        """Forget a connection."""
        address, connection.address = connection.address, None
        if address is not None:
            address.idle.pop(connection, None)
            address.busy.pop(connection, None)
            self.heads.pop(connection, None)
            self._starting.discard(connection)
            if connection in self._waiting:
                self._waiting.pop(connection).cancel()
            self._resize(address, -1)

    def begin(self, connection: HeldConnection) -> None:
        """Note that a request begins."""
        connection.waits_since = self.heads.pop(connection, 0.0) or self.now()
        address = connection.address
        if address is not None:
            address.idle.pop(connection, None)
            address.busy[connection] = None
            self._starting.add(connection)

    def turn(self, connection: HeldConnection) -> asyncio.Future[None] | None:
        """Return None if it is the turn of a request that has begun, and else what it has to wait for. That
        raises Overloaded if the request waits for too long, and CancelledError if the connection is lost."""
        if self._started < REQUESTS_PER_TURN and not self._waiting:
            self._started += 1
            if self._started == 1:
                asyncio.get_running_loop().call_soon(self._next_turn)
            return None
        self._starting.discard(connection)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[connection] = turn
        return turn

    def _next_turn(self) -> None:
        """Let some of the requests go on that wait, and reject those that have waited for too long. To reject
        all of them would leave no time for others, so if they are too many, the newest go on."""
        self._started = 0
        if not self._waiting:
            return
        asyncio.get_running_loop().call_soon(self._next_turn)
        latest = self.now() - self.max_wait_s
        for _ in range(REQUESTS_PER_TURN):
            if self._oldest() > latest:
                break
            self._waiting.popitem(last=False)[1].set_exception(Overloaded())
            self._counters.count("pysync_overload_refusals")
        is_newest_first = self._oldest() <= latest
        while self._waiting and self._started < REQUESTS_PER_TURN:
            self._started += 1
            connection, turn = self._waiting.popitem(last=is_newest_first)
            self._starting.add(connection)
            turn.set_result(None)

    def goes_on(self, connection: HeldConnection) -> None:
        """Note that the turn of a request has come."""
        self._starting.discard(connection)

    def _oldest(self) -> float:
        """Return since when the request waits that is first in the queue."""
        return next(iter(self._waiting)).waits_since if self._waiting else inf

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for its turn."""
        return bool(self._waiting)

    def others_follow(self) -> bool:
        """Return True if this turn of the event loop is about to handle other requests."""
        return bool(self._starting)

    def end(self, connection: HeldConnection) -> None:
        """Note that a request was answered."""
        self._starting.discard(connection)
        address = connection.address
        if address is not None and address.busy.pop(connection, True) is None:
            address.idle[connection] = None

    def _make_room(self, newcomer: Address | None) -> bool:
        most = next(iter(self._by_size[self._most]))
        found = next(iter(most.idle), None)
        if found is None and most is not newcomer:
            found = next(iter(most.busy))
        self._counters.count("pysync_rejected_connections")
        if found is None:
            return False
        found.abort()
        return True

    def _resize(self, address: Address, change: int) -> None:
        """Count a connection more or less of an address, and forget the address without any."""
        self.connections += change
        self._counters.gauges["pysync_connections"] = self.connections
        size = len(address.idle) + len(address.busy)
        before = self._by_size.get(size - change, {})
        before.pop(address, None)
        if not before:
            self._by_size.pop(size - change, None)
        if size:
            self._by_size.setdefault(size, {})[address] = None
        else:
            del self._addresses[address.network]
        if change > 0:
            self._most = max(self._most, size)
        elif self._most not in self._by_size:
            self._most = size
