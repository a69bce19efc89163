"""Reading many documents for one request (wire section 6)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator

from pysync.errors import StoreUnavailable
from pysync.store import READS_AT_ONCE, NotModified, Store

Read = Callable[[], Awaitable[None]]
"""A read that keeps what it finds, and its own failure, to itself."""

Outcome = bytes | str | None
"""What the store holds: bytes, None for nothing, or the text of the error that kept it from saying."""


async def read_each(
    store: Store,
    keys: Collection[str],
    beside: Collection[Read] = (),
    *,
    at_once: int = READS_AT_ONCE,
) -> dict[str, Outcome]:
    """What is stored at each of `keys`, which are distinct; the reads `beside` are made with them. A failing
    read fails alone.

    Where the store waits for others, up to `at_once` reads wait together; where it does not, tasks would only
    cost time.
    """
    found: dict[str, Outcome] = {}
    waiting, others = iter(keys), iter(beside)
    count = len(keys) + len(beside)
    if not store.reads_wait or count < 2:
        await _read_on(store, waiting, found, others)
        return found
    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(_read_on(store, waiting, found, others))
    return found


async def _read_on(
    store: Store, waiting: Iterator[str], found: dict[str, Outcome], others: Iterator[Read]
) -> None:
    for key in waiting:
        try:
            object_ = await store.get(key)
        except StoreUnavailable as error:
            found[key] = error.text
        else:
            found[key] = None if object_ is None or isinstance(object_, NotModified) else object_.body
    for read in others:
        await read()
