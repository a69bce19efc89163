"""The members that differ between two configurations, and which of them only a restart applies."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from pysync.config.collection import wire_name
from pysync.config.convert import join


class Change(NamedTuple):
    """A member that differs. `path` is as the file spells it; a list or a mapping differs as a whole."""

    path: str
    needs_restart: bool


def changes(old: Any, new: Any, path: str = "", *, needs_restart: bool = False) -> Iterator[Change]:
    """Yield the members that differ between two configurations, in the order of the reference."""
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        at, in_restart = join(path, wire_name(field.name)), needs_restart or field.metadata["restart"]
        if type(before) is type(after) and dataclasses.is_dataclass(before):
            yield from changes(before, after, at, needs_restart=in_restart)
        else:
            yield Change(at, in_restart)
