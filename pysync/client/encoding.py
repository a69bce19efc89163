"""Values as JSON text."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

import orjson


def encode(value: Any, options: int = 0) -> bytes:
    """Return `value` as JSON. Raises TypeError for what JSON cannot hold, and ValueError, which says where it
    is, for NaN and infinite numbers: orjson would write null in their place."""
    text = orjson.dumps(value, option=options)
    if b"null" in text:
        for path in _non_finite(value):
            raise ValueError(f"JSON has no NaN and no infinite numbers: {path or 'the value'} is one")
    return text


def _non_finite(value: Any, path: str = "") -> Iterator[str]:
    """Yield the places of all NaN and infinite numbers in whatever orjson can serialise."""
    if isinstance(value, float):
        if not isfinite(value):
            yield path
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _non_finite(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for at, element in enumerate(value):
            yield from _non_finite(element, f"{path}[{at}]")
    elif isinstance(value, Enum):
        yield from _non_finite(value.value, path)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _non_finite(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
