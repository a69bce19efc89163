"""Several stores or coordinators used in turns, as several processes would use them."""

from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Turns:
    def __init__(self, those: tuple[object, ...]) -> None:
        self._those = those
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        self._turn += 1
        return getattr(self._those[self._turn % len(self._those)], name)


def taking_turns(*those: T) -> T:
    """One of which each call goes to the next of `those`."""
    return cast(T, _Turns(those))


def first_of(turns: T) -> T:
    """The first of those that take turns."""
    return cast(T, cast(_Turns, turns)._those[0])
