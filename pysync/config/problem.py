"""What is wrong with a configuration, and where."""

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
    def place(self) -> str:
        """`collections[2].ttlMs (notes)`."""
        return f"{self.path} ({self.collection})" if self.collection else self.path

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.path else self.message


class ConfigError(Exception):
    """The configuration is refused. `problems` is all that was found, wrong types before broken rules."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        """A worker tells its parent what keeps it from starting."""
        return ConfigError, (self.problems,)
