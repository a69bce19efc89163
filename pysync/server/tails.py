"""Tails of logs for batch pulls (wire section 6)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from pysync.applog import Bounds, LogRules, Logs, Tail
from pysync.batch import Budget
from pysync.errors import BadRequest, DocumentCorrupt, PullBoundRequired, StoreUnavailable
from pysync.rule import Rule
from pysync.server.applogs import stripped, visible_frame

Told = tuple[str, bytes, bool] | str
"""What became of the read of a log: its hash, the text of `data` and whether elements were left out, or the
text of an error."""


def max_elements(rule: Rule) -> int | None:
    """What a read of this collection returns at most, as the planner wants it: None where it is no log, 0
    for as many as are asked for."""
    log = rule.collection.append_only
    return None if log is None else log.max_pull_limit or 0


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
    """What a batch asks of one log. What became of it is put among the `told`."""

    def __init__(
        self, logs: Logs, rules: LogRules, asked: Sequence[Asked], told: list[Told], budget: Budget
    ) -> None:
        self._logs = logs
        self._rules = rules
        self._asked = asked
        self._told = told
        self._budget = budget
        self._open: list[tuple[Asked, Tail]] = []

    async def open(self) -> None:
        """Read the head, and tell its hash."""
        admitted = []
        for each in self._asked:
            try:
                if self._rules.persist:
                    if each.bounds == Bounds():
                        raise PullBoundRequired
                    if not self._is_forced(each.bounds):
                        self._rules.check_age(each.bounds.since, self._logs.now_ms())
            except BadRequest as error:
                self._told[each.at] = error.text
            else:
                admitted.append(each)
        if not admitted:
            return
        try:
            bounds = [
                replace(each.bounds, since=None) if self._is_forced(each.bounds) else each.bounds
                for each in admitted
            ]
            tails = await self._logs.read_each(admitted[0].key, bounds, self._rules)
        except (DocumentCorrupt, StoreUnavailable) as error:
            for each in admitted:
                self._told[each.at] = error.text
            return
        for each, tail in zip(admitted, tails, strict=True):
            self._told[each.at] = tail.hash, b"", False
            self._open.append((each, tail))

    async def weigh(self) -> None:
        """Foresee what the reads will send. Raises BatchTooLarge."""
        for each, tail in self._open:
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
        self._open.clear()

    def _is_forced(self, bounds: Bounds) -> bool:
        """Whether all of the log is asked for, by a checkpoint alone."""
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
                await self._budget.pause()
        pieces.append(after)
        return b"".join(pieces)


class Tails:
    """The logs of one namespace, as batches read them; `rules` are those of pulling its collections."""

    def __init__(self, logs: Logs, rules: Sequence[Rule]) -> None:
        self._logs = logs
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
            found.append(LogReads(self._logs, rules, group, told, budget))
        return found
