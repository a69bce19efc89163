"""How a request names the part of a log that it asks for (wire sections 5 and 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ParamSet = Mapping[str, str | int]
Bounds = Mapping[str, int]
"""Of one log in a batch: `since` or `last` or both."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """The part of a log that a batch is to read: the log's path parameters, and `since` or `last` or both, as
    for `Client.pull`. With `since` alone a server gives the *oldest* elements above it, as many as it gives
    at once (its `maxPullLimit`, or 1000): ask again, since the newest of them, until none come."""

    params: ParamSet = field(default_factory=dict)
    since: int | None = None
    last: int | None = None

    @property
    def bounds(self) -> Bounds:
        named = {"since": self.since, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}


def pull_query(since: int | None, last: int | None, full: bool) -> dict[str, str]:
    """The query of a single pull; empty without bounds. Raises ValueError for what no server takes."""
    if full and (since is not None or last is not None):
        raise ValueError("full is all of a log: it excludes since and last")
    _check("since", since)
    _check("last", last)
    query = {"checkpoint": since, "last": last, "full": "true" if full else None}
    return {name: str(value) for name, value in query.items() if value is not None}


def check_batch_bounds(append_params: Mapping[str, Sequence[Bounds | None]]) -> None:
    """Raises ValueError for what no server takes."""
    for bounds in append_params.values():
        for entry in bounds:
            for name, value in (entry or {}).items():
                if name not in ("since", "last", "limit"):
                    raise ValueError(f"in a batch since and last bound a log, not {name}")
                _check(name, value)


def _check(name: str, value: int | None) -> None:
    # A bool is an int to Python and none to a server.
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} must be a whole number, 0 or more")
