"""The outcome of a function of the core: its value or its error."""

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
