"""A bounded cache, used throughout pysync."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

CACHED_ENTRIES: Final = 10_000
"""Entries of caches whose values are small."""
CACHED_BYTES: Final = 16 * 1024 * 1024
"""Bytes of caches whose values are texts of any length."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache that evicts the least recently used values while their total cost is above `max_cost`. The cost
    of a value is `cost_of(value)`, 1 by default. Values are never None."""

    def __init__(self, max_cost: int = CACHED_ENTRIES, cost_of: Callable[[V], int] = lambda value: 1) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._max_cost = max_cost
        self._cost_of = cost_of
        self.cost = 0
        """Total cost of the cached values."""

    def get(self, key: K) -> V | None:
        """Return the value of `key` and mark it as the most recently used; None if it is not cached."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Set the value of `key`, and evict others if the cache is full."""
        self.evict(key)
        self._entries[key] = value
        self.cost += self._cost_of(value)
        while self.cost > self._max_cost:
            self.cost -= self._cost_of(self._entries.popitem(last=False)[1])

    def evict(self, key: K) -> None:
        """Remove the value of `key`, if there is one."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.cost -= self._cost_of(value)
