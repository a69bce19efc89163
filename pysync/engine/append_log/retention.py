"""Segments that leave a log: the oldest ones with `keepElements` or `keepMs`, and all of them once it is
deleted or has expired.

The head that no longer names them is put first. Their objects are deleted afterwards. A crash
in between leaves objects that no head names.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Final

from pysync._core import LogHead, LogNode
from pysync.cache import CACHED_ENTRIES
from pysync.concurrency import gather_bounded
from pysync.engine.append_log.head import LogSettings, chunk_keys
from pysync.engine.append_log.read import log_prefix, object_key
from pysync.errors import DocumentCorrupt, PysyncError
from pysync.store import MAX_CONCURRENT_READS, NotModified, Store

log = logging.getLogger(__name__)

MAX_DROPPED_SEGMENTS: Final = 64
"""The number of segments that leave a log with one put of its head."""


async def without_oldest(
    store: Store, head: LogHead, settings: LogSettings, now_ms: int | None
) -> tuple[LogHead, list[str]]:
    """Return the log without the segments that need not stay, at most `MAX_DROPPED_SEGMENTS` of them, and
    without its tail if that is too old as well; and the keys of their objects, to delete once this head is
    stored. With `now_ms` None, no element counts as too old.

    A segment that is not found stays, because `head` may be an older one. Raises DocumentCorrupt if a block
    of the index is damaged, and StoreUnavailable.
    """
    after_all_ms = (head.ts_ms or 0) + 1

    def may_leave(end: int, next_ts_ms: int) -> bool:
        kept, age_ms = settings.keep_elements, settings.keep_ms
        is_surplus = kept is not None and end <= head.count - kept
        return is_surplus or (age_ms is not None and now_ms is not None and next_ts_ms <= now_ms - age_ms)

    waiting, segments, blocks = deque(head.nodes()), list[LogNode](), list[LogNode]()
    while waiting and len(segments) < MAX_DROPPED_SEGMENTS:
        node = waiting.popleft()
        if node.level == 0 and may_leave(node.end, node.next_ts_ms or after_all_ms):
            segments.append(node)
            continue
        found = None
        if node.level > 0 and may_leave(max(node.start, head.start) + 1, node.ts_ms + 1):
            found = await store.get(object_key(head.id, node.name))
        if found is None or isinstance(found, NotModified):
            waiting.appendleft(node)
            break
        blocks.append(node)
        waiting.extendleft(reversed(head.expand(found.body, node)))
    if head.tail_count and not waiting and may_leave(head.count, after_all_ms):
        start, dropped_ms = head.count, after_all_ms - 1
    elif segments:
        start, dropped_ms = segments[-1].end, await _last_ts_ms(store, head, segments[-1])
    else:
        return head, []
    gone = [*segments, *(block for block in blocks if block.end <= start)]
    return head.drop_before(start, dropped_ms), [object_key(head.id, node.name) for node in gone]


async def delete_objects(store: Store, keys: list[str]) -> None:
    """Delete the objects at these keys. Raises StoreUnavailable."""
    await gather_bounded(MAX_CONCURRENT_READS, keys, store.delete)


async def _last_ts_ms(store: Store, head: LogHead, segment: LogNode) -> int:
    """Return the time of the last element of a segment, or a later one before the next element if the segment
    is lost or damaged."""
    found = await store.get(object_key(head.id, segment.name))
    if found is not None and not isinstance(found, NotModified):
        try:
            return head.last_ts_ms(segment, found.body)
        except DocumentCorrupt:
            pass
    return (head.ts_ms or 0) if segment.next_ts_ms is None else segment.next_ts_ms - 1


class ObjectDeletions:
    """Deletes in the background what no head names any more. What fails stays, and belongs to no log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._of_expired: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Finish the deletions."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def delete_dropped(self, keys: list[str]) -> None:
        """Delete the objects that `without_oldest` returned."""
        self._spawn(self._delete_dropped(keys))

    def delete_log(self, key: str, head: LogHead) -> None:
        """Delete the objects of a log whose head was deleted."""
        self._spawn(self._delete_log(key, head))

    def drop_previous(self, head: LogHead, previous: str) -> LogHead:
        """Return the log without its reference to `previous`, an expired one, once the objects of that one
        are deleted."""
        task = self._of_expired.get(previous)
        if task is None:
            if len(self._of_expired) >= CACHED_ENTRIES:
                kept = self._of_expired.items()
                self._of_expired = {id_: task for id_, task in kept if not task.done()}
            self._of_expired[previous] = self._spawn(self._delete_expired(previous))
            return head
        if not task.done():
            return head
        del self._of_expired[previous]
        return head.without_previous()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _delete_dropped(self, keys: list[str]) -> None:
        try:
            await delete_objects(self._store, keys)
        except PysyncError as error:
            log.warning("failed to delete old segments of a log: %s", error)

    async def _delete_log(self, key: str, head: LogHead) -> None:
        try:
            for id_ in filter(None, (head.previous, head.id)):
                await delete_log_objects(self._store, id_)
            for chunk in await chunk_keys(self._store, key) if head.is_chunked else ():
                await self._store.delete(chunk)
        except PysyncError as error:
            log.warning("failed to delete the rest of a log: %s", error)

    async def _delete_expired(self, id_: str) -> None:
        try:
            await delete_log_objects(self._store, id_)
        except PysyncError as error:
            log.warning("failed to delete an expired log: %s", error)
            self._of_expired.pop(id_, None)


async def delete_log_objects(store: Store, id_: str) -> None:
    """Delete all objects of a log whose head is gone or has expired."""
    async for listed in store.walk(log_prefix(id_)):
        await store.delete(listed.key)
