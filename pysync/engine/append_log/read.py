"""Reads of a log: the objects that a range needs, and its elements as the text of a response."""

import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from pysync import _core
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log.head import HeadCache
from pysync.errors import CheckpointTooOld
from pysync.store import MAX_CONCURRENT_READS

STREAM_ABOVE_SEGMENTS: Final = 8
"""The number of segments above which a response is better sent in chunks."""
_MAX_UNSIZED_SEGMENTS: Final = 4
"""The number of segments of several elements that are read without a query for their sizes."""
_SEGMENT_OVERHEAD_BYTES: Final = 256
_ELEMENT_OVERHEAD_BYTES: Final = 32
"""Upper bounds of the bytes of a segment beside its elements: once, and for each element."""
CHUNK_BYTES: Final = 1024 * 1024
"""Approximate size in bytes of the segments of a chunk."""

Segment = tuple[_core.LogNode, bytes]


@dataclass(frozen=True, slots=True)
class LogRange:
    """The elements with a ts above `since`, and of those the `newest` or the `oldest` so many. None is no
    limit."""

    since: int | None = None
    newest: int | None = None
    oldest: int | None = None


class SegmentReader:
    """Reads the segments of the log at `key` that have elements within `bounds`, oldest first; the tail is in
    the head. `head` was read from `heads`. Objects are taken from `cache` and added to it. Segments that
    leave the log during the read are skipped."""

    def __init__(
        self,
        heads: HeadCache,
        key: str,
        field: str,
        head: _core.LogHead,
        bounds: LogRange,
        cache: dict[str, bytes] | None = None,
    ) -> None:
        self._heads = heads
        self._key = key
        self._field = field
        self._head = head
        self._cache = cache
        self._bounds = (bounds.since, bounds.newest, bounds.oldest)
        self._waiting = deque(head.nodes(*self._bounds))
        self._ready: list[_core.LogNode] = []
        self._at_once = STREAM_ABOVE_SEGMENTS
        self.dropped_ms = head.dropped_ms
        """The timestamp of the newest element that had left the log when it was last looked at."""
        self._min_selected: int | None = None
        """The number of elements of the segments so far that are certainly selected: all but those of the
        first segment."""

    @property
    def any_left(self) -> bool:
        """True if these bounds can select any element."""
        return bool(self._waiting or self._ready)

    async def has_more_than(self, count: int) -> bool:
        """Return True if more than `count` segments are left."""
        while self._waiting and len(self._ready) <= count:
            node = self._waiting.popleft()
            if node.level == 0:
                self._enqueue(node)
            else:
                for _, block in await self._read([node]):
                    self._waiting.extendleft(reversed(self._head.expand(block, node, *self._bounds)))
        return len(self._ready) > count

    def _enqueue(self, segment: _core.LogNode) -> None:
        oldest = self._bounds[2]
        if oldest is not None and self._min_selected is not None and self._min_selected >= oldest:
            # A block shows only which of the oldest elements it may have, not how many lie before it.
            self._waiting.clear()
            return
        self._min_selected = (
            0 if self._min_selected is None else self._min_selected + segment.end - segment.start
        )
        self._ready.append(segment)

    async def next(self) -> list[Segment]:
        """Read the next segments, about one chunk of them. Returns an empty list at the end."""
        segments: list[Segment] = []
        while not segments and await self.has_more_than(0):
            await self.has_more_than(self._at_once)
            count = self._batch_size()
            taken, self._ready = self._ready[:count], self._ready[count:]
            segments = await self._read(taken)
        size = sum(len(stored) for _, stored in segments)
        self._at_once = min(max(CHUNK_BYTES * len(segments) // max(size, 1), 1), MAX_CONCURRENT_READS)
        return segments

    def _batch_size(self) -> int:
        """Return the number of ready segments to read together. The earlier segments do not show the length
        of these, but only a segment with a single element can be longer than a sealed tail."""
        single = 0
        for at, segment in enumerate(self._ready[: self._at_once]):
            single += segment.end - segment.start == 1
            if single > STREAM_ABOVE_SEGMENTS:
                return at
        return self._at_once

    async def min_bytes(self) -> int:
        """Return the size of the segments that lie wholly within the bounds; 0 if they are few and small."""
        await self.has_more_than(sys.maxsize)
        whole, beside, has_single = [], 0, False
        since, newest, left = self._bounds
        first = 0 if newest is None else max(self._head.count - newest, 0)
        for node in self._ready:
            count = node.end - node.start
            is_whole = node.start >= first and (since is None or node.ts_ms > since)
            if left is not None:
                is_whole = is_whole and count <= left
                left = max(left - count, 0)
            if is_whole:
                whole.append(object_key(self._head.id, node.name))
                beside += _SEGMENT_OVERHEAD_BYTES + _ELEMENT_OVERHEAD_BYTES * count
                # Only a segment with one element can be longer than a sealed tail.
                has_single = has_single or count == 1
        if not has_single and len(whole) <= _MAX_UNSIZED_SEGMENTS:
            return 0
        found = await self._heads.store.info_many(whole)
        return max(sum(info.size for info in (found or {}).values() if info is not None) - beside, 0)

    async def _read(self, nodes: Sequence[_core.LogNode]) -> list[Segment]:
        """Return these nodes with their objects, except those whose elements have left the log."""
        segment_cache = {} if self._cache is None else self._cache
        missing = [node for node in nodes if node.name not in segment_cache]
        keys = [object_key(self._head.id, node.name) for node in missing]
        found = await self._heads.store.get_many(keys)
        for node, key in zip(missing, keys, strict=True):
            object_ = found[key]
            if object_ is not None:
                segment_cache[node.name] = object_.body
                continue
            now = await self._heads.explain_missing(self._key, self._field, self._head, node.end)
            self.dropped_ms = max(self.dropped_ms, now.dropped_ms)
        return [(node, segment_cache[node.name]) for node in nodes if node.name in segment_cache]


class LogSlice:
    """Elements of a log as it was at one moment. Later appends are not among them, nor elements that leave
    the log before they are read."""

    def __init__(
        self,
        key: str,
        head: _core.LogHead,
        bounds: LogRange,
        segments: SegmentReader,
        corruption: CorruptionReporter,
    ) -> None:
        self._key = key
        self._corruption = corruption
        self._head = head
        self._bounds = bounds
        self._segments = segments
        self.hash = head.hash
        self._last_given_ms = -1 if bounds.since is None else bounds.since
        """The timestamp of the newest element that was returned."""

    @property
    def newest_ms(self) -> int:
        """The timestamp of the newest element of the log, -1 if it is empty."""
        return -1 if self._head.ts_ms is None else self._head.ts_ms

    @property
    def has_more(self) -> bool:
        """True if the read left out elements that are newer than all that `text`, or `chunks`, gave."""
        return self._bounds.oldest is not None and self.newest_ms > self._last_given_ms

    @property
    def has_segments(self) -> bool:
        """True if some elements may lie outside the head."""
        return self._segments.any_left

    def check_retained(self) -> None:
        """Raise CheckpointTooOld if an element after the checkpoint of the range has left the log."""
        dropped_ms = self._segments.dropped_ms
        if self._bounds.since is not None and self._bounds.since < dropped_ms:
            raise CheckpointTooOld(extras={"earliest": dropped_ms})

    def head_text(self) -> bytes:
        """Return the elements that are in the head, separated by commas."""
        text = _slice(self._head, [], self._bounds, with_tail=True)
        if self._bounds.oldest is not None:
            self._record_last(text)
        return text

    async def is_long(self) -> bool:
        """Return True if the response is better sent in chunks."""
        with self._corruption.reporting("log", self._key):
            return await self._segments.has_more_than(STREAM_ABOVE_SEGMENTS)

    async def min_bytes(self) -> int:
        """Return a lower bound of the size of `text` in bytes, as far as the store can give it without
        reading segments; 0 if the segments are few and small."""
        with self._corruption.reporting("log", self._key):
            return await self._segments.min_bytes()

    async def text(self) -> bytes:
        """Return the elements, separated by commas. Raises CheckpointTooOld, as `check_retained`,
        DocumentCorrupt and StoreUnavailable."""
        segments: list[Segment] = []
        with self._corruption.reporting("log", self._key):
            while more := await self._segments.next():
                segments += more
            self.check_retained()
            text = _slice(self._head, segments, self._bounds, with_tail=True)
        self._record_last(text)
        return text

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield `text` in chunks, each of some segments. Raises as `text`, but CheckpointTooOld only before
        the first chunk. If later elements leave the log before they are read, a read of the oldest elements
        ends before them, and `has_more` is True; other reads continue after them."""
        bounds = self._bounds
        comma = b""
        is_last = False
        while not is_last:
            with self._corruption.reporting("log", self._key):
                segments = await self._segments.next()
                is_last = not await self._segments.has_more_than(0)
                if not comma:
                    self.check_retained()
                elif bounds.oldest is not None and self._last_given_ms < self._segments.dropped_ms:
                    return
                text = _slice(self._head, segments, bounds, with_tail=is_last)
            if text and bounds.oldest is not None:
                bounds = replace(bounds, oldest=bounds.oldest - 1 - text.count(b"\n"))
                self._record_last(text)
            del segments  # frees their memory while a slow client receives the text
            if text:
                text = comma + text
                yield text
                comma = b","

    def _record_last(self, text: bytes) -> None:
        if (last := _ts_of(text, text.rfind(b"\n") + 1)) is not None:
            self._last_given_ms = int(last[1])

    def envelope(self, field: str) -> tuple[bytes, bytes]:
        """Return the text before and after the elements in `data`."""
        beside = self._head.beside[1:-1].encode() + b"," if self._head.beside else b""
        return b"{%b%b:[" % (beside, orjson.dumps(field)), b"]}"


_ts_of = re.compile(rb'\{"ts":([0-9]+)').match
"""Matches the timestamp at the start of an element, which is a line of its own."""


def _slice(head: _core.LogHead, segments: list[Segment], bounds: LogRange, *, with_tail: bool) -> bytes:
    return head.slice(segments, with_tail, bounds.since, bounds.newest, bounds.oldest)


def object_key(id_: str, name: str) -> str:
    """Return the key of an object of the log with this id."""
    return f"{log_prefix(id_)}/{name}"


def log_prefix(id_: str) -> str:
    """Return the prefix of the keys of all objects of a log."""
    return f"_pysync/logs/{id_}"


def log_id(key: str) -> str:
    """Return the id of the log to which the object at a key belongs; `""` if it belongs to none."""
    prefix = log_prefix("")
    return key.removeprefix(prefix).partition("/")[0] if key.startswith(prefix) else ""
