"""Validate `projections` and `events` sections.

See docs/reference/protocol.md#projected-lists and docs/reference/protocol.md#events.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from pysync.config import key_templates
from pysync.config.collection import Collection, collection_for_key
from pysync.config.key_templates import KeyTemplate
from pysync.config.problem import FieldError
from pysync.config.schema import Config, EventsConfig, ProjectionConfig
from pysync.protocol import JSON_TYPE

T = TypeVar("T")


def events_errors(plugin: EventsConfig, known: Mapping[str, list[Collection]]) -> Iterator[FieldError]:
    """Yield every rule that one `events` section breaks; `known` are the collections by their names."""
    if plugin.collection not in known:
        yield "collection", f"there is no collection {plugin.collection!r}"
    for message in path_errors(plugin.storage_path):
        yield "storagePath", message
    for collection in known.get(plugin.collection, ()):
        yield from _collection_errors(collection)
        yield from _parameter_errors(plugin, collection)


def path_errors(storage_path: str) -> Iterator[str]:
    """Yield the reasons why the text is not a valid template for files of events; nothing for a valid one."""
    yield from key_templates.errors(storage_path)
    if not KeyTemplate.of(storage_path).ends_in_param:
        yield "must end in a path parameter"


def overlapping_collections(plugin: EventsConfig, config: Config) -> Iterator[str]:
    """Yield the names of collections, and of other `events` sections, that may have the same keys as the
    section's files."""
    files = KeyTemplate.of(plugin.storage_path)
    for _, _, collection in config.each_collection():
        if collection.name != plugin.collection and files.overlaps(collection.key_template):
            yield collection.name
    for other in config.events:
        is_other = other.collection != plugin.collection
        if is_other and files.overlaps(KeyTemplate.of(other.storage_path)):
            yield f"the events of {other.collection}"


def _collection_errors(collection: Collection) -> Iterator[FieldError]:
    """Yield the reasons why the collection cannot take batches of events, which are JSON, each at its own
    path."""
    if {found.lower() for found in collection.allowed_mime_types} != {JSON_TYPE}:
        yield "collection", f"its allowedMimeTypes must be {JSON_TYPE}, and nothing else: batches are JSON"
    for member, is_set in (
        ("appendOnly", collection.append_only is not None),
        ("bundle", collection.bundle is not None),
        ("pullOnly", collection.pull_only),
        ("encryption", collection.encryption != "none"),
    ):
        if is_set:
            yield "collection", f"cannot have {member}"
    if not collection.path_template.ends_in_param:
        yield "collection", "its storagePath must end in a path parameter, which the server chooses"


def _parameter_errors(plugin: EventsConfig, collection: Collection) -> Iterator[FieldError]:
    files, path = KeyTemplate.of(plugin.storage_path), collection.path_template
    if not (files.ends_in_param and path.ends_in_param):
        return
    own, theirs = files.params, path.params
    if own[-1] != theirs[-1]:
        yield "storagePath", f"must end in {{{theirs[-1]}}}, as the collection's storagePath does"
        own, theirs = own[:-1], theirs[:-1]
    for name in own:
        if name not in theirs:
            yield "storagePath", f"{{{name}}} is not a parameter of the collection's storagePath"
    for name in theirs:
        if name not in own:
            message = f"must have the collection's parameters: without {{{name}}} batches are mixed"
            yield "storagePath", message


OBJECT_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_POINTER: Final = re.compile(r"(/([^~]|~[01])*)+", re.DOTALL)


QualifiedName = tuple[str, str]
"""A namespace, `""` for the root, and the name of a collection in it."""


def projection_name(projection: ProjectionConfig) -> str:
    """Return the name of the projection; its target if it has none."""
    return projection.name or projection.target


def projection_errors(projection: ProjectionConfig, config: Config) -> Iterator[FieldError]:
    """Yield every rule that one of the projections breaks."""
    if not projection.source:
        yield "source", "must name at least one collection"
    for name in projection.source:
        if not any(_collections_named(name, config)):
            yield "source", f"there is no collection {name!r}"
    sources = sources_of(projection, config)
    yield from _project_errors(projection, sources.values())
    yield from _target_errors(projection, sources, config)
    for member, pointers in (("value", projection.value.values()), ("removeWhen", projection.remove_when)):
        for collection in sources.values() if pointers else ():
            reason = no_body_reason(collection, config)
            if reason is not None:
                yield member, f"{collection.name} has no body to point into: {reason}"
        for pointer in pointers:
            if not pointer.startswith("/"):
                yield member, "JSON pointers start with a slash"
            elif not _POINTER.fullmatch(pointer):
                yield member, f"{pointer} is no JSON pointer: write ~0 for ~ and ~1 for /"


