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

Place = tuple[str, Collection]
"""A namespace, `""` for the root, and one of its collections."""
_Name = tuple[str, str]
"""A namespace, and a collection's name in it."""


def projection_name(projection: Projection) -> str:
    return projection.name or projection.target


def projection_faults(projection: Projection, config: Config) -> Iterator[Fault]:
    """Every rule that one of the projections breaks."""
    if not projection.source:
        yield "source", "must name at least one collection"
    sources = []
    for name in projection.source:
        found = list(_named(name, config))
        if not found:
            yield "source", f"there is no collection {name!r}"
        sources += [collection for _, collection in found]
    yield from _project(projection, sources)
    yield from _target(projection, sources, config)
    for member, pointers in (("value", projection.value.values()), ("removeWhen", projection.remove_when)):
        for collection in sources if pointers else ():
            reason = bodiless(collection, config)
            if reason is not None:
                yield member, f"{collection.name} has no body to point into: {reason}"
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
    into: dict[_Name, set[_Name]] = {}
    for projection in config.projections:
        for source in sources_of(projection, config):
            into.setdefault(_name(source), set()).update(_owner_names(projection, config))
    for projection in config.projections:
        reached: set[_Name] = set()
        ahead = _owner_names(projection, config)
        while ahead - reached:
            reached |= ahead
            ahead = set().union(*(into.get(name, ()) for name in ahead))
        own = _owner_names(projection, config)
        sources = set(map(_name, sources_of(projection, config)))
        for _, name in sorted(reached & sources - own):
            yield projection, ("target", f"leads back to {name}, one of its sources, by other projections")


def orphaned_target(projection: Projection, config: Config) -> bool:
    """Whether its lists belong to no collection, as far as that can be told."""
    return not OBJECT_OF_MODULE.fullmatch(projection.target) and not owners_of(projection, config)


def sources_of(projection: Projection, config: Config) -> list[Place]:
    """The collections whose writes are projected, each once."""
    found = {id(place[1]): place for name in projection.source for place in _named(name, config)}
    return list(found.values())


def owners_of(projection: Projection, config: Config) -> list[Place]:
    """The collections of all namespaces that the lists belong to; none where a function names the lists."""
    if OBJECT_OF_MODULE.fullmatch(projection.target):
        return []
    return [
        (namespace, found)
        for namespace, _, collections in config.each_namespace()
        if (found := owner(collections, projection.target)) is not None
    ]


def bodiless(collection: Collection, config: Config) -> str | None:
    """Explain why writes of the collection have no body that a projection could read; None if they have."""
    if any(events.collection == collection.name for events in config.events):
        return "events stores its pushes as Parquet"
    if collection.append_only is not None and collection.append_only.persist is False:
        return "its appendOnly says persist=false, so nothing is stored"
    if not holds_documents(collection):
        return "it holds files: its allowedMimeTypes lack application/json"
    return None


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
    own = [collection for _, collection in sources_of(projection, config)]
    for _, found in owners_of(projection, config):
        if any(found is source for source in own):
            yield "target", f"belongs to {found.name}, one of its sources"
        elif found.append_only is not None:
            yield "target", f"belongs to {found.name}, which is append-only"
        elif not holds_documents(found):
            yield "target", f"belongs to {found.name}, whose allowedMimeTypes lack application/json"


def _named(source: str, config: Config) -> Iterator[Place]:
    """The collections that a source may mean: `notes` in any namespace, `acme/notes` in one, `/notes` in the
    root alone."""
    for namespace, _, collections in config.each_namespace():
        for collection in collections:
            if source in (collection.name, f"{namespace}/{collection.name}"):
                yield namespace, collection


def _name(place: Place) -> _Name:
    namespace, collection = place
    return namespace, collection.name


def _owner_names(projection: Projection, config: Config) -> set[_Name]:
    return set(map(_name, owners_of(projection, config)))


def _known_params(member: str, text: str, sources: list[Collection]) -> Iterator[Fault]:
    for name in dict.fromkeys(template.PARAM.findall(text)):
        if any(name not in template.params(source.storage_path) for source in sources):
            yield member, f"{{{name}}} is not a path parameter of every source"
