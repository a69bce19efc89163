"""How much a test tries: little with every change (`make test`), more in `make test-long`."""

import os
from typing import Final, TypeVar

T = TypeVar("T")

LONG: Final = "TESTS_LONG" in os.environ


def depth(short: T, long: T) -> T:
    """Seconds, examples or elements: `short` in a usual run, `long` in a long one."""
    return long if LONG else short
