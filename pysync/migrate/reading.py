"""Reading a store object by object: one that cannot be read is skipped, a store out of reach ends the run."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from pysync.errors import StoreUnavailable
from pysync.store import DamagedFile, NotModified, OpenFile, ReadableStore, StoredObject

T = TypeVar("T")

SCRUB_KEY: Final = "_pysync/scrub"
"""The key at which the server notes its last scrub."""
_ABSENT_KEY: Final = "_pysync/probe/nothing"
"""A key at which nothing is stored."""


class Unreadable(Exception):
    """An object cannot be read, though its store answers; the text says why."""


class Reader:
    """Reads objects of `source`. Every method raises Unreadable if only this object cannot be read, and
    StoreUnavailable, which names the key, if the store does not answer."""

    def __init__(self, source: ReadableStore) -> None:
        self._source = source

    async def get(self, key: str) -> StoredObject | None:
        """The object at `key`, None where there is none."""
        return as_object(await self._read(key, lambda: self._source.get(key)))

    async def open(self, key: str) -> OpenFile | None:
        """The file at `key`, None where there is none. The caller closes its chunks."""
        return await self._read(key, lambda: self._source.open(key))

    async def chunks(self, key: str, file: OpenFile) -> AsyncIterator[bytes]:
        """The chunks of the file that was opened at `key`."""
        try:
            async for chunk in file.chunks:
                yield chunk
        except StoreUnavailable as error:
            await self._check_reachable(key)
            raise Unreadable(error.detail) from error

    async def _read(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        try:
            return await read()
        except DamagedFile as error:
            raise Unreadable(error.detail) from error
        except StoreUnavailable:
            await self._check_reachable(key)
        try:
            return await read()
        except (DamagedFile, StoreUnavailable) as error:
            raise Unreadable(error.detail) from error

    async def _check_reachable(self, key: str) -> None:
        """Raise StoreUnavailable where the store cannot be read at all."""
        with error_context(f"reading {key}"):
            await self._source.get(_ABSENT_KEY)


async def for_each_key(source: ReadableStore, at_once: int, work: Callable[[str], Awaitable[None]]) -> None:
    """Call `work` with every key, `concurrency` calls at a time. The first error, or a cancellation, ends it,
    but only when the calls under way have ended: their outcomes are then known. A second cancellation cuts
    them off. Raises StoreUnavailable, which says what could not be done."""
    walk = source.walk("")
    turn = asyncio.Lock()
    is_over = False

    async def work_on() -> None:
        nonlocal is_over
        try:
            while True:
                async with turn:
                    if is_over:
                        return
                    with error_context("listing the objects"):
                        listed = await anext(walk, None)
                if listed is None:
                    return
                await work(listed.key)
        finally:
            is_over = True

    workers = [asyncio.ensure_future(work_on()) for _ in range(at_once)]
    try:
        await asyncio.wait(workers)
    finally:
        is_over = True
        try:
            await asyncio.wait(workers)
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
            if isinstance(walk, AsyncGenerator):  # else a store would wait for it when it is closed
                await walk.aclose()
    for error in ended:
        if error is not None:
            raise error


def as_object(found: StoredObject | NotModified | None) -> StoredObject | None:
    """The result of `Source.get` without a condition."""
    return None if isinstance(found, NotModified) else found


@contextmanager
def error_context(action: str) -> Iterator[None]:
    """Have StoreUnavailable say what could not be done, and why."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{action}: {error.detail}") from error
