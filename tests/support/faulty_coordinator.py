"""A store and a coordinator that fail on demand, and the outbox between them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

from pysync.changelog import Change
from pysync.coordinator import PreparedWrite
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import parse_change
from pysync.engine.idempotency import SETTLED_MS
from pysync.engine.outbox import Outbox, outbox_of
from pysync.errors import CoordinatorUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock
from support.faulty_store import FaultyStore

T = TypeVar("T")

Verb = Literal["intend", "announce", "withdraw", "intents"]


class FaultyCoordinator(MemoryCoordinator):
    """One whose memory outlives what its users see of it: `fail` lets the next calls of a verb go wrong,
    `done` or not, and after `crash` nothing is done any more."""

    def __init__(self, clock: FakeClock) -> None:
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

    async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
        return await self._call("announce", lambda: super(FaultyCoordinator, self).append(changes, prepared))

    async def prepare(self, changes: Sequence[Change]) -> str:
        return await self._call("intend", lambda: super(FaultyCoordinator, self).prepare(changes))

    async def abort(self, name: str) -> None:
        await self._call("withdraw", lambda: super(FaultyCoordinator, self).abort(name))

    async def prepared(self, limit: int) -> list[PreparedWrite]:
        return await self._call("intents", lambda: super(FaultyCoordinator, self).prepared(limit))

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
    clock: FakeClock
    kept: MemoryStore
    """What is really stored."""
    store: FaultyStore
    coordinator: FaultyCoordinator
    outbox: Outbox

    async def announced(self) -> list[str]:
        """What followers have been told, in order."""
        found = await self.coordinator.read("", 10_000)
        assert found is not None
        return [found.text.decode() for _, found in found]

    async def recover(self) -> None:
        """What the service does some time later, once everything can be reached again."""
        self.store.reset()
        self.coordinator.restart()
        self.clock.now_ms += SETTLED_MS
        await self.outbox.recover()
        assert await self.coordinator.prepared(10) == []


def made_scene() -> Scene:
    clock = FakeClock()
    kept = MemoryStore(clock)
    store = FaultyStore(kept)
    coordinator = FaultyCoordinator(clock)
    return Scene(clock, kept, store, coordinator, outbox_of(store, coordinator))


async def announced_despite_faults(
    seed: int,
    kept: MemoryStore,
    clock: FakeClock,
    call: Literal["put", "write"],
    verbs: Sequence[Verb],
    write_all: Callable[[Random, Sequence[Outbox], Sequence[bytes]], Iterable[Coroutine[Any, Any, object]]],
) -> list[str]:
    """The hashes in the order in which they were first announced, after rounds of one or three writes on two
    nodes. A call of the store or the coordinator fails, a writer leaves, or a node recovers."""
    chosen = Random(seed)
    store, coordinator = FaultyStore(kept), FaultyCoordinator(clock)
    nodes = [outbox_of(store, coordinator) for _ in range(2)]
    for n in range(40):
        fault = chosen.randrange(8)
        if fault < 2:
            coordinator.fail(chosen.choice(verbs), done=bool(fault))
        elif fault == 2:
            store.fail(call)
        elif fault == 3:
            store.lose_reply(call)
        contents = [b"%d" % (3 * n + m) for m in range(chosen.choice([1, 3]))]
        writing = [asyncio.ensure_future(each) for each in write_all(chosen, nodes, contents)]
        if fault == 4:
            for _ in range(chosen.randrange(6)):
                await asyncio.sleep(0)
            writing[0].cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        clock.now_ms += chosen.choice([0, 10, SETTLED_MS])
        if fault == 5:
            with suppress(CoordinatorUnavailable):
                await chosen.choice(nodes).recover(early=chosen.random() < 0.5)
    coordinator.restart()
    await nodes[1].flush_outcomes()
    await Scene(clock, kept, store, coordinator, nodes[0]).recover()
    found = await coordinator.read("", 10_000)
    assert found is not None
    return list(dict.fromkeys(parse_change(change).hash for _, change in found))
