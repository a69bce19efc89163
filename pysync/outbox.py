"""Writes and their changes: each applied write is announced, whatever happens in between (wire section 9).

A store that keeps a change log of its own takes both in one transaction. With any other the coordinator is
told first that a write is about to be made; after the write it is announced. Who stops in between leaves that
intent behind, and `heal` announces it: perhaps a write that was not made after all, which costs followers a
pull.
"""

import logging
from collections.abc import Sequence
from typing import Final

from pysync.changes import Change, ChangeLog
from pysync.coordinator import Coordinator
from pysync.errors import CoordinatorUnavailable
from pysync.store import EtagMismatch, Expect, Store

log = logging.getLogger(__name__)

SETTLED_MS: Final = 30_000
"""When the write of an intent is made, or never will be: longer than any put is waited for."""
_PAGE: Final = 1_000
"""Intents that are looked at together; of younger ones `heal` sees so many, which is more than a node has."""


class Outbox:
    """The writes of documents and logs to `store`, and their changes in `log`."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._kept = store.change_log
        self.log: ChangeLog = coordinator if self._kept is None else self._kept

    async def put(self, key: str, body: bytes, expect: Expect, changes: Sequence[Change]) -> str:
        """`Store.put`, announced as `changes`. Raises what that does; after StoreUnavailable the changes may
        be announced though the write is not made.

        Raises CoordinatorUnavailable where nobody could be told: nothing is written then.
        """
        if not changes:
            return await self._store.put(key, body, expect=expect)
        if self._kept is not None:
            return await self._kept.put(key, body, expect, changes)
        intent = await self._coordinator.intend(changes)
        try:
            etag = await self._store.put(key, body, expect=expect)
        except EtagMismatch:
            await self._withdrawn(intent)
            raise
        await self._announced(intent, changes)
        return etag

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

    async def heal(self, *, all_: bool = False) -> int:
        """Announce the intents that nobody can be expected to announce any more, or, `all_`, those that are
        young too, which their writers then announce once more; how many there were. Raises
        CoordinatorUnavailable."""
        if not self.needs_healing:
            return 0
        healed = 0
        while True:
            intents = await self._coordinator.intents(_PAGE)
            for intent in intents:
                is_settled = intent.age_ms >= SETTLED_MS
                if is_settled or all_:
                    await self._coordinator.announce(intent.changes, intent.name if is_settled else "")
                    healed += 1
            if len(intents) < _PAGE or intents[-1].age_ms < SETTLED_MS:
                return healed

    async def _announced(self, intent: str, changes: Sequence[Change]) -> None:
        """Announce a write that is made. Where that fails `heal` does it: the write's outcome is known."""
        try:
            await self._coordinator.announce(changes, intent)
        except CoordinatorUnavailable as error:
            log.warning("a write that is stored will be announced later: %s", error.why)

    async def _withdrawn(self, intent: str) -> None:
        """Withdraw the intent of a write that was not made. Where that fails `heal` announces it."""
        try:
            await self._coordinator.withdraw(intent)
        except CoordinatorUnavailable as error:
            log.warning("a write that was refused will be announced as if it were stored: %s", error.why)
