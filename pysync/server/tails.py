"""Tails of logs for batch pulls (wire section 6)."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from pysync.auth.policy import Rule
from pysync.batch import Budget
from pysync.engine.append_log import Bounds, LogRules, Logs, Tail
from pysync.engine.keyed_versions import KeyedVersions
from pysync.errors import CheckpointTooOld, DocumentCorrupt, PullBoundRequired, StoreUnavailable
from pysync.server.applogs import stripped, visible_frame

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
