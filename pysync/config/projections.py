"""What is refused of projections, and what is probably not meant (wire section 10)."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from pysync.config import template
from pysync.config.effective import owner
from pysync.config.media import holds_documents
from pysync.config.tree import Collection, Config, Projection

OBJECT_OF_MODULE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_POINTER: Final = re.compile(r"(/([^~]|~[01])*)+", re.DOTALL)

Fault = tuple[str, str]
"""The member at fault, relative to its object, and the message."""


def projection_name(projection: Projection) -> str:
    return projection.name or projection.target


def projection_faults(projection: Projection, config: Config) -> Iterator[Fault]:
    """Every rule that one of the projections breaks."""
    known = config.by_name()
    if not projection.source:
        yield "source", "must name at least one collection"
    for name in projection.source:
        if name not in known:
            yield "source", f"there is no collection {name!r}"
        for collection in known.get(name, ()):
            yield from _source(collection, config)
    sources = [collection for name in projection.source for collection in known.get(name, ())]
    yield from _project(projection, sources)
    yield from _target(projection, sources, config)
    for member, pointers in (("value", projection.value.values()), ("removeWhen", projection.remove_when)):
        for pointer in pointers:
            if not pointer.startswith("/"):
                yield member, "JSON pointers start with a slash"
            elif not _POINTER.fullmatch(pointer):
                yield member, f"{pointer} is no JSON pointer: write ~0 for ~ and ~1 for /"


def repeated_names(projections: Sequence[Projection]) -> Iterator[tuple[Projection, Fault]]:
    """The projections whose name another one has."""
    first: dict[str, Projection] = {}
    for projection in projections:
        name = projection_name(projection)
        if first.setdefault(name, projection) is projection:
            continue
        if projection.name is None:
            yield projection, ("name", f"is required: {name!r} is also another projection's")
        else:
            yield projection, ("name", f"{name!r} is also another projection's")


def circles(config: Config) -> Iterator[tuple[Projection, Fault]]:
    """The projections whose lists are projected back into one of their sources, as far as can be told: each
    write would be followed by another."""
    into: dict[str, set[str]] = {}
    for projection in config.projections:
        for name in projection.source:
            into.setdefault(name, set()).update(_owner_names(projection, config))
    for projection in config.projections:
        reached: set[str] = set()
        ahead = _owner_names(projection, config)
        while ahead - reached:
            reached |= ahead
            ahead = set().union(*(into.get(name, ()) for name in ahead))
        own = _owner_names(projection, config)
        for name in sorted(reached & set(projection.source) - own):
            yield projection, ("target", f"leads back to {name}, one of its sources, by other projections")


def orphaned_target(projection: Projection, config: Config) -> bool:
    """Whether its lists belong to no collection, as far as that can be told."""
    return not OBJECT_OF_MODULE.fullmatch(projection.target) and not _owners(projection.target, config)


def _source(collection: Collection, config: Config) -> Iterator[Fault]:
    name = collection.name
    if not holds_documents(collection):
        yield "source", f"{name} holds no documents: its allowedMimeTypes lack application/json"
    if collection.append_only is not None and collection.append_only.persist is False:
        yield "source", f"{name} stores nothing: its appendOnly says persist=false"
    if any(events.collection == name for events in config.events):
        yield "source", f"{name} holds no documents: events stores its pushes as Parquet"


def _project(projection: Projection, sources: list[Collection]) -> Iterator[Fault]:
    if projection.project is None:
        if projection.id is None:
            yield "id", "is required, or project"
        else:
            yield from _known_params("id", projection.id, sources)
        return
    if not OBJECT_OF_MODULE.fullmatch(projection.project):
        yield "project", "must be module:function"
    if projection.id is not None or projection.value or projection.remove_when:
        yield "project", "stands in place of id, value and removeWhen"


def _target(projection: Projection, sources: list[Collection], config: Config) -> Iterator[Fault]:
    # module:function has the form of a template too
    faults = list(template.faults(projection.target))
    for message in faults:
        yield "target", message
    yield from _known_params("target", projection.target, sources)
    if faults or OBJECT_OF_MODULE.fullmatch(projection.target):
        return
    for found in _owners(projection.target, config):
        if found.name in projection.source:
            yield "target", f"belongs to {found.name}, one of its sources"
        elif found.append_only is not None:
            yield "target", f"belongs to {found.name}, which is append-only"
        elif not holds_documents(found):
            yield "target", f"belongs to {found.name}, whose allowedMimeTypes lack application/json"


def _owners(target: str, config: Config) -> list[Collection]:
    """The collections of all namespaces that the lists belong to."""
    return [
        found
        for _, _, collections in config.each_namespace()
        if (found := owner(collections, target)) is not None
    ]


def _owner_names(projection: Projection, config: Config) -> set[str]:
    if OBJECT_OF_MODULE.fullmatch(projection.target):
        return set()
    return {found.name for found in _owners(projection.target, config)}


def _known_params(member: str, text: str, sources: list[Collection]) -> Iterator[Fault]:
    for name in dict.fromkeys(template.PARAM.findall(text)):
        if any(name not in template.params(source.storage_path) for source in sources):
            yield member, f"{{{name}}} is not a path parameter of every source"
