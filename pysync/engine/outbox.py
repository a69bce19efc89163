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
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

from pysync.cache import BoundedCache
from pysync.changelog import Change, ChangeLog
from pysync.clock import HybridTimestamp
from pysync.coordinator import Coordinator, PreparedWrite
from pysync.engine.changes import parse_change
from pysync.engine.idempotency import SETTLED_MS, CoordinatedRequests
from pysync.errors import CoordinatorUnavailable, KeyConflict, QuotaExceeded, StoreUnavailable
from pysync.store import (
    ABSENT,
    ANY,
    AppendedObject,
    Charge,
    Claim,
    DamagedFile,
    EtagMismatch,
    OnReceived,
    Precondition,
    Segment,
    Store,
)

log = logging.getLogger(__name__)

INTENT_TIMEOUT_MS: Final = SETTLED_MS
"""Age at which the write of an intent has been made or never will be."""
EARLY_RECOVERY_MS: Final = 5_000
"""Age at which nearly every write has been made, or rejected and its intent withdrawn."""
MAX_UNREPORTED: Final = 10_000
"""The number of unreported outcomes that are kept. For older ones `recover` assumes a successful write."""
ANNOUNCED_CACHE_SIZE: Final = 4_096
"""The number of documents whose last announced version is cached."""
_PAGE: Final = 1_000
"""The number of intents that are read at a time. Of the younger ones `recover` reads only so many, which is
more than a node has."""
_KEY_LOCKS: Final = 256
"""The number of locks that the keys of files share."""
_NO_INTENT: Final = PreparedWrite("", 0, [])


