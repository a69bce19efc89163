"""The transactional outbox: every write that takes effect is announced, even if the process stops in between.

A store with a change log of its own writes the object and its changes in one transaction. For any other store
the outbox prepares an intent at the coordinator before the write, and announces its changes after it. A
process that stops in between leaves the intent behind, and `recover` announces it. The write may not have
been made after all, which costs followers one pull. If the next write of the document comes first, it
announces the earlier change too, so that the versions of a document are announced in order.

A change is serialised once, at its write. The stored text is the text that subscribers receive.

See docs/reference/protocol.md#delivery.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import ClassVar, Final

from pysync.cache import BoundedCache
from pysync.changelog import Change, ChangeLog
from pysync.concurrency import KeyLocks
from pysync.coordinator import Coordinator, PreparedWrite
from pysync.engine.changes import parse_change
from pysync.engine.idempotency import SETTLED_MS, IdempotentRequests
from pysync.errors import CoordinatorUnavailable, KeyConflict, QuotaExceeded, StoreUnavailable
from pysync.store import (
    ABSENT,
    ANY,
    PAGE,
    Charge,
    Claim,
    ClaimTable,
    DamagedFile,
    EtagMismatch,
    Precondition,
    Store,
    TransactionalStore,
    Write,
)

log = logging.getLogger(__name__)

EARLY_RECOVERY_MS: Final = 5_000
"""Age at which nearly every write has been made, or rejected and its intent withdrawn."""
MAX_UNREPORTED: Final = 10_000
"""The number of unreported outcomes that are kept. For older ones `recover` assumes a successful write."""
_NO_INTENT: Final = PreparedWrite("", 0, [])


def outbox_of(store: Store, coordinator: Coordinator) -> "Outbox":
    """Return the outbox that suits the store."""
    if store.transactional is None:
        return AnnouncingOutbox(store, coordinator)
    return TransactionalOutbox(store.transactional, coordinator)


class Outbox(ABC):
    """The writes of documents, logs and files to a store, and the announcement of their changes in `log`."""

    is_transactional: ClassVar[bool]
    """True if a write, its changes and its segments are one transaction. Otherwise changes may have to be
    recovered."""

    def __init__(self, log: ChangeLog, coordinator: Coordinator, claims: ClaimTable | None = None) -> None:
        self.log: Final = log
        self._coordinator = coordinator
        self._claims = claims

    @abstractmethod
    def commit(self, write: Write) -> Awaitable[str]:
        """Carry out a write or a removal and announce its changes, after the pending change of the version
        with the hash `base`. Returns the etag, `""` after a removal. A store without a change log appends the
        objects of `also` before: they may stay although the write was not made. The segments are stored with
        it as well, or before it, and stay. Only a transactional store takes claims.

        The changes of a removal name their document with its key. A store with a change log announces nothing
        if there was nothing to remove. Otherwise a removal may be announced although another writer has
        created the document again; a change without `removed` then follows it.

        Raises the errors of `Store.put` and `Store.delete`; after StoreUnavailable the changes may be
        announced although the write was not made. Raises CoordinatorUnavailable if the intent cannot be
        prepared; nothing is written then.
        """

    @abstractmethod
    def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[str], Claim] | None = None,
        claimed: Callable[[str], AbstractAsyncContextManager[None]] | None = None,
    ) -> Awaitable[str]:
        """Write a file as `Store.write` and announce `changes_of(sha256)`, which is at least one change.
        `charge` is that of a `Write`. A transactional store commits the claim of `claim_of(sha256)`; to any
        other the file is written within `claimed(sha256)`. Raises as `Store.write`, `commit` and `claimed`.

        If the store has no change log, the changes of two writes of one key are announced in the order of the
        writes, unless these overlap on two nodes: the last write is not known then.
        """

    async def announce(self, changes: Sequence[Change]) -> None:
        """Announce changes without a write to the store. Raises Unavailable."""
        if changes:
            await self.log.append(changes)

    @abstractmethod
    async def reannounce(self, changes: Sequence[Change]) -> None:
        """Announce the write of an earlier attempt again, in case that attempt did not get to it. Raises
        CoordinatorUnavailable."""

    def idempotent_requests(self, now_ms: Callable[[], int]) -> IdempotentRequests:
        """Return what carries out requests that may be repeated."""
        return IdempotentRequests(self._claims, self._coordinator, now_ms)

    @property
    @abstractmethod
    def is_flushed(self) -> bool:
        """True if every write with a known outcome has been announced."""

    @abstractmethod
    async def flush_outcomes(self) -> None:
        """Report the outcomes that could not be reported to the coordinator at their time. Raises
        CoordinatorUnavailable."""

    @abstractmethod
    async def recover(self, *, early: bool = False) -> int:
        """Announce the intents whose writer will not announce them any more. With `early`, also announce
        younger ones, which their writers or a later call may announce once more. Returns the number of
        announced intents. Raises CoordinatorUnavailable."""


class TransactionalOutbox(Outbox):
    """The outbox of a store with a change log of its own: there is nothing to recover."""

    is_transactional = True
    is_flushed = True

    def __init__(self, store: TransactionalStore, coordinator: Coordinator) -> None:
        super().__init__(store.change_log, coordinator, store.claims)
        self._store = store

    def commit(self, write: Write) -> Awaitable[str]:
        """See `Outbox.commit`."""
        return self._store.commit(write)

    def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[str], Claim] | None = None,
        claimed: Callable[[str], AbstractAsyncContextManager[None]] | None = None,
    ) -> Awaitable[str]:
        """See `Outbox.write`."""
        return self._store.write(
            key, chunks, content_type, changes_of=changes_of, charge=charge, claim_of=claim_of
        )

    async def reannounce(self, changes: Sequence[Change]) -> None:
        """See `Outbox.reannounce`."""

    async def flush_outcomes(self) -> None:
        """See `Outbox.flush_outcomes`."""

    async def recover(self, *, early: bool = False) -> int:
        """See `Outbox.recover`."""
        return 0


class AnnouncingOutbox(Outbox):
    """The outbox of any other store: its changes are announced by the coordinator."""

    is_transactional = False

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        super().__init__(coordinator, coordinator)
        self._store = store
        self._counting = store.counting
        self._last_announced = BoundedCache[str, Change]()
        self._key_locks = KeyLocks()
        self._flush_lock = asyncio.Lock()
        self._unreported: deque[tuple[str, list[Change]]] = deque(maxlen=MAX_UNREPORTED)

    async def commit(self, write: Write) -> str:
        """See `Outbox.commit`."""
        account = None if write.charge is None else write.charge.account
        if write.segments and self._counting is not None:
            await self._counting.check_room(write)
        for segment in write.segments:
            charge = Charge(account, 0, write.key, checked=False)
            await self._put(segment.key, segment.body, ANY, charge)
        if write.also:
            async with self._appended_before(write):
                return await self.commit(write._replace(also=(), segments=()))
        if not write.changes:
            return await self._carry_out(write)
        await self.flush_outcomes()
        earlier = await self._pending_predecessor(write.key, write.base, write.changes[-1])
        to_announce = [*earlier.changes, *write.changes]
        intent = await self._coordinator.prepare(to_announce)
        try:
            etag = await self._carry_out(write)
        except (EtagMismatch, QuotaExceeded):
            await self._report_outcome(intent, [])
            raise
        if write.body is not None:
            await self._report_outcome(intent, to_announce)
        elif not await self._announce_removal(intent, to_announce):
            return etag
        if earlier.name:
            await self._report_outcome(earlier.name, [])
        self._last_announced.put(write.key, write.changes[-1])
        return etag

    async def _carry_out(self, write: Write) -> str:
        if write.body is not None:
            return await self._put(write.key, write.body, write.expect, write.charge)
        await self._store.delete(write.key, expect=write.expect)
        return ""

    async def _put(self, key: str, body: bytes, expect: Precondition, charge: Charge | None) -> str:
        if self._counting is None:
            return await self._store.put(key, body, expect=expect)
        return await self._counting.put(key, body, expect=expect, charge=charge)

    @asynccontextmanager
    async def _appended_before(self, write: Write) -> AsyncIterator[None]:
        """Append the objects of `also` before a write, and delete them if it is rejected."""
        keys: list[str] = []
        for each in write.also:
            keys.append(each.key(await self._coordinator.next_timestamp()))
            await self._put(keys[-1], each.body, ABSENT, None if write.body is None else write.charge)
        try:
            yield
        except (EtagMismatch, QuotaExceeded):
            for key in keys:
                with suppress(StoreUnavailable):
                    await self._store.delete(key)
            raise

    async def _announce_removal(self, intent: str, changes: list[Change]) -> bool:
        """Announce a removal. Returns False if that failed; `recover` then finds the intent."""
        try:
            await self._append_with_removals(PreparedWrite(intent, 0, changes), is_done=True)
        except (CoordinatorUnavailable, StoreUnavailable) as error:
            log.warning("failed to announce a removal, will retry: %s", error.detail)
            return False
        return True

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[str], Claim] | None = None,
        claimed: Callable[[str], AbstractAsyncContextManager[None]] | None = None,
    ) -> str:
        """See `Outbox.write`. The intent is prepared once all chunks have arrived: an error before that
        leaves nothing behind, and the outcomes of earlier writes have had time to reach the coordinator."""
        intent, changes = "", list[Change]()
        async with AsyncExitStack() as stack:

            async def prepare(sha256: str) -> None:
                nonlocal intent
                await self.flush_outcomes()
                if claimed is not None:
                    await stack.enter_async_context(claimed(sha256))
                await stack.enter_async_context(self._key_locks[key])
                new = changes_of(sha256)
                changes.extend([*await self._pending_for(new[-1]), *new])
                intent = await self._coordinator.prepare(changes)

            try:
                if self._counting is None:
                    sha256 = await self._store.write(key, chunks, content_type, prepare)
                else:
                    sha256 = await self._counting.write(key, chunks, content_type, prepare, charge)
            except KeyConflict:
                if intent:
                    await self._report_outcome(intent, [])
                raise
            await self._report_outcome(intent, changes)
            return sha256

    async def reannounce(self, changes: Sequence[Change]) -> None:
        """See `Outbox.reannounce`."""
        if changes:
            await self._coordinator.append(changes)

    @property
    def is_flushed(self) -> bool:
        """See `Outbox.is_flushed`."""
        return not self._unreported

    async def flush_outcomes(self) -> None:
        """See `Outbox.flush_outcomes`."""
        async with self._flush_lock:  # later callers wait until all outcomes are reported
            while self._unreported:
                outcome = self._unreported.popleft()
                try:
                    await self._close_intent(*outcome)
                except BaseException:
                    self._unreported.appendleft(outcome)
                    raise

    async def recover(self, *, early: bool = False) -> int:
        """See `Outbox.recover`."""
        await self.flush_outcomes()
        recovered = 0
        while True:
            intents = await self._coordinator.prepared(PAGE)
            for intent in intents:
                is_timed_out = intent.age_ms >= SETTLED_MS
                if is_timed_out or (early and intent.age_ms >= EARLY_RECOVERY_MS):
                    await self._append_with_removals(intent, is_done=is_timed_out)
                    recovered += 1
            if len(intents) < PAGE or intents[-1].age_ms < SETTLED_MS:
                return recovered

    async def _append_with_removals(self, intent: PreparedWrite, *, is_done: bool) -> None:
        """Announce the changes of an intent, and close it if it `is_done`. A document that is stored after
        its removal was announced was never removed, or was created again, perhaps announced too early. Its
        change is then announced again without `removed`."""
        removed = [change for change in intent.changes if change.removed]
        await self._coordinator.append(intent.changes, "" if removed or not is_done else intent.name)
        if removed:
            stored = [change for change in removed if await self._is_stored(parse_change(change).ref.key)]
            if stored:
                written = [parse_change(change) for change in stored]
                await self._coordinator.append(
                    [each.ref.change(*each[1:3], each.identity) for each in written]
                )
            if is_done:
                await self._coordinator.abort(intent.name)

    async def _is_stored(self, key: str) -> bool:
        try:
            return await self._store.get(key) is not None or await self._store.stat(key) is not None
        except DamagedFile:
            return True

    async def _pending_predecessor(self, key: str, base: str, change: Change) -> PreparedWrite:
        """Return the intent of the write that made the version `base` of the document of `change`, with all
        changes that were not announced before it, if it is not announced yet."""
        announced = self._last_announced.get(key)
        if not base or (announced is not None and announced.is_for_hash(base)):
            return _NO_INTENT
        for intent in await self._coordinator.prepared(PAGE):
            last = intent.changes[-1]
            if last.is_for_hash(base) and parse_change(last).ref.is_same_document(parse_change(change).ref):
                return intent
        return _NO_INTENT

    async def _pending_for(self, change: Change) -> list[Change]:
        """Return the prepared changes of the document of `change`. The write of a file does not know which
        change it replaces, so they include changes of writes that were not made after all. Their intents are
        left to their writers, which may still be writing."""
        ref = parse_change(change).ref
        pending = (each for intent in await self._coordinator.prepared(PAGE) for each in intent.changes)
        return [each for each in dict.fromkeys(pending) if parse_change(each).ref.is_same_document(ref)]

    async def _report_outcome(self, intent: str, changes: list[Change]) -> None:
        """Close an intent whose outcome is known: announce `changes`, which are empty if the write was
        rejected. If the coordinator is unavailable, the outcome is reported later."""
        try:
            await self._close_intent(intent, changes)
        except CoordinatorUnavailable as error:
            if changes:
                log.warning("failed to announce a stored write, will retry: %s", error.detail)
            else:
                log.warning("failed to withdraw a rejected write, will retry: %s", error.detail)
            self._unreported.append((intent, changes))

    async def _close_intent(self, intent: str, changes: list[Change]) -> None:
        if changes:
            await self._coordinator.append(changes, intent)
        else:
            await self._coordinator.abort(intent)
