"""Reading many documents for one request (wire section 6)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

from pysync.errors import BatchTooLarge, StoreUnavailable
from pysync.store import READS_AT_ONCE, NotModified, ObjectInfo, Store

Read = Callable[[], Awaitable[None]]
"""A read that keeps what it finds, and its own failure, to itself."""


Outcome = bytes | str | None
"""What the store holds: bytes, None for nothing, or the text of the error that kept it from saying."""

RUN_BYTES = 1024 * 1024
"""The approximate number of bytes that are read in one tick of the loop, and before the sizes of the rest are
asked for."""


class Budget:
    """The budget of bytes of an answer. `times` is the number of times that it sends each document, `sent`
    the size of the reads so far, and `etags` are those of the documents that were read."""

    def __init__(self, store: Store, times: Mapping[str, int], max_bytes: int) -> None:
        self.sent = 0
        self.etags: dict[str, str] = {}
        self.run = 0
        """Bytes of documents that were read since the last `pause`."""
        self._store = store
        self._times = times
        self._max_bytes = max_bytes
        self._foreseen = 0
        self._counted: set[str] = set()
        self._is_weighed = False

    def foresee(self, size: int) -> None:
        """Add the bytes that logs are going to send. Raises BatchTooLarge."""
        self._foreseen += size
        self._check(self._foreseen)

    async def infos(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Return the etags and sizes of these documents, as far as the store knows them without reading;
        empty if it knows none."""
        try:
            found = await self._store.info_many(keys) if keys else None
        except StoreUnavailable:
            found = None  # whoever reads them will see
        return {} if found is None else dict(zip(keys, found, strict=True))

    def weigh(self, found: Mapping[str, ObjectInfo | None], sent: int = 0) -> None:
        """Count the documents `found`, of which none was read, beside what is `sent` and not counted yet.
        Raises BatchTooLarge."""
        times = self._times
        sizes = sum(info.size * times[key] for key, info in found.items() if info is not None)
        self._check(self.sent + sent + self._foreseen + sizes)

    def send(self, size: int, times: int = 1) -> bool:
        """Count bytes of a log that were read, and that the answer sends so many times. Returns True if it is
        time to yield to others. Raises BatchTooLarge."""
        self.sent += size * times
        self._check(self.sent)
        return size > RUN_BYTES // 4

    def count(self, found: Mapping[str, Outcome]) -> None:
        """Count the documents of one `read_each`, once all are read. Raises BatchTooLarge."""
        self.sent += self._size(found)
        self._counted |= found.keys()
        self._check(self.sent)

    async def pause(self, found: Mapping[str, Outcome]) -> None:
        """Yield to others after a run of documents; `found` are those that one `read_each` has read so far.
        The first time, check the sizes of the documents that are not read yet. Raises BatchTooLarge."""
        self.run = 0
        sent = self._size(found)
        self._check(self.sent + sent)
        if not self._is_weighed:
            self._is_weighed = True
            left = [key for key in self._times if key not in found and key not in self._counted]
            self.weigh(await self.infos(left), sent)
        await asyncio.sleep(0)

    def _size(self, found: Mapping[str, Outcome]) -> int:
        times = self._times
        return sum([len(body) * times[key] for key, body in found.items() if body.__class__ is bytes])

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise BatchTooLarge


async def read_each(
    store: Store,
    keys: Collection[str],
    beside: Collection[Read] = (),
    budget: Budget | None = None,
    *,
    at_once: int = READS_AT_ONCE,
) -> dict[str, Outcome]:
    """Return the object at each of `keys`, which are distinct; the reads `beside` are made with them. A
    failing read fails alone. Raises BatchTooLarge if the reads exceed the budget.

    Up to `at_once` reads run concurrently if the store waits for a network; otherwise tasks would only cost
    time.
    """
    found: dict[str, Outcome] = {}
    waiting, others = iter(keys), iter(beside)
    count = len(keys) + len(beside)
    if not store.reads_wait or count < 2:
        await _read_on(store, waiting, found, others, budget)
        if budget is not None:
            budget.count(found)
        return found
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, count)):
                group.create_task(_read_on(store, waiting, found, others, budget))
    except ExceptionGroup as failed:
        if failed.subgroup(BatchTooLarge) is None:
            raise
        raise BatchTooLarge from None
    if budget is not None:
        budget.count(found)
    return found


async def _read_on(
    store: Store,
    waiting: Iterator[str],
    found: dict[str, Outcome],
    others: Iterator[Read],
    budget: Budget | None,
) -> None:
    for key in waiting:
        try:
            object_ = await store.get(key)
        except StoreUnavailable as error:
            found[key] = error.text
        else:
            if object_ is None or isinstance(object_, NotModified):
                found[key] = None
                continue
            found[key] = body = object_.body
            if budget is not None:
                budget.etags[key] = object_.etag
                budget.run += len(body)
                if budget.run > RUN_BYTES:
                    await budget.pause(found)
    for read in others:
        await read()
