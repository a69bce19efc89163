"""Writes and their changes: each applied write is announced, whatever happens in between (wire section 9).

A store that keeps a change log of its own takes both in one transaction. With any other the coordinator is
told first that a write is about to be made; after the write it is announced. Who stops in between leaves that
intent behind, and `heal` announces it: perhaps a write that was not made after all, which costs followers a
pull. Where the next write of the document comes first it takes the announcement along, so that the versions
of a document are told in their order.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from pysync.changelog import Change, ChangeLog, read_change
from pysync.clock import Tick
from pysync.coordinator import Coordinator, Intent
from pysync.errors import CoordinatorUnavailable, KeyConflict
from pysync.store import EtagMismatch, Expect, Namesakes, Store

log = logging.getLogger(__name__)

SETTLED_MS: Final = 30_000
"""When the write of an intent is made, or never will be: longer than any put is waited for."""
EARLY_MS: Final = 5_000
"""When nearly every write is made, or was refused and its intent withdrawn."""
MAX_UNSETTLED: Final = 10_000
"""Outcomes kept that could not be told; of older ones `heal` takes the worse for granted."""
MAX_LATEST: Final = 4_096
"""Documents of which the version is remembered that was announced last."""
_PAGE: Final = 1_000
"""Intents that are looked at together; of younger ones `heal` sees so many, which is more than a node has."""
_TURNS: Final = 256
"""Locks that the keys of files share."""
_NONE: Final = Intent("", 0, [])
_NOTHING: Final = Change(b"")


class Outbox:
    """The writes of documents and logs to `store`, and their changes in `log`."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._kept = store.change_log
        self.log: ChangeLog = coordinator if self._kept is None else self._kept
        self._latest: OrderedDict[str, Change] = OrderedDict()
        self._turns = [asyncio.Lock() for _ in range(_TURNS)]
        self._settling = asyncio.Lock()
        self._unsettled: deque[tuple[str, list[Change]]] = deque(maxlen=MAX_UNSETTLED)

    async def put(
        self, key: str, body: bytes, expect: Expect, changes: Sequence[Change], base: str = ""
    ) -> str:
        """`Store.put`, announced as `changes`, after the version with the hash `base` that it replaces (`""`:
        none). Raises what that does; after StoreUnavailable the changes may be announced though the write is
        not made.

        Raises CoordinatorUnavailable where nobody could be told: nothing is written then.
        """
        if not changes:
            return await self._store.put(key, body, expect=expect)
        if self._kept is not None:
            return await self._kept.put(key, body, expect, changes)
        await self.settle()
        earlier = await self._unannounced(key, base, changes[-1])
        told = [*earlier.changes, *changes]
        intent = await self._coordinator.intend(told)
        try:
            etag = await self._store.put(key, body, expect=expect)
        except EtagMismatch:
            await self._settle(intent, [])
            raise
        await self._settle(intent, told)
        if earlier.name:
            await self._settle(earlier.name, [])
        self._remember(key, changes[-1])
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
        if self._kept is not None:
            return await self._kept.write(key, chunks, content_type, changes_of)
        async with AsyncExitStack() as turn:

            async def changes_in_turn(sha256: str) -> list[Change]:
                await turn.enter_async_context(self._turns[hash(key) % _TURNS])
                changes = changes_of(sha256)
                return [*await self._under_way(changes[-1]), *changes]

            return await self._write(key, chunks, content_type, changes_in_turn)

    async def write_next(
        self,
        key_of: Callable[[Tick], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[Tick, str], Sequence[Change]],
        unless: Namesakes | None = None,
    ) -> tuple[Tick, str]:
        """`write` at a key that is made of a tick, later than all before. Where the store keeps its changes
        the files come to light in the order of their ticks, and AlreadyWritten is raised where one of
        `unless` is there; else `Coordinator.tick` gives these, one may come to light after a later one, and
        nobody looks for others. Both functions may be called in another thread."""
        if self._kept is not None:
            return await self._kept.write_next(key_of, chunks, content_type, changes_of, unless)
        tick = await self._coordinator.tick()

        async def changes_then(sha256: str) -> Sequence[Change]:
            return changes_of(tick, sha256)

        return tick, await self._write(key_of(tick), chunks, content_type, changes_then)

    async def announce(self, changes: Sequence[Change]) -> None:
        """Announce what is stored nowhere. Raises Unavailable."""
        if changes:
            await self.log.announce(changes)

    async def repeat(self, changes: Sequence[Change]) -> None:
        """Announce a write of an earlier attempt again, where that may not have come to it."""
        if changes and self._kept is None:
            await self._coordinator.announce(changes)

    @property
    def needs_healing(self) -> bool:
        """Whether a write and its announcement can come apart."""
        return self._kept is None

    @property
    def is_settled(self) -> bool:
        """True if every write with a known outcome has been announced."""
        return not self._unsettled

    async def settle(self) -> None:
        """Tell the coordinator what it could not be told when it was time. Raises CoordinatorUnavailable."""
        async with self._settling:  # who comes meanwhile must not go on as if all were told
            while self._unsettled:
                outcome = self._unsettled.popleft()
                try:
                    await self._end(*outcome)
                except BaseException:
                    self._unsettled.appendleft(outcome)
                    raise

    async def heal(self, *, early: bool = False) -> int:
        """Announce the intents that nobody can be expected to announce any more, or, `early`, those too that
        somebody still may, once more then; how many there were. Raises CoordinatorUnavailable."""
        if not self.needs_healing:
            return 0
        await self.settle()
        healed = 0
        while True:
            intents = await self._coordinator.intents(_PAGE)
            for intent in intents:
                is_settled = intent.age_ms >= SETTLED_MS
                if is_settled or (early and intent.age_ms >= EARLY_MS):
                    await self._coordinator.announce(intent.changes, intent.name if is_settled else "")
                    healed += 1
            if len(intents) < _PAGE or intents[-1].age_ms < SETTLED_MS:
                return healed

    async def _unannounced(self, key: str, base: str, change: Change) -> Intent:
        """The intent of the write that made the version `base` of the document that `change` is of, with all
        that was not announced before it, where it is not announced yet."""
        if not base or self._latest.get(key, _NOTHING).tells_of(base):
            return _NONE
        for intent in await self._coordinator.intents(_PAGE):
            last = intent.changes[-1]
            if last.tells_of(base) and read_change(last).subject.is_document_of(read_change(change).subject):
                return intent
        return _NONE

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

        async def intend(sha256: str) -> None:
            nonlocal intent
            await self.settle()
            changes.extend(await changes_of(sha256))
            intent = await self._coordinator.intend(changes)

        try:
            sha256 = await self._store.write(key, chunks, content_type, intend)
        except KeyConflict:
            if intent:
                await self._settle(intent, [])
            raise
        await self._settle(intent, changes)
        return sha256

    async def _under_way(self, change: Change) -> list[Change]:
        """What is intended of the document that `change` is of. Who replaces a file does not know whose it
        is, so those that were not made after all are among them; their intents are left to their writers, who
        may not have made them yet."""
        subject = read_change(change).subject
        told = (each for intent in await self._coordinator.intents(_PAGE) for each in intent.changes)
        return [each for each in dict.fromkeys(told) if read_change(each).subject.is_document_of(subject)]

    async def _settle(self, intent: str, changes: list[Change]) -> None:
        """End an intent whose outcome is known: `changes` are announced, none where the write was refused.
        What cannot be told now is told later."""
        try:
            await self._end(intent, changes)
        except CoordinatorUnavailable as error:
            what = "a write that is stored will be announced" if changes else "a refused write is withdrawn"
            log.warning("%s later: %s", what, error.why)
            self._unsettled.append((intent, changes))

    async def _end(self, intent: str, changes: list[Change]) -> None:
        if changes:
            await self._coordinator.announce(changes, intent)
        else:
            await self._coordinator.withdraw(intent)

    def _remember(self, key: str, change: Change) -> None:
        self._latest[key] = change
        self._latest.move_to_end(key)
        if len(self._latest) > MAX_LATEST:
            self._latest.popitem(last=False)
