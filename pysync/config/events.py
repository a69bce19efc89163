"""What is refused of an `events` section, and what is probably not meant (service, Events plugin)."""

from collections.abc import Iterator, Mapping, Sequence

from pysync.config import template
from pysync.config.effective import document_path
from pysync.config.tree import Collection, Config, EventsPlugin
from pysync.protocol import JSON_TYPE

Fault = tuple[str, str]
"""The member at fault, relative to its object, and the message."""


def events_faults(plugin: EventsPlugin, known: Mapping[str, list[Collection]]) -> Iterator[Fault]:
    """Every rule that one of the plugins breaks; `known` are the collections by their names."""
    if plugin.collection not in known:
        yield "collection", f"there is no collection {plugin.collection!r}"
    for message in path_faults(plugin.storage_path):
        yield "storagePath", message
    for collection in known.get(plugin.collection, ()):
        yield from _unfit(collection)
        yield from _parameters(plugin, collection)


def path_faults(storage_path: str) -> Iterator[str]:
    """What keeps the text from being the template of files of events, nothing for a good one."""
    yield from template.faults(storage_path)
    if not template.PARAM.fullmatch(_last(storage_path)):
        yield "must end in a path parameter"


def repeated_collections(plugins: Sequence[EventsPlugin]) -> Iterator[tuple[EventsPlugin, Fault]]:
    """The plugins whose collection another one has."""
    first: dict[str, EventsPlugin] = {}
    for plugin in plugins:
        if first.setdefault(plugin.collection, plugin) is not plugin:
            yield plugin, ("collection", f"{plugin.collection!r} is also another one's")


def strangers(plugin: EventsPlugin, config: Config) -> Iterator[str]:
    """The names of what else has keys that the plugin's files may have."""
    for _, _, collections in config.each_namespace():
        for collection in collections:
            is_other = collection.name != plugin.collection
            if is_other and template.meet(plugin.storage_path, document_path(collection)):
                yield collection.name
    for other in config.events:
        is_other = other.collection != plugin.collection
        if is_other and template.meet(plugin.storage_path, other.storage_path):
            yield f"the events of {other.collection}"


def _unfit(collection: Collection) -> Iterator[Fault]:
    """What keeps the collection from taking batches of events: JSON, each at a path of its own."""
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
    if not template.PARAM.fullmatch(_last(collection.storage_path)):
        yield "collection", "its storagePath must end in a path parameter, which the server chooses"


def _parameters(plugin: EventsPlugin, collection: Collection) -> Iterator[Fault]:
    id_ = _last(collection.storage_path)
    own, theirs = template.params(plugin.storage_path), template.params(collection.storage_path)
    if not (template.PARAM.fullmatch(id_) and template.PARAM.fullmatch(_last(plugin.storage_path))):
        return
    if _last(plugin.storage_path) != id_:
        yield "storagePath", f"must end in {id_}, as the collection's storagePath does"
        own, theirs = own[:-1], theirs[:-1]
    for name in own:
        if name not in theirs:
            yield "storagePath", f"{{{name}}} is not a parameter of the collection's storagePath"
    for name in theirs:
        if name not in own:
            yield (
                "storagePath",
                f"must have the collection's parameters: without {{{name}}} batches are mixed",
            )


def _last(path: str) -> str:
    return path.rpartition("/")[2]
