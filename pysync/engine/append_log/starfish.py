"""Logs as Starfish keeps them, until their first append takes them over: chunks are at `<key>__seg/<ts>`."""

import hashlib
from typing import Final

import orjson

from pysync._core import LogHead
from pysync.errors import DocumentCorrupt
from pysync.store import NotModified, ReadableStore, Store

_DIGITS: Final = 16
_PAGE: Final = 1000


def convert_head(key: str, field: str, head: LogHead, etag: str) -> LogHead:
    """The log that is stored under `etag`, under an id that every node and every attempt gives it."""
    return head.adopted(hashlib.sha256(f"{field} {key} {etag}".encode()).hexdigest()[:32])


async def load_chunks(
    store: Store, key: str, head: LogHead, since: int | None = None, newest: int | None = None
) -> LogHead:
    """The log whose elements Starfish keeps in chunks, as far as it takes to know those above `since` and, of
    those, the `newest`: the key of a chunk holds the ts of its first element.

    Raises DocumentCorrupt, also where all chunks together hold less than the head knows of.
    """
    keys = await chunk_keys(store, key)
    known = len(keys)
    if since is not None:
        later = next((at for at, chunk in enumerate(keys) if int(chunk[-_DIGITS:]) > since), known)
        keys = keys[max(later - 1, 0) :]
    chunks: list[bytes] = []
    count = 0
    for chunk in reversed(keys):
        if chunks and newest is not None and count >= newest:
            break
        found = await store.get(chunk)
        if found is None or isinstance(found, NotModified):
            raise DocumentCorrupt
        chunks.insert(0, found.body)
        if newest is not None:
            count += _element_count(found.body)
    return head.gather(chunks, whole=len(chunks) == known)


def _element_count(chunk: bytes) -> int:
    """The number of its elements. Raises DocumentCorrupt."""
    try:
        return len(orjson.loads(chunk))
    except (ValueError, TypeError):
        raise DocumentCorrupt from None


async def chunk_keys(store: ReadableStore, key: str) -> list[str]:
    """Return the keys of the chunks that Starfish keeps of the log at `key`, in the log's order."""
    folder = f"{key}__seg"
    names: list[str] = []
    page: list[str] | None = None
    while page is None or len(page) == _PAGE:
        page = await store.list(folder, names[-1] if names else None, _PAGE)
        names += page
    return [f"{folder}/{name}" for name in names if len(name) == _DIGITS and name.isdecimal()]
