"""Logs in the format of Starfish, until their first append converts them. Chunks are at `<key>__seg/<ts>`."""

import hashlib
from typing import Final

import orjson

from pysync._core import LogHead
from pysync.errors import DocumentCorrupt
from pysync.store import NotModified, ReadableStore, Store

_DIGITS: Final = 16
_PAGE: Final = 1000


def convert_head(key: str, field: str, head: LogHead, etag: str) -> LogHead:
    """Return the log that is stored under `etag`, with an id that is the same on every node and for every
    attempt."""
    return head.adopted(hashlib.sha256(f"{field} {key} {etag}".encode()).hexdigest()[:32])


async def load_chunks(
    store: Store, key: str, head: LogHead, since: int | None = None, newest: int | None = None
) -> LogHead:
    """Return the log whose elements Starfish stores in chunks, with as many chunks as are needed for the
    elements above `since` and, of those, the `newest`. The key of a chunk has the ts of its first element.

    Raises DocumentCorrupt, also if all chunks together have fewer elements than the head states.
    """
    keys = await chunk_keys(store, key)
    total = len(keys)
    if since is not None:
        later = next((at for at, chunk in enumerate(keys) if int(chunk[-_DIGITS:]) > since), total)
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
    return head.gather(chunks, whole=len(chunks) == total)


def _element_count(chunk: bytes) -> int:
    """Return the number of elements of the chunk. Raises DocumentCorrupt."""
    try:
        return len(orjson.loads(chunk))
    except (ValueError, TypeError):
        raise DocumentCorrupt from None


async def chunk_keys(store: ReadableStore, key: str) -> list[str]:
    """Return the keys of the chunks that Starfish stores for the log at `key`, in the order of the log."""
    folder = f"{key}__seg"
    names: list[str] = []
    page: list[str] | None = None
    while page is None or len(page) == _PAGE:
        page = await store.list(folder, names[-1] if names else None, _PAGE)
        names += page
    return [f"{folder}/{name}" for name in names if len(name) == _DIGITS and name.isdecimal()]
