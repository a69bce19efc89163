"""Bounded concurrency, periodic tasks, and resources that are closed in the end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from pysync._core import PanicException
from pysync.errors import PysyncError, Unavailable

T = TypeVar("T")
R = TypeVar("R")


class Closable(Protocol):
    """A resource, such as a store or a coordinator, that its owner closes."""

    async def close(self) -> None:
        """Release the resource."""


C = TypeVar("C", bound=Closable)


@asynccontextmanager
async def closing(opening: Awaitable[C]) -> AsyncIterator[C]:
    """Yield the resource that `opening` opens, and close it at the end of the block."""
    resource = await opening
    try:
        yield resource
    finally:
        await resource.close()


async def gather_bounded(
    limit: int, items: Collection[T], work: Callable[[T], Awaitable[R]], max_errors: int = 1
) -> list[R]:
    """Return `await work(item)` for each of `items`, in their order, with at most `limit` calls running
    concurrently.

    After `max_errors` errors no further call starts. The first error is raised once all running calls have
    ended, so that their outcomes are known. Cancellation cancels the running calls and waits for their end.
    """
    results: dict[int, R] = {}
    waiting = enumerate(items)
    errors: list[BaseException] = []

    async def work_on() -> None:
        for at, item in waiting:
            if len(errors) >= max_errors:
                return
            try:
                results[at] = await work(item)
            except BaseException as error:
                errors.append(error)
                if not isinstance(error, Exception):
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
    """Await `work()` every `seconds`, until cancelled. Errors are logged as `failed`, and do not end it."""
    while True:
        await sleep(seconds)
        try:
            await work()
        except PysyncError as error:
            log.warning("%s: %s", failed, error.detail if isinstance(error, Unavailable) else error)
        except (Exception, PanicException):
            log.exception("%s; will retry", failed)
