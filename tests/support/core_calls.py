"""Counts calls of functions of the core, without standing in for them."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def core_calls() -> Iterator[Counter[str]]:
    """Count the calls that this thread makes of functions of the core, by their names."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", None) == "pysync._core":
            calls[getattr(function, "__name__", "")] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
