"""What the configuration may say and this version does not serve yet: nothing."""

from collections.abc import Iterable, Iterator

from pysync.config.problem import Problem
from pysync.config.tree import Collection, Config


def served(config: Config, collections: Iterable[Collection]) -> Iterator[Collection]:
    """Those of the collections that this version serves."""
    return iter(collections)


def unserved(config: Config) -> Iterator[Problem]:
    """The members that are accepted and have no effect yet."""
    return iter(())
