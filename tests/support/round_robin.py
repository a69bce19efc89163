"""Several stores or coordinators used in turns, as several processes would use them."""

from typing import Any, TypeVar, cast

T = TypeVar("T")


class _RoundRobin:
    def __init__(self, those: tuple[object, ...]) -> None:
        self.members = those
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        self._calls += 1
        return getattr(self.members[self._calls % len(self.members)], name)


def round_robin(*those: T) -> T:
    """One of which each call goes to the next of `those`."""
    return cast(T, _RoundRobin(those))


def first_member(robin: T) -> T:
    """The first of those that take turns."""
    return cast(T, cast(_RoundRobin, robin).members[0])
