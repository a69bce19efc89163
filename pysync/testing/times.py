"""Time that stands until a test moves it."""

from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest

Advance = Callable[[int], Awaitable[None]]
"""Lets so many milliseconds pass."""


class MovedClock:
    """A clock in milliseconds that stands until a test moves it. Call it to read it.

    To move `now_ms` lets time pass; `step` sets the clock as an administrator does. `booted_ms` is when the
    machine was started.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms
        self.booted_ms = 0
        self._stepped_ms = 0

    def __call__(self) -> int:
        return self.now_ms + self._stepped_ms

    def elapsed_ms(self) -> int:
        """The time since the machine was started, which no step moves."""
        return self.now_ms - self.booted_ms

    def step(self, ms: int) -> None:
        """Set the clock ahead, or back."""
        self._stepped_ms += ms


class MovedTime:
    """The time of a contract: the fixture `clock`, and `advance`, which moves it. For a coordinator that has
    a clock of its own, too, override `advance`, and say in `slack_ms` how far it may run on in a test."""

    slack_ms: ClassVar[int] = 0

    @pytest.fixture
    def clock(self) -> MovedClock:
        return MovedClock()

    @pytest.fixture
    def advance(self, clock: MovedClock) -> Advance:
        async def advance(ms: int) -> None:
            clock.now_ms += ms

        return advance
