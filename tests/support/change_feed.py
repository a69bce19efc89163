"""Subscribers of changes that remember what they are given."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from pysync.changelog import Change, ChangePage, OriginFilter, Retention
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef, origin
from pysync.engine.subscriptions import (
    Authorize,
    AuthorizeDeliveries,
    ChangeDispatcher,
    Event,
    KeyMatch,
    PlannedDeliveries,
    Topic,
)
from pysync.errors import CoordinatorUnavailable

NOTES: Topic = (None, "notes")


def note(id_: object, namespace: str | None = None) -> Change:
    return DocumentRef("notes", {"id": str(id_)}, namespace).change("h", 1)


class Listener:
    """A listener that remembers. `slow`: it takes a while after each event."""

    def __init__(self, cursor: str, interest: Mapping[Topic, Mapping[str, str]] | None = None) -> None:
        self.cursor = cursor
        self.account = ""
        self.filter = {NOTES: {}} if interest is None else interest
        self.needs_authorization = False
        self.slow = False
        self.delivered: list[str] = []
        self.is_writable = True
        self.is_aborted = False
        self.resets = 0

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.id > self.cursor
            self.cursor = event.id
            self.delivered.append(event.params["id"])
        self.is_writable = not self.slow

    def reset(self, cursor: str) -> None:
        self.cursor = cursor
        self.resets += 1

    def abort(self) -> None:
        self.is_aborted = True

    async def drained(self) -> bool:
        await asyncio.sleep(0)
        self.is_writable = True
        return not self.is_aborted


class Log(MemoryCoordinator):
    """A log that takes its time: each read lets others have so many turns."""

    def __init__(self, ticks: Sequence[int] = (), retention: Retention = Retention()) -> None:  # noqa: B008
        super().__init__(retention=retention)
        self._ticks = iter(ticks)
        self.reads = self.found = 0
        self.fails = 0
        self._held: list[tuple[asyncio.Event, asyncio.Event]] = []

    def hold(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Hold the next read back once it has found what it will return: when it has, and until when."""
        self._held.append((asyncio.Event(), asyncio.Event()))
        return self._held[-1]

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        self.reads += 1
        for _ in range(next(self._ticks, 0)):
            await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise CoordinatorUnavailable()
        found = await super().read(after, limit)
        if self._held:
            arrived, release = self._held.pop()
            arrived.set()
            await release.wait()
        for _ in range(next(self._ticks, 0)):
            await asyncio.sleep(0)
        return found

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        if await self.read(after, 0) is None:
            return None
        page = await super().read_matching(after, limit, written_by)
        self.found += 0 if page is None else page.scanned
        return page


async def anybody(plan: PlannedDeliveries) -> Authorize:
    return lambda listener, event: event


class Keys:
    """Every collection pulls what it writes, and nothing else."""

    def matches(self, ref: DocumentRef) -> list[KeyMatch]:
        return [KeyMatch((ref.namespace, ref.collection), ref.params, "key")]

    def may_write_to(self, topics: Iterable[Topic]) -> OriginFilter:
        return {origin(*topic) for topic in topics}.__contains__


class Followed(ChangeDispatcher):
    """A feed whose listeners may begin in the past."""

    def __init__(self, log: Log, authorize: AuthorizeDeliveries, most_missed: int = 20_000) -> None:
        super().__init__(log, Keys(), authorize)
        self._most_missed = most_missed

    async def bring(self, listener: Listener) -> bool:
        return await self.catch_up(listener, self._most_missed)


def following(log: Log, most_missed: int = 20_000) -> Followed:
    return Followed(log, anybody, most_missed)


async def until(listener: Listener, count: int) -> list[str]:
    """What was delivered to the listener once that is so much."""
    while len(listener.delivered) < count:
        await asyncio.sleep(0)
    return listener.delivered
