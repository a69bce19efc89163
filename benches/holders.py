"""Clients that hold connections to a server: they do nothing, read nothing, send slowly, or ask for much."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from benches.open_loop import FOREVER, Address, Poller, Reading, Wire

RETURN_S: Final = 1.0


class Holders:
    """Connections that are opened within `spread_s` and stay: each sends the pieces of `request` for its
    number. Those with `trickle_s` then send a byte now and then. An answered one asks again after `again_s`,
    and one that was ended comes back after RETURN_S. `tally` counts statuses and what went wrong."""

    def __init__(
        self,
        poller: Poller,
        server: Address,
        sources: Sequence[str],
        count: int,
        request: Callable[[int], tuple[bytes, ...]],
        start: float,
        *,
        spread_s: float = 0.0,
        reading: Reading = Reading.ANSWERS,
        trickle_s: float = 0.0,
        again_s: float = 0.1,
    ) -> None:
        self._poller, self._server, self._sources, self._request = poller, server, sources, request
        self._reading, self._trickle_s, self._again_s = reading, trickle_s, again_s
        self._wires: list[Wire | None] = [None] * count
        self._due = [(start + spread_s * n / count, n) for n in range(count)]
        self._is_due = [True] * count
        self.tally: Counter[str] = Counter()

    def act(self, now: float) -> float:
        """See `Actor.act`."""
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            self._is_due[number] = False
            self._go_on(number, now)
        return self._due[0][0] if self._due else FOREVER

    def answered(self, wire: Wire, status: int, now: float) -> None:
        """See `Owner.answered`."""
        self.tally[str(status)] += 1
        if self._reading is Reading.ANSWERS:
            self._come_back(wire.number, now + self._again_s)

    def lost(self, wire: Wire) -> None:
        """See `Owner.lost`."""
        self.tally["ended"] += 1
        self._wires[wire.number] = None
        self._come_back(wire.number, time.perf_counter() + RETURN_S)

    def _come_back(self, number: int, when: float) -> None:
        if not self._is_due[number]:
            self._is_due[number] = True
            heapq.heappush(self._due, (when, number))

    def _go_on(self, number: int, now: float) -> None:
        wire = self._wires[number]
        if wire is not None and self._trickle_s:
            wire.send(b" ")
        else:
            wire = wire or self._open(number)
            for piece in self._request(number) if wire is not None else ():
                if wire is not None and wire.is_open:
                    wire.send(piece)
        if wire is None:
            self._come_back(number, now + RETURN_S)
        elif self._trickle_s:
            self._come_back(number, now + self._trickle_s)

    def _open(self, number: int) -> Wire | None:
        source = self._sources[number % len(self._sources)]
        try:
            wire = Wire(self._poller, self, self._server, source, self._reading, number)
        except OSError:
            self.tally["not opened"] += 1
            return None
        self._wires[number] = wire
        return wire
