"""Bytes in flight: the request bodies and responses that the server holds, bounded in all.

A body reserves its length before it is read, and a large response its length before it is sent. When the
budget is full, a body waits for a short time without being read, and then the request is rejected (503
`overloaded`). Room is made by ending the transfers that make the least progress, such as a client that never
reads its response. Bodies and responses below 64 KiB that arrive or leave at once are not counted.
"""

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from operator import itemgetter
from typing import Any, Final

from aiohttp import web
from aiohttp.streams import StreamReader

from pysync.errors import Overloaded
from pysync.server.process.metrics import Counters

SMALL_BYTES: Final = 64 * 1024
"""Bytes up to which a body that has arrived, or a response, is not counted. Smaller reservations may use a
reserve, so that large transfers cannot keep them waiting."""
RESERVE: Final = 1.25
"""Multiple of the budget up to which small reservations are granted."""
MIN_BYTES: Final = 4 * 1024
"""The least that counts for a body that is still arriving."""
STREAMED_BYTES: Final = 512 * 1024
"""What counts at most for a body that is streamed, which is never held as a whole."""
WAIT_S: Final = 1.0
"""How long a request waits for room."""
WORK_WAIT_S: Final = 10.0
"""How long a body that has arrived waits until it can be decoded."""
MAX_WAITING: Final = 64
"""Requests that may wait for room; more are rejected at once."""
ADDRESS_SHARE: Final = 0.75
"""Share of the budget that one client address may have."""
WORK_SHARE: Final = 0.25
"""Share of the budget up to which bodies are decoded and stored at once. Each of them needs about twice its
length in addition."""
GRACE_S: Final = 2.0
"""Age from which a transfer may be ended to make room."""
SLOW_BYTES_PER_S: Final = 32 * 1024
"""Mean progress above which no transfer is ended to make room."""
SEARCH_EVERY_S: Final = 0.1
"""Smallest time between two searches for slow transfers."""


class _Budget:
    """A number of bytes, and the requests that wait for some of them, first come, first served. One address
    may have `address_share` of them."""

    def __init__(self, max_bytes: float, address_share: float = 1.0) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._address_share = address_share
        self._by_address: Tally[str] = Tally()
        self._waiting: dict[asyncio.Future[None], tuple[int, str, int]] = {}

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def has_room(self, size: int, address: str, own: int = 0) -> bool:
        """Return True if `size` more bytes may be taken by one that has `own` bytes already. More than the
        whole budget is granted to one that is alone."""
        if self.held == own:
            return True
        limit = self.max_bytes if size >= SMALL_BYTES else self.max_bytes * RESERVE
        return self.held + size <= limit and not self.exceeds_share(size, address)

    def exceeds_share(self, size: int, address: str) -> bool:
        """Return True if `size` more bytes are too many for this address."""
        own = self._by_address[address]
        return own > 0 and own + size > self.max_bytes * self._address_share

    def take(self, size: int, address: str) -> None:
        """Take bytes for which there is room."""
        self.held += size
        self._by_address[address] += size

    def give_back(self, size: int, address: str) -> None:
        """Return bytes, and grant them to requests that wait."""
        self.held -= size
        self._by_address[address] -= size
        if self._by_address[address] <= 0:
            del self._by_address[address]
        for future, (wanted, waiter, own) in list(self._waiting.items()):
            if not future.done() and self.has_room(wanted, waiter, own):
                self.take(wanted, waiter)
                future.set_result(None)

    async def wait(self, size: int, address: str, wait_s: float, own: int = 0) -> None:
        """Take bytes as soon as `has_room`. Raises Overloaded if there is none within `wait_s`."""
        if self.waiting >= MAX_WAITING:
            raise Overloaded
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = size, address, own
        try:
            async with asyncio.timeout(wait_s):
                await future
        except (TimeoutError, asyncio.CancelledError) as error:
            if not future.cancelled():  # granted at the same time
                self.give_back(size, address)
            if isinstance(error, TimeoutError):
                raise Overloaded from None
            raise
        finally:
            del self._waiting[future]


