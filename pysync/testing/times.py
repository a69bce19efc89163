"""Time that stands until a test moves it."""

from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest

Advance = Callable[[int], Awaitable[None]]
"""Lets so many milliseconds pass."""


class MovedClock:
    """A clock in milliseconds that stands until a test moves it. Call it to read it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


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
