"""Compaction: small files of events are merged into larger ones, so that a query opens fewer files.

Files are merged in the order of their ids, each group into one file whose id is just below that of its last
file. The id is new, so no id ever stands for two contents: a reader that lists files and then misses one
lists again and counts nothing twice. The id follows every other id of the group, so a reader that asks for
everything after one of these receives the merged file.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pysync.concurrency import ATTEMPTS, every
from pysync.config.key_templates import KeyTemplate
from pysync.engine.files import is_expired
from pysync.errors import StoreUnavailable, Unavailable
from pysync.plugins.events.batch_ids import SUFFIX
from pysync.protocol import PARQUET_TYPE
from pysync.store import PAGE, DamagedFile, EtagMismatch, MergeRejected, Store

if TYPE_CHECKING:
    from pysync.parquet.event_merger import ParquetMerger

batch_match = re.compile(rf"([0-9]{{13}})(-[0-9]{{6}}-)([0-9a-f]{{12}}){re.escape(SUFFIX)}").fullmatch
"""Matches the name of a batch's file: milliseconds, counter and random digits."""


async def batch_keys(store: Store, storage_path: str) -> AsyncIterator[str]:
    """Yield the keys of all files of batches below the template, in no promised order."""
    template = KeyTemplate.of(storage_path)
    async for listed in store.walk(template.prefix):
        if batch_match(listed.key.rpartition("/")[2]) and template.matches(listed.key):
            yield listed.key


async def current_keys(store: Store, storage_path: str) -> list[str]:
    """Return the keys of files that together contain each event once, sorted by name, also while files are
    being merged. Raises StoreUnavailable if too many merges are under way."""
    for _ in range(ATTEMPTS):
        found = {key async for key in batch_keys(store, storage_path)}
        # Where nothing of it has gone until afterwards, it is what there was when the merges were read.
        merges = await store.pending_merges()
        if found <= {key async for key in batch_keys(store, storage_path)}:
            for merge in merges:
                if merge.key in found:
                    found -= merge.merged.keys()
            return sorted(found)
    raise StoreUnavailable("files are being merged all the time: try again")


log = logging.getLogger("pysync.events")

T = TypeVar("T")

_LOWEST_SUFFIX: Final = f"-{0:012x}{SUFFIX}"
"""The end of the name of a batch that has no id below it. Such a batch, which is rare, is not merged."""
_READ_FILES: Final = 32
_READ_BYTES: Final = 8_388_608
"""Bounds on the files read at once, in number and in bytes. A single file may be larger."""


class SourceFile(NamedTuple):
    """A file that may be merged, by its name in the folder."""

    name: str
    size: int


@dataclass(slots=True)
class CompactionResult:
    """The outcome for one folder: the number of files before and after, the number of merged rows, the number
    of files that are too recent, and the files that were skipped, with the reason."""

    folder: str
    before: int = 0
    after: int = 0
    rows: int = 0
    young: int = 0
    left: dict[str, str] = field(default_factory=dict)


async def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Compaction:
    """Compaction of the files below one key template. Files older than `older_than_ms` are merged into files
    of about `to_bytes`; `now_ms` is the clock of their ids. Files older than `ttl_ms` are left to the TTL
    sweeper: a merge would restart their lifetime."""

    store: Store
    storage_path: str
    older_than_ms: int
    to_bytes: int
    now_ms: Callable[[], int]
    ttl_ms: int | None = None

    async def run(
        self, should_continue: Callable[[], Awaitable[bool]] = _always
    ) -> AsyncIterator[CompactionResult]:
        """Merge files, and yield the result of each folder. `should_continue` is called before each merge.
        Servers, readers and other compactions may run meanwhile. Raises Unavailable; an error that concerns
        one folder is raised after all folders."""
        await self.store.recover_merges()
        failed: Unavailable | None = None
        with ThreadPoolExecutor(1, "event-compaction") as thread:
            keys = batch_keys(self.store, self.storage_path)
            for folder in sorted({key.rpartition("/")[0] async for key in keys}):
                try:
                    done = await _Folder(self, thread, folder).compact(should_continue)
                except Unavailable as error:
                    failed = error  # that is no reason to leave the other folders
                else:
                    yield done
        if failed is not None:
            raise failed


