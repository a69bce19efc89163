"""Writes of lists: each is a conditional put of the whole list, over a version read before its sources were
read.

A writer that succeeds has therefore read its sources later than every earlier writer, and the last put
reflects their newest state, whatever the order of changes and the number of processes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from pysync import _core
from pysync.concurrency import CONCURRENT, PYTHON_IN_THREAD_ABOVE, gather_bounded
from pysync.config.key_templates import RESERVED, KeyTemplate
from pysync.engine.changes import ParsedChange
from pysync.errors import DocumentCorrupt
from pysync.model import WriteEvent
from pysync.plugins import PluginContext
from pysync.plugins.projection.sources import ChangedSource, DocumentLocation, KeyResolver, SourceReader
from pysync.plugins.projection.spec import EntryChange, ProjectionSpec
from pysync.store import ABSENT, Etag, EtagMismatch, Precondition, StoredObject, Write

MAX_FAILED_LISTS: Final = 16
"""Number of lists that may fail before the rest is not attempted: one that fails must not hold up others."""

log = logging.getLogger("pysync.projections")

T = TypeVar("T")

ListSource = tuple[ProjectionSpec, ChangedSource]
"""A source that a projection folds into a list."""


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
MakeChange = Callable[[], Awaitable[ListTransform | None]]
"""Returns the transform for a list that has just been read; None to leave it."""


def prune_entries(kept: Collection[str], data: bytes | None) -> FoldResult:
    """Remove entries whose ids are not in `kept`."""
    members, entries = _read(data)
    gone = [id_ for id_ in entries if isinstance(id_, str) and id_ not in kept]
    for id_ in gone:
        del entries[id_]
    return _fold_result(members, entries, len(gone), [])


def apply_entries(work: Sequence[PendingEntry], data: bytes | None) -> FoldResult:
    """Add, replace and remove entries. An existing entry keeps its position."""
    members, entries = _read(data)
    newest = {one.change.id: one for one in sorted(work, key=lambda one: one.at_ms)}
    latest_first = sorted(work, key=lambda one: one.since_ms, reverse=True)
    first = {one.change.id: one.since_ms for one in latest_first}
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


class ListWriteOutcome(NamedTuple):
    """The outcome of a write of a list: the number of its entries, and of those added, changed or removed."""

    entries: int = 0
    changed: int = 0


class _LoadedList(NamedTuple):
    """A list as it was read: the text of its `data`, None without a list; the version that a put replaces,
    and its hash."""

    data: bytes | None
    precondition: Precondition
    hash: str


class ListWriter:
    """Writes the lists of `projections` to the store of a service."""

    def __init__(self, projections: Sequence[ProjectionSpec], services: PluginContext) -> None:
        self.projections = projections
        self._config = services.config
        self._keys = KeyResolver(services.config)
        self.sources = SourceReader(services)
        self._services = services

    @property
    def keys(self) -> KeyResolver:
        """The keys of the configuration in force."""
        if self._config is not self._services.config:
            self._config = self._services.config
            self._keys = KeyResolver(self._config)
        return self._keys

    async def fold(self, changes: Sequence[ParsedChange]) -> None:
        """Update the lists affected by these writes, each with one put. Raises Unavailable; some lists may
        then be updated."""
        groups = await self._grouped(self._changed_sources(changes))
        await gather_bounded(
            CONCURRENT, groups, lambda key: self.fold_list(key, groups[key]), MAX_FAILED_LISTS
        )

    async def fold_list(
        self, key: str, sources: Sequence[ListSource], *, repair: bool = False
    ) -> ListWriteOutcome | None:
        """Fold the current state of the sources into the list at `key`; `repair` as in `write`. Raises
        Unavailable."""
        projections = list(dict.fromkeys(projection for projection, _ in sources))

        async def change() -> ListTransform | None:
            work = await self._pending_entries(key, sources)
            return partial(apply_entries, work) if work else None

        self._count("folds", projections)
        return await self.write(key, projections, change, repair=repair)

    async def write(
        self, key: str, projections: Sequence[ProjectionSpec], make: MakeChange, *, repair: bool = False
    ) -> ListWriteOutcome | None:
        """Replace the list at `key` by the result of `make`, and retry if another writer was faster, as often
        as its projections allow; after that the list is left as it is, and the failure is logged. An object
        that is not a list is left as it is, unless it is corrupt and `repair` is set. Returns None if nothing
        was written. Raises Unavailable."""
        owners = self.keys.owners(key)
        for _ in range(max(projection.max_retries for projection in projections) + 1):
            found = await self._services.store.get(key)
            change = await make()
            if change is None:
                return ListWriteOutcome()
            try:
                held = self._current(key, found if isinstance(found, StoredObject) else None, owners, repair)
                data = held.data
                is_long = data is not None and len(data) > PYTHON_IN_THREAD_ABOVE
                folded = await asyncio.to_thread(change, data) if is_long else change(data)
            except (NotAList, DocumentCorrupt):
                self._fail(projections, f"what is stored at {key} is no list, and stays as it is")
                return None
            if folded.body is not None:
                if not await self._put(key, folded.body, held, owners):
                    continue
                self._count("puts", projections)
            self._log_dropped(key, folded)
            return ListWriteOutcome(folded.entries, folded.changed)
        log.error("the list %s is written by others all the time: a change of it is dropped", key)
        self._count("drops", projections)
        return None

    async def stored(self, template: KeyTemplate, suffix: str = "") -> AsyncIterator[str]:
        """Return the stored keys of this template with `suffix`. Raises StoreUnavailable."""
        if not template.params:
            if await self._services.store.get(template.text) is not None:
                yield template.text
            return
        async for listed in self._services.store.walk(template.prefix):
            is_one = listed.key.endswith(suffix) and template.matches(listed.key.removesuffix(suffix))
            if is_one and not listed.key.startswith(RESERVED):
                yield listed.key

    def target_key(self, projection: ProjectionSpec, event: WriteEvent) -> str | None:
        """Return the key of the list that the write belongs to; None without one, or if the key is not
        allowed."""
        key = self._call(projection, "target", projection.target_key, event)
        reason = None if key is None else self.keys.why_not_allowed(projection, key)
        if reason is not None:
            self._fail([projection], f"target {key!r} of {_describe(event)} {reason}")
            return None
        return key

    def entry_change(self, projection: ProjectionSpec, event: WriteEvent) -> EntryChange | None:
        """Return the change that the write makes to its list; None if `project` fails, which is logged."""
        return self._call(projection, "project", projection.entry_change, event)

    def _call(
        self, projection: ProjectionSpec, what: str, call: Callable[[WriteEvent], T | None], event: WriteEvent
    ) -> T | None:
        try:
            return call(event)
        except Exception as error:  # whatever somebody's function raises
            self._fail([projection], f"{what} of {_describe(event)}: {error!r}", error)
            return None

    def report_corrupt(self, projections: Sequence[ProjectionSpec], location: DocumentLocation) -> None:
        """Report a corrupt source."""
        self._fail(projections, f"source {location.key} is corrupt, and left out")

    def _changed_sources(self, changes: Sequence[ParsedChange]) -> list[ChangedSource]:
        """Return the sources of these writes, each once."""

        def is_read(namespace: str | None, collection: str) -> bool:
            return any(projection.reads(namespace, collection) for projection in self.projections)

        touched: dict[DocumentLocation, ChangedSource] = {}
        for write in changes:
            for location in self.keys.locate_all(write.ref, is_read):
                touched.setdefault(location, ChangedSource(location)).changes.append(write)
        return list(touched.values())

    async def _grouped(self, touched: Sequence[ChangedSource]) -> dict[str, list[ListSource]]:
        """Return the sources to fold by list. If a function computes the target, the sources are read for
        it."""
        groups: dict[str, dict[tuple[ProjectionSpec, DocumentLocation], ListSource]] = {}
        for projection in self.projections:
            # Of several sources with one key the first: what they hold is one document.
            own_by_key: dict[str, ChangedSource] = {}
            for one in touched:
                if projection.reads(one.location.namespace, one.location.name):
                    own_by_key.setdefault(one.location.key, one)
            own = list(own_by_key.values())
            if projection.target_template is not None:  # it needs the path parameters alone
                events = [(one, one.location.event("", 0)) for one in own]
            else:
                events = []
                async for one, event in self.sources.events(own):
                    if isinstance(event, DocumentCorrupt):
                        self.report_corrupt([projection], one.location)
                    else:
                        events.append((one, event))
            for one, event in events:
                key = self.target_key(projection, event)
                if key is not None:
                    groups.setdefault(key, {})[projection, one.location] = (projection, one)
        return {key: list(parts.values()) for key, parts in groups.items()}

    async def _pending_entries(self, key: str, parts: Sequence[ListSource]) -> list[PendingEntry]:
        """Return the changes that the current state of the sources makes to the list at `key`."""
        readers: dict[DocumentLocation, list[ProjectionSpec]] = {}
        for projection, one in parts:
            readers.setdefault(one.location, []).append(projection)
        work = []
        sources = list({one.location: one for _, one in parts}.values())
        async for one, event in self.sources.events(sources):
            if isinstance(event, DocumentCorrupt):
                self.report_corrupt(readers[one.location], one.location)
                continue
            is_one_write = one.location.kind in ("document", "file")
            since_ms = one.since_ms if is_one_write and one.since_ms is not None else event.timestamp
            for projection in readers[one.location]:
                if self.target_key(projection, event) == key:
                    change = self.entry_change(projection, event)
                    if change is not None:
                        work.append(PendingEntry(projection, change, event.timestamp, since_ms))
        return work

    def _current(
        self, key: str, found: StoredObject | None, owners: Sequence[DocumentLocation], repair: bool
    ) -> _LoadedList:
        """Return the list as it is, empty if there is none or it has expired. Raises DocumentCorrupt."""
        if found is None:
            return _LoadedList(None, ABSENT, "")
        try:
            document = _core.read_document(found.body)
        except DocumentCorrupt as error:
            self._services.corruption.report_once(error, "document", key)
            if repair and not _core.is_log(found.body):
                return _LoadedList(None, Etag(found.etag), "")
            raise
        expired = bool(owners) and owners[0].is_expired(document.ts_ms, self._services.now_ms())
        return _LoadedList(None if expired else document.data, Etag(found.etag), document.hash)

    async def _put(
        self, key: str, body: _core.PushBody, loaded: _LoadedList, owners: Sequence[DocumentLocation]
    ) -> bool:
        """Write and announce the list; return False if another write was faster."""
        now_ms = self._services.now_ms()
        changes = [location.document_ref.change(body.hash, now_ms) for location in owners[:1]]
        try:
            stored, version = body.stored(now_ms), (body.hash, now_ms)
            write = Write(key, stored, loaded.precondition, changes, loaded.hash, version=version)
            await self._services.outbox.commit(write)
        except EtagMismatch:
            return False
        return True

    def _log_dropped(self, key: str, folded: FoldResult) -> None:
        for projection in dict.fromkeys(folded.dropped):
            count = folded.dropped.count(projection)
            log.error(
                "projection %s: the list %s is full: %s new entries dropped", projection.name, key, count
            )
            self._count("drops", [projection], by=count)

    def _fail(self, projections: Sequence[ProjectionSpec], text: str, error: Exception | None = None) -> None:
        for projection in projections:
            log.error("projection %s: %s", projection.name, text, exc_info=error)
        self._count("failures", projections)

    def _count(self, what: str, projections: Sequence[ProjectionSpec], by: int = 1) -> None:
        for projection in projections:
            self._services.count(f"pysync_projection_{what}", projection.name, by=by)


def _describe(event: WriteEvent) -> str:
    return f"{event.collection} {dict(event.params)}"
