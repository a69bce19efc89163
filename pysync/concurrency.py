"""Several awaits at a time, and work that recurs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from pysync._core import PanicException
from pysync.errors import PysyncError, Unavailable

T = TypeVar("T")
R = TypeVar("R")


async def gather_bounded(limit: int, items: Collection[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Return `await work(item)` for each of `items`, in their order; `limit` calls at most run concurrently.

    After an error no further call begins. The error is raised once all calls under way have ended, so their
    outcomes are known. Cancellation cancels them and waits for their end.
    """
    results: dict[int, R] = {}
    waiting = enumerate(items)
    errors: list[BaseException] = []

    async def work_on() -> None:
        for at, item in waiting:
            if errors:
                return
            try:
                results[at] = await work(item)
            except BaseException as error:
                errors.append(error)
                raise

    workers = [work_on() for _ in range(min(limit, len(items)))]
    await asyncio.gather(*workers, return_exceptions=True)
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(results))]


async def every(
    seconds: float,
    work: Callable[[], Awaitable[object]],
    failed: str,
    log: logging.Logger,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Await `work()` after every `seconds`, until cancelled. An error is logged with the text `failed`, and
    ends nothing."""
    while True:
        await sleep(seconds)
        try:
            await work()
        except PysyncError as error:
            log.warning("%s: %s", failed, error.detail if isinstance(error, Unavailable) else error)
        except (Exception, PanicException):
            log.exception("%s; will retry", failed)
