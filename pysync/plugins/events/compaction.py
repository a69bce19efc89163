"""Compaction: small files of events become larger ones, so that a query opens fewer of them.

Files are merged in the order of their ids, each group into one file whose id is just below that of its last.
So the id is new, and none ever stands for two contents: who has listed files and then finds one gone lists
again, and counts nothing twice. And it lies behind every other id of the group: who asks for what comes after
one of these gets it.

Which files hold the events of a template at one moment.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pysync.config.key_templates import KeyTemplate
from pysync.engine.files import is_expired
from pysync.errors import StoreUnavailable, Unavailable
from pysync.plugins.events.batch_ids import SUFFIX
from pysync.protocol import PARQUET_TYPE
from pysync.store import DamagedFile, EtagMismatch, FileStat, MergeRejected, Store, merge_journal

_MAX_ATTEMPTS: Final = 10

batch_match = re.compile(rf"([0-9]{{13}})(-[0-9]{{6}}-)([0-9a-f]{{12}}){re.escape(SUFFIX)}").fullmatch
"""The name of a batch's file: milliseconds, number and random digits."""


async def batch_keys(store: Store, storage_path: str) -> AsyncIterator[str]:
    """The keys of all files of batches below the template, in no promised order."""
    template = KeyTemplate.of(storage_path)
    async for listed in store.walk(template.prefix):
        if batch_match(listed.key.rpartition("/")[2]) and template.matches(listed.key):
            yield listed.key


async def current_keys(store: Store, storage_path: str) -> list[str]:
    """The keys of files that hold each event once, in the order of their names, also while files are merged.
    Raises StoreUnavailable where too much is merged meanwhile."""
    for _ in range(_MAX_ATTEMPTS):
        found = {key async for key in batch_keys(store, storage_path)}
        # Where nothing of it has gone until afterwards, it is what there was when the merges were read.
        merges = await merge_journal.unfinished_merges(store)
        if found <= {key async for key in batch_keys(store, storage_path)}:
            for merge in merges:
                if merge.key in found:
                    found -= merge.merged.keys()
            return sorted(found)
    raise StoreUnavailable("files are being merged all the time: try again")


if TYPE_CHECKING:
    from pysync.parquet.event_files import ParquetMerger

log = logging.getLogger("pysync.events")

T = TypeVar("T")

_LOWEST_SUFFIX: Final = f"-{0:012x}{SUFFIX}"
"""What the name of the rare batch ends with below whose id there is none: it stays as it is."""
_PAGE: Final = 1_000
_READ_FILES: Final = 32
_READ_BYTES: Final = 8_388_608
"""Files that are read at once: so many, or so many bytes; one may be larger."""


class SourceFile(NamedTuple):
    """A file that may be merged, by its name in the folder."""

    name: str
    size: int


@dataclass(slots=True)
class CompactionResult:
    """What became of the files in one folder: how many there were and are, and how many rows were merged; how
    many files are too young yet, and which others were left, with the reason."""

    folder: str
    before: int = 0
    after: int = 0
    rows: int = 0
    young: int = 0
    left: dict[str, str] = field(default_factory=dict)


async def _always() -> bool:
    return True


class Compaction:
    """The compaction of the files below one template of keys. They are merged once they are `older_than_ms`,
    into files of about `to_bytes`; `now_ms` is the clock of their ids. What has outlived `ttl_ms` is left to
    the sweep: in a merged file it would begin to live anew."""

    def __init__(
        self,
        store: Store,
        storage_path: str,
        older_than_ms: int,
        to_bytes: int,
        now_ms: Callable[[], int],
        ttl_ms: int | None = None,
    ) -> None:
        self._store = store
        self._storage_path = storage_path
        self._older_than_ms = older_than_ms
        self._to_bytes = to_bytes
        self._now_ms = now_ms
        self._ttl_ms = ttl_ms

    async def run(
        self, should_continue: Callable[[], Awaitable[bool]] = _always
    ) -> AsyncIterator[CompactionResult]:
        """Merge what can be merged, and say what became of each folder. `should_continue` is asked before
        each merge. Servers, readers and other compactions may work meanwhile. Raises Unavailable, where that
        is about one folder when it has been through all of them."""
        await self._store.recover_merges()
        failed: Unavailable | None = None
        with ThreadPoolExecutor(1, "event-compaction") as thread:
            keys = batch_keys(self._store, self._storage_path)
            for folder in sorted({key.rpartition("/")[0] async for key in keys}):
                work = _Folder(self._store, thread, folder, self._now_ms, self._ttl_ms)
                try:
                    done = await work.compact(self._older_than_ms, self._to_bytes, should_continue)
                except Unavailable as error:
                    failed = error  # that is no reason to leave the other folders
                else:
                    yield done
        if failed is not None:
            raise failed


