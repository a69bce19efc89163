"""The time of a contract: a clock that its tests move."""

from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest

from pysync.testing import FakeClock

Advance = Callable[[int], Awaitable[None]]
"""Lets this number of milliseconds pass."""


class FakeTime:
    """The time of a contract: the fixture `clock`, and the fixture `advance`, which moves it. For a
    coordinator that also reads a clock of its own, override `advance`, and set `slack_ms` to the milliseconds
    that this clock may advance during a test."""

    slack_ms: ClassVar[int] = 0

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The clock of the test."""
        return FakeClock()

    @pytest.fixture
    def advance(self, clock: FakeClock) -> Advance:
        """A function that lets time pass."""

        async def advance(ms: int) -> None:
            clock.now_ms += ms

        return advance
