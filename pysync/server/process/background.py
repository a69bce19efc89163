"""Background jobs of a service. Each has a method `run`, which runs until it is cancelled.

`TtlSweeper` deletes expired documents, logs and files, which reads no longer return, and lets old elements
leave logs. `HistorySweeper` deletes old versions of documents. With an index by time both read what has
expired; otherwise, as in a bucket, they list a bounded number of keys, and the next sweep continues behind
them. `OutboxRelay` announces writes whose announcement was lost. `Scrubber` verifies everything that is
stored and reports damage. `resume_erasure` finishes what an earlier process left unfinished.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from pysync._core import PanicException
from pysync.clock import elapsed_of, is_stable
from pysync.concurrency import every
from pysync.config import Collection, Config, HistoryConfig, ScrubConfig
from pysync.config.key_templates import KeyTemplate
from pysync.coordinator import LEASE_RENEW_S, Coordinator
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.changes import DocumentRef
from pysync.engine.documents import Documents
from pysync.engine.history import PREFIX, History, document_of, has_version, is_expired
from pysync.engine.outbox import Outbox
from pysync.erase import Eraser
from pysync.errors import CoordinatorUnavailable, DocumentCorrupt, PysyncError, Unavailable
from pysync.migrate import SCRUB_KEY, Damage, VerificationReport, Verifier
from pysync.server.api import owners_of
from pysync.server.http.router import Route, Router
from pysync.store import RELIST_MS, KeyShape, ListEntry, Store

SWEEP_EVERY_S = 60.0
"""Seconds between two rounds of a job that looks for what is due."""
MAX_LISTED: Final = 10_000
"""The number of keys of a collection that one sweep lists to find expired ones: ten pages of a bucket."""
MAX_READ: Final = 1_000
"""The number of keys of a collection that one sweep lists to find logs with old elements, each of which it
reads."""

log = logging.getLogger("pysync.server")


class SweptCollection(NamedTuple):
    """A collection whose data expires. `shape` is that of its keys, `ref_of` returns the reference to the
    document of a key, None if the key belongs to another collection."""

    collection: Collection
    shape: KeyShape
    ref_of: Callable[[str], DocumentRef | None]

    @property
    def prefix(self) -> str:
        """The prefix of all keys."""
        parts = list(self.shape[:-1])
        return "/".join(part for part in parts[: parts.index(None) if None in parts else None] if part)


class TtlSweeper:
    """Deletes expired data of one service, if any collection has a `ttlMs`, or logs whose old elements leave.
    The deletion of expired data is announced. Before each sweep, `report_debt` gets the seconds since one
    began that looked at all keys."""

    def __init__(
        self,
        store: Store,
        documents: Documents,
        logs: AppendLogs,
        clock: Callable[[], int],
        report_debt: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._clock = clock
        self._elapsed_ms = elapsed_of(clock)
        self._report_debt = report_debt
        self._store = store
        self._index = store.time_index
        self._documents = documents
        self._logs = logs
        self._expiring: list[SweptCollection] = []
        self._shrinking: list[SweptCollection] = []
        self._listed: dict[tuple[str, KeyShape], tuple[str, int]] = {}
        """The key behind which the next sweep continues and when the first began, by purpose and shape."""
        self._complete_ms: dict[tuple[str, KeyShape], int] = {}

    def use(self, routes: Router) -> None:
        """Sweep the collections of these routes. A sweep that is under way deletes nothing more."""
        swept = _swept_collections(routes)
        self._expiring = [each for each in swept if each.collection.ttl_ms is not None]
        self._shrinking = [each for each in swept if _drops_elements(each.collection)]
        now_ms, done_ms = self._elapsed_ms(), self._complete_ms
        self._complete_ms = {
            at: done_ms.get(at, now_ms)
            for purpose, some in (("expiry", self._expiring), ("retention", self._shrinking))
            for at in ((purpose, each.shape) for each in some)
        }

    async def run(self) -> None:
        """Sweep at intervals, until cancelled."""
        await every(SWEEP_EVERY_S, self.sweep, "failed to delete expired data", log)

    async def sweep(self) -> int:
        """Delete expired data, and return the number of documents, logs and files. Deletes nothing within ten
        minutes of a step of the clock."""
        now_ms = self._elapsed_ms()
        self._report_debt((now_ms - min(self._complete_ms.values(), default=now_ms)) / 1000)
        if not is_stable(self._clock):
            return 0
        if self._index is not None and self._expiring:
            await self._index.prepare({each.shape for each in self._expiring})
        for each in self._shrinking:
            await self._shorten_logs(each)
        return sum([await self._delete_expired(each) for each in self._expiring])

    async def _delete_expired(self, swept: SweptCollection) -> int:
        collection, deleted = swept.collection, 0
        assert collection.ttl_ms is not None, "these collections are the expiring ones"
        settings = None if collection.append_only is None else LogSettings.from_collection(collection)
        async for listed in self._candidates(swept, self._clock() - collection.ttl_ms):
            ref = swept.ref_of(listed.key)
            if ref is None:
                continue
            if all(swept is not each for each in self._expiring):
                break
            if settings is not None:
                deleted += await self._logs.delete_expired(listed, settings, ref)
            else:
                deleted += await self._documents.delete_expired(listed, ref, collection.ttl_ms)
        return deleted

    async def _candidates(self, swept: SweptCollection, before_ms: int) -> AsyncIterator[ListEntry]:
        """Yield the objects of a collection that were last written before this time; without an index only
        those among the next keys."""
        if self._index is not None:
            begun_ms = self._elapsed_ms()
            async for listed in self._index.written_before(swept.shape, before_ms):
                yield listed
            self._complete("expiry", swept, begun_ms)
            return
        async for listed in self._next("expiry", swept, MAX_LISTED):
            if listed.modified_ms < before_ms:
                yield listed

    async def _shorten_logs(self, swept: SweptCollection) -> None:
        """Let old elements leave the next logs of a collection."""
        settings = LogSettings.from_collection(swept.collection)
        async for listed in self._next("retention", swept, MAX_READ):
            if all(swept is not each for each in self._shrinking):
                break
            if swept.ref_of(listed.key) is not None:
                with suppress(DocumentCorrupt):  # it has been reported
                    await self._logs.drop_oldest(listed.key, settings)

    async def _next(self, purpose: str, swept: SweptCollection, count: int) -> AsyncIterator[ListEntry]:
        """Yield the next `count` objects, and continue behind them when called again. At the end, the next
        call starts from the beginning."""
        at, listed = (purpose, swept.shape), 0
        after, begun_ms = self._listed.pop(at, (None, self._elapsed_ms()))
        async for entry in self._store.walk(swept.prefix, after):
            yield entry
            listed += 1
            if listed == count:
                self._listed[at] = entry.key, begun_ms
                return
        self._complete(purpose, swept, begun_ms)

    def _complete(self, purpose: str, swept: SweptCollection, begun_ms: int) -> None:
        if (purpose, swept.shape) in self._complete_ms:  # else another configuration no longer has it
            self._complete_ms[purpose, swept.shape] = begun_ms


def _drops_elements(collection: Collection) -> bool:
    return collection.append_only is not None and LogSettings.from_collection(collection).drops_elements


def _swept_collections(routes: Router) -> list[SweptCollection]:
    """Return every collection once, with the shape of its keys."""
    found: dict[tuple[str | None, str], SweptCollection] = {}
    for method, route in routes:
        policy = route.policy
        if policy is None or route.action not in ("pull", "push", "append") or route.alias:
            continue
        found.setdefault((policy.namespace, policy.collection.name), _swept(routes, method, route))
    return list(found.values())


def _swept(routes: Router, method: str, route: Route) -> SweptCollection:
    policy = route.policy
    assert policy is not None, "it is the route of a collection"
    name, namespace = policy.collection.name, policy.namespace
    files = route.files
    if files is not None and files.template is not None:
        template, suffix = files.template, files.suffix

        def file_ref(key: str) -> DocumentRef | None:
            if not files.matches_key(key):
                return None
            return DocumentRef(name, template.params_of(key.removesuffix(suffix)), namespace, key)

        return SweptCollection(policy.collection, key_shape(template, suffix), file_ref)

    head = "/" + "/".join(route.template[: route.key_from])

    def ref(key: str) -> DocumentRef | None:
        with suppress(PysyncError):
            match = routes.match(method, f"{head}/{key}")
            if match.route is route:
                return DocumentRef(name, match.params, namespace, key)
        return None

    return SweptCollection(
        policy.collection, key_shape(KeyTemplate("/".join(route.template[route.key_from :]))), ref
    )


def key_shape(template: KeyTemplate, suffix: str = "") -> KeyShape:
    """Return the shape of the keys of a template with this suffix, which a last parameter includes."""
    *above, last = (
        None if is_open else part
        for part, is_open in zip(template.segments, template.open_segments, strict=True)
    )
    return (*above, None if last is None else last + suffix)


class HistorySweeper:
    """Deletes versions of documents that are older than their collection's `history.forMs`, if any collection
    has one. Pushes delete those of the document that they write."""

    def __init__(
        self,
        store: Store,
        history: History,
        clock: Callable[[], int],
    ) -> None:
        self._store = store
        self._index = store.time_index
        self._history = history
        self._owners: Sequence[Router] = ()
        self._clock = clock
        self._shapes: dict[KeyShape, tuple[int, int]] = {}
        """The shapes of the entries, with the shortest and the longest time for which any collection keeps
        them."""
        self._swept_ms: dict[KeyShape, int] = {}
        """The time before which all that was written has expired and was looked at, by shape."""
        self._after: str | None = None
        self._listed_ms: int | None = None

    def use(self, config: Config, owners: Sequence[Router]) -> None:
        """Sweep the collections of `config`. `owners` are those of its `Service`."""
        shapes: dict[KeyShape, tuple[int, int]] = {}
        for _, _, one in config.each_collection():
            for_ms = None if one.history is None else one.history.for_ms
            if for_ms is not None:
                shape = (*PREFIX.split("/"), *key_shape(one.key_template), None)
                shortest_ms, longest_ms = shapes.get(shape, (for_ms, for_ms))
                shapes[shape] = min(for_ms, shortest_ms), max(for_ms, longest_ms)
        self._shapes, self._owners = shapes, owners
        self._swept_ms.clear()

    async def run(self) -> None:
        """Sweep at intervals, until cancelled."""
        await every(SWEEP_EVERY_S, self.sweep, "failed to delete old versions", log)

    async def sweep(self) -> int:
        """Delete what has expired, and return the number of deleted entries. Deletes nothing within ten
        minutes of a step of the clock."""
        now_ms = self._clock()
        if not (self._shapes and is_stable(self._clock)):
            return 0
        if self._index is None:
            return await self._prune(self._listed(now_ms), now_ms)
        await self._index.prepare(self._shapes)
        deleted = 0
        for shape, (shortest_ms, longest_ms) in self._shapes.items():
            before_ms, after_ms = now_ms - shortest_ms, self._swept_ms.get(shape, 0)
            # If the clock was set back, entries may have been written at times that were looked at.
            after_ms = after_ms if after_ms <= now_ms - longest_ms else 0
            deleted += await self._prune(self._index.written_before(shape, before_ms, after_ms), now_ms)
            self._swept_ms[shape] = now_ms - longest_ms
        return deleted

    async def _prune(self, entries: AsyncIterator[ListEntry], now_ms: int) -> int:
        """Delete the versions that have expired of the documents with these entries."""
        due: dict[str, None] = {}
        async for listed in entries:
            key, name = document_of(listed.key), listed.key.rpartition("/")[2]
            if key not in due and has_version(name):
                limits = self._limits_of(key)
                if limits is not None and is_expired(name, limits, now_ms):
                    due[key] = None
        return sum(
            [
                await self._history.prune(key, limits)
                for key in due
                if (limits := self._limits_of(key)) is not None
            ]
        )

    async def _listed(self, now_ms: int) -> AsyncIterator[ListEntry]:
        """Yield the next entries of all documents; none if all were listed not long ago."""
        if self._listed_ms is not None and 0 <= now_ms - self._listed_ms < RELIST_MS:
            return
        listed, after, self._after, self._listed_ms = 0, self._after, None, None
        async for entry in self._store.walk(PREFIX, after):
            yield entry
            listed += 1
            if listed == MAX_LISTED:
                self._after = entry.key
                return
        self._listed_ms = now_ms

    def _limits_of(self, key: str) -> HistoryConfig | None:
        found = (owner.policy.collection.history for owner in owners_of(self._owners, key))
        return next((limits for limits in found if limits is not None), None)


RECOVER_EVERY_S = 5.0
INITIAL_ROUNDS = 2
"""Number of rounds that announce writes early, because an earlier process may have left them. In the last of
them all such writes have become old enough."""


class OutboxRelay:
    """Recovers lost announcements of one service. Every few seconds it flushes the outcomes
    that this process could not report and, if it `sweeps`, announces writes that no other process will
    announce; its first rounds include what an earlier process may have left behind. It does nothing if the
    store commits writes together with their changes."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        sweeps: bool = True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._outbox = outbox
        self._sleep = sleep
        self._sweeps = sweeps

    async def run(self) -> None:
        """Recover every few seconds, until cancelled."""
        if self._outbox.is_transactional:
            return
        first, was_logged = INITIAL_ROUNDS, False
        while True:
            try:
                await self._recover(early=first > 0)
            except CoordinatorUnavailable as error:
                if not was_logged:
                    log.warning("failed to announce changes; will retry: %s", error.detail)
                was_logged = True
            except (Exception, PanicException):
                log.exception("failed to announce changes; will retry")
            else:
                first, was_logged = first - 1, False
            await self._sleep(RECOVER_EVERY_S)

    async def _recover(self, *, early: bool) -> None:
        if not self._sweeps:
            await self._outbox.flush_outcomes()
        elif recovered := await self._outbox.recover(early=early):
            log.info("announced %d writes whose announcement may have been lost", recovered)


