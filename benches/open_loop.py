"""A generator of HTTP requests that does not wait for answers: raw sockets and epoll in one thread.

Each request is sent when it is due, whatever became of those before it, and its time is counted from then. A
`Poller` turns a few actors: `OpenLoop` here sends requests at a rate, `Holders` of `holders.py` hold
connections.
"""

import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from pysync.cli.load_generator import read_head

Address = tuple[str, int]

FOREVER: Final = float("inf")
READ_BYTES: Final = 65_536
LEAST_READ: Final = 16_384
"""A stream that is read and thrown away wakes the generator for as many bytes, not for each event."""
CHECK_S: Final = 0.05
SEND_BUFFER: Final = 262_144
"""What the kernel keeps of what a server does not read, for each connection."""
_THROWN_AWAY: Final = bytearray(READ_BYTES)
_BIND_ADDRESS_NO_PORT: Final = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT: choose the port when the destination is known, for it may be shared."""


class Actor(Protocol):
    """Something that does what is due."""

    def act(self, now: float) -> float:
        """Do what is due, and return when there is something to do again."""


class Owner(Protocol):
    """Hears what becomes of a wire."""

    def answered(self, wire: "Wire", status: int, now: float) -> None: ...

    def lost(self, wire: "Wire") -> None: ...


class Reading(Enum):
    """What a client does with what the server sends: read answers, read and throw away what follows the first
    bytes, or never read."""

    ANSWERS = 1
    DISCARD = 2
    NEVER = 3


class Poller:
    """Turns actors and their wires until it is time to end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wires: dict[int, Wire] = {}

    def add(self, wire: "Wire") -> None:
        self._wires[wire.socket.fileno()] = wire
        self._epoll.register(wire.socket, wire.events)

    def modify(self, wire: "Wire") -> None:
        self._epoll.modify(wire.socket, wire.events)

    def remove(self, wire: "Wire") -> None:
        del self._wires[wire.socket.fileno()]
        self._epoll.unregister(wire.socket)

    def run(self, actors: Sequence[Actor], ends: float) -> None:
        """Act until `ends`, then close all wires; no owner hears of that."""
        while (now := time.perf_counter()) < ends:
            wake = min(actor.act(now) for actor in actors)
            wait_s = max(0.0, min(wake, ends, now + CHECK_S) - time.perf_counter())
            for descriptor, events in self._epoll.poll(wait_s, 256):
                wire = self._wires.get(descriptor)
                if wire is not None:
                    wire.ready(events)
        for wire in self._wires.values():
            wire.socket.close()
        self._wires.clear()
        self._epoll.close()


