"""What the configuration may say and this version does not serve yet."""

from collections.abc import Iterable, Iterator

from pysync.config.problem import Problem
from pysync.config.tree import Collection, Config

_NOT_YET = "not served by this version"


def served(config: Config, collections: Iterable[Collection]) -> Iterator[Collection]:
    """Those of the collections that this version serves. What `events` turns into Parquet is not: stored as
    documents, its batches would stay for good."""
    batched = {plugin.collection for plugin in config.events}
    return (collection for collection in collections if collection.name not in batched)


def unserved(config: Config) -> Iterator[Problem]:
    """The members that are accepted and have no effect yet."""
    for _, path, collections in config.each_namespace():
        for at, collection in enumerate(collections):
            if not any(served(config, [collection])):
                yield Problem(f"{path}[{at}]", _NOT_YET, collection.name)
    if config.events:
        yield Problem("events", _NOT_YET)
