"""Build the response of a batch pull from what it reads (docs/reference/protocol.md#batch-pull)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import orjson

from pysync import _core
from pysync.auth import field_permissions
from pysync.concurrency import CORE_IN_THREAD_ABOVE, run_heavy
from pysync.engine.append_log import LogRange, LogSettings
from pysync.errors import DocumentCorrupt, Forbidden
from pysync.server.api import Service
from pysync.server.api.batch_reads import (
    Budget,
    LogReadOutcome,
    LogReadRequest,
    LogReads,
    ReadOutcome,
    ReadTask,
    read_many,
)
from pysync.server.authorization import Access
from pysync.server.http.in_flight import Reservation
from pysync.store import StoredObject

_NOTHING: Final = frozenset[str]()
_T = TypeVar("_T")

Decision = Access | str
"""The decision on a group of entries: the access, or the text of an error."""


class PlannedBatch:
    """The plan of a query, taken out of the core once."""

    def __init__(self, plan: _core.BatchPlan, query_bytes: int) -> None:
        self.query_bytes = query_bytes
        self.answer = plan.answer
        self.collections = plan.collections
        self.groups = plan.groups
        self.reads = plan.reads
        self.keys = [key for key, _ in self.reads]
        self.tails = plan.tails
        self.document_times, self.tail_times = plan.times
        self.times = dict(zip(self.keys, self.document_times, strict=True))


class BatchReads:
    """The reads of one batch pull. `log_settings` are those of the namespace's collections, None for one
    without logs. `decisions` are those on the groups of the plan, `shadowed` are reads of keys that belong to
    other collections, and `access` has access documents that were read already. `reservation` returns that of
    the request, which a batch needs once it has read a megabyte."""

    def __init__(
        self,
        service: Service,
        log_settings: Sequence[LogSettings | None],
        plan: PlannedBatch,
        decisions: Sequence[Decision],
        shadowed: frozenset[tuple[str, int]],
        access: Mapping[str, ReadOutcome],
        reservation: Callable[[], Reservation],
    ) -> None:
        self._service = service
        self._store = service.store
        self._versions = service.documents.versions
        self._plan = plan
        self._reads = plan.reads
        self._errors = [decision if isinstance(decision, str) else None for decision in decisions]
        self._hidden = [
            decision.hidden if isinstance(decision, Access) else _NOTHING for decision in decisions
        ]
        self._shadowed = shadowed
        self._access = access
        self._found: dict[str, ReadOutcome] = dict(access)
        self._is_plain = not shadowed and not any(self._errors) and not any(self._hidden)
        self._times = plan.times
        if not self._is_plain or len(self._times) < len(self._reads):
            self._times = {}
            for read, times in zip(self._reads, plan.document_times, strict=True):
                if self._error_for(read) is None:
                    self._times[read[0]] = self._times.get(read[0], 0) + times
        self._budget = Budget(self._store, self._times, service.config.max_batch_bytes, reservation)
        self._log_outcomes: list[LogReadOutcome] = []
        self._logs = self._make_log_reads(log_settings) if plan.tails else []

    def _error_for(self, read: tuple[str, int]) -> str | None:
        return Forbidden.default_message if read in self._shadowed else self._errors[read[1]]

    def _make_log_reads(self, log_settings: Sequence[LogSettings | None]) -> list[LogReads]:
        logs: dict[tuple[str, int], LogReads] = {}
        rows = [row for row, _, _ in self._plan.groups]
        for (key, group, *bounds), times in zip(self._plan.tails, self._plan.tail_times, strict=True):
            error = self._error_for((key, group))
            if error is None:
                log = logs.get((key, rows[group]))
                if log is None:
                    settings = log_settings[rows[group]]
                    assert settings is not None, "the plan's tails are of logs"
                    log = LogReads(self._service, key, settings, self._log_outcomes, self._budget)
                    logs[key, rows[group]] = log
                hidden = self._hidden[group]
                log.requests.append(LogReadRequest(len(self._log_outcomes), LogRange(*bounds), hidden, times))
            self._log_outcomes.append(error or "")
        return list(logs.values())

    async def full(self, now_ms: int) -> _core.BatchAnswer:
        """Read all, and build the response. Raises BatchTooLarge."""
        for key in self._access.keys() & self._times.keys():
            stored = self._access[key]
            size = stored.size if isinstance(stored, StoredObject) else 0
            self._budget.count_log_bytes(size, self._times[key])
        # If reads wait for a network, everything that is certainly needed is read concurrently.
        keys = self._unread() if self._store.is_remote else []
        if keys or self._logs:
            await self._read(keys, [log.begin for log in self._logs])
        logs = [log for log in self._logs if log.is_open]
        if logs:
            await self._read([], [log.weigh for log in logs])
        await self._read(self._unread(), [log.read for log in logs])
        return await self._build(now_ms)

    async def body(self, answer: _core.BatchAnswer) -> bytes:
        """Return the body of a response from `full`."""
        return await self._in_thread_if_large(answer.body)

    def _unread(self) -> list[str]:
        found = self._found
        return [key for key in self._times if key not in found] if found else list(self._times)

    async def _read(self, keys: Sequence[str], extra_reads: Sequence[ReadTask]) -> None:
        self._found |= await read_many(self._store, keys, extra_reads, self._budget)

    async def _build(self, now_ms: int) -> _core.BatchAnswer:
        """Build the response from what was read."""
        found = self._found
        if not self._is_plain and any(self._hidden):
            await self._versions.load()

        def build() -> _core.BatchAnswer:
            if self._is_plain:
                return self._plan.answer(
                    list(map(found.__getitem__, self._plan.keys)), now_ms, None, self._log_outcomes
                )
            stored = [self._redacted(read, found.get(read[0])) for read in self._reads]
            hidden = orjson.dumps([sorted(names) for names in self._hidden])
            return self._plan.answer(stored, now_ms, hidden, self._log_outcomes)

        made = await self._in_thread_if_large(build)
        for key in made.corrupt if made.failed else ():
            self._service.corruption.report_once(DocumentCorrupt(), "document", key)
        return made

    async def _in_thread_if_large(self, work: Callable[[], _T]) -> _T:
        return await run_heavy(work) if self._budget.sent > CORE_IN_THREAD_ABOVE else work()

    def _redacted(self, read: tuple[str, int], stored: ReadOutcome) -> ReadOutcome | bytes:
        """Return the stored document as the caller may see it."""
        key, group = read
        hidden = self._hidden[group]
        error = self._error_for(read)
        if error is not None:
            return error
        if not hidden or not isinstance(stored, StoredObject):
            return stored
        try:
            document = _core.read_document(stored.body)
            data = field_permissions.redact(document.data, hidden)
        except DocumentCorrupt:
            return stored  # building the response reports it
        return document.redacted(data, self._versions.compute(key, document.hash, document.ts_ms, hidden))
