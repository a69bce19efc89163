"""Writes of lists: each a conditional put of the whole, over what was read before its sources were.

So whoever puts a list has seen its sources at a later time than any list that was put before, and the last
put holds their newest state, whatever the order of changes and whoever else folds them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Final, NamedTuple

from pysync import _core
from pysync.changelog import Subject, Told
from pysync.config import key_templates
from pysync.errors import DocumentCorrupt
from pysync.model import WriteEvent
from pysync.plugins import Services
from pysync.plugins.projection.fold import Change, Folded, NoList, Sources, Touched, Work, with_steps
from pysync.plugins.projection.spec import ProjectionSpec, Step
from pysync.plugins.projection.targets import Keys, Place, folder
from pysync.store import ABSENT, Etag, EtagMismatch, Expect, Object

_LISTS_AT_ONCE: Final = 16

LONG_BYTES: Final = 65_536
"""From this size on a list is folded in a thread: that takes a millisecond or more."""

log = logging.getLogger("pysync.projections")

Part = tuple[ProjectionSpec, Touched]
"""A source that a projection folds into a list."""
MakeChange = Callable[[], Awaitable[Change | None]]
"""Says what is to become of a list that has just been read; None: nothing."""


class Outcome(NamedTuple):
    """What became of a list: its entries now, and how many of them are new, other or gone."""

    entries: int = 0
    changed: int = 0


class _Held(NamedTuple):
    """A list that was read: the text of its `data`, None for no list; what a put is to replace, and its
    hash."""

    data: bytes | None
    expect: Expect
    hash: str


class Lists:
    """The lists of `projections`, in a service's store."""

    def __init__(self, projections: Sequence[ProjectionSpec], services: Services) -> None:
        self.projections = projections
        self.keys = Keys(services.config)
        self.sources = Sources(services)
        self._services = services

    async def fold(self, told: Sequence[Told]) -> None:
        """Bring the lists of these writes up to date, each with one put. Raises Unavailable: some are, some
        are not."""
        groups = await self._grouped(self._touched(told))
        await for_each(groups, lambda key: self.fold_list(key, groups[key]))

    async def fold_list(self, key: str, parts: Sequence[Part], *, heals: bool = False) -> Outcome | None:
        """Fold the sources as they are now into the list at `key`; `heals` as in `write`. Raises
        Unavailable."""
        projections = list(dict.fromkeys(projection for projection, _ in parts))

        async def change() -> Change | None:
            work = await self._work(key, parts)
            return with_steps(work) if work else None

        self._count("folds", projections)
        return await self.write(key, projections, change, heals=heals)

    async def write(
        self, key: str, projections: Sequence[ProjectionSpec], make: MakeChange, *, heals: bool = False
    ) -> Outcome | None:
        """Replace the list at `key` by what is made of it, where nobody else has meanwhile; else again, as
        often as its projections say, and then it is left as it is, and that is logged. What is stored there
        and is no list stays, unless it is corrupt and the write `heals`. None where it is left; raises
        Unavailable."""
        owners = self.keys.owners(key)
        for _ in range(max(projection.max_retries for projection in projections) + 1):
            found = await self._services.store.get(key)
            change = await make()
            if change is None:
                return Outcome()
            try:
                held = self._current(key, found if isinstance(found, Object) else None, owners, heals)
                data = held.data
                is_long = data is not None and len(data) >= LONG_BYTES
                folded = await asyncio.to_thread(change, data) if is_long else change(data)
            except (NoList, DocumentCorrupt):
                self._fail(projections, f"what is stored at {key} is no list, and stays as it is")
                return None
            if folded.body is not None and not await self._put(key, folded.body, held, owners):
                continue
            if folded.body is not None:
                self._count("puts", projections)
            self._tell_dropped(key, folded)
            return Outcome(folded.entries, folded.changed)
        log.error("the list %s is written by others all the time: a change of it is dropped", key)
        self._count("drops", projections)
        return None

    async def stored(self, path: str, suffix: str = "") -> AsyncIterator[str]:
        """The keys of this template, with `suffix` behind it, at which something is stored. Raises
        StoreUnavailable."""
        if not key_templates.params(path):
            if await self._services.store.get(path) is not None:
                yield path
            return
        async for listed in self._services.store.walk(folder(path)):
            is_one = listed.key.endswith(suffix) and key_templates.matches(
                path, listed.key.removesuffix(suffix)
            )
            if is_one and not listed.key.startswith(key_templates.RESERVED):
                yield listed.key

    def list_of(self, projection: ProjectionSpec, event: WriteEvent) -> str | None:
        """The key of the list that the write belongs to; None for none, and for one that may not be."""
        try:
            key = projection.list_of(event)
        except Exception as error:  # whatever somebody's function raises
            self._fail([projection], f"target of {_named(event)}: {error!r}", error)
            return None
        if key is None:
            return None
        refusal = self.keys.refusal(projection, key)
        if refusal is not None:
            self._fail([projection], f"target {key!r} of {_named(event)} {refusal}")
            return None
        return key

    def step(self, projection: ProjectionSpec, event: WriteEvent) -> Step | None:
        """What the write does to its list; nothing, and that is logged, where `project` fails."""
        try:
            return projection.step(event)
        except Exception as error:  # whatever somebody's function raises
            self._fail([projection], f"project of {_named(event)}: {error!r}", error)
            return None

    def unreadable(self, projections: Sequence[ProjectionSpec], place: Place) -> None:
        """Tell of a source that is corrupt."""
        self._fail(projections, f"source {place.key} is corrupt, and left out")

    def _touched(self, told: Sequence[Told]) -> list[Touched]:
        """The sources among what was written, each once."""
        touched: dict[Place, Touched] = {}
        for write in told:
            for place in self.keys.shared(write.subject, self._reads):
                touched.setdefault(place, Touched(place)).told.append(write)
        return list(touched.values())

    def _reads(self, namespace: str | None, collection: str) -> bool:
        return any(one.reads(namespace, collection) for one in self.projections)

    async def _grouped(self, touched: Sequence[Touched]) -> dict[str, list[Part]]:
        """What is to be folded into which list. Where a function says so, the sources are read for it."""
        groups: dict[str, dict[tuple[ProjectionSpec, Place], Part]] = {}
        for projection in self.projections:
            # Of several sources with one key the first: what they hold is one document.
            own_by_key: dict[str, Touched] = {}
            for one in touched:
                if projection.reads(one.place.namespace, one.place.name):
                    own_by_key.setdefault(one.place.key, one)
            own = list(own_by_key.values())
            if isinstance(projection.target, str):
                events = [(one, _of_params(one.place)) for one in own]
            else:
                events = []
                async for one, event in self.sources.events(own):
                    if isinstance(event, DocumentCorrupt):
                        self.unreadable([projection], one.place)
                    else:
                        events.append((one, event))
            for one, event in events:
                key = self.list_of(projection, event)
                if key is not None:
                    groups.setdefault(key, {})[projection, one.place] = (projection, one)
        return {key: list(parts.values()) for key, parts in groups.items()}

    async def _work(self, key: str, parts: Sequence[Part]) -> list[Work]:
        """What the sources do to the list at `key`, as they are now."""
        readers: dict[Place, list[ProjectionSpec]] = {}
        for projection, one in parts:
            readers.setdefault(one.place, []).append(projection)
        work = []
        sources = list({one.place: one for _, one in parts}.values())
        async for one, event in self.sources.events(sources):
            if isinstance(event, DocumentCorrupt):
                self.unreadable(readers[one.place], one.place)
                continue
            for projection in readers[one.place]:
                step = self.step(projection, event) if self.list_of(projection, event) == key else None
                if step is not None:
                    since_ms = event.timestamp
                    if one.place.kind in ("document", "file") and one.since_ms is not None:
                        since_ms = one.since_ms
                    work.append(Work(projection, step, event.timestamp, since_ms))
        return work

    def _current(self, key: str, found: Object | None, owners: Sequence[Place], heals: bool) -> _Held:
        """The list as it is, empty where there is none yet or it has expired. Raises DocumentCorrupt."""
        if found is None:
            return _Held(None, ABSENT, "")
        try:
            document = _core.read_document(found.body)
        except DocumentCorrupt as error:
            self._services.corruption.meet(error, "document", key)
            if heals and not _core.is_log(found.body):
                return _Held(None, Etag(found.etag), "")
            raise
        ttl_ms = owners[0].collection.ttl_ms if owners else None
        expired = ttl_ms is not None and document.ts_ms + ttl_ms < self._services.now_ms()
        return _Held(None if expired else document.data, Etag(found.etag), document.hash)

    async def _put(self, key: str, body: _core.PushBody, held: _Held, owners: Sequence[Place]) -> bool:
        """Whether the list is written and announced; else another write came first."""
        now_ms = self._services.now_ms()
        changes = [place.subject.change(body.hash, now_ms) for place in owners[:1]]
        try:
            await self._services.outbox.put(key, body.stored(now_ms), held.expect, changes, held.hash)
        except EtagMismatch:
            return False
        return True

    def _tell_dropped(self, key: str, folded: Folded) -> None:
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


async def for_each(keys: Collection[str], do: Callable[[str], Awaitable[object]]) -> None:
    """Do it for each of the lists, some at a time. Raises what any of that does, once all of it has ended."""
    waiting = iter(keys)

    async def do_on() -> None:
        for key in waiting:
            await do(key)

    doing = [do_on() for _ in range(min(_LISTS_AT_ONCE, len(keys)))]
    for outcome in await asyncio.gather(*doing, return_exceptions=True):
        if outcome is not None:
            raise outcome


def _of_params(place: Place) -> WriteEvent:
    """All that the template of a list needs of a write."""
    subject: Subject = place.subject
    return WriteEvent(place.name, subject.params, "", 0, namespace=place.namespace)


def _named(event: WriteEvent) -> str:
    return f"{event.collection} {dict(event.params)}"
