"""Read the documents and log tails of a batch pull (docs/reference/protocol.md#batch-pull)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

from pysync.auth.policy import AccessPolicy
from pysync.engine.append_log import LogRange, LogSettings, LogSlice
from pysync.errors import (
    BatchTooLarge,
    CheckpointTooOld,
    DocumentCorrupt,
    Overloaded,
    PullBoundRequired,
    StoreUnavailable,
)
from pysync.server.api import Service
from pysync.server.api.append_log import redact_in_thread, visible_envelope
from pysync.server.http.in_flight import Reservation
from pysync.store import MAX_CONCURRENT_READS, RUN_BYTES, NotModified, ObjectInfo, Store, StoredObject

ReadTask = Callable[[], Awaitable[None]]
"""A read that stores its own result, and handles its own failure."""


ReadOutcome = StoredObject | str | None
"""The result of a read: the object, None if nothing is stored, or the text of an error."""


Infos = Mapping[str, StoredObject | ObjectInfo | None]
"""Objects that are stored, or their etags and sizes, as far as they are known without reading."""


class Budget:
    """The budget of bytes of a response. `times` is the number of times that it sends each document, and
    `sent` the size of the reads so far. `reservation` returns that of the request. `drop_unchanged` removes
    documents from what was read that the response does not send; `undecided` may be among them."""

    def __init__(
        self,
        store: Store,
        times: Mapping[str, int],
        max_bytes: int,
        reservation: Callable[[], Reservation],
        undecided: Collection[str],
        drop_unchanged: Callable[[dict[str, ReadOutcome]], None],
    ) -> None:
        self.sent = 0
        self._run = 0
        self._store = store
        self._times = times
        self._max_bytes = max_bytes
        self._foreseen = 0
        self._counted: set[str] = set()
        self._is_checked = False
        self._reservation = reservation
        self._undecided = undecided
        self._drop_unchanged = drop_unchanged

    def foresee(self, size: int) -> None:
        """Add the bytes that logs are going to send. Raises BatchTooLarge."""
        self._foreseen += size
        self._check(self._foreseen)

    async def _infos(self, keys: Sequence[str]) -> Infos:
        """Return the sizes of these documents, as far as the store knows them without reading; empty if it
        knows none."""
        try:
            found = await self._store.info_many(keys) if keys else None
        except StoreUnavailable:
            found = None  # the reads report the error
        return found or {}

    def count_log_bytes(self, size: int, times: int = 1) -> bool:
        """Count bytes of a log that were read and are sent `times` times. Returns True if the caller should
        yield to other tasks. Raises BatchTooLarge."""
        self.sent += size * times
        self._check(self.sent)
        return size > RUN_BYTES // 4

    def count(self, found: Mapping[str, ReadOutcome]) -> None:
        """Count the documents of one `read_many`, once all are read. Raises BatchTooLarge."""
        self.sent += self._size(found)
        self._counted |= found.keys()
        self._check(self.sent)

    @property
    def left_in_run(self) -> int:
        """The bytes of documents that may be read before the next `reserve`."""
        return RUN_BYTES - self._run

    async def add(self, size: int, found: dict[str, ReadOutcome]) -> None:
        """Add bytes of documents that were read; `found` are all that one `read_many` has read so far. If a
        run ends with them, reserve the bytes that the response takes, and let other tasks run. Raises
        BatchTooLarge and Overloaded."""
        self._drop_unchanged(found)
        self._run += size
        if self._run > RUN_BYTES:
            self._run = 0
            await self._reserve(found)
            await asyncio.sleep(0)

    async def _reserve(self, found: Mapping[str, ReadOutcome]) -> None:
        """The first time, the sizes of those that are not read yet are checked as well."""
        sent = self._size(found)
        self._check(self.sent + sent)
        if not self._is_checked:
            self._is_checked = True
            left = [
                key
                for key in self._times
                if key not in found and key not in self._counted and key not in self._undecided
            ]
            infos = await self._infos(left)
            sent += self._sizes(infos)
            self._check(self.sent + sent + self._foreseen)
        # Responses are built one at a time, so of most batches only the documents or the response exist.
        await self._reservation().grow(self.sent + sent + self._foreseen)

    def _sizes(self, found: Infos) -> int:
        return sum(info.size * self._times[key] for key, info in found.items() if info is not None)

    def _size(self, found: Mapping[str, ReadOutcome]) -> int:
        times = self._times
        return sum(
            [len(each.body) * times[key] for key, each in found.items() if isinstance(each, StoredObject)]
        )

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise BatchTooLarge


async def read_many(
    store: Store,
    keys: Collection[str],
    extra_reads: Collection[ReadTask] = (),
    budget: Budget | None = None,
    *,
    at_once: int = MAX_CONCURRENT_READS,
) -> dict[str, ReadOutcome]:
    """Return the result of reading each of `keys`, which are distinct, and run `extra_reads` with them. An
    error of one read does not affect the others. Raises BatchTooLarge if the reads exceed the budget.

    At most `at_once` reads run concurrently if the store waits for a network. Otherwise the store reads as
    many documents as possible at once, because tasks would only cost time.
    """
    found: dict[str, ReadOutcome] = {}
    waiting, others = iter(keys), iter(extra_reads)
    count = len(keys) + len(extra_reads)
    if not store.is_remote or count < 2:
        if not store.is_remote:
            waiting = iter(await _read_runs(store, keys, found, budget))
        await _read_worker(store, waiting, found, others, budget)
        if budget is not None:
            budget.count(found)
        return found
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, count)):
                group.create_task(_read_worker(store, waiting, found, others, budget))
    except ExceptionGroup as failed:
        for error in (BatchTooLarge, Overloaded):
            if failed.subgroup(error) is not None:
                raise error from None
        raise
    if budget is not None:
        budget.count(found)
    return found


async def _read_runs(
    store: Store, keys: Collection[str], found: dict[str, ReadOutcome], budget: Budget | None
) -> Sequence[str]:
    """Read documents into `found`, a run of them at a time. Return the keys that are left if that fails."""
    left = list(keys)
    while left:
        try:
            run = await store.get_many(left, inf if budget is None else budget.left_in_run)
        except StoreUnavailable:
            return left
        found |= run
        left = [key for key in left if key not in found] if len(run) < len(left) else []
        size = sum([len(each.body) for each in run.values() if each is not None])
        if budget is not None:
            await budget.add(size, found)
    return ()


async def _read_worker(
    store: Store,
    waiting: Iterator[str],
    found: dict[str, ReadOutcome],
    others: Iterator[ReadTask],
    budget: Budget | None,
) -> None:
    for key in waiting:
        try:
            object_ = await store.get(key)
        except StoreUnavailable as error:
            found[key] = error.default_message
        else:
            if object_ is None or isinstance(object_, NotModified):
                found[key] = None
                continue
            found[key] = object_
            if budget is not None:
                await budget.add(object_.size, found)
    for read in others:
        await read()


LogReadOutcome = tuple[str, bytes, bool] | str
"""The result of reading a log: its hash, the text of `data`, and True if elements were left out; or the text
of an error."""


def max_elements(policy: AccessPolicy) -> int | None:
    """Return the largest number of elements that a read of this collection returns, as the planner expects
    it: None if it is not a log, 0 for no limit."""
    log = policy.collection.append_only
    return None if log is None else log.max_pull_limit or 0


_NOTHING = LogRange()


class LogReadRequest(NamedTuple):
    """A read of a log: its position among the outcomes, the members of data that are hidden, and how often
    the response sends it."""

    position: int
    bounds: LogRange
    hidden: frozenset[str]
    times: int


class LogReads:
    """The `requests` of one batch for the log at `key`. They store their results in `outcomes`."""

    def __init__(
        self,
        service: Service,
        key: str,
        settings: LogSettings,
        outcomes: list[LogReadOutcome],
        budget: Budget,
    ) -> None:
        self.requests: list[LogReadRequest] = []
        self._logs = service.logs
        self._versions = service.documents.versions
        self._key = key
        self._settings = settings
        self._outcomes = outcomes
        self._budget = budget
        self._open: list[tuple[LogReadRequest, LogSlice]] = []

    async def begin(self) -> None:
        """Read the head of the log, and store the elements of reads that need only that. Raises
        BatchTooLarge."""
        for each, tail in await self._tails():
            if tail.has_segments:
                self._open.append((each, tail))
                continue
            text = tail.head_text()
            self._budget.count_log_bytes(len(text), each.times)
            if each.hidden:
                text = await redact_in_thread(text, each.hidden)
            before, after = visible_envelope(tail, self._settings.field, each.hidden)
            self._outcomes[each.position] = tail.hash, before + text + after, tail.has_more

    async def _tails(self) -> list[tuple[LogReadRequest, LogSlice]]:
        """Read the head of the log, and return what each request reads of it, with its hash. Store the errors
        of the others."""
        admitted = []
        for each in self.requests:
            error = self._error_for(each.bounds)
            if error is None:
                admitted.append(each)
            else:
                self._outcomes[each.position] = error
        if not admitted:
            return []
        found = []
        try:
            bounds = [
                replace(each.bounds, since=None) if self._is_forced(each.bounds) else each.bounds
                for each in admitted
            ]
            tails = await self._logs.read_many(self._key, bounds, self._settings)
            for each, tail in zip(admitted, tails, strict=True):
                try:
                    tail.check_retained()
                except CheckpointTooOld as error:
                    self._outcomes[each.position] = error.default_message
                    continue
                tail.hash = await self._versions.load_and_compute(
                    self._key, tail.hash, tail.newest_ms, each.hidden
                )
                found.append((each, tail))
        except (DocumentCorrupt, StoreUnavailable) as error:
            for each in admitted:
                self._outcomes[each.position] = error.default_message
            return []
        return found

    @property
    def is_open(self) -> bool:
        """True if reads are left that need more than the head."""
        return bool(self._open)

    async def weigh(self) -> None:
        """Add the bytes that the reads will send to the budget. Raises BatchTooLarge."""
        for each, tail in self._open:
            with suppress(DocumentCorrupt, StoreUnavailable):  # the read reports the error
                self._budget.foresee(each.times * await tail.min_bytes())

    async def read(self) -> None:
        """Read the elements and store them too. Raises BatchTooLarge."""
        for each, tail in self._open:
            try:
                text = await self._text(each, tail)
                self._outcomes[each.position] = tail.hash, text, tail.has_more
            except (CheckpointTooOld, DocumentCorrupt, StoreUnavailable) as error:
                self._outcomes[each.position] = error.default_message

    def _error_for(self, bounds: LogRange) -> str | None:
        if not self._settings.persist:
            return None
        if bounds == _NOTHING:
            return PullBoundRequired.default_message
        if self._settings.max_checkpoint_age_ms is not None and not self._is_forced(bounds):
            try:
                self._settings.check_checkpoint_age(bounds.since, self._logs.now_ms())
            except CheckpointTooOld as error:
                return error.default_message
        return None

    def _is_forced(self, bounds: LogRange) -> bool:
        """Return True if a checkpoint alone requests the whole log."""
        return self._settings.force_full and bounds.newest is None

    async def _text(self, each: LogReadRequest, tail: LogSlice) -> bytes:
        """Return the text of `data`, without hidden members."""
        before, after = visible_envelope(tail, self._settings.field, each.hidden)
        parts = [before]
        async for chunk in tail.chunks():
            is_due = self._budget.count_log_bytes(len(chunk), each.times)
            if each.hidden:
                comma = b"," if len(parts) > 1 else b""
                chunk = comma + await redact_in_thread(chunk.removeprefix(b","), each.hidden)
            parts.append(chunk)
            if is_due:
                await asyncio.sleep(0)
        parts.append(after)
        return b"".join(parts)
