"""Catch up subscribers that resume from the past, until they join the live feed.

They read the change log together, so a change that several of them have missed is read once, and the time
that all of them take is bounded. Only changes that their collections may have written are read. A subscriber
that arrives during a run waits for the next one, unless it is no further back than the subscribers that are
catching up.

See docs/reference/protocol.md#resume.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Final

from pysync._core import PanicException
from pysync.changelog import MAX_RESUMED
from pysync.engine.subscriptions import ChangeDispatcher, Slices, Subscriber, SubscriberIndex, Topic
from pysync.errors import Unavailable

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 128
"""The number of changes that are read at a time."""
MAX_SUBSCRIBERS: Final = 256
MAX_PER_ACCOUNT: Final = 128
"""The number of subscribers that catch up at a time, in all and for one account. Others wait."""
MAX_COUNTS: Final = 1_000
"""The number of cursors for which it is remembered how many changes have come since."""


@dataclass(eq=False, slots=True)
class _LaggingSubscriber:
    """A subscriber that catches up. `caught_up` becomes True once it listens to the live feed, and False if
    its connection is blocked. If only reading shows how many changes it has missed, `left` is the number that
    may still be read for it."""

    subscriber: Subscriber
    caught_up: asyncio.Future[bool]
    is_counted: bool = False
    left: int | None = None

    def has_missed_too_many(self, scanned: int) -> bool:
        """Count `scanned` more changes. Returns True if the subscriber has missed more than may be
        delivered."""
        if self.left is not None:
            self.left -= scanned
        return self.left is not None and self.left < 0


class CatchUp:
    """Brings the subscribers of `dispatcher` up to date. A subscriber that has missed more than `max_missed`
    changes that may concern it gets a reset."""

    def __init__(self, dispatcher: ChangeDispatcher, max_missed: int = MAX_RESUMED) -> None:
        self._dispatcher = dispatcher
        self._max_missed = max_missed
        self._waiting: dict[_LaggingSubscriber, None] = {}
        self._behind: list[_LaggingSubscriber] = []
        self._index = SubscriberIndex()
        self._task: asyncio.Task[None] | None = None
        self._counts: dict[tuple[str, frozenset[Topic]], int | None] = {}
        self._counted_to = ""

    async def catch_up(self, subscriber: Subscriber) -> bool:
        """Deliver the changes that the subscriber has missed, then subscribe it to the live feed. Returns
        True if it is subscribed, False if its connection is closed or the change log cannot be read; the
        latter aborts its stream."""
        try:
            while await subscriber.drained():
                behind = _LaggingSubscriber(subscriber, asyncio.get_running_loop().create_future())
                self._waiting[behind] = None
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                try:
                    if await behind.caught_up:
                        return True
                finally:
                    self._waiting.pop(behind, None)
        except Unavailable as error:
            log.warning(
                "aborted a change stream: failed to read changes: %s",
                error.detail,
                extra={"repeats": error.detail},
            )
            subscriber.abort()
        return False

    async def _run(self) -> None:
        """Read the change log for all lagging subscribers, until there are none. Leaves half of the time to
        other tasks."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting or self._behind:
                began = loop.time()
                await self._admit_waiting()
                if self._behind:
                    await self._read_page()
                self._behind = [each for each in self._behind if self._is_behind(each)]
                await asyncio.sleep(loop.time() - began)
        except (Exception, PanicException) as error:
            for each in (*self._behind, *self._waiting):
                self._index.discard(each.subscriber)
                if not each.caught_up.done():
                    each.caught_up.set_exception(error)
            self._behind.clear()
            self._waiting.clear()
        finally:
            self._task = None

    async def _admit_waiting(self) -> None:
        """Admit waiting subscribers, up to the first that is further back than those already catching up,
        which would have to wait for it. Those that have missed too much get a reset first."""
        earliest = min((each.subscriber.cursor for each in self._behind), default="")
        accounts = Counter(each.subscriber.account for each in self._behind)
        turns = Slices()
        for each in list(self._waiting) if len(self._behind) < MAX_SUBSCRIBERS else ():
            account = each.subscriber.account
            if len(self._behind) >= MAX_SUBSCRIBERS:
                break
            if accounts[account] >= MAX_PER_ACCOUNT:
                continue
            if not each.is_counted:
                await self._count_missed(each)
                await turns.share()
            if each.caught_up.done():
                continue
            if each.subscriber.cursor < earliest:
                break
            accounts[account] += 1
            del self._waiting[each]
            self._behind.append(each)
            self._index.add(each.subscriber)

    async def _count_missed(self, each: _LaggingSubscriber) -> None:
        """Reset a subscriber that has missed too much. Its changes are counted once for all who resume at the
        same cursor."""
        changes, subscriber = self._dispatcher.log, each.subscriber
        newest, about = await changes.last_id(), (subscriber.cursor, frozenset(subscriber.filter))
        if newest != self._counted_to or len(self._counts) >= MAX_COUNTS:
            self._counts, self._counted_to = {}, newest
        if about not in self._counts:
            written_by = self._dispatcher.keys.may_write_to(subscriber.filter)
            self._counts[about] = await changes.count_after(subscriber.cursor, self._max_missed, written_by)
        count = self._counts[about]
        each.is_counted, each.left = True, self._max_missed if count is None else None
        if count is not None and count > self._max_missed and not each.caught_up.done():
            subscriber.reset(newest)

    def _is_behind(self, each: _LaggingSubscriber) -> bool:
        if each.caught_up.done():
            self._index.discard(each.subscriber)
        return not each.caught_up.done()

    async def _read_page(self) -> None:
        """Deliver the next page, from the cursor of the subscriber that is furthest behind."""
        cursor = min(each.subscriber.cursor for each in self._behind)
        topics = {topic for each in self._behind for topic in each.subscriber.filter}
        page = await self._dispatcher.log.read_matching(
            cursor, PAGE_SIZE, self._dispatcher.keys.may_write_to(topics)
        )
        if page is not None:
            await self._dispatcher.deliver(await self._dispatcher.plan_deliveries(page.changes, self._index))
        for each in self._behind:
            subscriber = each.subscriber
            if each.caught_up.done():
                continue
            if page is None or each.has_missed_too_many(page.scanned):
                if page is not None or subscriber.cursor == cursor:
                    subscriber.reset(await self._dispatcher.log.last_id())
                    each.left = each.left and self._max_missed
                continue
            subscriber.cursor = max(subscriber.cursor, page.last)
            if page.is_end and self._dispatcher.subscribe(subscriber):
                each.caught_up.set_result(True)
            elif not subscriber.is_writable:
                each.caught_up.set_result(False)

    def close(self) -> None:
        """Stop catching up."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
