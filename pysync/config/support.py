"""What the configuration may say and this version does not serve yet."""

from collections.abc import Iterator

from pysync.config.problem import Problem
from pysync.config.tree import Collection, Config

_NOT_YET = "not served by this version"


def is_served(collection: Collection) -> bool:
    """Whether this version serves the collection: JSON documents, one at a time."""
    return (
        collection.append_only is None
        and collection.bundle is None
        and "application/json" in collection.allowed_mime_types
    )


def unserved(config: Config) -> Iterator[Problem]:
    """The members that are accepted and have no effect yet, in the order of the file."""
    for _, path, collections in config.each_namespace():
        for at, collection in enumerate(collections):
            if not is_served(collection):
                yield Problem(f"{path}[{at}]", f"{collection.name}: {_NOT_YET}")
            elif collection.listable:
                yield Problem(f"{path}[{at}].listable", _NOT_YET)
    for member, said in (
        ("auth.spaces", config.auth.spaces is not None),
        ("configEndpoint", config.config_endpoint is not None),
        ("projections", bool(config.projections)),
        ("events", bool(config.events)),
        ("plugins", bool(config.plugins)),
    ):
        if said:
            yield Problem(member, _NOT_YET)