class Outbox:
    """The writes of documents, logs and files to a store, and the announcement of their changes in `log`."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._transactional = store.transactional
        self._counting = store.counting
        self.log: ChangeLog = coordinator if self._transactional is None else self._transactional.change_log
        self._last_announced = BoundedCache[str, Change](ANNOUNCED_CACHE_SIZE)
        self._key_locks = [asyncio.Lock() for _ in range(_KEY_LOCKS)]
        self._flush_lock = asyncio.Lock()
        self._unreported: deque[tuple[str, list[Change]]] = deque(maxlen=MAX_UNREPORTED)

    def put(
        self,
        key: str,
        body: bytes,
        expect: Precondition,
        changes: Sequence[Change],
        base: str = "",
        charge: Charge | None = None,
        also: Sequence[AppendedObject] = (),
        segments: Sequence[Segment] = (),
        claims: Sequence[Claim] = (),
    ) -> Awaitable[str]:
        """Write as `Store.put` and announce `changes`, after the pending change of the version with the hash
        `base` that this write replaces (`""` for none). If usage is tracked, the write counts as `charge`, by
        default as its key says. The objects of `also` are appended with it. A store without a change log
        appends them before: they may stay although the write was not made. The segments are stored
        with it as well, or before it, and stay. Only a transactional store takes claims.

        Raises the errors of `Store.put`; after StoreUnavailable the changes may be announced although the
        write was not made. Raises CoordinatorUnavailable if the intent cannot be prepared; nothing is written
        then.
        """
        if self._transactional is not None:
            return self._transactional.put(
                key,
                body,
                expect=expect,
                changes=changes,
                charge=charge,
                also=also,
                segments=segments,
                claims=claims,
            )
        return self._put_announced(key, body, expect, changes, base, charge, also, segments)

    async def _put_announced(
        self,
        key: str,
        body: bytes,
        expect: Precondition,
        changes: Sequence[Change],
        base: str,
        charge: Charge | None,
        also: Sequence[AppendedObject] = (),
        segments: Sequence[Segment] = (),
    ) -> str:
        """Put in a store without a change log."""
        for segment in segments:
            await self._put(segment.key, segment.body, ANY, segment.charge)
        if also:
            async with self._written_before(also, charge):
                return await self._put_announced(key, body, expect, changes, base, charge)
        if not changes:
            return await self._put(key, body, expect, charge)
        await self.flush_outcomes()
        earlier = await self._pending_predecessor(key, base, changes[-1])
        to_announce = [*earlier.changes, *changes]
        etag, intent = await self._put_prepared(key, body, expect, charge, to_announce)
        await self._report_outcome(intent, to_announce)
        if earlier.name:
            await self._report_outcome(earlier.name, [])
        self._last_announced.put(key, changes[-1])
        return etag

    async def delete(
        self,
        key: str,
        expect: Precondition,
        changes: Sequence[Change],
        base: str = "",
        also: Sequence[AppendedObject] = (),
        charge: Charge | None = None,
        claims: Sequence[Claim] = (),
    ) -> None:
        """Delete as `Store.delete` and announce `changes`, which are removals of documents named with their
        keys, after the pending change of the version with the hash `base`. A store with a change log
        announces nothing if there was nothing to delete. Otherwise a removal may be announced although
        another writer has created the document again; a change without `removed` then follows it. `also` is
        as for `put`; the objects count as `charge` and are never rejected. Claims are as for `put`.

        Raises the errors of `Store.delete` and of `put`.
        """
        if self._transactional is not None:
            await self._transactional.delete(
                key, expect=expect, changes=changes, also=also, charge=charge, claims=claims
            )
            return
        if also:
            async with self._written_before(also, None):
                await self.delete(key, expect, changes, base)
            return
        if not changes:
            await self._store.delete(key, expect=expect)
            return
        await self.flush_outcomes()
        earlier = await self._pending_predecessor(key, base, changes[-1])
        to_announce = [*earlier.changes, *changes]
        intent = await self._coordinator.prepare(to_announce)
        try:
            await self._store.delete(key, expect=expect)
        except EtagMismatch:
            await self._report_outcome(intent, [])
            raise
        try:
            await self._append_with_removals(PreparedWrite(intent, 0, to_announce), is_done=True)
        except (CoordinatorUnavailable, StoreUnavailable) as error:
            text, extra = error.detail, {"repeats": ("announce", error.detail)}
            log.warning("failed to announce a removal, will retry: %s", text, extra=extra)
            return  # `recover` finds the intent
        if earlier.name:
            await self._report_outcome(earlier.name, [])
        self._last_announced.put(key, changes[-1])

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[str], Claim] | None = None,
        received: OnReceived | None = None,
    ) -> str:
        """Write as `Store.write` and announce `changes_of(sha256)`, which is at least one change. `charge` is
        that of `put`. Only a transactional store takes a claim; any other calls `received`. Raises as
        `Store.write` and `put`.

        If the store has no change log, the changes of two writes of one key are announced in the order of the
        writes, unless these overlap on two nodes: the last write is not known then.
        """
        if self._transactional is not None:
            return await self._transactional.write(
                key, chunks, content_type, changes_of=changes_of, charge=charge, claim_of=claim_of
            )
        async with AsyncExitStack() as turn:

            async def changes_in_turn(sha256: str) -> list[Change]:
                if received is not None:
                    await received(sha256)
                await turn.enter_async_context(self._key_locks[hash(key) % _KEY_LOCKS])
                changes = changes_of(sha256)
                return [*await self._pending_for(changes[-1]), *changes]

            return await self._write(key, chunks, content_type, changes_in_turn, charge)

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[HybridTimestamp, str], Claim] | None = None,
    ) -> tuple[HybridTimestamp, str]:
        """Write as `write`, at a key made of a timestamp that is later than all before.

        If the store has a change log, files become visible in the order of their timestamps. Otherwise the
        timestamp is `Coordinator.next_timestamp`, and a file may become visible after a later one. The
        functions may be called in another thread. Only a transactional store takes a claim.
        """
        if self._transactional is not None:
            return await self._transactional.write_ordered(
                key_of, chunks, content_type, changes_of, charge, claim_of
            )
        tick = await self._coordinator.next_timestamp()

        async def changes_then(sha256: str) -> Sequence[Change]:
            return changes_of(tick, sha256)

        return tick, await self._write(key_of(tick), chunks, content_type, changes_then, charge)

    async def announce(self, changes: Sequence[Change]) -> None:
        """Announce changes without a write to the store. Raises Unavailable."""
        if changes:
            await self.log.append(changes)

    async def reannounce(self, changes: Sequence[Change]) -> None:
        """Announce the write of an earlier attempt again, in case that attempt did not get to it. Raises
        CoordinatorUnavailable."""
        if changes and self._transactional is None:
            await self._coordinator.append(changes)

    def coordinated_requests(self, now_ms: Callable[[], int]) -> CoordinatedRequests:
        """Return the claims of requests, for a store that is not transactional."""
        return CoordinatedRequests(self._coordinator, now_ms)

    @property
    def is_transactional(self) -> bool:
        """True if a write, its changes and its segments are one transaction."""
        return self._transactional is not None

    @property
    def needs_recovery(self) -> bool:
        """True if a write and its announcement are not one transaction."""
        return self._transactional is None

    @property
    def is_flushed(self) -> bool:
        """True if every write with a known outcome has been announced."""
        return not self._unreported

    async def flush_outcomes(self) -> None:
        """Report the outcomes that could not be reported to the coordinator at their time. Raises
        CoordinatorUnavailable."""
        async with self._flush_lock:  # later callers wait until all outcomes are reported
            while self._unreported:
                outcome = self._unreported.popleft()
                try:
                    await self._close_intent(*outcome)
                except BaseException:
                    self._unreported.appendleft(outcome)
                    raise

    async def recover(self, *, early: bool = False) -> int:
        """Announce the intents whose writer will not announce them any more. With `early`, also announce
        younger ones, which their writers or a later call may announce once more. Returns the number of
        announced intents. Raises CoordinatorUnavailable."""
        if not self.needs_recovery:
            return 0
        await self.flush_outcomes()
        recovered = 0
        while True:
            intents = await self._coordinator.prepared(_PAGE)
            for intent in intents:
                is_timed_out = intent.age_ms >= INTENT_TIMEOUT_MS
                if is_timed_out or (early and intent.age_ms >= EARLY_RECOVERY_MS):
                    await self._append_with_removals(intent, is_done=is_timed_out)
                    recovered += 1
            if len(intents) < _PAGE or intents[-1].age_ms < INTENT_TIMEOUT_MS:
                return recovered

    @asynccontextmanager
    async def _written_before(
        self, also: Sequence[AppendedObject], charge: Charge | None
    ) -> AsyncIterator[None]:
        """Append objects before a write, and delete them if it is rejected."""
        keys: list[str] = []
        for each in also:
            keys.append(each.key(await self._coordinator.next_timestamp()))
            await self._put(keys[-1], each.body, ABSENT, charge)
        try:
            yield
        except (EtagMismatch, QuotaExceeded):
            for key in keys:
                with suppress(StoreUnavailable):
                    await self._store.delete(key)
            raise

    async def _put(self, key: str, body: bytes, expect: Precondition, charge: Charge | None) -> str:
        if self._counting is None:
            return await self._store.put(key, body, expect=expect)
        return await self._counting.put(key, body, expect=expect, charge=charge)

    async def _put_prepared(
        self, key: str, body: bytes, expect: Precondition, charge: Charge | None, changes: list[Change]
    ) -> tuple[str, str]:
        """Put an object behind an intent, and return its etag and the name of the intent. Nothing is left if
        the write is rejected."""
        intent = await self._coordinator.prepare(changes)
        try:
            return await self._put(key, body, expect, charge), intent
        except (EtagMismatch, QuotaExceeded):
            await self._report_outcome(intent, [])
            raise

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
                await self._coordinator.append([each.ref.change(*each[1:3]) for each in written])
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
        for intent in await self._coordinator.prepared(_PAGE):
            last = intent.changes[-1]
            if last.is_for_hash(base) and parse_change(last).ref.is_same_document(parse_change(change).ref):
                return intent
        return _NO_INTENT

    async def _write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Awaitable[Sequence[Change]]],
        charge: Charge | None,
    ) -> str:
        """Write the object and return its sha256. The intent is prepared once all chunks have arrived: an
        error before that leaves nothing behind, and the outcomes of earlier writes have had time to reach the
        coordinator."""
        intent, changes = "", list[Change]()

        async def prepare(sha256: str) -> None:
            nonlocal intent
            await self.flush_outcomes()
            changes.extend(await changes_of(sha256))
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

    async def _pending_for(self, change: Change) -> list[Change]:
        """Return the prepared changes of the document of `change`. The write of a file does not know which
        change it replaces, so they include changes of writes that were not made after all. Their intents are
        left to their writers, which may still be writing."""
        subject = parse_change(change).ref
        pending = (each for intent in await self._coordinator.prepared(_PAGE) for each in intent.changes)
        return [each for each in dict.fromkeys(pending) if parse_change(each).ref.is_same_document(subject)]

    async def _report_outcome(self, intent: str, changes: list[Change]) -> None:
        """Close an intent whose outcome is known: announce `changes`, which are empty if the write was
        rejected. If the coordinator is unavailable, the outcome is reported later."""
        try:
            await self._close_intent(intent, changes)
        except CoordinatorUnavailable as error:
            if changes:
                text, extra = error.detail, {"repeats": ("announce", error.detail)}
                log.warning("failed to announce a stored write, will retry: %s", text, extra=extra)
            else:
                text, extra = error.detail, {"repeats": ("withdraw", error.detail)}
                log.warning("failed to withdraw a rejected write, will retry: %s", text, extra=extra)
            self._unreported.append((intent, changes))

    async def _close_intent(self, intent: str, changes: list[Change]) -> None:
        if changes:
            await self._coordinator.append(changes, intent)
        else:
            await self._coordinator.abort(intent)
