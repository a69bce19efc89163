"""The clock of the machine. Whoever depends on time takes a clock as an argument; this one is the default."""

import time


def wall_clock_ms() -> int:
    """Milliseconds since the epoch. It may step back."""
    return time.time_ns() // 1_000_000