async def compact_periodically(
    compaction: Compaction,
    every_ms: int,
    acquire_lease: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Merge what can be merged every so often, for as long as this process leads, until it is cancelled."""
    while True:
        await sleep(every_ms / 1000)
        try:
            if await acquire_lease():
                async for done in compaction.run(acquire_lease):
                    if done.rows:
                        log.info("merged files in %s: %d are %d now", done.folder, done.before, done.after)
                    for batch, why in done.left.items():
                        log.warning("%s/%s is not merged: %s", done.folder, batch, why)
        except Unavailable as error:
            log.warning("merging files of events waits: %s", error.detail)
        except Exception:
            log.exception("merging files of events failed, and is tried again")


class _Folder:
    """The compaction of one folder. What takes long is done in `thread`."""

    def __init__(
        self,
        store: Store,
        thread: ThreadPoolExecutor,
        folder: str,
        now_ms: Callable[[], int],
        ttl_ms: int | None,
    ) -> None:
        self._store = store
        self._thread = thread
        self._folder = folder
        self._now_ms = now_ms
        self._ttl_ms = ttl_ms
        self._done = CompactionResult(folder)

    async def compact(
        self, older_than_ms: int, to_bytes: int, should_continue: Callable[[], Awaitable[bool]]
    ) -> CompactionResult:
        """Merge what can be merged; what became of it."""
        before_ms = self._now_ms() - older_than_ms
        async for group in self._groups(before_ms, to_bytes):
            if len(group) > 1 and await should_continue():
                await self._merge(group)
        self._done.after += self._done.before
        return self._done

    async def _groups(self, before_ms: int, to_bytes: int) -> AsyncIterator[list[SourceFile]]:
        """Files to be merged into one, in the order of their ids. One that is large enough parts the groups,
        so that rows keep their order."""
        group: list[SourceFile] = []
        size = 0
        async for source in self._sources(before_ms):
            is_large = 2 * source.size >= to_bytes
            if is_large or size + source.size > to_bytes:
                yield _drop_large_prefix(group)
                group, size = [], 0
            if not is_large:
                group.append(source)
                size += source.size
        yield _drop_large_prefix(group)

    async def _sources(self, before_ms: int) -> AsyncIterator[SourceFile]:
        """The batches that are old enough, in the order of their ids."""
        after: str | None = None
        while names := await self._store.list(self._folder, after, _PAGE):
            after = names[-1]
            batches = [(name, int(match[1])) for name in names if (match := batch_match(name))]
            self._done.before += len(batches)
            old = [name for name, ms in batches if ms <= before_ms]
            self._done.young += len(batches) - len(old)
            old = [name for name in old if not name.endswith(_LOWEST_SUFFIX)]
            for at in range(0, len(old), _READ_FILES):
                some = old[at : at + _READ_FILES]
                stats = await asyncio.gather(*(self._stat(name) for name in some))
                for name, stat in zip(some, stats, strict=True):
                    if stat is not None and not is_expired(stat, self._ttl_ms, self._now_ms()):
                        yield SourceFile(name, stat.size)

    async def _merge(self, group: Sequence[SourceFile]) -> None:
        """Have one file take the place of those in the group that can be merged."""
        from pysync.parquet.event_files import ParquetMerger

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
        """Append files, as far as they can be merged: their keys, and what their sha256 are."""
        from pysync.parquet.event_files import StillRetryable

        now_ms = self._now_ms()
        read = await asyncio.gather(*(self._read(source.name) for source in some))
        found = [(source.name, *file) for source, file in zip(some, read, strict=True) if file is not None]
        refusals = await self._in_thread(into.append_files, [body for _, _, body in found], now_ms)
        appended: dict[str, str] = {}
        for (name, sha256, _), refused in zip(found, refusals, strict=True):
            if refused is None:
                appended[self._key(name)] = sha256
            elif isinstance(refused, StillRetryable):
                self._done.young += 1
            else:
                self._done.left[name] = str(refused)
        return appended

    async def _stat(self, name: str) -> FileStat | None:
        """Return the metadata of a file; None if it is gone, or damaged, which is noted."""
        try:
            return await self._store.stat(self._key(name))
        except DamagedFile as error:
            self._done.left[name] = error.detail
            return None

    async def _read(self, name: str) -> tuple[str, bytes] | None:
        """The sha256 and the bytes of a file; None as in `_stat`."""
        try:
            file = await self._store.open(self._key(name))
        except DamagedFile as error:
            self._done.left[name] = error.detail
            return None
        if file is None:
            return None
        return file.sha256, b"".join([chunk async for chunk in file.chunks])

    async def _chunks(self, merged: "ParquetMerger") -> AsyncIterator[bytes]:
        at = 0
        while chunk := await self._in_thread(merged.read, at, 262_144):
            at += len(chunk)
            yield chunk

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work` in the thread. Who is cancelled waits for it, as it has hold of the file."""
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
        """The key of the id just below that of `key`. Nobody else has it, as ids end with random digits."""
        match = batch_match(key.rpartition("/")[2])
        assert match is not None
        ms, number, token = match.groups()
        return self._key(f"{ms}{number}{int(token, 16) - 1:012x}{SUFFIX}")

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"


def _drop_large_prefix(group: list[SourceFile]) -> list[SourceFile]:
    """The group without those at its beginning that are larger than all that follows: a file is written again
    only where it doubles, so that all merges together write each row only some times."""
    total = sum(source.size for source in group)
    for at, source in enumerate(group):
        total -= source.size
        if source.size <= total:
            return group[at:]
    return []


def _read_groups(group: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """The group in parts whose files are read at once."""
    parts: list[list[SourceFile]] = [[]]
    size = 0
    for source in group:
        if len(parts[-1]) == _READ_FILES or (parts[-1] and size + source.size > _READ_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(source)
        size += source.size
    return parts
