"""Garbage collection: deletes what crashes and interrupted requests left in a store, and nothing else.

An object is garbage if nothing leads to it, it is older than a grace period, and both still hold when it is
looked at again. It is deleted only as the very version that was listed: a write that comes first keeps it.
"""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pysync import _core
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.engine.append_log import log_id, log_prefix, object_key
from pysync.engine.history import PREFIX as HISTORY
from pysync.engine.history import document_of
from pysync.errors import DocumentCorrupt
from pysync.migrate.verify import log_of_chunk
from pysync.store import PAGE, Etag, EtagMismatch, ListEntry, Store, StoredObject

DEFAULT_GRACE_MS: Final = 3_600_000
MIN_GRACE_MS: Final = 1_800_000
"""The shortest grace period. It is longer than any write takes from its first object to its last, though the
clock of a bucket be a quarter of an hour off."""
_MAX_BYTES: Final = 8 * 1024 * 1024
_LOGS: Final = log_prefix("").rstrip("/")
_NO_HEADS: Final = ("_pysync/", "__sync__/config.json")
"""Objects that lead to no log: the server's own, and the configuration that Starfish stores."""
_CHUNK: Final = re.compile(r"(.+)__seg/[0-9]{16}")


@dataclass(slots=True)
class GarbageReport:
    """The number of garbage objects by kind, and their bytes as far as the store knows them without reading
    them. `unclear` are keys of damaged objects: they may lead to objects, which are therefore kept."""

    segments: int = 0
    chunks: int = 0
    versions: int = 0
    files: int = 0
    temporary_files: int = 0
    uploads: int = 0
    merges: int = 0
    bytes: int = 0
    unclear: set[str] = field(default_factory=set)

    def count(self, kind: str, size: int) -> None:
        """Count one object of this kind, which is the name of a field."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.bytes += size


OnGarbage = Callable[[str, str], None]
"""Called with the kind of a garbage object and its key, or its name if it has no key."""


class GarbageCollector:
    """Finds the garbage of `store`, which may be written meanwhile, and deletes it unless `dry_run` is set.
    Objects that were written within `grace_ms`, by the clock `now_ms` of the store, are kept. `has_history`
    returns True for the keys of documents whose earlier versions are kept; without it all versions are.

    Do not run it while logs are copied or restored into the store: their segments arrive long before their
    heads.
    """

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        on_garbage: OnGarbage,
        *,
        has_history: Callable[[str], bool] | None = None,
        grace_ms: int = DEFAULT_GRACE_MS,
        dry_run: bool = False,
    ) -> None:
        self.report = GarbageReport()
        self.listed = 0
        """Number of objects up to now, some of which are listed again."""
        self._store = store
        self._before_ms = now_ms() - grace_ms
        self._on_garbage = on_garbage
        self._has_history = has_history
        self._dry_run = dry_run

    async def run(self) -> None:
        """Collect the garbage. Raises StoreUnavailable; what was deleted until then is in `report`."""
        await self._collect_logs()
        await self._collect_chunks()
        if self._has_history is not None:
            await self._collect_versions(self._has_history)
        for leftover in await self._store.remove_leftovers(self._before_ms, dry_run=self._dry_run):
            self._on_garbage(leftover.kind, leftover.name)
            self.report.count(leftover.kind, leftover.size)

    # Segments of logs, and blocks of their indexes

    async def _collect_logs(self) -> None:
        entries = self._walk(_LOGS)
        old = {log_id(listed.key) async for listed in entries if self._is_old(listed)}
        if not old:
            return
        heads = await self._heads()
        for id_ in old & heads.keys():
            await self._collect_log(id_, heads[id_])
        if orphans := old - heads.keys():
            candidates = {id_: await self._old_objects(id_) for id_ in orphans}
            heads = await self._heads()  # a log may have been restored since the first look
            for id_ in orphans - heads.keys():
                await self._delete("segments", candidates[id_])

    async def _collect_log(self, id_: str, keys: set[str]) -> None:
        """Delete the old objects of a log that none of the heads at these keys leads to."""
        unused = await self._old_objects(id_)
        for key in keys:
            found = await self._store.get(key)
            if not isinstance(found, StoredObject) or not _core.is_log(found.body):
                return  # the log was deleted or replaced just now, and its objects are left to that
            try:
                head = _core.LogHead.read(found.body, "")
                if head.id != id_:
                    return
                reachable = {object_key(id_, name) async for name in self._reachable(head)}
            except DocumentCorrupt:
                return  # the scrub and `pysync verify` report it
            unused = [listed for listed in unused if listed.key not in reachable]
        await self._delete("segments", unused)

    async def _reachable(self, head: _core.LogHead) -> AsyncIterator[str]:
        """Yield the names of the objects that a head leads to. Raises DocumentCorrupt if a block is lost or
        damaged."""
        waiting = head.nodes()
        while waiting:
            node = waiting.pop()
            yield node.name
            if node.level:
                block = await self._store.get(object_key(head.id, node.name))
                if not isinstance(block, StoredObject):
                    raise DocumentCorrupt
                waiting += head.expand(block.body, node)

    async def _old_objects(self, id_: str) -> list[ListEntry]:
        return [listed async for listed in self._walk(log_prefix(id_)) if self._is_old(listed)]

    async def _heads(self) -> dict[str, set[str]]:
        """Return the keys of the heads of all logs by their ids, and by the ids of earlier logs that are
        still to be deleted. Adds damaged objects, which may be heads, to `unclear`."""
        heads = defaultdict[str, set[str]](set)
        page: list[str] = []

        async def read_page() -> None:
            while page:
                found = await self._store.get_many(page, _MAX_BYTES)
                for key, object_ in found.items():
                    if object_ is not None:
                        self._add_head(heads, key, object_.body)
                page[:] = [key for key in page if key not in found]

        async for listed in self._walk(""):
            if not listed.key.startswith(_NO_HEADS):
                page.append(listed.key)
                if len(page) == PAGE:
                    await read_page()
        await read_page()
        return heads

    def _add_head(self, heads: dict[str, set[str]], key: str, body: bytes) -> None:
        try:
            if _core.is_log(body):
                head = _core.LogHead.read(body, "")
                heads[head.id].add(key)
                if head.previous is not None:
                    heads[head.previous].add(key)
            elif log_of_chunk(key, body) is None:
                _core.read_document(body)
        except DocumentCorrupt:
            self.report.unclear.add(key)

    # Chunks of logs that Starfish wrote

    async def _collect_chunks(self) -> None:
        """Delete the chunks of logs that pysync has taken over."""
        by_log = defaultdict[str, list[ListEntry]](list)
        async for listed in self._walk(""):
            found = _CHUNK.fullmatch(listed.key)
            if found is not None and self._is_old(listed):
                by_log[found[1]].append(listed)
        for log, listed_chunks in by_log.items():
            for listed in listed_chunks:
                chunk, head = await self._store.get(listed.key), await self._store.get(log)
                if (
                    isinstance(chunk, StoredObject)
                    and log_of_chunk(listed.key, chunk.body) is not None
                    and isinstance(head, StoredObject)
                    and _is_own_head(head.body)
                ):
                    await self._delete("chunks", [listed])

    # History

    async def _collect_versions(self, has_history: Callable[[str], bool]) -> None:
        """Delete earlier versions of documents that no collection keeps a history of any more."""
        walk = self._walk(HISTORY)
        old = [
            listed
            async for listed in walk
            if self._is_old(listed) and not has_history(document_of(listed.key))
        ]
        await self._delete("versions", old)

    # All kinds

    async def _walk(self, prefix: str) -> AsyncIterator[ListEntry]:
        async for listed in self._store.walk(prefix):
            self.listed += 1
            yield listed

    def _is_old(self, listed: ListEntry) -> bool:
        return listed.modified_ms < self._before_ms

    async def _delete(self, kind: str, unused: list[ListEntry]) -> None:
        """Delete these versions, and report them. Segments stay if damaged objects may lead to them."""
        if kind == "segments" and self.report.unclear:
            return

        async def delete(listed: ListEntry) -> None:
            sizes = await self._store.info_many([listed.key])
            info = None if sizes is None else sizes[listed.key]
            if not self._dry_run:
                try:
                    await self._store.delete(listed.key, expect=Etag(listed.etag))
                except EtagMismatch:
                    return
            self._on_garbage(kind, listed.key)
            self.report.count(kind, 0 if info is None else info.size)

        await gather_bounded(CONCURRENT, unused, delete)


def _is_own_head(body: bytes) -> bool:
    """Return True for the head of a log in pysync's own format, which has no chunks."""
    with suppress(DocumentCorrupt):
        return _core.is_log(body) and bool(_core.LogHead.read(body, "").id)
    return False