def repeated(items: Iterable[T], key: Callable[[T], object]) -> Iterator[tuple[T, T]]:
    """Yield the items whose key an earlier one already has, each with the first that has it."""
    first: dict[object, T] = {}
    for item in items:
        other = first.setdefault(key(item), item)
        if other is not item:
            yield item, other


def cycles(config: Config) -> Iterator[tuple[ProjectionConfig, str]]:
    """Yield the projections whose lists are projected back into one of their sources, so that each write
    would cause another, with the names of these sources. Lists that a function names are not checked."""
    into: dict[QualifiedName, set[QualifiedName]] = {}
    for projection in config.projections:
        for source in sources_of(projection, config):
            into.setdefault(source, set()).update(owners_of(projection, config))
    for projection in config.projections:
        own = owners_of(projection, config).keys()
        reached: set[QualifiedName] = set()
        ahead = set(own)
        while ahead - reached:
            reached |= ahead
            ahead = set().union(*(into.get(name, ()) for name in ahead))
        for _, name in sorted(reached & sources_of(projection, config).keys() - own):
            yield projection, name


def has_unowned_target(projection: ProjectionConfig, config: Config) -> bool:
    """Return True if its lists belong to no collection. Lists that a function names are not checked."""
    return not OBJECT_REFERENCE.fullmatch(projection.target) and not owners_of(projection, config)


def sources_of(projection: ProjectionConfig, config: Config) -> dict[QualifiedName, Collection]:
    """Return the collections whose writes are projected."""
    return {
        (namespace, found.name): found
        for source in projection.source
        for namespace, found in _collections_named(source, config)
    }


def owners_of(projection: ProjectionConfig, config: Config) -> dict[QualifiedName, Collection]:
    """Return the collections, of all namespaces, that the lists belong to; none if a function names them."""
    if OBJECT_REFERENCE.fullmatch(projection.target):
        return {}
    return {
        (namespace, found.name): found
        for namespace, _, collections in config.each_namespace()
        if (found := collection_for_key(collections, projection.target)) is not None
    }


def no_body_reason(collection: Collection, config: Config) -> str | None:
    """Return the reason why writes of the collection have no body that a projection could read; None if they
    have one."""
    if any(events.collection == collection.name for events in config.events):
        return "events stores its pushes as Parquet"
    if collection.append_only is not None and collection.append_only.persist is False:
        return "its appendOnly says persist=false, so nothing is stored"
    if not collection.accepts_json:
        return "it holds files: its allowedMimeTypes lack application/json"
    return None


def _project_errors(projection: ProjectionConfig, sources: Iterable[Collection]) -> Iterator[FieldError]:
    if projection.project is None:
        if projection.id is None:
            yield "id", "is required, or project"
        else:
            yield from _unknown_params("id", projection.id, sources)
        return
    if not OBJECT_REFERENCE.fullmatch(projection.project):
        yield "project", "must be module:function"
    if projection.id is not None or projection.value or projection.remove_when:
        yield "project", "stands in place of id, value and removeWhen"


def _target_errors(
    projection: ProjectionConfig, sources: Mapping[QualifiedName, Collection], config: Config
) -> Iterator[FieldError]:
    # module:function has the form of a template too
    faults = list(key_templates.errors(projection.target))
    for message in faults:
        yield "target", message
    yield from _unknown_params("target", projection.target, sources.values())
    if faults or OBJECT_REFERENCE.fullmatch(projection.target):
        return
    for name, found in owners_of(projection, config).items():
        if name in sources:
            yield "target", f"belongs to {found.name}, one of its sources"
        elif found.append_only is not None:
            yield "target", f"belongs to {found.name}, which is append-only"
        elif not found.accepts_json:
            yield "target", f"belongs to {found.name}, whose allowedMimeTypes lack application/json"


def _collections_named(source: str, config: Config) -> Iterator[tuple[str, Collection]]:
    """Yield the collections that a source may name: `notes` in any namespace, `acme/notes` in one, `/notes`
    in the root alone."""
    for namespace, _, collection in config.each_collection():
        if source in (collection.name, f"{namespace}/{collection.name}"):
            yield namespace, collection


def _unknown_params(member: str, text: str, sources: Iterable[Collection]) -> Iterator[FieldError]:
    for name in dict.fromkeys(key_templates.PARAM.findall(text)):
        if any(name not in source.path_template.params for source in sources):
            yield member, f"{{{name}}} is not a path parameter of every source"
