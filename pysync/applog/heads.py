"""Heads of logs: from the store, or as this node knows them."""

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final, NamedTuple

from pysync._core import LogHead
from pysync.errors import DocumentCorrupt
from pysync.store import NotModified, Store

HELD_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all heads that are kept, roughly."""
_HELD_AT_MOST: Final = HELD_BYTES // 16
_OVERHEAD_BYTES: Final = 1024
_IN_THREAD_ABOVE: Final = 1024 * 1024
"""Bytes of a head that is read beside the event loop: Starfish's may hold all elements."""
_STARFISH_DIGITS: Final = 16
_PAGE: Final = 1000


class Held(NamedTuple):
    """A head as it is stored under `etag`."""

    head: LogHead
    etag: str


class Heads:
    """The heads of a store. Those read or written last are kept, so that an append need not read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: OrderedDict[tuple[str, str], Held] = OrderedDict()
        self._bytes = 0

    async def read(self, key: str, field: str) -> Held | None:
        """The head at `key` as it is now, None where nothing is stored. Raises DocumentCorrupt,
        StoreUnavailable."""
        known = self._held.get((key, field))
        found = await self._store.get(key, None if known is None else known.etag)
        if isinstance(found, NotModified):
            return known
        if found is None:
            self.forget(key, field)
            return None
        if len(found.body) > _IN_THREAD_ABOVE:
            head = await asyncio.to_thread(LogHead.read, found.body, field)
        else:
            head = LogHead.read(found.body, field)
        held = Held(head, found.etag)
        self.keep(key, field, held)
        return held

    def known(self, key: str, field: str) -> Held | None:
        """The head at `key` as it was when this node last met it. Another node may have written since."""
        return self._held.get((key, field))

    def keep(self, key: str, field: str, held: Held) -> None:
        """Know that this is the head at `key`."""
        self.forget(key, field)
        if held.head.size > _HELD_AT_MOST or held.head.is_chunked:
            return
        self._held[key, field] = held
        self._bytes += _size(held)
        while self._bytes > HELD_BYTES:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= _size(oldest)

    def forget(self, key: str, field: str) -> None:
        """Know nothing of `key`."""
        held = self._held.pop((key, field), None)
        if held is not None:
            self._bytes -= _size(held)


def _size(held: Held) -> int:
    return held.head.size + _OVERHEAD_BYTES


def adopted(key: str, field: str, held: Held) -> LogHead:
    """The log of Starfish's, under an id that every node and every attempt gives this version of it."""
    return held.head.adopted(hashlib.sha256(f"{field} {key} {held.etag}".encode()).hexdigest()[:32])


async def gathered(
    store: Store, key: str, head: LogHead, since: int | None = None, newest: int | None = None
) -> LogHead:
    """The log whose elements Starfish keeps in chunks, as far as it takes to know those above `since` and, of
    those, the `newest`: the key of a chunk holds the ts of its first element.

    Raises DocumentCorrupt, also where all chunks together hold less than the head knows of.
    """
    names = await chunk_names(store, key)
    known = len(names)
    if since is not None:
        later = next((at for at, name in enumerate(names) if int(name) > since), len(names))
        names = names[max(later - 1, 0) :]
    chunks: list[bytes] = []
    count = 0
    for name in reversed(names):
        if chunks and newest is not None and count >= newest:
            break
        found = await store.get(chunk_key(key, name))
        if found is None or isinstance(found, NotModified):
            raise DocumentCorrupt
        chunks.insert(0, found.body)
        if newest is not None:
            count += head.gather([found.body]).count
    return head.gather(chunks, whole=len(chunks) == known)


async def chunk_names(store: Store, key: str) -> list[str]:
    """The names of the chunks that Starfish keeps of the log at `key`, in the log's order."""
    names: list[str] = []
    page: list[str] | None = None
    while page is None or len(page) == _PAGE:
        page = await store.list(_chunk_folder(key), names[-1] if names else None, _PAGE)
        names += page
    return [name for name in names if len(name) == _STARFISH_DIGITS and name.isdecimal()]


def chunk_key(key: str, name: str) -> str:
    """The key of a chunk of the log at `key`."""
    return f"{_chunk_folder(key)}/{name}"


def _chunk_folder(key: str) -> str:
    return f"{key}__seg"
