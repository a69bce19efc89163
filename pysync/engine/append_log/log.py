"""Append-only logs: append, read, and deletion of expired logs."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Self

import orjson

from pysync import _core
from pysync.coordinator import IDEMPOTENCY_TTL_MS, Coordinator, release_claim
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log.append import AppendBatcher, ElementsDropped, PendingAppend
from pysync.engine.append_log.head import HeadCache, LogSettings, chunk_keys, load_chunks
from pysync.engine.append_log.read import LogRange, LogSlice, SegmentReader
from pysync.engine.append_log.retention import (
    ObjectDeletions,
    delete_log_objects,
    delete_objects,
    without_oldest,
)
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.idempotency import (
    Attempt,
    AttemptRecord,
    IdempotentRequest,
    commit_once,
    result_of,
)
from pysync.engine.outbox import Outbox, outbox_of
from pysync.errors import (
    AppendLimitExceeded,
    Conflict,
    CoordinatorUnavailable,
    DocumentCorrupt,
    IdempotencyKeyReused,
    NonMonotonicTimestamp,
    OutcomeUnknown,
    QuotaExceeded,
    TsTooFarAhead,
)
from pysync.model import WriteResult
from pysync.store import (
    ABSENT,
    CarriedOut,
    Charge,
    Etag,
    EtagMismatch,
    ListEntry,
    Precondition,
    Store,
    StoredObject,
    Write,
)
from pysync.write_ids import new_write_id

EMPTY_LOG: Final = _core.LogHead("")
"""What is read where nothing is stored."""


class AppendClaim(NamedTuple):
    """The claim of the first append under an Idempotency-Key: its write id, the log and the position in it
    from which that id may be found, the hash of its data (`""` if an earlier version made the claim), and the
    result once the element is written. `is_repeated` is True once a repetition may have written it."""

    write_id: str
    id: str
    position: int
    hash: str = ""
    result: WriteResult | None = None
    is_repeated: bool = False

    def encode(self) -> bytes:
        """Return the claim as the coordinator stores it."""
        return orjson.dumps([*self[:4], self.result and [*self.result], self.is_repeated])

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Parse a stored claim."""
        return cls(*orjson.loads(text))


class _ClaimChanged(Exception):
    """Another attempt has changed the claim of an append, or this one has withdrawn it."""


