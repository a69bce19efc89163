"""Tails of logs for batch pulls (wire section 6).

Reading many documents for one request (wire section 6).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from pysync.auth.policy import Rule
from pysync.engine.append_log import Bounds, LogRules, Logs, Tail
from pysync.engine.keyed_versions import KeyedVersions
from pysync.errors import (
    BatchTooLarge,
    CheckpointTooOld,
    DocumentCorrupt,
    PullBoundRequired,
    StoreUnavailable,
)
from pysync.server.handlers.append_log import stripped, visible_frame
from pysync.store import READS_AT_ONCE, NotModified, ObjectInfo, Store

Read = Callable[[], Awaitable[None]]
"""A read that keeps what it finds, and its own failure, to itself."""


Outcome = bytes | str | None
"""What the store holds: bytes, None for nothing, or the text of the error that kept it from saying."""

RUN_BYTES = 1024 * 1024
"""The approximate number of bytes that are read in one tick of the loop, and before the sizes of the rest are
asked for."""


class Budget:
    """The budget of bytes of an answer. `times` is the number of times that it sends each document, `sent`
    the size of the reads so far, and `etags` are those of the documents that were read."""

    def __init__(self, store: Store, times: Mapping[str, int], max_bytes: int) -> None:
        self.sent = 0
        self.etags: dict[str, str] = {}
        self.run = 0
        """Bytes of documents that were read since the last `pause`."""
        self._store = store
        self._times = times
        self._max_bytes = max_bytes
        self._foreseen = 0
        self._counted: set[str] = set()
        self._is_weighed = False

    def foresee(self, size: int) -> None:
        """Add the bytes that logs are going to send. Raises BatchTooLarge."""
        self._foreseen += size
        self._check(self._foreseen)

    async def infos(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Return the etags and sizes of these documents, as far as the store knows them without reading;
        empty if it knows none."""
        try:
            found = await self._store.info_many(keys) if keys else None
        except StoreUnavailable:
            found = None  # whoever reads them will see
        return {} if found is None else dict(zip(keys, found, strict=True))

    def weigh(self, found: Mapping[str, ObjectInfo | None], sent: int = 0) -> None:
        """Count the documents `found`, of which none was read, beside what is `sent` and not counted yet.
        Raises BatchTooLarge."""
        times = self._times
        sizes = sum(info.size * times[key] for key, info in found.items() if info is not None)
        self._check(self.sent + sent + self._foreseen + sizes)

    def send(self, size: int, times: int = 1) -> bool:
        """Count bytes of a log that were read, and that the answer sends so many times. Returns True if it is
        time to yield to others. Raises BatchTooLarge."""
        self.sent += size * times
        self._check(self.sent)
        return size > RUN_BYTES // 4

    def count(self, found: Mapping[str, Outcome]) -> None:
        """Count the documents of one `read_each`, once all are read. Raises BatchTooLarge."""
        self.sent += self._size(found)
        self._counted |= found.keys()
        self._check(self.sent)

    async def pause(self, found: Mapping[str, Outcome]) -> None:
        """Yield to others after a run of documents; `found` are those that one `read_each` has read so far.
        The first time, check the sizes of the documents that are not read yet. Raises BatchTooLarge."""
        self.run = 0
        sent = self._size(found)
        self._check(self.sent + sent)
        if not self._is_weighed:
            self._is_weighed = True
            left = [key for key in self._times if key not in found and key not in self._counted]
            self.weigh(await self.infos(left), sent)
        await asyncio.sleep(0)

    def _size(self, found: Mapping[str, Outcome]) -> int:
        times = self._times
        return sum([len(body) * times[key] for key, body in found.items() if body.__class__ is bytes])

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise BatchTooLarge


async def read_each(
    store: Store,
    keys: Collection[str],
    beside: Collection[Read] = (),
    budget: Budget | None = None,
    *,
    at_once: int = READS_AT_ONCE,
) -> dict[str, Outcome]:
    """Return the object at each of `keys`, which are distinct; the reads `beside` are made with them. A
    failing read fails alone. Raises BatchTooLarge if the reads exceed the budget.

    Up to `at_once` reads run concurrently if the store waits for a network; otherwise tasks would only cost
    time.
    """
    found: dict[str, Outcome] = {}
    waiting, others = iter(keys), iter(beside)
    count = len(keys) + len(beside)
    if not store.reads_wait or count < 2:
        await _read_on(store, waiting, found, others, budget)
        if budget is not None:
            budget.count(found)
        return found
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, count)):
                group.create_task(_read_on(store, waiting, found, others, budget))
    except ExceptionGroup as failed:
        if failed.subgroup(BatchTooLarge) is None:
            raise
        raise BatchTooLarge from None
    if budget is not None:
        budget.count(found)
    return found


async def _read_on(
    store: Store,
    waiting: Iterator[str],
    found: dict[str, Outcome],
    others: Iterator[Read],
    budget: Budget | None,
) -> None:
    for key in waiting:
        try:
            object_ = await store.get(key)
        except StoreUnavailable as error:
            found[key] = error.text
        else:
            if object_ is None or isinstance(object_, NotModified):
                found[key] = None
                continue
            found[key] = body = object_.body
            if budget is not None:
                budget.etags[key] = object_.etag
                budget.run += len(body)
                if budget.run > RUN_BYTES:
                    await budget.pause(found)
    for read in others:
        await read()


Told = tuple[str, bytes, bool] | str
"""The outcome of reading a log: its hash, the text of `data` and whether elements were left out, or the text
of an error."""


