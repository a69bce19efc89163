"""The bounded cache that all parts use."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache that evicts the least recently used values while it holds more than `max_cost`: so many values,
    or so much as `cost_of` says of all of them together. Values are never None."""

    def __init__(self, max_cost: int, cost_of: Callable[[V], int] = lambda value: 1) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._max_cost = max_cost
        self._cost_of = cost_of
        self.cost = 0
        """The cost of all values."""

    def get(self, key: K) -> V | None:
        """Return the value of `key`, which is now the most recently used one."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Set the value of `key`."""
        self.evict(key)
        self._entries[key] = value
        self.cost += self._cost_of(value)
        while self.cost > self._max_cost:
            self.cost -= self._cost_of(self._entries.popitem(last=False)[1])

    def evict(self, key: K) -> None:
        """Forget the value of `key`."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.cost -= self._cost_of(value)