class AppendLogs:
    """Append-only logs on top of a store, which any number of nodes may share. `now_ms` is the clock of every
    timestamp. `head_bytes` is the size up to which a head may grow before its tail is sealed; the default
    suits the store."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        now_ms: Callable[[], int],
        *,
        head_bytes: int | None = None,
        outbox: Outbox | None = None,
        corruption: CorruptionReporter | None = None,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self.now_ms = now_ms
        self._corruption = corruption or CorruptionReporter()
        self._head_cache = HeadCache(store, now_ms, self._corruption)
        self._outbox = outbox or outbox_of(store, coordinator)
        self._requests = self._outbox.idempotent_requests(now_ms)
        self._deletions = ObjectDeletions(store)
        self._batcher = AppendBatcher(
            store,
            self._outbox,
            self._head_cache,
            now_ms,
            store.cheap_put_bytes if head_bytes is None else head_bytes,
            self._corruption,
            self._deletions,
        )

    async def append(
        self,
        key: str,
        element: _core.Append,
        settings: LogSettings,
        context: WriteContext | None = None,
        request: IdempotentRequest | None = None,
    ) -> WriteResult:
        """Append an element to the log at `key`, durably. All readers see one order, in which each element
        has a later timestamp than the one before. The append is announced as a change of `context`, or not
        announced if that is None. A repetition of `request` returns the result of the first append.

        Raises:
            TsTooFarAhead, NonMonotonicTimestamp, AppendLimitExceeded, QuotaExceeded: the element is not
                appended.
            DocumentCorrupt: the stored object is not a log.
            StoreUnavailable: the append may or may not have taken effect, or the element of an earlier
                attempt may have left the log.
            IdempotencyKeyReused: the request's key was claimed for other data.
            OutcomeUnknown: the log that the first attempt appended to is gone.
        """
        if not settings.persist:
            return await self._announce(element, context, request)
        pending = PendingAppend(element, settings, _future(), context)
        if request is None:
            return await self._batcher.submit(key, pending)
        if (store := self._store.transactional) is not None:
            pending.request = request
            claim = request.claim(WriteResult("", 0))
            return await commit_once(store.claims, claim, self._batcher.submit(key, pending))
        while True:
            with suppress(_ClaimChanged):
                return await self._append_with_write_id(key, replace(pending, done=_future()), request)

    async def _append_with_write_id(
        self, key: str, pending: PendingAppend, request: IdempotentRequest
    ) -> WriteResult:
        """Append to a log of a store without claims, or return the result of the first append.

        The first attempt claims the key in the coordinator, for its data and a write id of its own. Every
        attempt appends under that write id, to a log that does not contain it yet. Of two concurrent attempts
        one finds the element that the other has written. Then the claim gets the result. A rejected append
        leaves no claim, unless a repetition may have written the element.

        Raises _ClaimChanged if this attempt has written nothing, and the next one decides by another claim.
        """
        # Repetitions search all elements since this head. An older head would be correct but expensive.
        cached = await self._head_cache.get_fresh(key, pending.settings.field)
        is_new = cached is None or pending.settings.is_expired(cached.head, self.now_ms())
        id_, count = ("", 0) if cached is None or is_new else (cached.head.id, cached.head.count)
        own = AppendClaim(os.urandom(8).hex(), id_, count, request.content)
        name = hashlib.sha256(f"append {request.key}".encode()).hexdigest()
        text = await self._coordinator.put_if_absent(name, own.encode(), IDEMPOTENCY_TTL_MS)
        first = AppendClaim.decode(text)
        if first.hash not in ("", own.hash):
            raise IdempotencyKeyReused
        if first.result is not None:
            return WriteResult(*first.result)
        repeated = first._replace(is_repeated=True).encode()
        if first != own and not await self._coordinator.compare_and_set(name, text, repeated):
            raise _ClaimChanged
        pending.write_id = first.write_id
        pending.search_from = first.id, first.position
        pending.only_in = first.id
        try:
            written = await self._batcher.submit(key, pending)
        except (AppendLimitExceeded, NonMonotonicTimestamp, TsTooFarAhead, ElementsDropped, QuotaExceeded):
            if first == own:
                await release_claim(self._coordinator, name, text)
            raise
        except OutcomeUnknown:
            if first != own:
                raise
            # The log is gone. The claim stays if a repetition may have written to it.
            await release_claim(self._coordinator, name, text)
            raise _ClaimChanged from None
        done = first._replace(result=written).encode()
        with suppress(CoordinatorUnavailable):
            if first != own or not await self._coordinator.compare_and_set(name, text, done):
                await self._coordinator.compare_and_set(name, repeated, done)
        return written

    async def _announce(
        self, element: _core.Append, context: WriteContext | None, request: IdempotentRequest | None
    ) -> WriteResult:
        """Announce an element that is not stored, or return the result of the earlier attempt that did."""
        _, (outcome,) = EMPTY_LOG.append([(element, "")], self.now_ms(), None)
        if isinstance(outcome, str):
            raise TsTooFarAhead
        written = WriteResult(_core.content_hash(element.canonical), outcome[1])

        async def announce(result: WriteResult) -> bool:
            if context is not None:
                await self._outbox.announce([context.change(result.hash, result.timestamp_ms)])
            return True

        if request is None:
            await announce(written)
            return written
        own = AttemptRecord(new_write_id(), *written, request.content)
        try:
            async with self._requests.claimed(request, own, lambda first: announce(first.result)):
                await announce(written)
        except CarriedOut as earlier:
            return result_of(earlier.outcome)
        return written

    async def read(self, key: str, bounds: LogRange, settings: LogSettings) -> LogSlice:
        """Return the current elements of the log at `key` within `bounds`; none if nothing is stored or it
        has expired. Raises CheckpointTooOld if elements after `bounds.since` have left the log,
        DocumentCorrupt and StoreUnavailable."""
        (tail,) = await self.read_many(key, [bounds], settings)
        tail.check_retained()
        return tail

    async def read_many(self, key: str, each: Sequence[LogRange], settings: LogSettings) -> list[LogSlice]:
        """Read the log within each of these bounds, all from one version of its head. Does not check whether
        elements have left the log: call `check_retained` of each slice."""
        cached = await self._head_cache.read(key, settings.field) if settings.persist else None
        is_expired = (
            cached is not None
            and settings.ttl_ms is not None
            and settings.is_expired(cached.head, self.now_ms())
        )
        stored = EMPTY_LOG if cached is None or is_expired else cached.head
        # Segments that several bounds need are read once.
        segment_cache: dict[str, bytes] | None = {} if len(each) > 1 else None
        tails = []
        for bounds in each:
            head = stored
            if head.is_chunked:
                with self._corruption.reporting("log", key):
                    head = await load_chunks(self._store, key, head, bounds.since, bounds.newest)
            segments = SegmentReader(self._head_cache, key, settings.field, head, bounds, segment_cache)
            tails.append(LogSlice(key, head, bounds, segments, self._corruption))
        return tails

    async def delete(
        self,
        key: str,
        base_hash: str,
        settings: LogSettings,
        context: WriteContext | None = None,
        request: IdempotentRequest | None = None,
    ) -> WriteResult:
        """Remove the log at `key` if its hash is `base_hash` (`""`: of nothing), and announce the removal
        unless `context` is None. The head goes first, and its segments in the background: after a crash those
        that are left belong to no log. Returns the removed hash and the time, also to a repetition of
        `request`. Raises Conflict, DocumentCorrupt and StoreUnavailable."""
        removed = WriteResult(base_hash, self.now_ms())
        remove = partial(self._remove, key, settings, context)
        if request is None:
            return await remove(Attempt(removed))
        return await self._requests.carry_out(
            request,
            removed,
            remove,
            base=lambda: self._stored_etag(key, settings),
            stored=lambda first: self._stored_etag(key, settings),
        )

    async def _stored_etag(self, key: str, settings: LogSettings) -> str:
        """Return the etag of the head at `key`, `""` if there is none."""
        cached = await self._head_cache.read(key, settings.field)
        return "" if cached is None else cached.etag

    async def _remove(
        self, key: str, settings: LogSettings, context: WriteContext | None, attempt: Attempt
    ) -> WriteResult:
        """Delete the version with the hash of the result, and return the result. Raises as `delete`."""
        removed, claims, _, only = attempt
        base_hash = removed.hash
        changes = [] if context is None else [context.change(base_hash, removed.timestamp_ms, removed=True)]
        while True:
            cached = await self._head_cache.read(key, settings.field)
            if cached is None or settings.is_expired(cached.head, removed.timestamp_ms):
                current_hash, written_ms = "", 0
            else:
                current_hash, written_ms = cached.head.hash, cached.head.ts_ms or 0
            if current_hash != base_hash:
                raise Conflict(current_hash, written_ms)
            if only and (cached is None or cached.etag != only):
                raise Conflict("")
            if cached is None and not claims:
                return removed
            try:
                expect: Precondition = ABSENT if cached is None else Etag(cached.etag)
                write = Write(key, None, expect, changes, base_hash, claims=claims, version=removed)
                await self._outbox.commit(write)
            except EtagMismatch:
                continue
            self._head_cache.invalidate(key, settings.field)
            if cached is not None:
                self._deletions.delete_log(key, cached.head)
            return removed

    async def drop_oldest(self, key: str, settings: LogSettings) -> int:
        """Let the elements of the log at `key` leave that `settings` do not keep, and return the number of
        deleted objects. Does nothing if nothing is stored. Raises DocumentCorrupt and StoreUnavailable."""
        deleted = 0
        while True:
            cached = await self._head_cache.read(key, settings.field)
            if cached is None or not cached.head.id:
                return deleted
            with self._corruption.reporting("log", key):
                head, keys = await without_oldest(self._store, cached.head, settings, self.now_ms())
            if head.start == cached.head.start:
                return deleted
            try:
                etag = await self._put_head(key, head, cached.etag)
            except EtagMismatch:
                return deleted  # an append came first, and another call continues
            self._head_cache.put(key, settings.field, head, etag)
            await delete_objects(self._store, keys)
            deleted += len(keys)

    async def begin_deletion(self, key: str, head: _core.LogHead, etag: str) -> tuple[_core.LogHead, str]:
        """Let the log at `key` have no elements if some are in objects of their own. Returns the head that is
        then stored, which refers to the objects until they are deleted: neither an append of a node whose
        clock is behind nor a crash can then leave a part of the log. Raises EtagMismatch if this is not the
        stored version."""
        if head.previous is not None:
            await delete_log_objects(self._store, head.previous)
        if not head.nodes():
            return head, etag
        emptied = _core.LogHead(os.urandom(16).hex(), head.id)
        return emptied, await self._put_head(key, emptied, etag)

    async def close(self) -> None:
        """Finish the pending appends and deletions."""
        await self._batcher.close()
        await self._deletions.close()

    async def _put_head(self, key: str, head: _core.LogHead, etag: str) -> str:
        """Replace a head by one with which no element is added, and return its etag."""
        charge = Charge(elements=head.count - head.start, checked=False)
        return await self._outbox.commit(Write(key, head.stored(), Etag(etag), charge=charge))

    async def delete_expired(
        self, listed: ListEntry, settings: LogSettings, ref: DocumentRef | None = None
    ) -> bool:
        """Delete a log if its head is still the listed version and says that it has expired, and announce its
        removal as a change of `ref`, which names the key. Returns True if it was deleted."""
        key, etag, now_ms = listed.key, listed.etag, self.now_ms()
        if settings.ttl_ms is None or listed.modified_ms + settings.ttl_ms >= now_ms:
            return False
        found = await self._store.get(key)
        if not isinstance(found, StoredObject) or found.etag != etag:
            return False
        try:
            with self._corruption.reporting("log", key):
                head = _core.LogHead.read(found.body, settings.field)
        except DocumentCorrupt:
            return False
        if not settings.is_expired(head, now_ms):
            return False
        try:
            emptied, etag = await self.begin_deletion(key, head, etag)
            if emptied is not head:
                await delete_log_objects(self._store, head.id)
            changes = [] if ref is None else [ref.change(head.hash, now_ms, removed=True)]
            await self._outbox.commit(Write(key, None, Etag(etag), changes, head.hash))
        except EtagMismatch:
            return False
        if head.id:  # segments that were stored before a crash and that no head refers to
            await delete_log_objects(self._store, head.id)
        if head.is_chunked:
            for chunk in await chunk_keys(self._store, key):
                await self._store.delete(chunk)
        return True


def _future() -> asyncio.Future[WriteResult]:
    return asyncio.get_running_loop().create_future()
