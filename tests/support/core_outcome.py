"""What a function of the core gives or raises."""

from collections.abc import Callable

from pysync.errors import (
    PysyncError,
)


def outcome(function: Callable[[bytes], object], text: bytes) -> object:
    """What a function returns, or the class that it raises."""
    try:
        return function(text)
    except PysyncError as error:
        return type(error)
