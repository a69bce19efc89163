"""Batches appends: those that wait for one log are written together, with one conditional put of its head."""

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pysync import _core
from pysync.cache import BoundedCache
from pysync.clock import is_stable
from pysync.concurrency import MAX_WAITING, MAX_WAITING_BYTES, GroupSize
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log.head import CachedHead, HeadCache, LogSettings, convert_head, load_chunks
from pysync.engine.append_log.read import LogRange, SegmentReader, object_key
from pysync.engine.append_log.retention import ObjectDeletions, without_oldest
from pysync.engine.changes import WriteContext
from pysync.engine.idempotency import IdempotentRequest, result_of
from pysync.engine.outbox import Outbox
from pysync.errors import (
    AppendLimitExceeded,
    DocumentCorrupt,
    IdempotencyKeyReused,
    NonMonotonicTimestamp,
    OutcomeUnknown,
    PysyncError,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.model import WriteResult
from pysync.store import (
    ABSENT,
    CarriedOut,
    Charge,
    ClaimsFull,
    Etag,
    EtagMismatch,
    Precondition,
    Segment,
    Store,
    Write,
)

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 64
"""The number of puts of one group, each repeated because another node's came first."""
INITIAL_BACKOFF_S: Final = 0.001
MAX_BACKOFF_S: Final = 0.05
"""The longest waits, in seconds: before the second put, doubled for each further one, and before any put.
Some puts take as long."""
MAX_GROUP_SIZE: Final = 1024
MAX_GROUP_BYTES: Final = 256 * 1024
"""Bytes of elements that one put carries. With more, the first append would wait too long for the last."""
SEGMENT_BYTES: Final = 64 * 1024
"""Bytes from which a tail is cut into several segments when it is sealed."""


@dataclass(eq=False, slots=True)
class PendingAppend:
    """A pending append. If the store is transactional, the claim of `request` is committed with it. Otherwise
    it recognises its element by a `write_id`, which another attempt may have written since the log had
    the id and count `search_from`. With `only_in` it is appended to no other log than the one with this id.
    """

    element: _core.Append
    settings: LogSettings
    done: asyncio.Future[WriteResult]
    context: WriteContext | None = None
    write_id: str = ""
    search_from: tuple[str, int] = ("", 0)
    request: IdempotentRequest | None = None
    only_in: str = ""

    @property
    def deduplication_id(self) -> str:
        """The id that attempts at one append have in common; `""` if it cannot be repeated."""
        return self.write_id or ("" if self.request is None else self.request.key)


class ElementsDropped(StoreUnavailable):
    """Elements that an append would have to search for those of earlier attempts have left the log. This
    attempt has written nothing."""


class AppendBatcher:
    """The appends to all logs of a store. `head_bytes` is the size up to which a head may grow before its
    tail is sealed."""

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        head_cache: HeadCache,
        now_ms: Callable[[], int],
        head_bytes: int,
        corruption: CorruptionReporter,
        deletions: ObjectDeletions,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._head_cache = head_cache
        self._now_ms = now_ms
        self._head_bytes = head_bytes
        self._corruption = corruption
        self._deletions = deletions
        self._queues: dict[str, deque[PendingAppend]] = {}
        self._group_sizes = BoundedCache[str, GroupSize]()
        self._waiting = self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, key: str, pending: PendingAppend) -> asyncio.Future[WriteResult]:
        """Queue the append for `key`, and return the future of its result. Raises StoreUnavailable at once if
        too many appends wait. Cancelling the future stops only the waiting."""
        size = len(pending.element)
        is_full = self._waiting > 0 and self._waiting_bytes + size > MAX_WAITING_BYTES
        if is_full or self._waiting >= MAX_WAITING:
            raise StoreUnavailable("too many appends wait to be written")
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            task = asyncio.get_running_loop().create_task(self._drain_queue(key, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.append(pending)
        self._waiting += 1
        self._waiting_bytes += size
        return pending.done

    async def close(self) -> None:
        """Finish the pending appends."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _drain_queue(self, key: str, queue: deque[PendingAppend]) -> None:
        group_size = self._group_sizes.get(key)
        if group_size is None:
            group_size = GroupSize()
            self._group_sizes.put(key, group_size)
        try:
            while queue:
                while not group_size.is_complete(len(queue)):  # noqa: ASYNC110 (each tick counts)
                    await asyncio.sleep(0)
                group = _next_group(queue)
                self._waiting -= len(group)
                self._waiting_bytes -= sum(len(pending.element) for pending in group)
                try:
                    await self._commit(key, group)
                except DocumentCorrupt as error:
                    self._corruption.report_once(error, "log", key)
                    _reject(group, error)
                except PysyncError as error:
                    _reject(group, error)
                except (Exception, _core.PanicException) as error:
                    log.exception("failed to append to %r", key)
                    _reject(group, error)
        finally:
            del self._queues[key]

    async def _commit(self, key: str, group: list[PendingAppend]) -> None:
        for attempt in range(MAX_ATTEMPTS):
            try:
                if await self._try_commit(key, group, refresh=attempt > 0):
                    return
            except (CarriedOut, IdempotencyKeyReused):
                self._resolve_repetitions(group)
            except ClaimsFull as error:
                # There may be room for those that have the larger share.
                shares = {
                    waiting: waiting.request.share
                    for waiting in group
                    if waiting.request is not None and not waiting.done.done()
                }
                least = min(shares.values(), default=0.0)
                _reject([waiting for waiting, share in shares.items() if share == least], error)
            except EtagMismatch:
                self._head_cache.invalidate(key, group[0].settings.field)
                longest_s: float = min(INITIAL_BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
                await asyncio.sleep(longest_s * random.random())  # noqa: S311
            except BaseException:
                # The last put may or may not have taken effect.
                self._head_cache.invalidate(key, group[0].settings.field)
                raise
        raise StoreUnavailable

    async def _try_commit(self, key: str, group: list[PendingAppend], *, refresh: bool) -> bool:
        """Append the accepted elements of this group and resolve their futures. Returns False if an element
        would be rejected by a cached head, or a cached tail may not be sealed, so that the caller must retry
        with `refresh`, which reads the head from the store.

        Raises EtagMismatch if another node was faster.
        """
        settings = group[0].settings
        now_ms = self._now_ms()
        cached = None if refresh else self._head_cache.cached(key, settings.field)
        is_guess = cached is not None
        if cached is None:
            cached = await self._head_cache.read(key, settings.field)
        expect: Precondition = ABSENT if cached is None else Etag(cached.etag)
        head = await self._head_for_append(key, cached, settings, now_ms)
        open_ = await self._not_yet_written(key, head, group)
        if not open_:
            return True
        elements = [(waiting.element, waiting.write_id) for waiting in open_]
        last = open_[-1].context
        account = None if last is None or last.charge is None else last.charge.account
        after, outcomes = head.append(elements, now_ms, settings.max_items)
        stored = after.stored()
        dropped: list[str] = []
        segments: list[Segment] = []
        if after.count > head.count and self._is_full(head, len(stored), settings):
            if is_guess and (settings.drops_elements or not self._outbox.is_transactional):
                # Objects that another node has dropped must not be looked for, and those of a log that was
                # deleted not be stored again.
                return False
            head, dropped = await self._without_oldest(key, head, settings)
            head, objects = head.seal(max(SEGMENT_BYTES, self._head_bytes))
            segments = [Segment(object_key(head.id, name), body) for name, body in objects]
            after, outcomes = head.append(elements, now_ms, settings.max_items)
            stored = after.stored()
        if is_guess and any(isinstance(outcome, str) for outcome in outcomes):
            return False
        if after.count > head.count:
            changes = [
                waiting.context.change(*outcome)
                for waiting, outcome in zip(open_, outcomes, strict=True)
                if waiting.context is not None and not isinstance(outcome, str)
            ]
            charge = Charge(account, after.count - after.start)
            claims = [
                waiting.request.claim(WriteResult(*outcome))
                for waiting, outcome in zip(open_, outcomes, strict=True)
                if waiting.request is not None and not isinstance(outcome, str)
            ]
            version = after.hash, after.ts_ms or 0
            write = Write(
                key, stored, expect, changes, head.hash, charge, (), segments, claims, version=version
            )
            etag = await self._outbox.commit(write)
            self._head_cache.put(key, settings.field, self._drop_previous(after), etag)
            if dropped:
                self._deletions.delete_dropped(dropped)
        for waiting, outcome in zip(open_, outcomes, strict=True):
            _resolve(waiting, outcome)
        return True

    async def _head_for_append(
        self, key: str, cached: CachedHead | None, settings: LogSettings, now_ms: int
    ) -> _core.LogHead:
        """Return the log to append to: the one at `key`, converted if it is Starfish's, or a new one if there
        is none or it has expired."""
        if cached is None:
            return _core.LogHead(os.urandom(16).hex())
        head = cached.head
        if settings.is_expired(head, now_ms):
            self._drop_previous(head)
            return _core.LogHead(os.urandom(16).hex(), head.id or None)
        if head.is_chunked:
            head = await load_chunks(self._store, key, head)
        return self._drop_previous(head) if head.id else convert_head(key, settings.field, head, cached.etag)

    def _is_full(self, head: _core.LogHead, size: int, settings: LogSettings) -> bool:
        """Return True if the tail must be sealed before an append with which the head would have `size`
        bytes."""
        if not head.tail_count:
            return False
        # Members that Starfish stored beside the elements stay in the head, whatever their size.
        return size - len(head.beside) > self._head_bytes or (
            settings.chunk_size is not None and head.tail_count >= settings.chunk_size
        )

    async def _without_oldest(
        self, key: str, head: _core.LogHead, settings: LogSettings
    ) -> tuple[_core.LogHead, list[str]]:
        """Return the log without the elements that need not stay, and the keys to delete once it is stored.
        Damage only keeps elements from leaving."""
        if settings.drops_elements:
            now_ms = self._now_ms() if is_stable(self._now_ms) else None
            try:
                return await without_oldest(self._store, head, settings, now_ms)
            except DocumentCorrupt as error:
                self._corruption.report_once(error, "log", key)
        return head, []

    async def _not_yet_written(
        self, key: str, head: _core.LogHead, group: list[PendingAppend]
    ) -> list[PendingAppend]:
        """Return the appends of the group that are still to be written. Others get the result of the attempt
        that wrote them."""
        if not any(waiting.deduplication_id for waiting in group):
            return group
        open_ = []
        for waiting in group:
            if waiting.done.done():
                continue
            found = None
            if waiting.write_id:
                try:
                    with self._corruption.reporting("log", key):
                        found = await self._find_written(key, head, waiting)
                except PysyncError as error:
                    _reject([waiting], error)  # the other appends do not need the damaged objects
                    continue
            if found is None:
                open_.append(waiting)
                continue
            if waiting.context is not None:
                await self._outbox.reannounce([waiting.context.change(*found)])
            _resolve(waiting, found)
        return open_

    def _resolve_repetitions(self, group: list[PendingAppend]) -> None:
        """Resolve the appends of a group that were carried out before."""
        store = self._store.transactional
        assert store is not None, "only such a store has claims"
        for waiting in group:
            if waiting.request is None or waiting.done.done():
                continue
            try:
                outcome = store.claims.find(waiting.request.claim(WriteResult("", 0)))
            except PysyncError as error:
                _reject([waiting], error)
            else:
                if outcome is not None:
                    waiting.done.set_result(result_of(outcome))

    async def _find_written(
        self, key: str, head: _core.LogHead, pending: PendingAppend
    ) -> tuple[str, int] | None:
        """Return the result of another attempt, if that attempt has written the element. Otherwise the next
        search continues behind this one. Raises OutcomeUnknown if the element may have been in a log that is
        gone, and ElementsDropped if it may have left the log."""
        found = head.written(pending.write_id, [])
        if found is not None:
            return found
        id_, count = pending.search_from
        first = count if id_ == head.id else 0
        if first < head.start:
            raise ElementsDropped
        bounds = LogRange(newest=max(head.count - first, 0))
        nodes = SegmentReader(self._head_cache, key, pending.settings.field, head, bounds)
        while segments := await nodes.next():
            found = head.written(pending.write_id, segments)
            if found is not None:
                return found
        if pending.only_in not in ("", head.id):
            raise OutcomeUnknown
        pending.search_from = head.id, head.count
        return None

    def _drop_previous(self, head: _core.LogHead) -> _core.LogHead:
        return head if head.previous is None else self._deletions.drop_previous(head, head.previous)


def _next_group(queue: deque[PendingAppend]) -> list[PendingAppend]:
    """Take the next group from the queue: appends with the same settings, as many as one put should carry. A
    repetition waits for the group after that of the first attempt, and finds there what became of it."""
    group = [queue.popleft()]
    size = len(group[0].element)
    ids = {group[0].deduplication_id}
    while queue and queue[0].settings is group[0].settings and len(group) < MAX_GROUP_SIZE:
        following = queue[0]
        size += len(following.element)
        id_ = following.deduplication_id
        if size > MAX_GROUP_BYTES or (id_ and id_ in ids):
            break
        ids.add(id_)
        group.append(queue.popleft())
    return group


def _resolve(pending: PendingAppend, outcome: tuple[str, int] | str) -> None:
    if isinstance(outcome, str):
        _reject([pending], _error_for(outcome, pending.settings))
    elif not pending.done.done():
        pending.done.set_result(WriteResult(*outcome))


def _reject(group: list[PendingAppend], error: BaseException) -> None:
    for waiting in group:
        if not waiting.done.done():
            waiting.done.set_exception(error)


def _error_for(code: str, settings: LogSettings) -> PysyncError:
    if code == AppendLimitExceeded.code:
        return AppendLimitExceeded(settings.max_items or 0)
    return TsTooFarAhead() if code == TsTooFarAhead.code else NonMonotonicTimestamp()
