"""Folding: the current state of the sources, as events, and the lists that they make."""

from collections.abc import AsyncIterator, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from pysync import _core
from pysync.engine.append_log import LogRange, LogSettings
from pysync.engine.outbox import ParsedChange
from pysync.errors import DocumentCorrupt
from pysync.model import WriteEvent
from pysync.plugins import PluginContext
from pysync.plugins.projection.spec import EntryChange, ProjectionSpec
from pysync.plugins.projection.targets import DocumentLocation
from pysync.store import StoredObject

_AT_ONCE: Final = 256
"""Number of documents that are read together."""


@dataclass(slots=True)
class ChangedSource:
    """A source, and the announced writes to it. Without any, the whole source is read."""

    location: DocumentLocation
    changes: list[ParsedChange] = field(default_factory=list)

    @property
    def since_ms(self) -> int | None:
        """Return the time of the first of these writes."""
        return min((told.timestamp_ms for told in self.changes), default=None)


class SourceReader:
    """Reads what a service stores."""

    def __init__(self, services: PluginContext) -> None:
        self._store = services.store
        self._logs = services.logs
        self._now_ms = services.now_ms
        self._corruption = services.corruption

    async def events(
        self, changed: Sequence[ChangedSource]
    ) -> AsyncIterator[tuple[ChangedSource, WriteEvent | DocumentCorrupt]]:
        """Yield the writes to fold: the last write of each document and file, the elements of each log since
        the first announced write, in order, and all announced writes that are stored nowhere, without a body.
        A missing or expired object yields nothing, an unreadable one the error. `identity` is known if the
        write was announced. Raises StoreUnavailable."""
        documents = [one for one in changed if one.location.kind == "document"]
        for start in range(0, len(documents), _AT_ONCE):
            some = documents[start : start + _AT_ONCE]
            keys = list(dict.fromkeys(one.location.key for one in some))
            found = dict(zip(keys, await self._store.get_many(keys), strict=True))
            for one in some:
                stored = found[one.location.key]
                event = None if stored is None else self._event(one, stored)
                if event is not None:
                    yield one, event
        for one in changed:
            if one.location.kind == "log":
                async for element in self._elements(one):
                    yield one, element
            elif one.location.kind == "file":
                file = await self._file(one)
                if file is not None:
                    yield one, file
            elif one.location.kind == "nothing":
                for told in one.changes:
                    yield one, _bodiless(one.location, told.hash, told.timestamp_ms, told.ref.identity)

    async def _file(self, one: ChangedSource) -> WriteEvent | DocumentCorrupt | None:
        try:
            stat = await self._store.stat(one.location.key)
        except DocumentCorrupt as error:
            return error
        ttl_ms = one.location.collection.ttl_ms
        if stat is None or (ttl_ms is not None and stat.modified_ms + ttl_ms < self._now_ms()):
            return None
        writers = {told.hash: told.ref.identity for told in one.changes}
        return _bodiless(one.location, stat.sha256, stat.modified_ms, writers.get(stat.sha256, ""))

    def _event(self, one: ChangedSource, stored: StoredObject) -> WriteEvent | DocumentCorrupt | None:
        place = one.location
        try:
            document = _core.read_document(stored.body)
        except DocumentCorrupt as error:
            self._corruption.report_once(error, "document", place.key)
            return error
        ttl_ms = place.collection.ttl_ms
        if ttl_ms is not None and document.ts_ms + ttl_ms < self._now_ms():
            return None
        writers = {told.hash: told.ref.identity for told in one.changes}
        return WriteEvent(
            place.name,
            place.params,
            document.hash,
            document.ts_ms,
            text=document.data,
            identity=writers.get(document.hash) or None,
            namespace=place.namespace,
        )

    async def _elements(self, one: ChangedSource) -> AsyncIterator[WriteEvent | DocumentCorrupt]:
        place = one.location
        bounds = LogRange(since=None if one.since_ms is None else one.since_ms - 1)
        told = {told.timestamp_ms: told for told in one.changes}
        try:
            tail = await self._logs.read(place.key, bounds, LogSettings.from_collection(place.collection))
            async for chunk in tail.chunks():
                for element in orjson.loads(b"[%b]" % chunk.strip(b",")):
                    write = told.get(element["ts"])
                    yield WriteEvent(
                        place.name,
                        place.params,
                        "" if write is None else write.hash,
                        element["ts"],
                        text=orjson.dumps(element["data"]),
                        identity=None if write is None else write.ref.identity or None,
                        namespace=place.namespace,
                    )
        except DocumentCorrupt as error:
            yield error


