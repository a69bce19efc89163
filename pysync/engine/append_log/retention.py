"""Retention of logs: the oldest segments leave a log with `keepElements` or `keepMs`.

The head that no longer names them is put first. Their objects are deleted afterwards. A crash
in between leaves objects that no head names.
"""

from collections import deque
from typing import Final

from pysync._core import LogHead, LogNode
from pysync.concurrency import gather_bounded
from pysync.engine.append_log.head import LogSettings
from pysync.engine.append_log.read import object_key
from pysync.errors import DocumentCorrupt
from pysync.store import MAX_CONCURRENT_READS, NotModified, Store

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