async def compact_periodically(
    make: Callable[[], Compaction],
    every_ms: int,
    acquire_lease: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Merge files periodically while this process holds the lease, until cancelled. `make` returns the
    compaction that the configuration in force wants."""

    async def compact() -> None:
        if not await acquire_lease():
            return
        async for done in make().run(acquire_lease):
            if done.rows:
                log.info("merged files in %s: %d are %d now", done.folder, done.before, done.after)
            for batch, why in done.left.items():
                log.warning("%s/%s is not merged: %s", done.folder, batch, why)

    await every(every_ms / 1000, compact, "failed to merge files of events", log, sleep)


class _Folder:
    """The compaction of one folder. Slow work runs in `thread`."""

    def __init__(self, options: Compaction, thread: ThreadPoolExecutor, folder: str) -> None:
        self._options = options
        self._store = options.store
        self._thread = thread
        self._folder = folder
        self._done = CompactionResult(folder)

    async def compact(self, should_continue: Callable[[], Awaitable[bool]]) -> CompactionResult:
        """Merge files and return the result."""
        async for group in self._groups():
            if len(group) > 1 and await should_continue():
                await self._merge(group)
        self._done.after += self._done.before
        return self._done

    async def _groups(self) -> AsyncIterator[list[SourceFile]]:
        """Yield groups of files to merge, in the order of their ids. A file that is large enough separates
        groups, so that rows keep their order."""
        group: list[SourceFile] = []
        size = 0
        async for source in self._sources():
            is_large = 2 * source.size >= self._options.to_bytes
            if is_large or size + source.size > self._options.to_bytes:
                yield _drop_large_prefix(group)
                group, size = [], 0
            if not is_large:
                group.append(source)
                size += source.size
        yield _drop_large_prefix(group)

    async def _sources(self) -> AsyncIterator[SourceFile]:
        """Yield the batches that are old enough, in the order of their ids."""
        before_ms = self._options.now_ms() - self._options.older_than_ms
        after: str | None = None
        while names := await self._store.list(self._folder, after, PAGE):
            after = names[-1]
            batches = [(name, int(match[1])) for name in names if (match := batch_match(name))]
            self._done.before += len(batches)
            old = [name for name, ms in batches if ms <= before_ms]
            self._done.young += len(batches) - len(old)
            old = [name for name in old if not name.endswith(_LOWEST_SUFFIX)]
            for at in range(0, len(old), _READ_FILES):
                some = old[at : at + _READ_FILES]
                stats = await asyncio.gather(*(self._find(self._store.stat, name) for name in some))
                for name, stat in zip(some, stats, strict=True):
                    if stat is not None and not is_expired(
                        stat, self._options.ttl_ms, self._options.now_ms()
                    ):
                        yield SourceFile(name, stat.size)

    async def _merge(self, group: Sequence[SourceFile]) -> None:
        """Replace the files of the group that can be merged by one file."""
        from pysync.parquet.event_merger import ParquetMerger

        into = await self._in_thread(ParquetMerger)
        try:
            merged: dict[str, str] = {}
            for some in _read_groups(group):
                merged.update(await self._append(into, some))
            if len(merged) < 2:
                return
            await self._in_thread(into.finish)
            try:
                await self._store.merge(
                    self._previous_id(max(merged)), self._chunks(into), PARQUET_TYPE, merged
                )
            except EtagMismatch:
                self._skip(merged, "a file of theirs was written or removed meanwhile")
            except MergeRejected as refused:
                self._skip(merged, str(refused))
            else:
                self._done.rows += into.rows
                self._done.after -= len(merged) - 1
        finally:
            await self._in_thread(into.close)

    async def _append(self, into: "ParquetMerger", some: Sequence[SourceFile]) -> dict[str, str]:
        """Append the files that can be merged, and return their keys and sha256."""
        read = await asyncio.gather(*(self._read(source.name) for source in some))
        found = [(source.name, *file) for source, file in zip(some, read, strict=True) if file is not None]
        refusals = await self._in_thread(into.append_files, [body for _, _, body in found])
        appended: dict[str, str] = {}
        for (name, sha256, _), refused in zip(found, refusals, strict=True):
            if refused is None:
                appended[self._key(name)] = sha256
            else:
                self._done.left[name] = refused
        return appended

    async def _find(self, get: Callable[[str], Awaitable[T | None]], name: str) -> T | None:
        """Return what the store has of a file; None if it is gone, or damaged, which is reported."""
        try:
            return await get(self._key(name))
        except DamagedFile as error:
            self._done.left[name] = error.detail
            return None

    async def _read(self, name: str) -> tuple[str, bytes] | None:
        """Return the sha256 and the bytes of a file; None as in `_find`."""
        file = await self._find(self._store.open, name)
        if file is None:
            return None
        body = b"".join([chunk async for chunk in file.chunks])
        if (await self._in_thread(hashlib.sha256, body)).hexdigest() != file.sha256:
            await self._find(self._store.verify, name)
            return None
        return file.sha256, body

    async def _chunks(self, merged: "ParquetMerger") -> AsyncIterator[bytes]:
        at = 0
        while chunk := await self._in_thread(merged.read, at, 262_144):
            at += len(chunk)
            yield chunk

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Return the result of `work` in the thread. A cancelled caller still waits, because the thread uses
        the file."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    def _skip(self, merged: dict[str, str], why: str) -> None:
        names = sorted(key.rpartition("/")[2] for key in merged)
        self._done.left[f"{names[0]} to {names[-1]}"] = why

    def _previous_id(self, key: str) -> str:
        """Return the key of the id just below that of `key`. It is unused, because ids end with random
        digits."""
        match = batch_match(key.rpartition("/")[2])
        assert match is not None
        ms, number, token = match.groups()
        return self._key(f"{ms}{number}{int(token, 16) - 1:012x}{SUFFIX}")

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"


def _drop_large_prefix(group: list[SourceFile]) -> list[SourceFile]:
    """Return the group without leading files that are larger than all that follow. A file is thus rewritten
    only when it doubles, and each row is written a few times in all."""
    total = sum(source.size for source in group)
    for at, source in enumerate(group):
        total -= source.size
        if source.size <= total:
            return group[at:]
    return []


def _read_groups(group: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Split the group into parts whose files are read at once."""
    parts: list[list[SourceFile]] = [[]]
    size = 0
    for source in group:
        if len(parts[-1]) == _READ_FILES or (parts[-1] and size + source.size > _READ_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(source)
        size += source.size
    return parts
