"""Earlier versions of documents (docs/reference/protocol.md#history).

A push of a collection with `history` writes an entry with the document, and so does a delete. The entry has
the identity of the writer, and the version that the write replaces, as it was stored. A crash may leave an
entry of a write that was not made. Its version was stored at that time nevertheless
(docs/explanation/decisions/0045-history-keeps-what-is-replaced.md).

    _pysync/history/<key of the document>/<place, 24 digits>-<time in ms, 12 hex digits><8 random ones>.<kind>

A later write has a later place, also if the clock steps back. The kind is `w` for an entry without an earlier
version, `r` if it was replaced, and `d` if it was deleted. Entries are stored as documents, so that damage to
them is found.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from random import getrandbits
from typing import Final, Literal, NamedTuple

import orjson

from pysync import _core
from pysync.cache import BoundedCache
from pysync.clock import is_stable
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.config import HistoryConfig
from pysync.config.key_templates import RESERVED
from pysync.corruption import CorruptionReporter
from pysync.errors import DocumentCorrupt, InvalidPathParameter, StoreUnavailable
from pysync.store import PAGE, RUN_BYTES, AppendedObject, NotModified, ReadableStore, Store, StoredObject

PREFIX: Final = f"{RESERVED}/history"
"""The prefix of all entries."""
MAX_DOCUMENT_KEY_BYTES: Final = 900
"""The longest key of a document with history. That of its entries must fit into a bucket."""
PRUNE_EVERY: Final = 8
"""Number of writes of one document by a process after which it prunes the entries."""
_TIME: Final = slice(25, 37)
"""The part of a name that is the time of the write."""

Kind = Literal["w", "r", "d"]

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """An entry, written by `identity` at `at_ms` with the version `hash` (`""`: the document was deleted).
    `replaced` is the version that this write replaced; None if there was none, or if it is not kept any
    more."""

    at_ms: int
    identity: str
    hash: str
    replaced: _core.Document | None


def folder_of(key: str) -> str:
    """Return the prefix of the entries of the document at `key`."""
    return f"{PREFIX}/{key}"


def document_of(entry_key: str) -> str:
    """Return the key of the document that an entry belongs to."""
    return entry_key.removeprefix(f"{PREFIX}/").rpartition("/")[0]


def has_version(entry_key: str) -> bool:
    """Return True if there is an earlier version in the entry."""
    return entry_key[-2:] in (".r", ".d")


async def entries_of(store: ReadableStore, key: str) -> list[str]:
    """Return the keys of all entries of the document at `key`, the oldest first. Raises StoreUnavailable."""
    folder = folder_of(key)
    return [f"{folder}/{name}" for name in await _names(store, folder)]


def check_key(key: str) -> None:
    """Raise InvalidPathParameter if a document with this key cannot have a history."""
    if len(key.encode()) > MAX_DOCUMENT_KEY_BYTES:
        raise InvalidPathParameter


def new_entry(key: str, replaced: bytes | None, hash_: str, at_ms: int, identity: str) -> AppendedObject:
    """Return the entry of a write of the version `hash_` (`""`: of a delete) over the document `replaced`, as
    it is stored; None if there is none, or it is not to be kept."""
    members: dict[str, object] = {"at": at_ms, "by": identity, "hash": hash_}
    if replaced is not None:
        members["object"] = replaced.decode()
    kind: Kind = "w" if replaced is None else "r" if hash_ else "d"
    suffix = f"-{at_ms:012x}{getrandbits(32):08x}.{kind}"
    return AppendedObject(folder_of(key), at_ms, suffix, _encode(members, at_ms))


class History:
    """The earlier versions of the documents of a store."""

    def __init__(self, store: Store, now_ms: Callable[[], int], corruption: CorruptionReporter) -> None:
        self._store = store
        self._now_ms = now_ms
        self._corruption = corruption
        self._unpruned = BoundedCache[str, int]()

    async def entries(self, key: str, limits: HistoryConfig) -> AsyncIterator[Entry]:
        """Yield the entries of the document at `key`, the newest first: those with a version that `limits`
        keep, and the entries of the writes that made these versions. Damaged ones are reported and left out.
        Others have their turn between any two. Raises StoreUnavailable."""
        folder, now_ms = folder_of(key), self._now_ms()
        seen: set[tuple[str, int]] = set()
        names = (await _names(self._store, folder))[::-1]
        while names:
            page = [f"{folder}/{name}" for name in names[:CONCURRENT]]
            found = await self._store.get_many(page, RUN_BYTES)
            page = [at for at in page if at in found]
            names = names[len(page) :]
            for at in page:
                await asyncio.sleep(0)  # a store may read without a pause, and a version may be large
                entry = self._read(at, found[at])
                if entry is None:
                    continue
                is_kept = limits.for_ms is None or entry.at_ms + limits.for_ms >= now_ms
                if entry.replaced is not None and is_kept:
                    # A crash may have left a second entry with the version.
                    seen.add((entry.replaced.hash, entry.replaced.ts_ms))
                    is_kept = len(seen) <= limits.versions
                yield entry if is_kept else entry._replace(replaced=None)
                if not is_kept:
                    return

    async def after_write(self, key: str, limits: HistoryConfig) -> None:
        """Prune the entries of the document at `key` if this process has written it often enough. An error is
        logged, because the write has been made."""
        count = (self._unpruned.get(key) or 0) + 1
        self._unpruned.put(key, count % PRUNE_EVERY)
        if count < PRUNE_EVERY:
            return
        try:
            await self.prune(key, limits)
        except StoreUnavailable as error:
            log.warning("failed to prune a history: %s", error.detail)

    async def make_room(self, key: str, limits: HistoryConfig) -> bool:
        """Prune the entries of the document at `key`, unless this process has done so since it wrote the last
        one. Returns True if any was deleted. Raises StoreUnavailable."""
        if self._unpruned.get(key) == 0:
            return False
        deleted = await self.prune(key, limits)
        self._unpruned.put(key, 0)
        return deleted > 0

    async def prune(self, key: str, limits: HistoryConfig) -> int:
        """Delete the versions of the document at `key` that `limits` do not keep. Returns the number of
        deleted entries. Raises StoreUnavailable."""
        folder = folder_of(key)
        names = await _names(self._store, folder)
        first = _first_kept(names, limits, self._stable_now_ms())
        if first == 0:
            return 0
        # Entries of writes that were not made may follow that of the write which made the oldest version.
        made_ms = await self._oldest_written_ms(key, names[first:])
        gone = []
        for name in names[:first]:
            is_of_oldest = name == names[first - 1] or int(name[_TIME], 16) == made_ms
            if name[-1] == "r" and is_of_oldest:
                await self._strip(folder, name)
            if name[-1] != "w" or not is_of_oldest:
                gone.append(name)

        keys = [f"{folder}/{name}" for name in gone]
        if (transactional := self._store.transactional) is not None:
            await transactional.delete_all(keys)
        else:
            await gather_bounded(CONCURRENT, keys, self._store.delete)
        return len(gone)

    def _stable_now_ms(self) -> int:
        """Return the time, or 0 after a step of the clock: then nothing has expired."""
        return self._now_ms() if is_stable(self._now_ms) else 0

    async def _oldest_written_ms(self, key: str, kept: Sequence[str]) -> int | None:
        """Return when the version in the first of the entries `kept` was written, or the document itself if
        there are none. None if it is damaged or gone."""
        try:
            if kept:
                at = f"{folder_of(key)}/{kept[0]}"
                entry = self._read(at, await self._store.get(at))
                return None if entry is None or entry.replaced is None else entry.replaced.ts_ms
            found = await self._store.get(key)
            return _core.read_document(found.body).ts_ms if isinstance(found, StoredObject) else None
        except DocumentCorrupt:
            return None

    async def _strip(self, folder: str, name: str) -> None:
        """Write the entry without the version that it holds: who wrote the next one is still of interest."""
        at = f"{folder}/{name}"
        entry = self._read(at, await self._store.get(at))
        if entry is not None:
            members = {"at": entry.at_ms, "by": entry.identity, "hash": entry.hash}
            await self._store.put(f"{folder}/{name[:-1]}w", _encode(members, entry.at_ms))

    def _read(self, at: str, found: StoredObject | NotModified | None) -> Entry | None:
        """Return an entry, None if it is damaged or has just been deleted."""
        if not isinstance(found, StoredObject):
            return None
        try:
            members = orjson.loads(_core.read_document(found.body).data)
            text = members.get("object")
            replaced = None if text is None else _core.read_document(text.encode())
        except DocumentCorrupt as error:
            self._corruption.report_once(error, "document", at)
            return None
        return Entry(members["at"], members["by"], members["hash"], replaced)


def _first_kept(names: Sequence[str], limits: HistoryConfig, now_ms: int) -> int:
    """Return the index of the oldest entry whose version is kept; the number of entries if there is none."""
    first, left = len(names), limits.versions
    for at in range(len(names) - 1, -1, -1):
        if names[at][-1] == "w":
            continue
        if not left or is_expired(names[at], limits, now_ms):
            break
        first, left = at, left - 1
    return first


def is_expired(name: str, limits: HistoryConfig, now_ms: int) -> bool:
    """Return True if `limits` do not keep the version in this entry any more, by the time of its write."""
    return limits.for_ms is not None and int(name[_TIME], 16) + limits.for_ms < now_ms


async def _names(store: ReadableStore, folder: str) -> list[str]:
    """Return the names of the entries in a folder, the oldest first."""
    names: list[str] = []
    page: list[str] | None = None
    while page is None or len(page) == PAGE:
        page = await store.list(folder, names[-1] if names else None, PAGE)
        names += page
    return [name for name in names if name[-2:] in (".w", ".r", ".d")]


def _encode(members: dict[str, object], at_ms: int) -> bytes:
    return _core.decode_push(orjson.dumps({"data": members})).stored(at_ms)
