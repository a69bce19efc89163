"""Test support for plugins: a clock that only a test moves."""


class FakeClock:
    """A clock in milliseconds that only a test moves. Call it to read the time.

    Increase `now_ms` to let time pass; call `step` to set the clock as an administrator does. `booted_ms` is
    the time of the machine's start.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms
        self.booted_ms = 0
        self._stepped_ms = 0

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ms + self._stepped_ms

    def elapsed_ms(self) -> int:
        """Return the time since the start of the machine, which `step` does not change."""
        return self.now_ms - self.booted_ms

    def step(self, ms: int) -> None:
        """Set the clock forward, or back if `ms` is negative."""
        self._stepped_ms += ms
