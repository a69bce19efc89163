"""The reads of one batch pull, within its budget: identical ones once, large ones beside the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import orjson

from pysync import _core
from pysync.auth import field_permissions
from pysync.batch import Budget, Outcome, Read, read_each
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import Bounds
from pysync.engine.documents import Documents, Known
from pysync.errors import DocumentCorrupt, Forbidden
from pysync.server.tails import Asked, LogReads, Tails, Told
from pysync.store import Store

IN_THREAD_ABOVE: Final = 64 * 1024
"""Bytes of documents that are rewritten, verified and joined beside the event loop."""


_T = TypeVar("_T")


class Verdict(NamedTuple):
    """The verdict on a group of entries: the text of an error, or the members `hidden` from its documents."""

    refusal: str | None
    hidden: frozenset[str] = frozenset()


ADMITTED: Final = Verdict(None)


class Reads:
    """The reads of one batch pull. `verdicts` decide the groups of the plan, `foreign` are reads of keys that
    belong to other collections, and `access` holds access documents that were read already. `at_once` reads
    run concurrently."""

    def __init__(
        self,
        store: Store,
        documents: Documents,
        tails: Tails,
        plan: _core.BatchPlan,
        verdicts: Sequence[Verdict],
        foreign: frozenset[tuple[str, int]],
        access: Mapping[str, Outcome],
        max_bytes: int,
        at_once: int,
        corruption: CorruptionReporter,
    ) -> None:
        self._store = store
        self._documents = documents
        self._plan = plan
        self._reads = plan.reads
        self._verdicts = verdicts
        self._foreign = foreign
        self._access = access
        self._at_once = at_once
        self._corruption = corruption
        self._versions = documents.versions
        self._found: dict[str, Outcome] = dict(access)
        document_times, tail_times = plan.times
        self._is_plain = not foreign and all(verdict is ADMITTED for verdict in verdicts)
        self._times: dict[str, int] = {}
        for read, times in zip(self._reads, document_times, strict=True):
            if self._is_plain or self._refusal(read) is None:
                self._times[read[0]] = self._times.get(read[0], 0) + times
        self._budget = Budget(store, self._times, max_bytes)
        self._told: list[Told] = []
        self._logs: list[LogReads] = self._asked(tails, tail_times) if tail_times else []

    def _refusal(self, read: tuple[str, int]) -> str | None:
        return Forbidden.text if read in self._foreign else self._verdicts[read[1]].refusal

    def _asked(self, tails: Tails, tail_times: Sequence[int]) -> list[LogReads]:
        asked: list[Asked] = []
        rows = [row for row, _, _ in self._plan.groups]
        for (key, group, *bounds), times in zip(self._plan.tails, tail_times, strict=True):
            refusal = self._refusal((key, group))
            if refusal is None:
                hidden = self._verdicts[group].hidden
                asked.append(Asked(len(self._told), rows[group], key, Bounds(*bounds), hidden, times))
            self._told.append(refusal or "")
        return tails.logs(asked, self._told, self._budget)

    async def begin(self, *, wants_body: bool) -> None:
        """Read the heads of logs, and where a body is wanted, the logs that are no more. Raises
        BatchTooLarge."""
        for key in self._access.keys() & self._times.keys():
            stored = self._access[key]
            self._budget.send(len(stored) if isinstance(stored, bytes) else 0, self._times[key])
        # If reads wait for a network, everything that is certainly needed is read concurrently.
        keys = self._unread() if self._store.reads_wait else []
        if keys or self._logs:
            await self._read(keys, [log.begin if wants_body else log.open for log in self._logs])
            if wants_body:
                self._logs = [log for log in self._logs if log.is_open]

    async def weigh(self) -> None:
        """Foresee what logs will send, as far as the store can tell. Raises BatchTooLarge."""
        if self._logs:
            await self._read([], [log.weigh for log in self._logs])

    async def version(self, now_ms: int) -> _core.BatchAnswer:
        """Build the answer without a body. Documents whose version this process knows are not read. Raises
        BatchTooLarge."""
        known: dict[str, Known] = {}
        unread = self._unread()
        found = await self._budget.infos(unread)
        self._budget.weigh(found)
        hidden = set()
        if not self._is_plain:
            hidden = {key for key, group in self._reads if self._verdicts[group].hidden}
        for key, info in found.items():
            version = None if info is None else self._documents.known(key, info.etag)
            if version is not None and key not in hidden:  # else what is told is made of its data
                known[key] = version
        if len(known) < len(unread):
            await self._read([key for key in unread if key not in known], [])
        answer = await self._answer(now_ms, {key: (each.hash, each.ts_ms) for key, each in known.items()})
        etags = self._budget.etags
        if etags:
            for (key, group), met in zip(self._reads, answer.versions, strict=True):
                if met is not None and key in etags and not self._verdicts[group].hidden:
                    self._documents.remember(key, Known(met[0], etags[key], met[1]))
        return answer

    async def whole(self, now_ms: int) -> _core.BatchAnswer:
        """The answer with its body. Raises BatchTooLarge."""
        await self.weigh()
        await self._read(self._unread(), [log.read for log in self._logs])
        return await self._answer(now_ms, {})

    async def body(self, answer: _core.BatchAnswer) -> bytes:
        """The text of an answer that is whole."""
        return await self._beside(answer.body)

    def _unread(self) -> list[str]:
        return [key for key in self._times if key not in self._found]

    async def _read(self, keys: Sequence[str], beside: Sequence[Read]) -> None:
        self._found |= await read_each(self._store, keys, beside, self._budget, at_once=self._at_once)

    async def _answer(self, now_ms: int, known: Mapping[str, tuple[str, int]]) -> _core.BatchAnswer:
        """Build the answer from what was read, and from versions if only those are `known`."""
        found: Mapping[str, Outcome | tuple[str, int]] = {**self._found, **known} if known else self._found
        if not self._is_plain and any(verdict.hidden for verdict in self._verdicts):
            await self._versions.load()

        def answer() -> _core.BatchAnswer:
            if self._is_plain:
                return self._plan.answer([found[key] for key, _ in self._reads], now_ms, None, self._told)
            stored = [self._visible(read, found.get(read[0])) for read in self._reads]
            hidden = orjson.dumps([sorted(verdict.hidden) for verdict in self._verdicts])
            return self._plan.answer(stored, now_ms, hidden, self._told)

        made = await self._beside(answer)
        for key in made.corrupt if made.failed else ():
            self._corruption.meet(DocumentCorrupt(), "document", key)
        return made

    async def _beside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(work) if self._budget.sent > IN_THREAD_ABOVE else work()

    def _visible(self, read: tuple[str, int], stored: Outcome | tuple[str, int]) -> Outcome | tuple[str, int]:
        """Return the stored document as the caller may see it."""
        key, group = read
        hidden = self._verdicts[group].hidden
        refusal = self._refusal(read)
        if refusal is not None:
            return refusal
        if not hidden or not isinstance(stored, bytes):
            return stored
        try:
            document = _core.read_document(stored)
            data = field_permissions.without(document.data, hidden)
        except DocumentCorrupt:
            return stored  # the answer finds it out, too
        return document.redacted(data, self._versions.of(key, document.hash, document.ts_ms, hidden))
