"""What is stored for whom, as a coordinator counts it for a store without counters of its own."""

from collections.abc import Collection, Mapping
from typing import Protocol

from pysync.model import Addition, Usage, check_limit

NOTHING = Usage()


class UsageTotals(Protocol):
    """The totals of subjects, which have any names. Those of the last count, and what was added since. All
    methods raise CoordinatorUnavailable.

    A count goes through all keys in the order of their code points. It has totals of its own, which replace
    the others at its end. A coordinator that lost its memory has no totals, and knows of no count."""

    async def add(self, addition: Addition) -> bool:
        """Add the amounts of an object, also to a count that has passed its key: True if there is one. Raises
        QuotaExceeded, with nothing added."""

    async def read(self, names: Collection[str] | None = None) -> dict[str, Usage]:
        """Return the totals of these subjects, by default of all, without those that use nothing."""

    async def counted_ms(self) -> int | None:
        """Return the time at which the last count ended; None if there was none."""

    async def begin_count(self, token: str) -> None:
        """Begin a count under a name of its own, which replaces one that is under way."""

    async def count(self, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
        """Add amounts to the count, which has passed this key. Return False if another count has begun."""

    async def end_count(self, token: str, now_ms: int) -> bool:
        """Replace the totals by those of the count. Return False if another count has begun."""

    async def forget(self, names: Collection[str]) -> None:
        """Forget the totals of these subjects, the count that is under way, and the time of the last one:
        everything is to be counted again, and the other totals hold until then."""

    async def clear(self) -> None:
        """Forget all totals, and the count."""


class MemoryUsage:
    """The `UsageTotals` of one process."""

    def __init__(self) -> None:
        self._totals: dict[str, Usage] = {}
        self._counted: dict[str, Usage] = {}
        self._count: tuple[str, str] | None = None
        self._counted_ms: int | None = None

    async def add(self, addition: Addition) -> bool:
        """See `UsageTotals.add`."""
        return self.add_now(addition)

    def add_now(self, addition: Addition) -> bool:
        """Do as `add`."""
        for kind, name, limit in addition.limited():
            check_limit(kind, limit, self._totals.get(name, NOTHING), addition.more)
        more = dict.fromkeys(addition.subjects.values(), addition.more)
        in_count = self._count is not None and "" < addition.key <= self._count[1]
        if in_count:
            _add(self._counted, more)
        _add(self._totals, more)
        return in_count

    async def read(self, names: Collection[str] | None = None) -> dict[str, Usage]:
        """See `UsageTotals.read`."""
        chosen = self._totals if names is None else names
        return {name: self._totals[name] for name in chosen if name in self._totals}

    async def counted_ms(self) -> int | None:
        """See `UsageTotals.counted_ms`."""
        return self._counted_ms

    async def begin_count(self, token: str) -> None:
        """See `UsageTotals.begin_count`."""
        self._counted, self._count = {}, (token, "")

    async def count(self, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
        """See `UsageTotals.count`."""
        if self._count is None or self._count[0] != token:
            return False
        _add(self._counted, more)
        self._count = (token, passed)
        return True

    async def end_count(self, token: str, now_ms: int) -> bool:
        """See `UsageTotals.end_count`."""
        if self._count is None or self._count[0] != token:
            return False
        self._totals, self._counted, self._count = self._counted, {}, None
        self._counted_ms = now_ms
        return True

    async def forget(self, names: Collection[str]) -> None:
        """See `UsageTotals.forget`."""
        for name in names:
            self._totals.pop(name, None)
        self._counted, self._count, self._counted_ms = {}, None, None

    async def clear(self) -> None:
        """See `UsageTotals.clear`."""
        self._totals, self._counted, self._count, self._counted_ms = {}, {}, None, None


def _add(totals: dict[str, Usage], more: Mapping[str, Usage]) -> None:
    for name, amounts in more.items():
        total = totals[name] = totals.get(name, NOTHING).plus(amounts)
        if total == NOTHING:
            del totals[name]
