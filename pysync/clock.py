"""The clock of the machine. Whoever depends on time takes a clock as an argument; this one is the default."""

import time
from typing import Final, NamedTuple

LAST_NUMBER: Final = 999_999
"""Of the ticks of one millisecond. Written with six digits they have as text the order that they have."""


class Tick(NamedTuple):
    """A place in an order of events: milliseconds since the epoch, and a number within the same one."""

    ms: int
    number: int

    def next(self, now_ms: int) -> "Tick":
        """The first tick later than this one that does not lie before `now_ms`, wherever the clock stands."""
        if now_ms > self.ms:
            return Tick(now_ms, 0)
        return Tick(self.ms + 1, 0) if self.number >= LAST_NUMBER else Tick(self.ms, self.number + 1)


FIRST_TICK = Tick(0, 0)


def wall_clock_ms() -> int:
    """Milliseconds since the epoch. It may step back."""
    return time.time_ns() // 1_000_000