async def resume_erasure(eraser: Eraser, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Finish the erasure that an earlier process left unfinished. Retries until that succeeds."""
    while True:
        try:
            if await eraser.resume():
                log.info("finished an interrupted erasure")
            return
        except PysyncError as error:
            detail = error.detail if isinstance(error, Unavailable) else str(error)
            log.warning("failed to finish an interrupted erasure; will retry: %s", detail)
        except (Exception, PanicException):
            log.exception("failed to finish an interrupted erasure; will retry")
        await sleep(SWEEP_EVERY_S)


MIN_BYTES: Final = 16_384
"""Minimum number of bytes that an object counts as, because small objects cost more than their bytes."""


class Scrubber:
    """Verifies the whole store at intervals, in one of all processes that share the coordinator. `on_damage`
    is called for each damaged object; the store no longer serves damaged files. `repair`, if there is a
    backup, is awaited with all of them in the end."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        config: ScrubConfig | Literal[False],
        on_damage: Callable[[Damage], None],
        now_ms: Callable[[], int],
        *,
        repair: Callable[[Sequence[Damage]], Awaitable[None]] | None = None,
        set_gauge: Callable[[str, float], None] = lambda metric, value: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self.config = config
        """How often and how fast; False while there is no scrub."""
        self._on_damage = on_damage
        self._repair = repair
        self._set_gauge = set_gauge
        self._now_ms = now_ms
        self._sleep = sleep
        self._clock_s = clock_s
        self._lease_checked_at = 0.0

    async def run(self) -> None:
        """Scrub whenever it is due, until cancelled."""
        await every(SWEEP_EVERY_S, self.run_if_due, "the scrub is paused", log, self._sleep)

    async def run_if_due(self) -> None:
        """Scrub if it is due and this process holds the lease. Raises StoreUnavailable and
        CoordinatorUnavailable."""
        if await self._is_due() and await self._acquire_lease() and await self._is_due():
            try:
                await self.run_once()
            except _Interrupted as error:
                log.info("%s", error)

    async def run_once(self) -> None:
        """Verify everything, and record the time. Raises StoreUnavailable and CoordinatorUnavailable."""
        damages: list[Damage] = []

        def report(damage: Damage) -> None:
            damages.append(damage)
            self._on_damage(damage)

        verifier = Verifier(self._store, report, self._pace)
        self._lease_checked_at = self._clock_s()
        async for listed in self._store.walk(""):
            await verifier.verify(listed.key)
        await verifier.report.record(self._store, SCRUB_KEY, self._now_ms())
        if damages and self._repair is not None:
            await self._repair(damages)
        found = verifier.report
        log.info(
            "scrub finished: %d objects, %d damaged, %d bytes", found.objects, found.damaged, found.bytes
        )

    async def _is_due(self) -> bool:
        if self.config is False:
            return False
        last = await VerificationReport.recorded(self._store, SCRUB_KEY)
        if last is None:
            return True
        self._set_gauge("pysync_scrub_timestamp_seconds", last["finishedMs"] // 1000)
        self._set_gauge("pysync_stored_bytes", last["bytes"])
        # A time in the future was recorded before the clock was set back.
        return not 0 <= self._now_ms() - last["finishedMs"] < self.config.every_ms

    async def _acquire_lease(self) -> bool:
        self._lease_checked_at = self._clock_s()
        return await self._coordinator.acquire_lease("scrub")

    async def _pace(self, size: int) -> None:
        """Sleep for as long as reading this many bytes may take at the configured rate, so that requests come
        first. Raises _Interrupted if another process holds the lease, or there is no scrub any more."""
        if self.config is False:
            raise _Interrupted("the scrub ends: it is turned off")
        await self._sleep(max(size, MIN_BYTES) / self.config.max_bytes_per_second)
        if self._clock_s() - self._lease_checked_at >= LEASE_RENEW_S and not await self._acquire_lease():
            raise _Interrupted("another process continues the scrub")


class _Interrupted(Exception):
    """The scrub does not go on here."""