def max_elements(rule: Rule) -> int | None:
    """What a read of this collection returns at most, as the planner wants it: None where it is no log, 0
    for as many as are asked for."""
    log = rule.collection.append_only
    return None if log is None else log.max_pull_limit or 0


_NOTHING = Bounds()


class Asked(NamedTuple):
    """A read of a log: its place among the told, the row of its collection, the members of data that are
    hidden, and how often the answer sends it."""

    at: int
    row: int
    key: str
    bounds: Bounds
    hidden: frozenset[str]
    times: int


class LogReads:
    """The reads of one log in a batch. Their outcomes are put among the `told`."""

    def __init__(
        self,
        logs: Logs,
        rules: LogRules,
        asked: Sequence[Asked],
        told: list[Told],
        budget: Budget,
        versions: KeyedVersions,
    ) -> None:
        self._logs = logs
        self._versions = versions
        self._rules = rules
        self._asked = asked
        self._told = told
        self._budget = budget
        self._open: list[tuple[Asked, Tail]] = []

    async def open(self) -> None:
        """Read the head, and tell its hash."""
        admitted = []
        for each in self._asked:
            refusal = self._refusal(each.bounds)
            if refusal is None:
                admitted.append(each)
            else:
                self._told[each.at] = refusal
        if not admitted:
            return
        try:
            bounds = [
                replace(each.bounds, since=None) if self._is_forced(each.bounds) else each.bounds
                for each in admitted
            ]
            tails = await self._logs.read_each(admitted[0].key, bounds, self._rules)
            for each, tail in zip(admitted, tails, strict=True):
                tail.hash = await self._versions.told(each.key, tail.hash, tail.newest_ms, each.hidden)
        except (DocumentCorrupt, StoreUnavailable) as error:
            for each in admitted:
                self._told[each.at] = error.text
            return
        for each, tail in zip(admitted, tails, strict=True):
            self._told[each.at] = tail.hash, b"", False
            self._open.append((each, tail))

    async def begin(self) -> None:
        """`open`, and tell the elements that are in the head, where no others are asked for. Raises
        BatchTooLarge."""
        await self.open()
        segmented = []
        for each, tail in self._open:
            if tail.has_segments:
                segmented.append((each, tail))
                continue
            text = tail.head_text()
            self._budget.send(len(text), each.times)
            if each.hidden:
                text = await stripped(text, each.hidden)
            before, after = visible_frame(tail, self._rules.field, each.hidden)
            self._told[each.at] = tail.hash, before + text + after, tail.has_more
        self._open = segmented

    @property
    def is_open(self) -> bool:
        """True if anything is left to read."""
        return bool(self._open)

    async def weigh(self) -> None:
        """Foresee what the reads will send. Raises BatchTooLarge."""
        for each, tail in self._open:
            if tail.has_segments:
                with suppress(DocumentCorrupt, StoreUnavailable):  # to be met again
                    self._budget.foresee(each.times * await tail.least_bytes())

    async def read(self) -> None:
        """Tell the elements too. Raises BatchTooLarge."""
        for each, tail in self._open:
            try:
                text = await self._text(each, tail)
                self._told[each.at] = tail.hash, text, tail.has_more
            except (DocumentCorrupt, StoreUnavailable) as error:
                self._told[each.at] = error.text
        self._open = []

    def _refusal(self, bounds: Bounds) -> str | None:
        if not self._rules.persist:
            return None
        if bounds == _NOTHING:
            return PullBoundRequired.text
        if self._rules.max_checkpoint_age_ms is not None and not self._is_forced(bounds):
            try:
                self._rules.check_age(bounds.since, self._logs.now_ms())
            except CheckpointTooOld as error:
                return error.text
        return None

    def _is_forced(self, bounds: Bounds) -> bool:
        """True if a checkpoint alone asks for the whole log."""
        return self._rules.force_full and bounds.newest is None

    async def _text(self, each: Asked, tail: Tail) -> bytes:
        """The text of `data`, without what is hidden."""
        before, after = visible_frame(tail, self._rules.field, each.hidden)
        pieces = [before]
        async for chunk in tail.chunks():
            is_due = self._budget.send(len(chunk), each.times)
            if each.hidden:
                comma = b"," if len(pieces) > 1 else b""
                chunk = comma + await stripped(chunk.removeprefix(b","), each.hidden)
            pieces.append(chunk)
            if is_due:
                await asyncio.sleep(0)
        pieces.append(after)
        return b"".join(pieces)


class Tails:
    """The logs of one namespace, as batches read them; `rules` are those of pulling its collections."""

    def __init__(self, logs: Logs, rules: Sequence[Rule], versions: KeyedVersions) -> None:
        self._logs = logs
        self._versions = versions
        self._rules = [
            None if rule.collection.append_only is None else LogRules.of(rule.collection) for rule in rules
        ]

    def logs(self, asked: Sequence[Asked], told: list[Told], budget: Budget) -> list[LogReads]:
        """The reads of each log that is asked for, whose collections hold it. A log that stores nothing asks
        for no bounds."""
        by_log: dict[tuple[int, str], list[Asked]] = {}
        for each in asked:
            by_log.setdefault((each.row, each.key), []).append(each)
        found = []
        for (row, _), group in by_log.items():
            rules = self._rules[row]
            assert rules is not None, "the plan's tails are of logs"
            found.append(LogReads(self._logs, rules, group, told, budget, self._versions))
        return found
