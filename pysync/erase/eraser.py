"""The steps of an erasure. Each finds what is left by itself, so an erasure that was interrupted anywhere is
finished by carrying out all of them again.

1. A note in the store names the request, for the service that starts after a crash.
2. Pages of keys. Of each page first what only its objects name: entries of lists, earlier versions and
   segments of logs. Then the objects. Repeated until no key is left. Access documents of spaces go once all
   else has gone: the next caller who makes one owns what is left of the space. They stay if members have
   written something else into the space meanwhile.
3. Entries of keyrings, counters, idempotency records, and names of damaged files.
4. The record of erasures names the collections whose changes go, and then the changes lose their text, once
   followers have had time to read the removals. Those by the identity to other keys lose their writer.
5. The note forgets the request, deleted bytes are removed from the files, and the note goes.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, starmap
from typing import Any, Final

import orjson

from pysync.auth.rate_limits import identity_name
from pysync.changelog import Change
from pysync.concurrency import ATTEMPTS, CONCURRENT, gather_bounded
from pysync.coordinator import LEASE_RENEW_S, holds_lease
from pysync.engine.append_log import log_prefix
from pysync.engine.changes import DocumentRef, origin, parse_change
from pysync.engine.feed import feed_of
from pysync.engine.subscriptions import Topic
from pysync.erase.plan import (
    PLAN_KEYS,
    ErasePlan,
    EraseReport,
    PlannedObject,
    Planner,
    delete_log_objects,
)
from pysync.erase.record import ErasureRecord
from pysync.erase.scope import EraseRequest, Scope
from pysync.errors import BadRequest, StoreUnavailable, Unavailable
from pysync.plugins import FileBackedCollection, PluginContext
from pysync.plugins.projection.lists import ListTransform, ListWriter, PendingEntry, apply_entries
from pysync.plugins.projection.spec import EntryChange, ProjectionSpec
from pysync.quotas.bucket import forget_subject
from pysync.store import (
    ABSENT,
    ANY,
    ERASED_KEY,
    ERASURE_KEY,
    PAGE,
    Etag,
    EtagMismatch,
    Precondition,
    StoredObject,
    Subject,
    Write,
)

NOTES: Final = "_pysync/erase"
LEASE: Final = "erase"
SETTLE_S: Final = 2.0
"""Seconds that followers of the change log have to read the removals before these go, and requests under
way to end."""
MAX_ATTEMPTS: Final = 100
"""The number of attempts at what others keep writing."""
_BUSY: Final = "an erasure is under way: try again when it has finished"
_DAMAGED: Final = "_pysync/damaged"

log = logging.getLogger("pysync.erase")


@dataclass(slots=True)
class _Erasure:
    """An erasure under way: the report so far, and the ids of logs and the hashes of what went."""

    request: EraseRequest
    scope: Scope
    report: EraseReport = field(default_factory=EraseReport)
    log_ids: set[str] = field(default_factory=set)
    hashes: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    """The marks that backups are to forget, as `ErasureRecord` records it."""


class Eraser:
    """Erases data of the service of `services`, with its `projections` and the locations of collections that
    its plugins store. Other processes may serve the same store meanwhile."""

    def __init__(
        self,
        services: PluginContext,
        projections: Sequence[ProjectionSpec],
        stored_files: Mapping[str, FileBackedCollection],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._services = services
        self._store = services.store
        self._coordinator = services.coordinator
        self._outbox = services.outbox
        self._stored_files = stored_files
        self._lists = ListWriter(projections, services)
        self._planner = Planner(self._lists, services)
        self._sleep = sleep
        self._is_running = False
        self.report = EraseReport()
        """The report up to now of the present or last request."""

    async def dry_run(self, request: EraseRequest) -> EraseReport:
        """Return the report of an erasure now, without changing anything. Raises BadRequest if the erasure
        would leave data of a space without the space's access document, and Unavailable."""
        self.report, scope = EraseReport(), self._scope(request)
        await self._check_spaces(scope)
        async for keys in self._pages(scope):
            await self._planner.plan(keys, self.report)
        await self._planner.remove_keyring_entries(request, scope, self.report, dry_run=True)
        return self.report

    async def run(self, request: EraseRequest) -> EraseReport:
        """Finish an erasure of something else that was interrupted, erase what belongs to the request, and
        return what went. Raises BadRequest, without erasing anything of the request, if data of a space would
        be left without the space's access document; if that data came meanwhile, all else has gone. Raises
        Unavailable if another process erases, or something could not be erased; the next run, or the start of
        a service, continues then."""
        async with self._exclusive():
            unfinished = await self._unfinished()
            if unfinished is not None and unfinished != request.members:
                await self._finish_interrupted(unfinished)
            await self._check_spaces(self._scope(request))
            report, left = await self._finish(request.members)
            if left is not None:
                raise left
            return report

    async def resume(self) -> bool:
        """Finish the erasure that was interrupted, unless another process is erasing. Returns False if there
        was none. Raises Unavailable."""
        if await self._unfinished() is None:
            return False
        async with self._exclusive():
            unfinished = await self._unfinished()
            if unfinished is not None:
                await self._finish_interrupted(unfinished)
            return unfinished is not None

    async def _unfinished(self) -> dict[str, Any] | None:
        """Return what the note of an erasure says, also of one under way; None without one."""
        if not [listed async for listed in self._store.walk(NOTES)]:
            return None
        found = await self._store.get(ERASURE_KEY)
        return orjson.loads(found.body) if isinstance(found, StoredObject) else None

    async def _finish_interrupted(self, members: dict[str, Any]) -> None:
        """Finish the erasure of another process. If access documents have to stay, it is logged."""
        _, left = await self._finish(members)
        if left is not None:
            log.warning("an interrupted erasure has left an access document: %s", left)

    async def _finish(self, members: dict[str, Any]) -> tuple[EraseReport, BadRequest | None]:
        """Carry out the request with these members; without any only remove deleted bytes. Return what went
        and, if access documents have to stay, why."""
        report = EraseReport()
        left: BadRequest | None = None
        if members:
            await self._store.put(ERASURE_KEY, orjson.dumps(members))
            report, left = await self._erase(EraseRequest.parse(members))
            await self._store.put(ERASURE_KEY, b"{}")
        await self._coordinator.purge_deleted()
        await self._store.purge_deleted()
        await self._store.delete(ERASURE_KEY)
        return report, left

    async def _erase(self, request: EraseRequest) -> tuple[EraseReport, BadRequest | None]:
        """Delete and announce everything of the request. Return as `_finish`."""
        left: BadRequest | None = None
        erasure = _Erasure(request, self._scope(request))
        self.report = erasure.report
        await self._record(
            erasure, {f"{'below' if request.kind == 'prefix' else request.kind} {request.value}"}
        )
        await self._store.recover_merges()
        for _ in range(MAX_ATTEMPTS):
            if await self._erase_pages(erasure, access_documents=False):
                continue
            if await self._is_merged(erasure.scope):
                await self._sleep(LEASE_RENEW_S)
                continue
            left = await self._left_in_spaces(erasure.scope)
            if left is not None or not await self._erase_pages(erasure, access_documents=True):
                break
        else:
            raise StoreUnavailable("others write it all the time: revoke their keys first")
        await self._planner.remove_keyring_entries(request, erasure.scope, erasure.report)
        await self._forget_damage(erasure.scope)
        await self._sleep(SETTLE_S)
        # A request that was under way may have stored a part of a log after its head was gone.
        await delete_log_objects(self._store, erasure.log_ids)
        await self._forget(erasure)
        await self._record(erasure)
        return erasure.report, left

    async def _record(
        self, erasure: _Erasure, marks: Collection[str] = (), topics: Collection[Topic] = ()
    ) -> None:
        """Record for backups what is erased, with what others wrote up to now, and for readers of feeds the
        collections from which changes go that were made up to now."""
        erasure.marks.update(marks)
        last_id = await self._outbox.log.last_id()
        while True:
            found = await self._store.get(ERASED_KEY)
            stored = found if isinstance(found, StoredObject) else None
            record = ErasureRecord.decode(None if stored is None else stored.body)
            record.add(erasure.marks, self._services.now_ms())
            record.collections.update(dict.fromkeys(starmap(origin, topics), last_id))
            expect: Precondition = ABSENT if stored is None else Etag(stored.etag)
            with suppress(EtagMismatch):
                await self._store.put(ERASED_KEY, record.encode(), expect=expect)
                return

    async def _erase_pages(self, erasure: _Erasure, *, access_documents: bool) -> bool:
        """Erase what is stored now: access documents, or all else. Returns False if there was nothing."""
        is_found = False
        async for keys in self._pages(erasure.scope, access_documents=access_documents):
            plan = await self._planner.plan(keys, erasure.report)
            logs = {f"below {log_prefix(id_)}" for planned in plan.objects for id_ in planned.log_ids}
            lists = {f"key {key}" for key, _ in plan.entries}
            if logs or lists:
                await self._record(erasure, logs | lists)
            await self._drop_entries(plan, erasure.scope)
            await gather_bounded(CONCURRENT, plan.other, self._store.delete)
            await gather_bounded(CONCURRENT, plan.objects, lambda planned: self._delete(planned, erasure))
            await self._drop_entries(plan, erasure.scope)  # a projection may have just read the objects
            is_found = is_found or bool(plan.objects or plan.other)
        return is_found

    async def _delete(self, planned: PlannedObject, erasure: _Erasure) -> None:
        """Delete an object, after what only it names. A later version stays, for the next pass, if the store
        deletes by version without leaving a trace."""
        key, etag, head = planned.key, planned.etag, planned.head
        erasure.hashes.add(planned.hash)
        with suppress(EtagMismatch):
            if head is not None:
                erasure.log_ids.update(planned.log_ids)
                emptied, etag = await self._services.logs.begin_deletion(key, head, etag)
                await delete_log_objects(self._store, planned.log_ids)
                erasure.log_ids.update(filter(None, [emptied.id]))
            expect: Precondition = ANY if self._store.transactional is None else Etag(etag)
            changes = self._planner.removals(key, planned.hash, self._services.now_ms())
            await self._outbox.commit(Write(key, None, expect, changes, planned.hash))

    async def _drop_entries(self, plan: ErasePlan, scope: Scope) -> None:
        """Remove the entries of a plan from the lists that stay. Raises StoreUnavailable if others write one
        all the time."""
        for key, pairs in groupby(sorted(plan.entries), lambda entry: entry[0]):
            if not scope.includes(key) and await self._store.get(key) is not None:
                await self._drop_from(key, [id_ for _, id_ in pairs])

    async def _drop_from(self, key: str, ids: Sequence[str]) -> None:
        projections = self._lists.projections
        work = [PendingEntry(projections[0], EntryChange(id_, None), 0, 0) for id_ in ids]

        async def make() -> ListTransform:
            return partial(apply_entries, work)

        for _ in range(MAX_ATTEMPTS):
            if await self._lists.write(key, projections, make) is not None:
                return
        raise StoreUnavailable(f"the list {key} cannot be written")

    async def _is_merged(self, scope: Scope) -> bool:
        """Return True if files of the scope are being merged into another one."""
        merges = await self._store.pending_merges()
        return any(scope.includes(key) for merge in merges for key in (merge.key, *merge.merged))

    async def _forget_damage(self, scope: Scope) -> None:
        """Remove the keys of the scope from the list of damaged files that a bucket has."""
        found = await self._store.get(_DAMAGED)
        if isinstance(found, StoredObject):
            files = orjson.loads(found.body).get("files", {})
            kept = {key: version for key, version in files.items() if not scope.includes(key)}
            if len(kept) < len(files):
                with suppress(EtagMismatch):  # the next finding replaces the list as well
                    await self._store.put(_DAMAGED, orjson.dumps({"files": kept}), expect=Etag(found.etag))

    async def _forget(self, erasure: _Erasure) -> None:
        """Remove what the coordinator and the change log know of the request."""
        request, scope = erasure.request, erasure.scope
        await self._wait_for_intents(request, scope)
        known, erased, topics = erasure.hashes | erasure.log_ids, dict[str, Change](), set[Topic]()
        async for id_, change in self._written(request, scope):
            ref, hash_, *_ = parse_change(change)
            known.add(hash_)
            if scope.includes(key := self._key_of(ref)):
                erased[id_] = change.erased(self._planner.topics(key))
                topics |= self._planner.topics(key)
            else:
                erased[id_] = change._replace(identity="")
        known.discard("")
        # Version 0.1.0 had the identity itself in its buckets.
        named = {identity_name(request.value), f"identity={request.value}"}

        def is_counter(bucket: str) -> bool:
            return request.kind == "identity" and not named.isdisjoint(re.split("[: ,]", bucket))

        def is_claim(value: bytes | str) -> bool:
            try:
                parts = orjson.loads(value)
            except ValueError:
                return False
            return isinstance(parts, list) and any(isinstance(part, str) and part in known for part in parts)

        counters, claims = await self._coordinator.forget(is_counter, is_claim)
        if self._store.transactional is not None:
            claims += await self._store.transactional.claims.forget(is_claim)
        if self._store.transactional is None and request.kind == "identity":
            await forget_subject(self._store, Subject("identity", request.value))
        erasure.report.erased.update(rateCounters=counters, idempotencyRecords=claims, changes=len(erased))

        def note_removal(key: str) -> bool:
            """Add the collections of a removal, and leave it: the record has to come first."""
            topics.update(self._planner.topics(key) if scope.includes(key) else ())
            return False

        feed = feed_of(self._store, self._coordinator, self._key_of)
        await feed.erase(note_removal)
        await self._record(erasure, topics=topics)
        await self._outbox.log.erase(erased)
        await feed.erase(scope.includes)

    async def _written(self, request: EraseRequest, scope: Scope) -> AsyncIterator[tuple[str, Change]]:
        """Yield every change in the log that names something of the request, with its id."""
        after = ""
        while found := await self._outbox.log.read(after, PAGE):
            for id_, change in found:
                if self._names(change, request, scope):
                    yield id_, change
            after = found[-1][0]

    def _names(self, change: Change, request: EraseRequest, scope: Scope) -> bool:
        """Return True if the change is of a key of the request, or by its identity."""
        key = self._key_of(parse_change(change).ref)
        return scope.includes(key) or (request.kind == "identity" and change.identity == request.value)

    def _key_of(self, ref: DocumentRef) -> str:
        """Return the key of a document; `""` if nobody knows it any more."""
        location = None if ref.key else self._lists.keys.locate(ref)
        return ref.key if location is None else location.key

    async def _wait_for_intents(self, request: EraseRequest, scope: Scope) -> None:
        """Wait until no write that names something of the request waits to be announced."""
        while not self._outbox.is_transactional:
            await self._outbox.recover()
            intents = await self._coordinator.prepared(PAGE)
            changes = [change for intent in intents for change in intent.changes]
            if not any(self._names(change, request, scope) for change in changes):
                return
            await self._sleep(LEASE_RENEW_S)

    async def _pages(self, scope: Scope, *, access_documents: bool | None = None) -> AsyncIterator[list[str]]:
        """Yield the keys of the scope in pages: all, only those of access documents, or only the others."""
        page = dict[str, None]()
        async for key in scope.keys(self._store):
            if access_documents is not None and scope.is_access_document(key) is not access_documents:
                continue
            page[key] = None
            if len(page) == PLAN_KEYS:
                yield list(page)
                page.clear()
        if page:
            yield list(page)

    async def _check_spaces(self, scope: Scope) -> None:
        """Raise BadRequest if an access document would go and something of its space would stay."""
        if (left := await self._left_in_spaces(scope)) is not None:
            raise left

    async def _left_in_spaces(self, scope: Scope) -> BadRequest | None:
        """Return why an access document has to stay; None if none has to."""
        async for access, key in scope.left_in_spaces(self._store):
            return BadRequest(
                f"{key} would be left without its access document {access}, and the next caller who made one "
                "would own it: erase everything else of the space first"
            )
        return None

    def _scope(self, request: EraseRequest) -> Scope:
        return Scope(request, self._services.config, self._stored_files)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Hold the lease of erasures. Raises Unavailable if this process is erasing, or another one keeps
        the lease."""
        if self._is_running:
            raise Unavailable(_BUSY)
        self._is_running = True
        try:
            for _ in range(ATTEMPTS):  # a lease is free some seconds after its holder has ended
                if await self._coordinator.acquire_lease(LEASE):
                    break
                await self._sleep(LEASE_RENEW_S)
            else:
                raise Unavailable(_BUSY)
            renewing = asyncio.create_task(self._renew_lease())
            try:
                yield
            finally:
                renewing.cancel()
                await asyncio.wait({renewing})
        finally:
            self._is_running = False

    async def _renew_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            await holds_lease(self._coordinator, LEASE)
