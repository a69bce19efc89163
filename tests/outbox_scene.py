"""A store and a coordinator that fail on demand, and the outbox between them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from pysync.changelog import Change
from pysync.coordinator import Intent
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.outbox import SETTLED_MS, Outbox
from pysync.errors import CoordinatorUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FaultyStore, MovedClock

T = TypeVar("T")

Verb = Literal["intend", "announce", "withdraw", "intents"]


class FaultyCoordinator(MemoryCoordinator):
    """One whose memory outlives what its users see of it: `fail` lets the next calls of a verb go wrong,
    `done` or not, and after `crash` nothing is done any more."""

    def __init__(self, clock: MovedClock) -> None:
        super().__init__(clock)
        self._faults: dict[Verb, deque[bool | None]] = {}
        self._is_gone = False

    def fail(self, verb: Verb, *, done: bool = False, after: int = 0) -> None:
        self._faults.setdefault(verb, deque()).extend([*[None] * after, done])

    def restart(self) -> None:
        self._is_gone = False
        self._faults.clear()

    def crash(self) -> None:
        self._is_gone = True

    async def announce(self, changes: Sequence[Change], intent: str = "") -> str:
        return await self._call("announce", lambda: super(FaultyCoordinator, self).announce(changes, intent))

    async def intend(self, changes: Sequence[Change]) -> str:
        return await self._call("intend", lambda: super(FaultyCoordinator, self).intend(changes))

    async def withdraw(self, intent: str) -> None:
        await self._call("withdraw", lambda: super(FaultyCoordinator, self).withdraw(intent))

    async def intents(self, limit: int) -> list[Intent]:
        return await self._call("intents", lambda: super(FaultyCoordinator, self).intents(limit))

    async def _call(self, verb: Verb, call: Callable[[], Awaitable[T]]) -> T:
        faults = self._faults.get(verb)
        done = faults.popleft() if faults else None
        await asyncio.sleep(0)  # others come in between, as with any that is far away
        if self._is_gone or done is False:
            raise CoordinatorUnavailable
        result = await call()
        if done:
            raise CoordinatorUnavailable
        return result


class Scene(NamedTuple):
    clock: MovedClock
    kept: MemoryStore
    """What is really stored."""
    store: FaultyStore
    coordinator: FaultyCoordinator
    outbox: Outbox

    async def told(self) -> list[str]:
        """What followers have been told, in order."""
        found = await self.coordinator.changes("", 10_000)
        assert found is not None
        return [found.text.decode() for _, found in found]

    async def heal(self) -> None:
        """What the service does some time later, once everything can be reached again."""
        self.store.heal()
        self.coordinator.restart()
        self.clock.now_ms += SETTLED_MS
        await self.outbox.heal()
        assert await self.coordinator.intents(10) == []


def made_scene() -> Scene:
    clock = MovedClock()
    kept = MemoryStore(clock)
    store = FaultyStore(kept)
    coordinator = FaultyCoordinator(clock)
    return Scene(clock, kept, store, coordinator, Outbox(store, coordinator))
