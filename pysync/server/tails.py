"""Tails of logs for batch pulls (wire section 6)."""

from collections.abc import Sequence

from pysync.applog import Bounds, LogRules, Logs
from pysync.errors import BadRequest, DocumentCorrupt, PullBoundRequired, StoreUnavailable
from pysync.rule import Rule
from pysync.server.applogs import stripped, visible_frame

Told = tuple[str, bytes] | str
"""What became of the read of a log: its hash and the text of `data`, or the text of an error."""


def max_elements(rule: Rule) -> int | None:
    """What a read of this collection returns at most, as the planner wants it: None where it is no log, 0
    for as many as are asked for."""
    log = rule.collection.append_only
    return None if log is None else log.max_pull_limit or 0


class Tails:
    """The logs of one namespace, as batches read them; `rules` are those of pulling its collections."""

    def __init__(self, logs: Logs, rules: Sequence[Rule]) -> None:
        self._logs = logs
        self._rules = [
            None if rule.collection.append_only is None else LogRules.of(rule.collection) for rule in rules
        ]

    async def read(self, row: int, key: str, bounds: Bounds, hidden: frozenset[str]) -> Told:
        """The elements within `bounds` of the log at `key`, which the collection at `row` holds, without the
        members `hidden` of their data. A log that stores nothing asks for no bounds."""
        rules = self._rules[row]
        assert rules is not None, "the plan's tails are of logs"
        try:
            if rules.persist:
                if bounds == Bounds():
                    raise PullBoundRequired
                rules.check_age(bounds.since, self._logs.now_ms())
            tail = await self._logs.read(key, bounds, rules)
            text = await tail.text()
            if hidden:
                text = await stripped(text, hidden)
            before, after = visible_frame(tail, rules.field, hidden)
        except (BadRequest, DocumentCorrupt, StoreUnavailable) as error:
            return error.text
        return tail.hash, before + text + after
