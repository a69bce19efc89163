"""Reads a store object by object, until the end or until the store is unreachable."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from pysync import _core
from pysync.errors import StoreUnavailable
from pysync.store import DamagedFile, NotModified, OpenFile, ReadableStore, StoredObject

T = TypeVar("T")

SCRUB_KEY: Final = "_pysync/scrub"
"""The key at which the server notes its last scrub."""
VERIFY_KEY: Final = "_pysync/verify"
"""The key at which `pysync verify` notes its last run."""
_ABSENT_KEY: Final = "_pysync/probe/nothing"
"""A key at which nothing is stored."""


class Unreadable(Exception):
    """An object that cannot be read although its store responds; the text has the reason."""


class Reader:
    """Reads objects of `source`. Every method raises Unreadable if only this object cannot be read, and
    StoreUnavailable, which names the key, if the store does not respond."""

    def __init__(self, source: ReadableStore) -> None:
        self._source = source

    async def get(self, key: str) -> StoredObject | None:
        """Return the object at `key`, None if there is none."""
        return as_object(await self._read(key, lambda: self._source.get(key)))

    async def open(self, key: str) -> OpenFile | None:
        """Return the file at `key`, None if there is none. The caller closes its chunks."""
        return await self._read(key, lambda: self._source.open(key))

    async def chunks(self, key: str, file: OpenFile) -> AsyncIterator[bytes]:
        """Yield the chunks of the file that was opened at `key`."""
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
        """Raise StoreUnavailable if the store cannot be read at all."""
        with error_context(f"reading {key}"):
            await self._source.get(_ABSENT_KEY)


class LogShortened(Exception):
    """Elements have left a log since its head was read. `stored` is its present head, which says `head`."""

    def __init__(self, stored: StoredObject, head: _core.LogHead) -> None:
        super().__init__()
        self.stored = stored
        self.head = head


async def check_retained(reader: Reader, key: str, head: _core.LogHead, node: _core.LogNode) -> None:
    """Raise LogShortened if the elements of `node` have left the log since `head` was read at `key`.
    Raises DocumentCorrupt if the present head is damaged."""
    found = await reader.get(key)
    if found is not None and _core.is_log(found.body):
        now = _core.LogHead.read(found.body, "")
        if now.id == head.id and node.end <= now.start:
            raise LogShortened(found, now)


async def for_each_key(source: ReadableStore, at_once: int, work: Callable[[str], Awaitable[None]]) -> None:
    """Call `work` with every key, `at_once` calls at a time. The first error, or a cancellation, ends the run
    once the current calls have ended, so that their outcomes are known. A second cancellation cancels these
    calls. Raises StoreUnavailable, which names what failed."""
    walk = source.walk("")
    lock = asyncio.Lock()
    is_over = False

    async def work_on() -> None:
        nonlocal is_over
        try:
            while True:
                async with lock:
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
            if isinstance(walk, AsyncGenerator):  # otherwise the store would wait for it on closing
                await walk.aclose()
    for error in ended:
        if error is not None:
            raise error


def as_object(found: StoredObject | NotModified | None) -> StoredObject | None:
    """Return the result of an unconditional `ReadableStore.get`."""
    return None if isinstance(found, NotModified) else found


@contextmanager
def error_context(action: str) -> Iterator[None]:
    """Prefix the detail of StoreUnavailable with `action`, the operation that failed."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{action}: {error.detail}") from error
