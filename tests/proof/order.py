"""Real time: whatever has ended before another begins has happened before it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proof.history import Operation


@dataclass(frozen=True, slots=True)
class Sight:
    """What an operation tells of a key that goes from state to state, numbered from 0: at one moment between
    `start` and `end` it was in state `index`. `writes`: this very operation brought it there."""

    index: int
    start: float
    end: float
    operation: Operation
    writes: bool = False


def out_of_order(sights: Iterable[Sight]) -> Iterator[tuple[Sight, Sight]]:
    """The pairs of which the second began when the first had ended, and tells of an earlier state; or brought
    about a state that the first had already seen. Where there is none, and each state was brought about
    once, some order of all these moments explains what everybody saw: they are linearizable.
    """
    sights = list(sights)
    ended = iter(sorted(sights, key=lambda sight: sight.end))
    next_ended = next(ended, None)
    newest: Sight | None = None
    for sight in sorted(sights, key=lambda sight: sight.start):
        while next_ended is not None and next_ended.end < sight.start:
            if newest is None or next_ended.index > newest.index:
                newest = next_ended
            next_ended = next(ended, None)
        if newest is not None and sight.index < newest.index + sight.writes:
            yield newest, sight