def _bodiless(place: DocumentLocation, hash_: str, timestamp_ms: int, identity: str) -> WriteEvent:
    return WriteEvent(
        place.name,
        place.params,
        hash_,
        timestamp_ms,
        identity=identity or None,
        namespace=place.namespace,
    )


class NotAList(Exception):
    """The stored data is not `{"items": [..]}`."""


class PendingEntry(NamedTuple):
    """A change of an entry. `at_ms` is the time of the write that caused it: of two changes to one entry the
    later one counts. `since_ms`, the time of the first announced write, orders new entries."""

    projection: ProjectionSpec
    change: EntryChange
    at_ms: int
    since_ms: int


class FoldResult(NamedTuple):
    """The result of a fold: the new `body`, None if unchanged; the number of `entries` and of those
    `changed`; and the projections whose entries did not fit, once each."""

    body: _core.PushBody | None
    entries: int
    changed: int
    dropped: list[ProjectionSpec]


ListTransform = Callable[[bytes | None], FoldResult]
"""Transforms the text of the `data` of a list, None for a new list. Raises NotAList."""


def apply_entries(work: Sequence[PendingEntry]) -> ListTransform:
    """Return the transform that adds, replaces and removes entries. An existing entry keeps its position."""

    def fold(data: bytes | None) -> FoldResult:
        return _fold(data, work)

    return fold


def prune_entries(kept: Collection[str]) -> ListTransform:
    """Return the transform that removes entries whose ids are not in `kept`."""

    def prune(data: bytes | None) -> FoldResult:
        members, entries = _read(data)
        gone = [id_ for id_ in entries if isinstance(id_, str) and id_ not in kept]
        for id_ in gone:
            del entries[id_]
        return _fold_result(members, entries, len(gone), [])

    return prune


def _fold(data: bytes | None, work: Sequence[PendingEntry]) -> FoldResult:
    members, entries = _read(data)
    newest = {one.change.id: one for one in sorted(work, key=lambda one: one.at_ms)}
    first: dict[str, int] = {}
    for one in work:
        first[one.change.id] = min(one.since_ms, first.get(one.change.id, one.since_ms))
    changed, dropped = 0, []
    for id_ in sorted(newest, key=first.__getitem__):
        projection, (_, entry), _, _ = newest[id_]
        held = entries.get(id_)
        if entry is None:
            changed += entries.pop(id_, None) is not None
        elif held is None and projection.max_items is not None and len(entries) >= projection.max_items:
            dropped.append(projection)
        elif held is None or not _is_same(held, entry):
            entries[id_] = entry
            changed += 1
    return _fold_result(members, entries, changed, dropped)


def _read(data: bytes | None) -> tuple[dict[str, Any], dict[Hashable, Any]]:
    """Return the list's members, and its entries by id, in order. Foreign values among them, and duplicates,
    keep their position under a key that is no id."""
    members = {"items": []} if data is None else orjson.loads(data)
    items = members.get("items")
    if not isinstance(items, list):
        raise NotAList
    entries: dict[Hashable, Any] = {}
    for at, item in enumerate(items):
        id_ = item.get("id") if isinstance(item, dict) else None
        entries[id_ if isinstance(id_, str) and id_ not in entries else at] = item
    return members, entries


def _fold_result(
    members: dict[str, Any], entries: dict[Hashable, Any], changed: int, dropped: list[ProjectionSpec]
) -> FoldResult:
    body = None
    if changed:
        members["items"] = list(entries.values())
        body = _core.decode_push(orjson.dumps({"data": members}))
    return FoldResult(body, len(entries), changed, dropped)


def _is_same(one: object, other: object) -> bool:
    """Return True for equal JSON values; unlike Python, `1` is not `true`."""
    return one == other and orjson.dumps(one, option=orjson.OPT_SORT_KEYS) == orjson.dumps(
        other, option=orjson.OPT_SORT_KEYS
    )
