"""The collections that keys belong to, and the keys that projections may write."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pysync.config import Collection, Config
from pysync.config.derived import accepts_json, collection_for_key
from pysync.config.key_templates import (
    MAX_KEY_BYTES,
    MAX_PARAMETER_BYTES,
    RESERVED,
    KeyTemplate,
    TemplateIndex,
    errors,
)
from pysync.engine.outbox import DocumentRef
from pysync.plugins.events.batch_ids import SUFFIX
from pysync.plugins.projection.spec import ProjectionSpec
from pysync.protocol import JSON_TYPE

StoredKind = Literal["document", "log", "file", "nothing"]
"""The stored object of a write."""


@dataclass(frozen=True, slots=True)
class DocumentLocation:
    """The stored object of a collection at a key."""

    namespace: str | None
    name: str
    key: str
    params: dict[str, str] = field(compare=False)
    collection: Collection = field(compare=False, repr=False)
    kind: StoredKind = field(compare=False)

    @property
    def document_ref(self) -> DocumentRef:
        """Return the reference of the document, for a write by the server itself."""
        return DocumentRef(self.name, self.params, self.namespace, key=self.key)


class KeyResolver:
    """Resolves the keys of a configuration's collections."""

    def __init__(self, config: Config) -> None:
        self._by_namespace = [(name or None, collections) for name, _, collections in config.each_namespace()]
        self._by_name = {
            (namespace, collection.name): collection
            for namespace, collections in self._by_namespace
            for collection in collections
        }
        self._batches = {events.collection: KeyTemplate.of(events.storage_path) for events in config.events}
        self._index: dict[str, TemplateIndex[tuple[str | None, Collection]]] = {}
        for (namespace, _), collection in self._by_name.items():
            path, suffix = self.stored_at(collection)
            self._index.setdefault(suffix, TemplateIndex()).add(path, (namespace, collection))

    def stored_at(self, collection: Collection) -> tuple[KeyTemplate, str]:
        """Return the template of the keys at which a collection stores its objects, and the suffix."""
        batches = self._batches.get(collection.name)
        return (collection.key_template, "") if batches is None else (batches, SUFFIX)

    def locate(self, subject: DocumentRef) -> DocumentLocation | None:
        """Return the document of `document_ref`; None if the configuration has changed since."""
        collection = self._by_name.get((subject.namespace, subject.collection))
        if collection is None or set(collection.path_template.params) != set(subject.params):
            return None
        path, suffix = self.stored_at(collection)
        key = path.fill(subject.params) + suffix
        kind = self._kind(collection)
        return DocumentLocation(
            subject.namespace, subject.collection, key, dict(subject.params), collection, kind
        )

    def locate_all(
        self, subject: DocumentRef, reads: Callable[[str | None, str], bool]
    ) -> list[DocumentLocation]:
        """Return the collections that contain the written key and are read, the writer's first."""
        own = (
            self.locate(subject) if not subject.key or reads(subject.namespace, subject.collection) else None
        )
        key = subject.key or (own.key if own is not None else "")
        found = [own] if own is not None and reads(own.namespace, own.name) else []
        for suffix, index in self._index.items():
            for (namespace, collection), _ in index.find(key.removesuffix(suffix)):
                place = (
                    self.location_at(namespace, collection, key)
                    if reads(namespace, collection.name)
                    else None
                )
                if place is not None and place != own:
                    found.append(place)
        return found

    def owners(self, key: str) -> list[DocumentLocation]:
        """Return the collection of each namespace that the key belongs to."""
        return [
            self._location(namespace, found, key)
            for namespace, collections in self._by_namespace
            if (found := collection_for_key(collections, key)) is not None
        ]

    def why_not_allowed(self, projection: ProjectionSpec, key: object) -> str | None:
        """Return the reason why the projection may not keep a list at `key`; None if it may."""
        if not isinstance(key, str) or not _is_key(key):
            return "is no key"
        for place in self.owners(key):
            if projection.reads(place.namespace, place.name):
                return f"belongs to {place.name}, one of its sources"
            if place.collection.append_only is not None:
                return f"belongs to {place.name}, which is append-only"
            if JSON_TYPE not in place.collection.allowed_mime_types:
                return f"belongs to {place.name}, which holds files"
        return None

    def sources(self, projection: ProjectionSpec) -> Iterator[tuple[str | None, Collection]]:
        """Yield the collections that the projection reads, with their namespaces."""
        for (namespace, name), collection in self._by_name.items():
            if projection.reads(namespace, name):
                yield namespace, collection

    def location_at(self, namespace: str | None, collection: Collection, key: str) -> DocumentLocation | None:
        """Return the document of the collection at `key`; None if the key belongs to another collection or to
        none."""
        path, suffix = self.stored_at(collection)
        bare = key.removesuffix(suffix)
        if not key.endswith(suffix) or key.startswith(RESERVED) or not path.matches(bare):
            return None
        for own, collections in self._by_namespace:
            if own == namespace and not suffix:
                found = collection_for_key(collections, key)
                if found is None or found.key_template.shape != path.shape:
                    return None
        return self._location(namespace, collection, key)

    def is_list(self, target: str, key: str) -> bool:
        """Return True if a template of lists matches `key`, and no other collection owns it."""
        return KeyTemplate.of(target).matches(key) and all(
            collection_for_key(collections, key) is collection_for_key(collections, target)
            for _, collections in self._by_namespace
        )

    def has_unstored_sources(self, projection: ProjectionSpec) -> bool:
        """Return True if the list has entries from writes that are not stored, so that superfluous entries
        cannot be recognised."""
        return any(self._kind(collection) == "nothing" for _, collection in self.sources(projection))

    def _kind(self, collection: Collection) -> StoredKind:
        if collection.append_only is not None:
            return "nothing" if collection.append_only.persist is False else "log"
        is_file = collection.name in self._batches or not accepts_json(collection)
        return "file" if is_file else "document"

    def _location(self, namespace: str | None, collection: Collection, key: str) -> DocumentLocation:
        path, suffix = self.stored_at(collection)
        params = path.params_of(key.removesuffix(suffix))
        return DocumentLocation(namespace, collection.name, key, params, collection, self._kind(collection))


def _is_key(key: str) -> bool:
    return (
        bool(key)
        and not KeyTemplate(key).params
        and not any(errors(key))
        and len(key.encode()) <= MAX_KEY_BYTES
        and max(map(len, key.split("/"))) <= MAX_PARAMETER_BYTES
    )
