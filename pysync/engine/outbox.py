"""Writes and their changes: each applied write is announced, whatever happens in between.

A store that keeps a change log of its own takes both in one transaction. With any other the coordinator is
told first that a write is about to be made; after the write it is announced. Who stops in between leaves that
intent behind, and `recover` announces it: perhaps a write that was not made after all, which costs followers
a pull. Where the next write of the document comes first it takes the announcement along, so that the versions
of a document are told in their order.

See docs/reference/protocol.md#delivery.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from pysync.cache import BoundedCache
from pysync.changelog import Change, ChangeLog, parse_change
from pysync.clock import HybridTimestamp
from pysync.coordinator import Coordinator, PreparedWrite
from pysync.errors import CoordinatorUnavailable, KeyConflict
from pysync.store import EtagMismatch, ExistingFileFilter, Precondition, Store

log = logging.getLogger(__name__)

INTENT_TIMEOUT_MS: Final = 30_000
"""When the write of an intent is made, or never will be: longer than any put is waited for."""
EARLY_RECOVERY_MS: Final = 5_000
"""When nearly every write is made, or was refused and its intent withdrawn."""
MAX_UNREPORTED: Final = 10_000
"""Outcomes kept that could not be told; of older ones `recover` takes the worse for granted."""
ANNOUNCED_CACHE_SIZE: Final = 4_096
"""Documents of which the version is remembered that was announced last."""
_PAGE: Final = 1_000
"""Intents that are looked at together; of younger ones `recover` sees so many, which is more than a node
has."""
_KEY_LOCKS: Final = 256
"""Locks that the keys of files share."""
_NO_INTENT: Final = PreparedWrite("", 0, [])


class Outbox:
    """The writes of documents and logs to `store`, and their changes in `log`."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._transactional = store.transactional
        self.log: ChangeLog = coordinator if self._transactional is None else self._transactional.change_log
        self._last_announced = BoundedCache[str, Change](ANNOUNCED_CACHE_SIZE)
        self._key_locks = [asyncio.Lock() for _ in range(_KEY_LOCKS)]
        self._flush_lock = asyncio.Lock()
        self._unreported: deque[tuple[str, list[Change]]] = deque(maxlen=MAX_UNREPORTED)

    async def put(
        self, key: str, body: bytes, expect: Precondition, changes: Sequence[Change], base: str = ""
    ) -> str:
        """`Store.put`, announced as `changes`, after the version with the hash `base` that it replaces (`""`:
        none). Raises what that does; after StoreUnavailable the changes may be announced though the write is
        not made.

        Raises CoordinatorUnavailable where nobody could be told: nothing is written then.
        """
        if self._transactional is not None:
            return await self._transactional.put(key, body, expect=expect, changes=changes)
        if not changes:
            return await self._store.put(key, body, expect=expect)
        await self.flush_outcomes()
        earlier = await self._pending_predecessor(key, base, changes[-1])
        told = [*earlier.changes, *changes]
        intent = await self._coordinator.prepare(told)
        try:
            etag = await self._store.put(key, body, expect=expect)
        except EtagMismatch:
            await self._report_outcome(intent, [])
            raise
        await self._report_outcome(intent, told)
        if earlier.name:
            await self._report_outcome(earlier.name, [])
        self._last_announced.put(key, changes[-1])
        return etag

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
    ) -> str:
        """`Store.write`, announced as the changes of what has this sha256, of which there is one at least.
        Raises as that and `put` do.

        Where the store keeps no changes two writes of one key are told in their order unless they overlap on
        two nodes: nobody knows then which was the last.
        """
        if self._transactional is not None:
            return await self._transactional.write(key, chunks, content_type, changes_of=changes_of)
        async with AsyncExitStack() as turn:

            async def changes_in_turn(sha256: str) -> list[Change]:
                await turn.enter_async_context(self._key_locks[hash(key) % _KEY_LOCKS])
                changes = changes_of(sha256)
                return [*await self._pending_for(changes[-1]), *changes]

            return await self._write(key, chunks, content_type, changes_in_turn)

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        unless: ExistingFileFilter | None = None,
    ) -> tuple[HybridTimestamp, str]:
        """`write` at a key that is made of a tick, later than all before. Where the store keeps its changes
        the files come to light in the order of their ticks, and FileAlreadyExists is raised where one of
        `unless` is there; else `Coordinator.tick` gives these, one may come to light after a later one, and
        nobody looks for others. Both functions may be called in another thread."""
        if self._transactional is not None:
            return await self._transactional.write_ordered(key_of, chunks, content_type, changes_of, unless)
        tick = await self._coordinator.next_timestamp()

        async def changes_then(sha256: str) -> Sequence[Change]:
            return changes_of(tick, sha256)

        return tick, await self._write(key_of(tick), chunks, content_type, changes_then)

    async def announce(self, changes: Sequence[Change]) -> None:
        """Announce what is stored nowhere. Raises Unavailable."""
        if changes:
            await self.log.append(changes)

    async def reannounce(self, changes: Sequence[Change]) -> None:
        """Announce a write of an earlier attempt again, where that may not have come to it."""
        if changes and self._transactional is None:
            await self._coordinator.append(changes)

    @property
    def needs_recovery(self) -> bool:
        """Whether a write and its announcement can come apart."""
        return self._transactional is None

    @property
    def is_flushed(self) -> bool:
        """True if every write with a known outcome has been announced."""
        return not self._unreported

    async def flush_outcomes(self) -> None:
        """Tell the coordinator what it could not be told when it was time. Raises CoordinatorUnavailable."""
        async with self._flush_lock:  # who comes meanwhile must not go on as if all were told
            while self._unreported:
                outcome = self._unreported.popleft()
                try:
                    await self._close_intent(*outcome)
                except BaseException:
                    self._unreported.appendleft(outcome)
                    raise

    async def recover(self, *, early: bool = False) -> int:
        """Announce the intents that nobody can be expected to announce any more, or, `early`, those too that
        somebody still may, once more then; how many there were. Raises CoordinatorUnavailable."""
        if not self.needs_recovery:
            return 0
        await self.flush_outcomes()
        healed = 0
        while True:
            intents = await self._coordinator.prepared(_PAGE)
            for intent in intents:
                is_settled = intent.age_ms >= INTENT_TIMEOUT_MS
                if is_settled or (early and intent.age_ms >= EARLY_RECOVERY_MS):
                    await self._coordinator.append(intent.changes, intent.name if is_settled else "")
                    healed += 1
            if len(intents) < _PAGE or intents[-1].age_ms < INTENT_TIMEOUT_MS:
                return healed

    async def _pending_predecessor(self, key: str, base: str, change: Change) -> PreparedWrite:
        """The intent of the write that made the version `base` of the document that `change` is of, with all
        that was not announced before it, where it is not announced yet."""
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
    ) -> str:
        """The sha256 of what was written. It is intended when all of it has come in: what fails before that
        leaves nothing behind, and until then the coordinator has had time to be told of earlier writes."""
        intent, changes = "", list[Change]()

        async def prepare(sha256: str) -> None:
            nonlocal intent
            await self.flush_outcomes()
            changes.extend(await changes_of(sha256))
            intent = await self._coordinator.prepare(changes)

        try:
            sha256 = await self._store.write(key, chunks, content_type, prepare)
        except KeyConflict:
            if intent:
                await self._report_outcome(intent, [])
            raise
        await self._report_outcome(intent, changes)
        return sha256

    async def _pending_for(self, change: Change) -> list[Change]:
        """What is intended of the document that `change` is of. Who replaces a file does not know whose it
        is, so those that were not made after all are among them; their intents are left to their writers, who
        may not have made them yet."""
        subject = parse_change(change).ref
        told = (each for intent in await self._coordinator.prepared(_PAGE) for each in intent.changes)
        return [each for each in dict.fromkeys(told) if parse_change(each).ref.is_same_document(subject)]

    async def _report_outcome(self, intent: str, changes: list[Change]) -> None:
        """End an intent whose outcome is known: `changes` are announced, none where the write was refused.
        What cannot be told now is told later."""
        try:
            await self._close_intent(intent, changes)
        except CoordinatorUnavailable as error:
            what = "a write that is stored will be announced" if changes else "a refused write is withdrawn"
            log.warning("%s later: %s", what, error.detail)
            self._unreported.append((intent, changes))

    async def _close_intent(self, intent: str, changes: list[Change]) -> None:
        if changes:
            await self._coordinator.append(changes, intent)
        else:
            await self._coordinator.abort(intent)
