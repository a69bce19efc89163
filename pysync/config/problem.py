"""Problems of a configuration and their locations."""

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One problem. `path` is the member as the file spells it (`collections[2].ttlMs`), `""` for the whole
    file. `collection` is the name of the collection that contains it, because an index is hard to find in the
    file."""

    path: str
    message: str
    collection: str = ""

    @property
    def location(self) -> str:
        """The path and the name of the collection: `collections[2].ttlMs (notes)`."""
        return f"{self.path} ({self.collection})" if self.collection else self.path

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.path else self.message


FieldError = tuple[str, str]
"""The path of the invalid member, relative to its object, and the message."""


class ConfigError(Exception):
    """The configuration is invalid. `problems` has everything that was found, wrong types before broken
    rules, in `file` (`""`: unknown, or named by the problems)."""

    def __init__(self, problems: Sequence[Problem], file: str = "") -> None:
        super().__init__(tuple(problems), file)  # what a worker pickles for its parent
        self.problems = tuple(problems)
        self.file = file

    def __str__(self) -> str:
        lines = [*map(str, self.problems)]
        if self.file and len(lines) > 1:
            return "\n  ".join([f"{self.file}: {len(lines)} problems", *lines])
        return f"{self.file}: {lines[0]}" if self.file else "\n".join(lines)

    def with_file(self, file: str | os.PathLike[str]) -> "ConfigError":
        """Return this error with the name of its file, unless the problems name it already, as for a file
        that could not be read."""
        is_named = self.file or not any(problem.path for problem in self.problems)
        return self if is_named else ConfigError(self.problems, os.fspath(file))