class Wire:
    """A connection to the server from the address `source`. `waiting` are the numbers of the requests that
    were not answered yet, the oldest first. Raises OSError where it cannot be opened."""

    __slots__ = (
        "_head", "_missing", "_owner", "_poller", "_status", "_unsent",
        "events", "is_open", "number", "reading", "socket", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        poller: Poller,
        owner: Owner,
        server: Address,
        source: str,
        reading: Reading = Reading.ANSWERS,
        number: int = 0,
    ) -> None:
        self.number = number
        self.reading = reading
        self.waiting: deque[int] = deque()
        self.is_open = True
        self._poller = poller
        self._owner = owner
        self._unsent: deque[memoryview] = deque()
        self._head = b""
        self._missing = self._status = 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if reading is Reading.NEVER:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            self.socket.bind((source, 0))
            with suppress(BlockingIOError):
                self.socket.connect(server)
        except OSError:
            self.socket.close()
            raise
        self.events = select.EPOLLRDHUP | (0 if reading is Reading.NEVER else select.EPOLLIN)
        poller.add(self)

    def send(self, data: bytes) -> None:
        """Send `data`, the part that does not go out now as soon as it does."""
        if not self._unsent:
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._lose()
                return
            if sent == len(data):
                return
            data = data[sent:] if sent else data
            self.events |= select.EPOLLOUT
            self._poller.modify(self)
        self._unsent.append(memoryview(data))

    def ready(self, events: int) -> None:
        """Go on, as epoll has told."""
        try:
            if events & select.EPOLLOUT:
                self._flush()
            if events & select.EPOLLIN:
                self._read()
            elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                self._lose()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._lose()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._poller.remove(self)
            self.socket.close()
            self._unsent.clear()

    def _lose(self) -> None:
        if self.is_open:
            self.close()
            self._owner.lost(self)

    def _flush(self) -> None:
        while self._unsent:
            piece = self._unsent[0]
            sent = self.socket.send(piece)
            if sent < len(piece):
                self._unsent[0] = piece[sent:]
                return
            self._unsent.popleft()
        self.events &= ~select.EPOLLOUT
        self._poller.modify(self)

    def _read(self) -> None:
        if self.reading is Reading.DISCARD and self._status:
            if not self.socket.recv_into(_THROWN_AWAY, READ_BYTES, socket.MSG_TRUNC):
                self._lose()
            return
        data = self.socket.recv(READ_BYTES)
        if not data:
            self._lose()
            return
        if self.reading is Reading.DISCARD:
            self._status = int(data[9:12])
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LEAST_READ)
            self._owner.answered(self, self._status, time.perf_counter())
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Take bytes of answers, of which several may have come together."""
        now = time.perf_counter()
        at = 0
        while at < len(data) and self.is_open:
            if not self._missing:
                data, at, self._head = self._head + data[at:], 0, b""
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    self._head = data
                    return
                self._status, length = read_head(data[: end + 2])
                self._missing, at = length, end + 4
            taken = min(self._missing, len(data) - at)
            at += taken
            self._missing -= taken
            if not self._missing:
                self._owner.answered(self, self._status, now)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Requests, when each is due (seconds after the start, in order), and of which kind it is."""

    requests: Sequence[bytes]
    due_s: "array[float]"
    kinds: bytes

    @classmethod
    def evenly(
        cls, requests: Sequence[bytes], rate: float, kind: int = 0, first_s: float = 0.0
    ) -> "Timeline":
        """All requests at one rate."""
        due = array("d", (first_s + n / rate for n in range(len(requests))))
        return cls(requests, due, bytes([kind]) * len(requests))

    def merged(self, other: "Timeline") -> "Timeline":
        """Both, in the order in which they are due."""
        due = array("d", [*self.due_s, *other.due_s])
        requests, kinds = [*self.requests, *other.requests], self.kinds + other.kinds
        order = sorted(range(len(due)), key=due.__getitem__)
        return Timeline(
            [requests[n] for n in order], array("d", (due[n] for n in order)), bytes(kinds[n] for n in order)
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of the requests of a timeline: the status of each (0: none came), the seconds from when it
    was due to its answer, and to when the generator came to it. `held` could not be sent when they were due,
    as no connection was left."""

    due_s: "array[float]"
    kinds: bytes
    statuses: "array[int]"
    took_s: "array[float]"
    lag_s: "array[float]"
    held: int


class OpenLoop:
    """Sends the requests of a timeline when they are due. They come from the addresses of `sources` in turns.
    A request goes on a connection that waits for nothing, on a new one while there are fewer than `most`, or
    on one with fewer than `depth` requests under way. Who waits for `limit_s` hangs up. `fresh`: each request
    has a connection of its own."""

    def __init__(
        self,
        poller: Poller,
        server: Address,
        sources: Sequence[str],
        timeline: Timeline,
        start: float,
        *,
        most: int,
        depth: int = 1,
        limit_s: float = 2.0,
        fresh: bool = False,
    ) -> None:
        self._poller, self._server = poller, server
        self._requests, self._due_s = timeline.requests, timeline.due_s
        self._start, self._depth, self._limit_s, self._fresh = start, depth, limit_s, fresh
        self._pools = [_Pool(source, max(1, most // len(sources))) for source in sources]
        count = len(timeline.requests)
        self._next = 0
        self._check_at = start
        self._statuses = array("H", bytes(2 * count))
        self._took_s = array("d", bytes(8 * count))
        self._lag_s = array("d", bytes(8 * count))
        self._kinds = timeline.kinds
        self._held = 0

    def result(self) -> Sent:
        """What became of all that was due so far."""
        done = self._next
        return Sent(
            self._due_s[:done], self._kinds[:done], self._statuses[:done], self._took_s[:done],
            self._lag_s[:done], self._held,
        )  # fmt: skip

    def act(self, now: float) -> float:
        """See `Actor.act`."""
        due, start = self._due_s, self._start
        while self._next < len(due) and start + due[self._next] <= now:
            number = self._next
            self._next += 1
            now = time.perf_counter()
            self._lag_s[number] = now - start - due[number]
            self._offer(number)
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            self._give_up(now - start - self._limit_s)
        return start + due[self._next] if self._next < len(due) else FOREVER

    def answered(self, wire: Wire, status: int, now: float) -> None:
        """See `Owner.answered`."""
        pool = self._pools[wire.number]
        if not wire.waiting:
            return
        number = wire.waiting.popleft()
        self._statuses[number] = status
        self._took_s[number] = now - self._start - self._due_s[number]
        if self._fresh:
            wire.close()
            pool.wires.remove(wire)
        elif not wire.waiting:
            if pool.held:
                self._send(wire, pool.held.popleft())
            else:
                pool.idle.append(wire)

    def lost(self, wire: Wire) -> None:
        """See `Owner.lost`."""
        self._pools[wire.number].wires.remove(wire)

    def _offer(self, number: int) -> None:
        pool = self._pools[number % len(self._pools)]
        while pool.idle and not self._fresh:
            wire = pool.idle.pop()
            if wire.is_open:
                self._send(wire, number)
                return
        if len(pool.wires) < pool.most:
            try:
                wire = Wire(self._poller, self, self._server, pool.source, number=number % len(self._pools))
            except OSError:
                self._held += 1
                return
            pool.wires.append(wire)
            self._send(wire, number)
            return
        for _ in range(min(len(pool.wires), 4) if self._depth > 1 else 0):
            pool.wires.rotate(-1)
            if len(pool.wires[0].waiting) < self._depth:
                self._send(pool.wires[0], number)
                return
        self._held += 1
        pool.held.append(number)

    def _send(self, wire: Wire, number: int) -> None:
        wire.waiting.append(number)
        wire.send(self._requests[number])

    def _give_up(self, latest_s: float) -> None:
        """Hang up where a request has been waiting since `latest_s`."""
        for pool in self._pools:
            late = [w for w in pool.wires if w.waiting and self._due_s[w.waiting[0]] < latest_s]
            for wire in late:
                wire.close()
                pool.wires.remove(wire)
            while pool.held and self._due_s[pool.held[0]] < latest_s:
                pool.held.popleft()


class _Pool:
    """The connections from one address, the idle ones beside, and requests that wait for one."""

    def __init__(self, source: str, most: int) -> None:
        self.source, self.most = source, most
        self.wires: deque[Wire] = deque()
        self.idle: list[Wire] = []
        self.held: deque[int] = deque()
