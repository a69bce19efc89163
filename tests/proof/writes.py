"""Writes: all requests that asked for one and the same."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from proof.history import Operation


@dataclass(frozen=True)
class Write:
    """One write and the requests that asked for it, in the order of their starts: more than one where it was
    repeated under its Idempotency-Key, or sent twice at once."""

    attempts: tuple[Operation, ...]

    @property
    def first(self) -> Operation:
        return self.attempts[0]

    @cached_property
    def acknowledged(self) -> tuple[Operation, ...]:
        """Those that were answered 200: the write was made."""
        return tuple(attempt for attempt in self.attempts if attempt.status == 200)

    @cached_property
    def is_unknown(self) -> bool:
        """Nobody knows whether it was made: it may still be, as long as nobody answers."""
        return not self.acknowledged and any(attempt.is_unknown for attempt in self.attempts)

    @property
    def is_rejected(self) -> bool:
        return not self.acknowledged and not self.is_unknown

    @property
    def start(self) -> float:
        """It was not made before."""
        return self.first.start

    @cached_property
    def end(self) -> float:
        """It was made by then."""
        return min((attempt.end for attempt in self.acknowledged), default=math.inf)


def writes(attempts: Iterable[Operation], name: Callable[[Operation], str]) -> list[Write]:
    """The writes that were asked for; `name` is what the attempts at one have in common."""
    named: defaultdict[str, list[Operation]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda attempt: attempt.start):
        named[name(attempt)].append(attempt)
    return [Write(tuple(group)) for group in named.values()]
