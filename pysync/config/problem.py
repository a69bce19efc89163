"""What is wrong with a configuration, and where."""

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault. `path` is the member as the file spells it (`collections[2].ttlMs`), `""` the whole file;
    `collection` is the name of the collection in which it lies, as nobody counts to 2."""

    path: str
    message: str
    collection: str = ""

    @property
    def location(self) -> str:
        """`collections[2].ttlMs (notes)`."""
        return f"{self.path} ({self.collection})" if self.collection else self.path

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.path else self.message


FieldError = tuple[str, str]
"""The member at fault, relative to its object, and the message."""


class ConfigError(Exception):
    """The configuration is invalid. `problems` has everything that was found, wrong types before broken
    rules, in `file` (`""`: not known, or named by the problems)."""

    def __init__(self, problems: Sequence[Problem], file: str = "") -> None:
        self.problems = tuple(problems)
        self.file = file
        lines = [*map(str, self.problems)]
        if file:
            many = [f"{file}: {len(lines)} problems", *(f"  {line}" for line in lines)]
            lines = [f"{file}: {lines[0]}"] if len(lines) == 1 else many
        super().__init__("\n".join(lines))

    def with_file(self, file: str | os.PathLike[str]) -> "ConfigError":
        """The same, of a file that is named, unless it could not be read: then it is named already."""
        is_named = self.file or not any(problem.path for problem in self.problems)
        return self if is_named else ConfigError(self.problems, os.fspath(file))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...], str]]:
        """A worker tells its parent what keeps it from starting."""
        return ConfigError, (self.problems, self.file)
