"""The steps of an erasure. Each may be repeated, so an erasure that was interrupted anywhere is finished by
carrying out all of them again.

1. The journal names the request.
2. Pages of keys: a plan is stored, then carried out. Repeated until no key is left. Access documents of
   spaces go once all else has gone: the next caller who makes one owns what is left of the space.
3. Entries of keyrings, counters, idempotency records, and names of damaged files.
4. The change log is cleared, once followers have had time to read the removals.
5. The journal forgets all names; deleted bytes are removed from the files; the journal entry goes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Final

import orjson

from pysync.changelog import Change
from pysync.concurrency import gather_bounded
from pysync.engine.changes import DocumentRef, parse_change
from pysync.engine.counted_store import forget_subject
from pysync.erase.journal import JournalEntry, unfinished
from pysync.erase.keyrings import KeyringEntries, remove_entries
from pysync.erase.plan import PAGE, ErasePlan, EraseReport, Planner, delete_log_objects
from pysync.erase.request import EraseRequest
from pysync.erase.scope import Scope
from pysync.errors import BadRequest, StoreUnavailable, Unavailable
from pysync.plugins import FileBackedCollection, PluginContext
from pysync.plugins.projection.lists import ListTransform, ListWriter, PendingEntry, apply_entries
from pysync.plugins.projection.spec import EntryChange, ProjectionSpec
from pysync.store import ANY, Etag, EtagMismatch, StoredObject, Subject

LEASE: Final = "erase"
LEASE_RENEW_S: Final = 1.0
SETTLE_S: Final = 2.0
"""Seconds that followers of the change log have to read the removals before it is cleared, and requests under
way to end."""
MAX_PASSES: Final = 100
"""The number of passes over the keys while others keep writing them."""
_EXACT_PASSES: Final = 3
"""Passes that erase only versions for which there is a plan. Later ones erase any version."""
_LIST_ATTEMPTS: Final = 20
_BUSY: Final = "an erasure is under way: try again when it has finished"
_LEASE_ATTEMPTS: Final = 8
"""A lease is free some seconds after its holder has ended."""
_INTENTS: Final = 1_000
_CHANGES: Final = 1_000
_CONCURRENT: Final = 16
_DAMAGED: Final = "_pysync/damaged"

log = logging.getLogger("pysync.erase")


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

    async def dry_run(self, request: EraseRequest) -> EraseReport:
        """Return the report of an erasure now, without changing anything. Raises BadRequest if the erasure
        would leave data of a space without the space's access document, and Unavailable."""
        report, scope = EraseReport(), self._scope(request)
        await self._check_spaces(scope)
        async for keys in self._pages(scope):
            report.add((await self._planner.plan(keys)).report)
        report.add_keyrings(await self._remove_keyring_entries(request, dry_run=True))
        return report

    async def run(self, request: EraseRequest) -> EraseReport:
        """Finish the erasures that were interrupted, erase what belongs to the request, and return what
        went. Raises BadRequest, without erasing anything of the request, if data of a space would be left
        without the space's access document. Raises Unavailable if another process erases, or something could
        not be erased; the next run, or the start of a service, continues then."""
        async with self._exclusive():
            report = EraseReport()
            for entry in await unfinished(self._store):
                is_this = entry.request == request
                finished = await self._finish(entry)
                if is_this:
                    report.add(finished)
            await self._check_spaces(self._scope(request))
            report.add(await self._finish(await JournalEntry.begin(self._store, request)))
        return report

    async def resume(self) -> int:
        """Finish the erasures that were interrupted, unless another process is erasing. Returns their number.
        Raises Unavailable."""
        if not await unfinished(self._store):
            return 0
        async with self._exclusive():
            entries = await unfinished(self._store)
            for entry in entries:
                await self._finish(entry)
            return len(entries)

    async def _finish(self, entry: JournalEntry) -> EraseReport:
        if entry.request is not None:
            await entry.end_deletion(await self._delete(entry, entry.request))
        await entry.delete_plans()
        await self._coordinator.purge_deleted()
        await self._store.purge_deleted()
        await entry.delete()
        return entry.report

    async def _delete(self, entry: JournalEntry, request: EraseRequest) -> EraseReport:
        """Delete and announce everything of the request."""
        scope, report = self._scope(request), EraseReport()
        await self._store.recover_merges()
        logs, hashes = list[str](), set[str]()

        async def carry_out(plan: ErasePlan, *, is_exact: bool) -> None:
            await self._carry_out(plan, is_exact=is_exact)
            report.add(plan.report)
            logs.extend(plan.logs)
            hashes.update(plan.hashes)

        of_access_documents = []
        async for plan in entry.plans():
            if any(map(scope.is_access_document, plan.keys)):
                of_access_documents.append(plan)
            else:
                await carry_out(plan, is_exact=True)
        for number in range(MAX_PASSES):
            found = 0
            async for keys in self._pages(scope, access_documents=False):
                plan = await self._planner.plan(keys)
                await entry.add_plan(plan)
                await carry_out(plan, is_exact=number < _EXACT_PASSES)
                found += len(plan.keys) + len(plan.objects)
            if found:
                continue
            if await self._is_merged(scope):
                await self._sleep(LEASE_RENEW_S)
                continue
            async for keys in self._pages(scope, access_documents=True):
                plan = await self._planner.plan(keys)
                await entry.add_plan(plan)
                of_access_documents.append(plan)
            if not of_access_documents:
                break
            while of_access_documents:
                plan = of_access_documents.pop()
                # Earlier versions first: whoever made the next access document could read them.
                await gather_bounded(_CONCURRENT, plan.objects, self._store.delete)
                await carry_out(plan, is_exact=number < _EXACT_PASSES)
        else:
            raise StoreUnavailable("others write it all the time: revoke their keys first")
        report.add_keyrings(await self._remove_keyring_entries(request))
        await self._forget_damage(scope)
        await self._sleep(SETTLE_S)
        # A request that was under way may have stored a part of a log after its head was gone.
        await delete_log_objects(self._store, logs)
        report.add(await self._forget(request, scope, hashes.union(logs)))
        return report

    async def _carry_out(self, plan: ErasePlan, *, is_exact: bool) -> None:
        """Delete what a plan names. A version that is not the planned one is left if `is_exact`, if the store
        deletes by version without leaving a trace."""
        now_ms = self._services.now_ms()
        is_exact = is_exact and self._store.transactional is not None

        async def delete(key: str) -> None:
            etag, hash_ = plan.keys[key]
            changes = self._planner.removals(key, hash_, now_ms)
            with suppress(EtagMismatch):
                await self._outbox.delete(key, Etag(etag) if is_exact else ANY, changes, hash_)

        await gather_bounded(_CONCURRENT, plan.keys, delete)
        await gather_bounded(_CONCURRENT, plan.objects, self._store.delete)
        await delete_log_objects(self._store, plan.logs)
        for key, pairs in groupby(sorted(plan.entries), lambda entry: entry[0]):
            await self._drop_entries(key, [id_ for _, id_ in pairs])

    async def _drop_entries(self, key: str, ids: Sequence[str]) -> None:
        """Remove these entries from the list at `key`. Raises StoreUnavailable if others write it all the
        time."""
        projections = self._lists.projections
        if await self._store.get(key) is None or not projections:
            return
        work = [PendingEntry(projections[0], EntryChange(id_, None), 0, 0) for id_ in ids]

        async def make() -> ListTransform:
            return partial(apply_entries, work)

        for _ in range(_LIST_ATTEMPTS):
            if await self._lists.write(key, projections, make) is not None:
                return
        raise StoreUnavailable(f"the list {key} cannot be written")

    async def _remove_keyring_entries(
        self, request: EraseRequest, *, dry_run: bool = False
    ) -> KeyringEntries:
        def ref_of(key: str) -> DocumentRef | None:
            places = self._planner.locations(key)
            return places[0].document_ref if places else None

        return await remove_entries(self._services, request, self._scope(request), ref_of, dry_run=dry_run)

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

    async def _forget(self, request: EraseRequest, scope: Scope, known: set[str]) -> EraseReport:
        """Remove what the coordinator and the change log know of the request. `known` are the ids of logs and
        the hashes that were erased."""
        await self._wait_for_intents(request, scope)
        report, changes = EraseReport(), 0
        async for hash_ in self._written(request, scope):
            changes += 1
            known.add(hash_)
        known.discard("")
        bucket = f"identity={request.value}" if request.kind == "identity" else None

        def is_counter(name: str) -> bool:
            return bucket is not None and bucket in name.replace(":", ",").replace(" ", ",").split(",")

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
        report.erased.update(rateCounters=counters, idempotencyRecords=claims, changes=changes)
        if changes:
            await self._outbox.log.clear()
        return report

    async def _written(self, request: EraseRequest, scope: Scope) -> AsyncIterator[str]:
        """Yield the hash of every change in the log that names something of the request."""
        after = ""
        while found := await self._outbox.log.read(after, _CHANGES):
            for _, change in found:
                if self._names(change, request, scope):
                    yield parse_change(change).hash
            after = found[-1][0]

    def _names(self, change: Change, request: EraseRequest, scope: Scope) -> bool:
        """Return True if the change is of a key of the request, or by its identity."""
        ref = parse_change(change).ref
        place = self._lists.keys.locate(ref)
        key = ref.key or (place.key if place is not None else "")
        return scope.includes(key) or (request.kind == "identity" and change.identity == request.value)

    async def _wait_for_intents(self, request: EraseRequest, scope: Scope) -> None:
        """Wait until no write that names something of the request waits to be announced."""
        while self._outbox.needs_recovery:
            await self._outbox.recover()
            intents = await self._coordinator.prepared(_INTENTS)
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
            if len(page) == PAGE:
                yield list(page)
                page.clear()
        if page:
            yield list(page)

    async def _check_spaces(self, scope: Scope) -> None:
        """Raise BadRequest if an access document would go and something of its space would stay."""
        async for access, key in scope.left_in_spaces(self._store):
            raise BadRequest(
                f"{key} would be left without its access document {access}, and the next caller who made one "
                "would own it: erase everything else of the space first"
            )

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
            for _ in range(_LEASE_ATTEMPTS):
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
            with suppress(Unavailable):
                await self._coordinator.acquire_lease(LEASE)
