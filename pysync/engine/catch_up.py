"""Catch up subscribers that begin in the past, until they join the live feed (wire section 9).

They read the log together, so changes that several have missed are read once, and the time that all of them
take is bounded. Only changes that their collections may have written are read. A subscriber that arrives
during a run waits for the next one, unless it is no further back than the subscribers under way.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pysync._core import PanicException
from pysync.changelog import MAX_RESUMED
from pysync.engine.subscriptions import Event, Feed, Listener, ListenerIndex, Plan
from pysync.errors import Unavailable

log = logging.getLogger(__name__)

PAGE: Final = 128
"""Changes that are read at a time."""
MAX_TOGETHER: Final = 256
MAX_OF_ACCOUNT: Final = 128
"""The number of subscribers that catch up at a time, in all and for one account; others wait."""
HELD_S: Final = 0.002
"""Time for which events are delivered before others get their turn."""


@dataclass(eq=False, slots=True)
class _Behind:
    """A subscriber that catches up. `joined` is True once it listens to the live feed, and False if its
    connection is blocked. If only reading shows how many changes it has missed, `left` is the number that may
    still be read for it."""

    listener: Listener
    left: int | None
    joined: asyncio.Future[bool]

    def is_over(self, looked_at: int) -> bool:
        """Count so many more changes, and return True if the listener has missed too many to be told of
        them."""
        if self.left is not None:
            self.left -= looked_at
        return self.left is not None and self.left < 0


class CatchUp:
    """Brings the subscribers of `feed` up to date. A subscriber that has missed more than `most_missed`
    changes that may concern it gets a reset."""

    def __init__(self, feed: Feed, most_missed: int = MAX_RESUMED) -> None:
        self._feed = feed
        self._most_missed = most_missed
        self._waiting: deque[_Behind] = deque()
        self._behind: list[_Behind] = []
        self._aboard = ListenerIndex()
        self._task: asyncio.Task[None] | None = None

    async def bring(self, listener: Listener) -> bool:
        """Deliver what the subscriber has missed, and have it listen from then on. Aborts its stream if
        changes cannot be read. Returns True if it listens now."""
        try:
            while await listener.ready():
                written_by = self._feed.keys.may_write_to(listener.interest)
                count = await self._feed.log.count_after(listener.place, self._most_missed, written_by)
                if count is not None and count > self._most_missed:
                    listener.reset(await self._feed.log.newest())
                left = self._most_missed if count is None else None
                behind = _Behind(listener, left, asyncio.get_running_loop().create_future())
                self._waiting.append(behind)
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                if await behind.joined:
                    return True
        except Unavailable as error:
            log.warning("aborted a change stream: failed to read changes: %s", error.why)
            listener.cut()
        return False

    async def _run(self) -> None:
        """Read the log for all subscribers that are behind, until there are none. Leaves half of the time to
        others."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting or self._behind:
                began = loop.time()
                self._board()
                if self._behind:
                    await self._read_past()
                self._behind = [each for each in self._behind if self._is_behind(each)]
                await asyncio.sleep(loop.time() - began)
        except (Exception, PanicException) as error:
            for each in (*self._behind, *self._waiting):
                self._aboard.discard(each.listener)
                if not each.joined.done():
                    each.joined.set_exception(error)
            self._behind.clear()
            self._waiting.clear()
        finally:
            self._task = None

    def _board(self) -> None:
        """Admit waiting subscribers, up to the first that is further back than those under way, who would
        have to wait for it."""
        earliest = min((each.listener.place for each in self._behind), default="")
        accounts = Counter(each.listener.account for each in self._behind)
        waiting, self._waiting, is_open = self._waiting, deque(), True
        for each in waiting:
            account = each.listener.account
            fits = len(self._behind) < MAX_TOGETHER and accounts[account] < MAX_OF_ACCOUNT
            if each.joined.done():
                continue
            is_open = is_open and not (fits and each.listener.place < earliest)
            if fits and is_open:
                accounts[account] += 1
                self._behind.append(each)
                self._aboard.add(each.listener)
            else:
                self._waiting.append(each)

    def _is_behind(self, each: _Behind) -> bool:
        if each.joined.done():
            self._aboard.discard(each.listener)
        return not each.joined.done()

    async def _read_past(self) -> None:
        """Deliver the next page, from the place of the last subscriber that is behind."""
        place = min(each.listener.place for each in self._behind)
        topics = {topic for each in self._behind for topic in each.listener.interest}
        page = await self._feed.log.matching(place, PAGE, self._feed.keys.may_write_to(topics))
        if page is not None:
            await self._tell_together(self._feed.plan(page.changes, self._aboard))
        for each in self._behind:
            listener = each.listener
            if each.joined.done():
                continue
            if page is None or each.is_over(page.looked_at):
                if page is not None or listener.place == place:
                    listener.reset(await self._feed.log.newest())
                    each.left = each.left and self._most_missed
                continue
            listener.place = max(listener.place, page.last)
            if page.is_end and self._feed.join(listener):
                each.joined.set_result(True)
            elif not listener.is_free:
                each.joined.set_result(False)

    async def _tell_together(self, plan: Plan) -> None:
        """Deliver the events of a page to each subscriber in one write, first to those that need no
        authorisation."""
        pause, asking = _Pause(), Plan()
        events: dict[Listener, list[Event]] = {}
        for event, found in plan:
            asked = []
            for who in found:
                if event.id > who.place:
                    if who.asks:
                        asked.append(who)
                    else:
                        events.setdefault(who, []).append(event)
            if asked:
                asking.append((event, asked))
            await pause()
        await _hand_out(events, pause)
        if asking:
            permit = await self._feed.permits(asking)
            allowed: dict[Listener, list[Event]] = {}
            for event, found in asking:
                for who in found:
                    if (heard := permit(who, event)) is not None:
                        allowed.setdefault(who, []).append(heard)
                await pause()
            await _hand_out(allowed, pause)

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


class _Pause:
    """Yields to others that have waited for a turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def __call__(self) -> None:
        if self._loop.time() - self._began > HELD_S:
            await asyncio.sleep(0)
            self._began = self._loop.time()


async def _hand_out(events: Mapping[Listener, Sequence[Event]], pause: _Pause) -> None:
    for who, told in events.items():
        who.hear(told)
        await pause()
