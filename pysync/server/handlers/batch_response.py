"""Build the response of a batch pull from what it reads (docs/reference/protocol.md#batch-pull)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import orjson

from pysync import _core
from pysync.auth import field_permissions
from pysync.engine.append_log import LogRange, LogSettings
from pysync.engine.documents import CachedVersion
from pysync.errors import DocumentCorrupt, Forbidden
from pysync.server.authorization import Access
from pysync.server.handlers import Service
from pysync.server.handlers.batch_reads import (
    Budget,
    Infos,
    LogReadOutcome,
    LogReadRequest,
    LogReads,
    ReadOutcome,
    ReadTask,
    read_many,
)
from pysync.server.heavy_work import run_heavy
from pysync.server.in_flight import Reservation
from pysync.store import StoredObject

IN_THREAD_ABOVE: Final = 256 * 1024
"""Number of bytes above which documents are rewritten, verified and joined in the thread for heavy work."""

_NOTHING: Final = frozenset[str]()
_T = TypeVar("_T")

Decision = Access | str
"""The decision on a group of entries: the access, or the text of an error."""


class BatchVersion(NamedTuple):
    """The ETag of a response, and True if any entry is an error."""

    etag: str
    failed: bool


class PlannedBatch:
    """The plan of a query, which callers who poll send again and again. `lasts` is True if the response stays
    the same as long as its documents do. When these had the etags `stored` (None for those that did not
    exist), the version of the response was `version`."""

    def __init__(self, plan: _core.BatchPlan, query_bytes: int, *, lasts: bool) -> None:
        self.plan = plan
        self.query_bytes = query_bytes
        self.lasts = lasts
        self.collections = plan.collections
        self.groups = plan.groups
        self.reads = plan.reads
        self.keys = [key for key, _ in self.reads]
        self.tails = plan.tails
        self.document_times, self.tail_times = plan.times
        self.times = dict(zip(self.keys, self.document_times, strict=True))
        self.stored: list[str | None] = []
        self.version: BatchVersion | None = None


class BatchReads:
    """The reads of one batch pull. `log_settings` are those of the namespace's collections, None for one
    without logs. `decisions` are those on the groups of the plan, `shadowed` are reads of keys that belong to
    other collections, and `access` has access documents that were read already."""

    def __init__(
        self,
        service: Service,
        log_settings: Sequence[LogSettings | None],
        planned: PlannedBatch,
        decisions: Sequence[Decision],
        shadowed: frozenset[tuple[str, int]],
        access: Mapping[str, ReadOutcome],
        reservation: Reservation,
    ) -> None:
        self._service = service
        self._store = service.store
        self._documents = service.documents
        self._versions = service.documents.versions
        self._planned = planned
        self._plan = planned.plan
        self._reads = planned.reads
        self._errors = [decision if isinstance(decision, str) else None for decision in decisions]
        self._hidden = [
            decision.hidden if isinstance(decision, Access) else _NOTHING for decision in decisions
        ]
        self._shadowed = shadowed
        self._access = access
        self._found: dict[str, ReadOutcome] = dict(access)
        self._is_plain = not shadowed and not any(self._errors) and not any(self._hidden)
        self._times = planned.times
        if not self._is_plain or len(self._times) < len(self._reads):
            self._times = {}
            for read, times in zip(self._reads, planned.document_times, strict=True):
                if self._error_for(read) is None:
                    self._times[read[0]] = self._times.get(read[0], 0) + times
        self._budget = Budget(self._store, self._times, service.config.max_batch_bytes, reservation)
        self._log_outcomes: list[LogReadOutcome] = []
        self._logs = self._make_log_reads(log_settings) if planned.tails else []

    def _error_for(self, read: tuple[str, int]) -> str | None:
        return Forbidden.default_message if read in self._shadowed else self._errors[read[1]]

    def _make_log_reads(self, log_settings: Sequence[LogSettings | None]) -> list[LogReads]:
        logs: dict[tuple[str, int], LogReads] = {}
        rows = [row for row, _, _ in self._planned.groups]
        for (key, group, *bounds), times in zip(self._planned.tails, self._planned.tail_times, strict=True):
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

    async def begin(self, *, wants_body: bool) -> None:
        """Read the heads of logs and, if a body is wanted, the logs that consist of a head alone. Raises
        BatchTooLarge."""
        for key in self._access.keys() & self._times.keys():
            stored = self._access[key]
            size = stored.size if isinstance(stored, StoredObject) else 0
            self._budget.count_log_bytes(size, self._times[key])
        # If reads wait for a network, everything that is certainly needed is read concurrently.
        keys = self._unread() if self._store.is_remote else []
        if keys or self._logs:
            await self._read(keys, [log.begin if wants_body else log.open for log in self._logs])
            if wants_body:
                self._logs = [log for log in self._logs if log.is_open]

    async def weigh(self) -> None:
        """Add the bytes that logs will send to the budget, as far as the store knows them. Raises
        BatchTooLarge."""
        if self._logs:
            await self._read([], [log.weigh for log in self._logs])

    async def check_size(self) -> None:
        """Check the budget without reading what is not read yet. Raises BatchTooLarge."""
        await self.weigh()
        self._budget.check_sizes(await self._budget.infos(self._unread()))

    async def version(self, now_ms: int) -> BatchVersion:
        """Return the version of the response. Documents whose version is cached are not read. Raises
        BatchTooLarge."""
        infos, planned = await self._budget.infos(self._unread()), self._planned
        stored: list[str | None] | None = None
        if planned.lasts and self._is_plain and len(infos) == len(self._times):
            stored = [None if (info := infos[key]) is None else info.etag for key in self._times]
            if planned.version is not None and stored == planned.stored:
                return planned.version
        answer = await self._version_of(infos, now_ms)
        version = BatchVersion(answer.etag, answer.failed)
        if stored is not None and not version.failed:
            planned.stored, planned.version = stored, version
        return version

    async def _version_of(self, infos: Infos, now_ms: int) -> _core.BatchAnswer:
        """Build the response without a body."""
        self._found |= dict.fromkeys([key for key, info in infos.items() if info is None])
        cached = self._documents.cached_versions(infos)
        if not self._is_plain:
            for key, group in self._reads:
                if self._hidden[group]:  # then the version depends on the data
                    cached.pop(key, None)
        unread = [key for key in self._unread() if key not in cached]
        if not unread:
            return await self._build(now_ms, cached)
        self._budget.check_sizes(infos)
        await self._read(unread, [])
        answer = await self._build(now_ms, cached)
        for (key, group), built in zip(self._reads, answer.versions, strict=True):
            stored = self._found.get(key)
            if built is not None and isinstance(stored, StoredObject) and not self._hidden[group]:
                self._documents.cache_version(key, CachedVersion(built[0], stored.etag, built[1]))
        return answer

    async def full(self, now_ms: int) -> _core.BatchAnswer:
        """Build the response with its body. Raises BatchTooLarge."""
        await self.weigh()
        await self._read(self._unread(), [log.read for log in self._logs])
        return await self._build(now_ms, {})

    async def body(self, answer: _core.BatchAnswer) -> bytes:
        """Return the body of a response from `full`."""
        return await self._in_thread_if_large(answer.body)

    def _unread(self) -> list[str]:
        found = self._found
        return [key for key in self._times if key not in found] if found else list(self._times)

    async def _read(self, keys: Sequence[str], extra_reads: Sequence[ReadTask]) -> None:
        self._found |= await read_many(self._store, keys, extra_reads, self._budget)

    async def _build(self, now_ms: int, cached: Mapping[str, CachedVersion]) -> _core.BatchAnswer:
        """Build the response from what was read, and from the `cached` versions of other documents."""
        found: Mapping[str, ReadOutcome | CachedVersion] = (
            {**self._found, **cached} if cached else self._found
        )
        if not self._is_plain and any(self._hidden):
            await self._versions.load()

        def build() -> _core.BatchAnswer:
            if self._is_plain:
                return self._plan.answer(
                    list(map(found.__getitem__, self._planned.keys)), now_ms, None, self._log_outcomes
                )
            stored = [self._redacted(read, found.get(read[0])) for read in self._reads]
            hidden = orjson.dumps([sorted(names) for names in self._hidden])
            return self._plan.answer(stored, now_ms, hidden, self._log_outcomes)

        made = await self._in_thread_if_large(build)
        for key in made.corrupt if made.failed else ():
            self._service.corruption.report_once(DocumentCorrupt(), "document", key)
        return made

    async def _in_thread_if_large(self, work: Callable[[], _T]) -> _T:
        return await run_heavy(work) if self._budget.sent > IN_THREAD_ABOVE else work()

    def _redacted(
        self, read: tuple[str, int], stored: ReadOutcome | CachedVersion
    ) -> ReadOutcome | CachedVersion | bytes:
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
