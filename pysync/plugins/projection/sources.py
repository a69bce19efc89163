"""The sources of lists: the collections that keys belong to, and the writes that they now contain."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import orjson

from pysync import _core
from pysync.config import Collection, Config
from pysync.config.collection import collection_for_key
from pysync.config.key_templates import (
    MAX_KEY_BYTES,
    MAX_PARAMETER_BYTES,
    RESERVED,
    KeyTemplate,
    TemplateIndex,
    errors,
)
from pysync.engine.append_log import LogRange, LogSettings
from pysync.engine.changes import DocumentRef, ParsedChange
from pysync.errors import CheckpointTooOld, DocumentCorrupt
from pysync.model import WriteEvent
from pysync.plugins import PluginContext
from pysync.plugins.events.batch_ids import SUFFIX
from pysync.plugins.projection.spec import ProjectionSpec
from pysync.protocol import JSON_TYPE
from pysync.store import StoredObject

MAX_DOCUMENTS: Final = 256
"""Number of documents that are read together, and folded into a list when it is rebuilt."""

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

    def event(self, hash_: str, ts_ms: int, text: bytes | None = None, identity: str = "") -> WriteEvent:
        """Return a write of the document."""
        return WriteEvent(self.name, self.params, hash_, ts_ms, text, identity or None, self.namespace)

    def is_expired(self, ts_ms: int, now_ms: int) -> bool:
        """Return True if the document was last written longer ago than its collection keeps it."""
        ttl_ms = self.collection.ttl_ms
        return ttl_ms is not None and ts_ms + ttl_ms < now_ms


class KeyResolver:
    """Resolves the keys of a configuration's collections."""

    def __init__(self, config: Config) -> None:
        self._by_namespace = {name or None: collections for name, _, collections in config.each_namespace()}
        self._by_name = {
            (namespace, collection.name): collection
            for namespace, collections in self._by_namespace.items()
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

    def locate(self, ref: DocumentRef) -> DocumentLocation | None:
        """Return the document of `document_ref`; None if the configuration has changed since."""
        collection = self._by_name.get((ref.namespace, ref.collection))
        if collection is None or set(collection.path_template.params) != set(ref.params):
            return None
        path, suffix = self.stored_at(collection)
        key = path.fill(ref.params) + suffix
        return DocumentLocation(
            ref.namespace, collection.name, key, dict(ref.params), collection, self._kind(collection)
        )

    def locate_all(
        self, ref: DocumentRef, reads: Callable[[str | None, str], bool]
    ) -> list[DocumentLocation]:
        """Return the collections that contain the written key and are read, the writer's first."""
        is_read = reads(ref.namespace, ref.collection)
        own = self.locate(ref) if is_read or not ref.key else None
        key = ref.key or (own.key if own is not None else "")
        found = [own] if own is not None and is_read else []
        for suffix, index in self._index.items():
            for (namespace, collection), _ in index.find(key.removesuffix(suffix)):
                if reads(namespace, collection.name):
                    location = self.location_at(namespace, collection, key)
                    if location is not None and location != own:
                        found.append(location)
        return found

    def owners(self, key: str) -> list[DocumentLocation]:
        """Return the collection of each namespace that the key belongs to."""
        return [
            self._location(namespace, found, key)
            for namespace, collections in self._by_namespace.items()
            if (found := collection_for_key(collections, key)) is not None
        ]

    def why_not_allowed(self, projection: ProjectionSpec, key: object) -> str | None:
        """Return the reason why the projection may not keep a list at `key`; None if it may."""
        if not isinstance(key, str) or not _is_key(key):
            return "is no key"
        for location in self.owners(key):
            if projection.reads(location.namespace, location.name):
                return f"belongs to {location.name}, one of its sources"
            if location.collection.append_only is not None:
                return f"belongs to {location.name}, which is append-only"
            if JSON_TYPE not in location.collection.allowed_mime_types:
                return f"belongs to {location.name}, which holds files"
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
        if not suffix:
            found = collection_for_key(self._by_namespace[namespace], key)
            if found is None or found.key_template.shape != path.shape:
                return None
        return self._location(namespace, collection, key)

    def is_list(self, template: KeyTemplate, key: str) -> bool:
        """Return True if the template of lists, which matches `key`, owns it rather than a collection."""
        return all(
            collection_for_key(collections, key) is collection_for_key(collections, template.text)
            for collections in self._by_namespace.values()
        )

    def has_unstored_sources(self, projection: ProjectionSpec) -> bool:
        """Return True if the list has entries from writes that are not stored, so that superfluous entries
        cannot be recognised."""
        return any(self._kind(collection) == "nothing" for _, collection in self.sources(projection))

    def _kind(self, collection: Collection) -> StoredKind:
        if collection.append_only is not None:
            return "nothing" if collection.append_only.persist is False else "log"
        is_file = collection.name in self._batches or not collection.accepts_json
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


@dataclass(slots=True)
class ChangedSource:
    """A source, and the announced writes to it. Without any, the whole source is read."""

    location: DocumentLocation
    changes: list[ParsedChange] = field(default_factory=list)

    @property
    def since_ms(self) -> int | None:
        """Return the time of the first of these writes."""
        return min((change.timestamp_ms for change in self.changes), default=None)

    def removal(self) -> WriteEvent | None:
        """Return the last announced removal; None without one."""
        for change in reversed(self.changes):
            if change.removed:
                found = self.location.event(change.hash, change.timestamp_ms, b"{}", change.identity)
                return replace(found, removed=True)
        return None

    def event(self, hash_: str, ts_ms: int, text: bytes | None = None) -> WriteEvent:
        """Return the write that stored this version, with its writer if it was announced."""
        writers = {change.hash: change.identity for change in self.changes}
        return self.location.event(hash_, ts_ms, text, writers.get(hash_, ""))


class SourceReader:
    """Reads what a service stores."""

    def __init__(self, services: PluginContext) -> None:
        self._services = services

    async def events(
        self, changed: Sequence[ChangedSource]
    ) -> AsyncIterator[tuple[ChangedSource, WriteEvent | DocumentCorrupt]]:
        """Yield the writes to fold: the last write of each document and file, the elements of each log since
        the first announced write, in order, and all announced writes that are stored nowhere, without a body.
        A missing or expired object yields its announced removal, or else nothing; an unreadable one yields
        the error. `identity` is known if the write was announced. Raises StoreUnavailable."""
        documents = [source for source in changed if source.location.kind == "document"]
        for start in range(0, len(documents), MAX_DOCUMENTS):
            some = documents[start : start + MAX_DOCUMENTS]
            keys = list(dict.fromkeys(source.location.key for source in some))
            found = await self._services.store.get_many(keys)
            for source in some:
                stored = found[source.location.key]
                event = None if stored is None else self._document(source, stored)
                event = event or source.removal()
                if event is not None:
                    yield source, event
        for source in changed:
            if source.location.kind == "log":
                if (removal := source.removal()) is not None:
                    yield source, removal
                async for element in self._elements(source):
                    yield source, element
            elif source.location.kind == "file":
                file = await self._file(source) or source.removal()
                if file is not None:
                    yield source, file
            elif source.location.kind == "nothing":
                for change in source.changes:
                    yield (
                        source,
                        source.location.event(change.hash, change.timestamp_ms, identity=change.identity),
                    )

    async def _file(self, source: ChangedSource) -> WriteEvent | DocumentCorrupt | None:
        try:
            stat = await self._services.store.stat(source.location.key)
        except DocumentCorrupt as error:
            return error
        if stat is None or source.location.is_expired(stat.modified_ms, self._services.now_ms()):
            return None
        return source.event(stat.sha256, stat.modified_ms)

    def _document(self, source: ChangedSource, stored: StoredObject) -> WriteEvent | DocumentCorrupt | None:
        try:
            document = _core.read_document(stored.body)
        except DocumentCorrupt as error:
            self._services.corruption.report_once(error, "document", source.location.key)
            return error
        if source.location.is_expired(document.ts_ms, self._services.now_ms()):
            return None
        return source.event(document.hash, document.ts_ms, document.data)

    async def _elements(
        self, source: ChangedSource, after_ms: int | None = None
    ) -> AsyncIterator[WriteEvent | DocumentCorrupt]:
        """Yield the elements after `after_ms`, or from the first announced one on."""
        location = source.location
        if after_ms is None and source.since_ms is not None:
            after_ms = source.since_ms - 1
        bounds = LogRange(since=after_ms)
        announced = {change.timestamp_ms: change for change in source.changes}
        try:
            tail = await self._services.logs.read(
                location.key, bounds, LogSettings.from_collection(location.collection)
            )
            async for chunk in tail.chunks():
                for element in orjson.loads(b"[%b]" % chunk.strip(b",")):
                    change = announced.get(element["ts"])
                    hash_, identity = ("", "") if change is None else (change.hash, change.identity)
                    yield location.event(hash_, element["ts"], orjson.dumps(element["data"]), identity)
        except CheckpointTooOld as error:
            # Announced elements have left the log: those after them are left.
            async for event in self._elements(source, error.earliest_ms):
                yield event
        except DocumentCorrupt as error:
            yield error
