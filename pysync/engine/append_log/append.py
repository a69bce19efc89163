"""Appends that wait for one log are written together: one conditional put of its head."""

import asyncio
import logging
import os
import random as random_module
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from pysync import _core
from pysync.changelog import Subject
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log.head import Heads, Held, LogRules
from pysync.engine.append_log.read import Bounds, Nodes, folder, object_key
from pysync.engine.append_log.starfish import adopted, gathered
from pysync.engine.outbox import Outbox
from pysync.errors import (
    AppendLimitExceeded,
    NonMonotonicTimestamp,
    PysyncError,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.model import Written
from pysync.store import ABSENT, Etag, EtagMismatch, Expect, Store

log = logging.getLogger(__name__)

ATTEMPTS: Final = 64
"""Puts of one group, each after another node's came first."""
BACKOFF_S: Final = 0.001
MOST_BACKOFF_S: Final = 0.05
"""The longest waits before the second put, doubling for each, and before any: some puts take so long."""
GROUP_COUNT: Final = 1024
GROUP_BYTES: Final = 256 * 1024
"""What one put carries: with more the first to wait would wait for the last."""
MAX_WAITING: Final = 4096
"""Appends of all logs that may wait at once; one more is refused rather than queued."""
MAX_DISCARDED: Final = 1024
"""Expired logs that are remembered as deleted; of others the next append looks again, and finds nothing."""
MAX_SEARCH_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a log that one attempt searches for the element of an earlier attempt: some 0.1 s of work, in
chunks. An attempt searches as much only if the earlier one ended without an answer and the log grew long
since."""
SEGMENT_BYTES: Final = 64 * 1024
"""Where a tail is cut that has become longer than this, in bytes."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A pending append, announced as a change of `subject`. With a `mark` it recognises its element, which
    another attempt may have written since the log had the id and count `claimed`. `claimed` advances when a
    long search found nothing."""

    element: _core.Append
    rules: LogRules
    done: asyncio.Future[Written]
    subject: Subject | None = None
    mark: str = ""
    claimed: tuple[str, int] = ("", 0)


class Commits:
    """The appends to all logs of a store. `head_bytes` is how large a head may get before its tail is
    sealed."""

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        heads: Heads,
        now_ms: Callable[[], int],
        head_bytes: int,
        blame: Callable[[str, str], Callable[[_core.LogHead], Awaitable[PysyncError]]],
        corruption: CorruptionReporter,
        random: Callable[[int], bytes] = os.urandom,
        chance: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._heads = heads
        self._now_ms = now_ms
        self._head_bytes = head_bytes
        self._blame = blame
        self._corruption = corruption
        self._random = random
        self._chance = chance
        self._sleep = sleep
        self._queues: dict[str, deque[Waiting]] = {}
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._discarding: dict[str, asyncio.Task[None]] = {}

    def submit(self, key: str, waiting: Waiting) -> asyncio.Future[Written]:
        """What becomes of the append, which joins those that wait for `key`. Raises StoreUnavailable at once
        where too many wait. Cancelling the future only stops the waiting."""
        if self._waiting >= MAX_WAITING:
            raise StoreUnavailable
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self._own(self._serve(key, queue))
        queue.append(waiting)
        self._waiting += 1
        return waiting.done

    async def close(self) -> None:
        """Finish what waits."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, key: str, queue: deque[Waiting]) -> None:
        try:
            while queue:
                group = _take(queue)
                self._waiting -= len(group)
                try:
                    with self._corruption.meeting("log", key):
                        await self._commit(key, group)
                except PysyncError as error:
                    _refuse(group, error)
                except (Exception, _core.PanicException) as error:
                    log.exception("an append to %r failed", key)
                    _refuse(group, error)
        finally:
            del self._queues[key]

    async def _commit(self, key: str, group: list[Waiting]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                if await self._attempt(key, group, asks=attempt > 0):
                    return
            except EtagMismatch:
                self._heads.forget(key, group[0].rules.field)
                longest_s: float = min(BACKOFF_S * 2**attempt, MOST_BACKOFF_S)
                await self._sleep(longest_s * self._chance())
            except BaseException:
                # Nobody knows whether the last put took effect.
                self._heads.forget(key, group[0].rules.field)
                raise
        raise StoreUnavailable

    async def _attempt(self, key: str, group: list[Waiting], *, asks: bool) -> bool:
        """Write what the log admits of the group and tell the outcomes; False where that must be decided on
        the head as it is now. `asks` the store for it rather than relying on what this node knows.

        Raises EtagMismatch where another node was faster.
        """
        rules = group[0].rules
        now_ms = self._now_ms()
        held = None if asks else self._heads.known(key, rules.field)
        is_guess = held is not None
        if held is None:
            held = await self._heads.read(key, rules.field)
        expect: Expect = ABSENT if held is None else Etag(held.etag)
        head = await self._writable(key, held, rules, now_ms)
        open_ = await self._open(key, head, group)
        if not open_:
            return True
        elements = [(waiting.element, waiting.mark) for waiting in open_]
        after, outcomes = head.append(elements, now_ms, rules.max_items)
        stored = after.stored()
        if after.count > head.count and self._is_full(head, len(stored), rules):
            head, objects = head.seal(max(SEGMENT_BYTES, self._head_bytes))
            await self._put_all(head.id, objects)
            after, outcomes = head.append(elements, now_ms, rules.max_items)
            stored = after.stored()
        if is_guess and any(isinstance(outcome, str) for outcome in outcomes):
            return False
        if after.count > head.count:
            changes = [
                waiting.subject.change(*outcome)
                for waiting, outcome in zip(open_, outcomes, strict=True)
                if waiting.subject is not None and not isinstance(outcome, str)
            ]
            etag = await self._outbox.put(key, stored, expect, changes, head.hash)
            self._heads.keep(key, rules.field, self._without_discarded(after), etag)
        for waiting, outcome in zip(open_, outcomes, strict=True):
            _tell(waiting, outcome)
        return True

    async def _writable(self, key: str, held: Held | None, rules: LogRules, now_ms: int) -> _core.LogHead:
        """The log to append to: the one at `key`, taken over where it is Starfish's, or a new one where there
        is none or it has expired."""
        if held is None:
            return _core.LogHead(self._random(16).hex())
        head = held.head
        if rules.expired(head, now_ms):
            self._without_discarded(head)
            return _core.LogHead(self._random(16).hex(), head.id or None)
        if head.is_chunked:
            head = await gathered(self._store, key, head)
        return self._without_discarded(head) if head.id else adopted(key, rules.field, head, held.etag)

    def _is_full(self, head: _core.LogHead, size: int, rules: LogRules) -> bool:
        """Whether the tail is to be sealed before more is appended, with which the head would have `size`."""
        if not head.tail_count:
            return False
        # What Starfish kept beside the elements stays in the head, however long it is.
        return size - len(head.beside) > self._head_bytes or (
            rules.chunk_size is not None and head.tail_count >= rules.chunk_size
        )

    async def _put_all(self, id_: str, objects: list[tuple[str, bytes]]) -> None:
        for name, body in objects:
            await self._store.put(object_key(id_, name), body)

    async def _open(self, key: str, head: _core.LogHead, group: list[Waiting]) -> list[Waiting]:
        """Those of the group that are still to be written; others are told what another attempt was."""
        if not any(waiting.mark for waiting in group):
            return group
        open_ = []
        marked: dict[str, Waiting] = {}
        for waiting in group:
            if waiting.done.done():
                continue
            if waiting.mark in marked:
                _tell_both(marked[waiting.mark], waiting)
                continue
            if waiting.mark:
                try:
                    with self._corruption.meeting("log", key):
                        found = await self._written(key, head, waiting)
                except PysyncError as error:
                    _refuse([waiting], error)  # the others ask for nothing that lies there
                    continue
                if found is not None:
                    if waiting.subject is not None:
                        await self._outbox.repeat([waiting.subject.change(*found)])
                    _tell(waiting, found)
                    continue
                marked[waiting.mark] = waiting
            open_.append(waiting)
        return open_

    async def _written(self, key: str, head: _core.LogHead, waiting: Waiting) -> tuple[str, int] | None:
        """Return the answer that another attempt got, if that attempt has written the element. Raises
        StoreUnavailable if there is more to search than one attempt may; the next attempt continues from
        `waiting.claimed`."""
        found = head.written(waiting.mark, [])
        if found is not None:
            return found
        id_, count = waiting.claimed
        bounds = Bounds(newest=max(head.count - (count if id_ == head.id else 0), 0))
        nodes = Nodes(self._store, head, bounds, self._blame(key, waiting.rules.field))
        reads = size = 0
        at, is_cut = head.count, False
        while segments := await nodes.next():
            found = head.written(waiting.mark, segments)
            reads += 1
            size += sum(len(stored) for _, stored in segments)
            if found is not None:
                at = segments[0][0].start
                break
            if size > MAX_SEARCH_BYTES:
                at, is_cut = segments[-1][0].end, True
                break
        if reads > 1 or is_cut:  # else it costs less to look again than to say so
            waiting.claimed = head.id, at
        if is_cut:
            raise StoreUnavailable
        return found

    def _without_discarded(self, head: _core.LogHead) -> _core.LogHead:
        """The log without the memory of an expired one, once that one's objects are deleted."""
        if head.previous is None:
            return head
        task = self._discarding.get(head.previous)
        if task is None:
            if len(self._discarding) >= MAX_DISCARDED:
                kept = self._discarding.items()
                self._discarding = {id_: task for id_, task in kept if not task.done()}
            self._discarding[head.previous] = self._own(self._discard(head.previous))
            return head
        if not task.done():
            return head
        del self._discarding[head.previous]
        return head.without_previous()

    async def _discard(self, id_: str) -> None:
        try:
            await discard(self._store, id_)
        except PysyncError as error:
            log.warning("deleting an expired log: %s", error)
            self._discarding.pop(id_, None)


async def discard(store: Store, id_: str) -> None:
    """Delete all objects of a log, whose head is not there any more or has expired."""
    async for listed in store.walk(folder(id_)):
        await store.delete(listed.key)


def _take(queue: deque[Waiting]) -> list[Waiting]:
    """The next group: appends under the same rules, as many as one put should carry."""
    group = [queue.popleft()]
    size = len(group[0].element)
    while queue and queue[0].rules is group[0].rules and len(group) < GROUP_COUNT:
        size += len(queue[0].element)
        if size > GROUP_BYTES:
            break
        group.append(queue.popleft())
    return group


def _tell(waiting: Waiting, outcome: tuple[str, int] | str) -> None:
    if isinstance(outcome, str):
        _refuse([waiting], _refusal(outcome, waiting.rules))
    elif not waiting.done.done():
        waiting.done.set_result(Written(*outcome))


def _tell_both(first: Waiting, other: Waiting) -> None:
    """Tell `other` what `first` is told, being the same append."""

    def tell(done: asyncio.Future[Written]) -> None:
        error = StoreUnavailable() if done.cancelled() else done.exception()
        if other.done.done():
            return
        if error is None:
            other.done.set_result(done.result())
        else:
            other.done.set_exception(error)

    first.done.add_done_callback(tell)


def _refuse(group: list[Waiting], error: BaseException) -> None:
    for waiting in group:
        if not waiting.done.done():
            waiting.done.set_exception(error)


def _refusal(code: str, rules: LogRules) -> PysyncError:
    if code == AppendLimitExceeded.code:
        return AppendLimitExceeded(rules.max_items or 0)
    return TsTooFarAhead() if code == TsTooFarAhead.code else NonMonotonicTimestamp()