class Reservation:
    """The bytes that one request holds, of which `size` are in flight."""

    __slots__ = ("_end", "_in_flight", "_moved", "_since", "_work", "address", "size")

    def __init__(self, in_flight: "BytesInFlight", address: str) -> None:
        self.address: Final = address
        self.size = 0
        self._in_flight = in_flight
        self._work = 0
        self._since = 0.0
        self._moved: Callable[[], int] | None = None
        self._end: Callable[[], None] | None = None

    async def grow(self, size: int) -> None:
        """Reserve at least `size` bytes in all. Raises Overloaded if there is no room for them within a
        second."""
        more = size - self.size
        if more <= 0:
            return
        if not self._in_flight.try_take(more, self.address, self.size):
            with self._in_flight.counting_rejections():
                await self._in_flight.budget.wait(more, self.address, WAIT_S, self.size)
        self.size += more  # which is all of it if the transfer was ended meanwhile

    def resize(self, size: int) -> None:
        """Reserve exactly `size` bytes. Raises Overloaded if these are more than before, and there is no
        room."""
        more = size - self.size
        if more > 0 and not self._in_flight.try_take(more, self.address, self.size):
            with self._in_flight.counting_rejections():
                raise Overloaded
        self.size += more
        if more < 0:
            self._in_flight.give_back(-more, self.address)

    async def begin_work(self, size: int) -> None:
        """Wait until a body of `size` bytes may be decoded and stored. Raises Overloaded after 10 s."""
        work = self._in_flight.work
        if work.has_room(size, ""):
            work.take(size, "")
        else:
            with self._in_flight.counting_rejections():
                await work.wait(size, "", WORK_WAIT_S)
        self._work += size

    async def begin_body(self, content: StreamReader, size: int) -> None:
        """Reserve `size` bytes for the body `content`, which is read from now on. If it has to make room for
        others, reading it raises Overloaded. Raises Overloaded if there is no room."""
        await self.grow(max(size, MIN_BYTES))
        before = content.total_bytes
        self.watch(lambda: content.total_bytes - before, lambda: content.set_exception(Overloaded()))

    def watch(self, moved: Callable[[], int], end: Callable[[], None]) -> None:
        """Allow that the transfer is ended with `end` if it makes little progress while the budget is full.
        `moved` returns the number of bytes that it has transferred since this call."""
        self._since = self._in_flight.now()
        self._moved, self._end = moved, end
        self._in_flight.watched[self] = None

    def unwatch(self) -> None:
        """Let the transfer, which is complete, no longer be ended."""
        self._moved = self._end = None
        self._in_flight.watched.pop(self, None)

    def rate(self, now: float) -> float:
        """Return the mean progress of a watched transfer, in bytes per second."""
        age_s = now - self._since
        return inf if self._moved is None or age_s < GRACE_S else self._moved() / age_s

    def end(self) -> None:
        """End a watched transfer, and give its bytes back."""
        end = self._end
        self.release()
        if end is not None:
            end()

    def release(self) -> None:
        """Give everything back."""
        self.unwatch()
        size, self.size = self.size, 0
        work, self._work = self._work, 0
        if size:
            self._in_flight.give_back(size, self.address)
        if work:
            self._in_flight.work.give_back(work, "")


_RESERVATION: Final = web.RequestKey("reservation", Reservation)


def release(request: web.BaseRequest) -> None:
    """Release the reservation of a request, if it has one."""
    found = request.get(_RESERVATION)
    if found is not None:
        found.release()


def hold_until(request: web.BaseRequest, task: asyncio.Task[Any]) -> None:
    """Keep what a request has reserved until `task` ends, which may be after the response."""
    found = request.get(_RESERVATION)
    if found is not None:
        del request[_RESERVATION]
        task.add_done_callback(lambda _: found.release())


class BytesInFlight:
    """The reservations of one process, of at most `max_bytes` in all. `client_ip` returns the address of a
    request; one address may have three quarters of them."""

    def __init__(
        self,
        max_bytes: float,
        client_ip: Callable[[web.BaseRequest], str],
        counters: Counters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget: Final = _Budget(max_bytes, ADDRESS_SHARE)
        self.work: Final = _Budget(max_bytes * WORK_SHARE)
        """Bytes of bodies that are being decoded and stored."""
        self.watched: Final[dict[Reservation, None]] = {}
        """The reservations of transfers that may be ended."""
        self.now: Final = now
        self._client_ip = client_ip
        self._counters = Counters() if counters is None else counters
        self._searched_at = -inf

    def limit(self, max_bytes: float, client_ip: Callable[[web.BaseRequest], str]) -> None:
        """Change what the reservations to come may have."""
        self.budget.max_bytes, self.work.max_bytes = max_bytes, max_bytes * WORK_SHARE
        self._client_ip = client_ip

    @property
    def held(self) -> int:
        """Number of bytes in flight."""
        return self.budget.held

    def reservation(self, request: web.BaseRequest) -> Reservation:
        """Return the reservation of `request`, which is empty at first. The connection calls `release` once
        the request has been answered."""
        found = request.get(_RESERVATION)
        if found is None:
            request[_RESERVATION] = found = Reservation(self, self._client_ip(request))
        return found

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count Overloaded, if it is raised."""
        try:
            yield
        except Overloaded:
            self._counters.count("pysync_bytes_rejections")
            raise

    def try_take(self, size: int, address: str, own: int = 0) -> bool:
        """Take bytes if there is room, or if there is after slow transfers were ended. `own` are those that
        the request has already."""
        if not self.budget.has_room(size, address, own):
            self._end_slow(size, address)
            if not self.budget.has_room(size, address, own):
                return False
        self.budget.take(size, address)
        self._update_gauge()
        return True

    def give_back(self, size: int, address: str) -> None:
        """Return bytes."""
        self.budget.give_back(size, address)
        self._update_gauge()

    def _update_gauge(self) -> None:
        self._counters.gauges["pysync_bytes_in_flight"] = self.budget.held

    def _end_slow(self, size: int, address: str) -> None:
        """End the transfers that make the least progress until there is room for `size` bytes; only its own
        if the address would exceed its share."""
        now = self.now()
        if now - self._searched_at < SEARCH_EVERY_S:
            return
        self._searched_at = now
        is_own = self.budget.exceeds_share(size, address)
        rates = [(each.rate(now), each) for each in self.watched if not is_own or each.address == address]
        slow = sorted((each for each in rates if each[0] < SLOW_BYTES_PER_S), key=itemgetter(0))
        for _, transfer in slow:
            transfer.end()
            self._counters.count("pysync_slow_transfers_ended")
            if self.budget.has_room(size, address):
                return
