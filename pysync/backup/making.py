"""Makes backups: once, or again and again as the store changes."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from pysync._core import split_key
from pysync.backup.encoding import MAX_FILE_BYTES, BackupEntry, Row
from pysync.backup.notes import GRACE_MS, expired_files
from pysync.backup.packing import Packer
from pysync.backup.repository import (
    PACKS,
    PAGES,
    BackupDamaged,
    Repository,
    Snapshot,
    path_of,
)
from pysync.backup.runs import SortedRun, runs_to_merge
from pysync.backup.source import EXCLUDED, FileParts, PositionLost, SnapshotSource
from pysync.errors import StoreUnavailable
from pysync.migrate.reading import Unreadable
from pysync.store.local.capture import CapturedRow

CHECKPOINT_ENTRIES: Final = 50_000
CHECKPOINT_BYTES: Final = 268_435_456
"""Objects and bytes after which a long backup records what it has stored. A killed one continues from
there."""
_ROUNDS: Final = 4
"""Attempts to read all files of one moment. Nobody can replace files while the last one opens them."""
_MAX_OPEN: Final = 256
"""Files of one moment that are held open. Those beyond are read before the moment ends."""
_CHECK_EVERY_MS: Final = 600_000
_VOUCHED_MS: Final = GRACE_MS // 2
"""Time after a snapshot in which no `prune` can note a file as unreferenced and delete it, too."""


@dataclass(slots=True)
class BackupReport:
    """The number of objects that a backup read or found removed, of those that it could not read, the bytes
    that it read, and the bytes and files that it wrote."""

    objects: int = 0
    unreadable: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    files_written: int = 0


class _Outdated(Exception):
    """Something that the next snapshot would refer to is deleted, or may be. List everything."""


class BackupMaker:
    """Makes backups of `source`, which `store` names, in `repository`. `on_problem` is called with a key that
    cannot be read, and the reason. After an error make a new one, which continues from what is stored."""

    def __init__(
        self,
        source: SnapshotSource,
        repository: Repository,
        now_ms: Callable[[], int],
        on_problem: Callable[[str, str], None],
        store: str = "",
    ) -> None:
        self.report = BackupReport()
        self.moment_ms = 0
        """Everything that was written before this moment is in the backup."""
        self._merging: asyncio.Task[None] | None = None
        self._source = source
        self._repository = repository
        self._now_ms = now_ms
        self._on_problem = on_problem
        self._store = store
        self._packer = Packer(repository)
        self._runs: list[SortedRun] = []
        self._base: Snapshot | None = None
        """The snapshot that this maker read or wrote last, which keeps what `_runs` refer to."""
        self._newest_ms = 0
        self._is_listed = False
        self._again: dict[str, str] = {}
        self._checkpoints: list[str] = []
        self._checkpoint_at = 0
        self._checked_ms = self._vouched_ms = now_ms()

    async def make(self, *, only_changes: bool = False) -> Snapshot | None:
        """Make a backup and return its snapshot. The first call compares everything that is stored with the
        newest backup, later ones read what has changed since. With `only_changes`, return None if nothing
        has. Raises StoreUnavailable."""
        while True:
            try:
                return await self._make(only_changes=only_changes)
            except _Outdated:
                self._is_listed = False

    async def _make(self, *, only_changes: bool) -> Snapshot | None:
        is_new = not self._is_listed
        await self._read_expired(at_once=is_new)
        try:
            if is_new:
                await self._list()
            try:
                moment_ms = await self._read_moment()
            except PositionLost:
                await self._list()
                moment_ms = await self._read_moment()
        except PositionLost:
            raise StoreUnavailable("the store changes faster than it can be listed") from None
        rows = await self._packer.flush()
        if rows or is_new or not only_changes:
            await self._check_references(rows)
        run = await self._repository.put_run(rows)
        if run is None and only_changes and not is_new:
            self.moment_ms = moment_ms
            return None
        self._runs += [] if run is None else [run]
        await (self._merge_in_background() if only_changes else self._merge())
        snapshot = await self._put_snapshot(moment_ms)
        self.moment_ms = moment_ms
        for name in self._checkpoints:
            await self._repository.target.delete(name)
        self._checkpoints = []
        return snapshot

    async def close(self) -> None:
        """Stop what is under way."""
        await self._stop_merging()
        await self._packer.close()

    async def _list(self) -> None:
        """Read what differs from the newest backup."""
        await self._stop_merging()
        await self._repository.target.delete_leftovers()
        await self._source.follow()
        known = await self._load_newest()
        previous = next(known, None)
        async for page in self._source.list_pages():
            changed: list[str] = []
            for key, etag in page:
                if key.startswith(EXCLUDED):
                    continue
                order = split_key(key)
                while previous is not None and previous.order < order:
                    self._remove(previous)
                    previous = next(known, None)
                if previous is not None and previous.order == order:
                    is_same = previous.etag == etag
                    self._packer.remember(previous)
                    previous = next(known, None)
                    if is_same:
                        continue
                changed.append(key)
            async for rows in self._source.load(changed):
                for row in await self._add(rows):
                    if (file := await self._open(row)) is not None:
                        await self._read_file(row, file)
            await self._record_progress()
        while previous is not None:
            self._remove(previous)
            previous = next(known, None)
        self._is_listed = True

    async def _load_newest(self) -> Iterator[BackupEntry]:
        """Return the entries of the newest snapshot, which this backup continues."""
        self._runs, self._base = [], None
        try:
            newest = await self._repository.newest(lambda error: self._on_problem("", str(error)))
            if newest is None:
                return iter(())
            entries = await self._repository.entries(newest)
        except BackupDamaged as error:
            self._on_problem("", f"the newest snapshot cannot be used, so everything is stored anew: {error}")
            return iter(())
        self._runs, self._base = [*newest.runs], newest
        self._newest_ms = max(self._newest_ms, newest.taken_ms)
        return entries

    def _remove(self, entry: BackupEntry) -> None:
        self._packer.remember(entry)
        self._packer.add_removed(entry.key)
        self.report.objects += 1

    async def _read_moment(self) -> int:
        """Read what changed, until all of it is of one moment. Returns that moment, in milliseconds."""
        for left in reversed(range(_ROUNDS)):
            again, self._again = self._again, {}
            moment_ms = self._now_ms()
            changes = self._source.changes(exclusive=left == 0, also=sorted(again))
            opened: list[tuple[CapturedRow, FileParts]] = []
            try:
                async with aclosing(changes):
                    async for rows in changes:
                        for row in await self._add(rows):
                            if len(opened) == _MAX_OPEN:
                                await self._read_file(*opened.pop())
                            if (file := await self._open(row)) is not None:
                                opened.append((row, file))
                while opened:
                    await self._read_file(*opened.pop())
            except BaseException:
                self._again |= again
                raise
            finally:
                for _, file in opened:
                    file.close()
            if not self._again:
                break
        for key, why in self._again.items():
            self.report.unreadable += 1
            self._on_problem(key, why)
        self._again = {}
        return moment_ms

    async def _add(self, rows: list[CapturedRow]) -> list[CapturedRow]:
        """Add documents, and return the rows of files."""
        rows = [row for row in rows if not row.key.startswith(EXCLUDED)]
        self.report.objects += len(rows)
        self.report.bytes_read += sum(len(row.body or b"") for row in rows)
        files = await asyncio.to_thread(self._packer.add_documents, rows)
        await self._packer.store_full()
        return files

    async def _open(self, row: CapturedRow) -> FileParts | None:
        """Open a file. Add it and return None if its bytes are stored; None, too, if it is lost or too
        long."""
        assert row.sha256 is not None, "only files are opened"
        if (places := self._packer.find(row.sha256, row.size)) is not None:
            self._packer.add_file(row, places)
            return None
        if (row.size or 0) > MAX_FILE_BYTES:
            self._again[row.key] = (
                f"the file has {row.size} bytes, and a backup takes no more than {MAX_FILE_BYTES}"
            )
            return None
        file = await self._source.open(row)
        if file is None:
            self._again[row.key] = "the file is lost"
        return file

    async def _read_file(self, row: CapturedRow, file: FileParts) -> None:
        """Store the bytes of a file, if they are those of the row. Otherwise the file is read again."""
        digest = hashlib.sha256()
        places = []
        try:
            async with aclosing(file.read()) as parts:
                async for part in parts:
                    await asyncio.to_thread(digest.update, part)
                    places.append(await asyncio.to_thread(self._packer.add, part, row.content_type))
                    await self._packer.store_full()
                    self.report.bytes_read += len(part)
        except Unreadable as error:
            self._again[row.key] = str(error)
            return
        finally:
            file.close()
        if digest.hexdigest() == row.sha256:
            self._packer.add_file(row, tuple(places))
        else:
            self._again[row.key] = f"its sha256 is {digest.hexdigest()} and should be {row.sha256}"

    async def _record_progress(self) -> None:
        """Write a snapshot that is not complete, if enough has been stored since the last one."""
        is_due = self.report.bytes_read - self._checkpoint_at >= CHECKPOINT_BYTES
        if is_due or len(self._packer) >= CHECKPOINT_ENTRIES:
            self._checkpoint_at = self.report.bytes_read
            rows = await self._packer.flush()
            await self._check_references(rows)
            run = await self._repository.put_run(rows)
            self._runs += [] if run is None else [run]
            await self._merge()
            checkpoint = await self._put_snapshot(self._now_ms(), is_complete=False)
            self._checkpoints.append(checkpoint.name)

    async def _check_references(self, rows: Sequence[Row]) -> None:
        """Raise _Outdated if something that the next snapshot would refer to is deleted, or if a `prune` may
        delete it."""
        repository, base = self._repository, self._base
        if base is not None and await repository.target.get(base.name) is None:
            raise _Outdated
        packs = {part[0] for row in rows if len(row) > 1 for part in row[7]}
        reused = packs - self._packer.written
        now_ms = self._now_ms()
        is_late = not 0 <= now_ms - self._vouched_ms < _VOUCHED_MS
        await self._read_expired(at_once=is_late or bool(reused))
        pages = {path_of(PAGES, page) for run in self._runs for page in run.pages}
        if is_late:
            # Notes go with the files that they name, so look which files are there.
            reused = packs
            named = pages | {path_of(PACKS, pack) for pack in packs | self._packer.known_packs()}
            named.difference_update(
                await repository.target.names(PACKS), await repository.target.names(PAGES)
            )
            repository.expired |= named
            self._packer.forget(repository.expired)
            self._vouched_ms = now_ms
        if any(path_of(PACKS, pack) in repository.expired for pack in reused):
            raise _Outdated
        if base is not None and not repository.expired.isdisjoint(pages):
            # They were merged since the last snapshot, and it names those that they were merged from.
            await self._stop_merging()
            self._runs = [*base.runs]

    async def _read_expired(self, *, at_once: bool) -> None:
        """Read which files a `prune` may delete, and forget them, unless that was done a short time ago."""
        now_ms = self._now_ms()
        if at_once or not 0 <= now_ms - self._checked_ms < _CHECK_EVERY_MS:
            notes = await expired_files(self._repository)
            self._repository.expired = {name for note in notes for name in note.files}
            self._packer.forget(self._repository.expired)
            self._checked_ms = now_ms

    async def _put_snapshot(self, moment_ms: int, *, is_complete: bool = True) -> Snapshot:
        self._newest_ms = max(moment_ms, self._newest_ms + 1)
        snapshot = Snapshot(
            self._newest_ms,
            [*self._runs],
            self._source.change,
            is_complete=is_complete,
            store=self._store,
            unreadable=self.report.unreadable,
        )
        self._base = written = await self._repository.put_snapshot(snapshot)
        self._vouched_ms = self._now_ms()
        self._packer.written.clear()
        self.report.bytes_written = self._repository.bytes_written
        self.report.files_written = self._repository.files_written
        return written

    async def _merge(self) -> None:
        """Merge runs while there are many of one size. Later ones may be added meanwhile."""
        while count := runs_to_merge(self._runs):
            end = len(self._runs)
            start = end - count
            merged = await self._repository.merge(self._runs[start:end], is_all=start == 0)
            self._runs[start:end] = merged

    async def _stop_merging(self) -> None:
        if self._merging is not None:
            self._merging.cancel()
            await asyncio.gather(self._merging, return_exceptions=True)
            self._merging = None

    async def _merge_in_background(self) -> None:
        """Begin to merge unless a merge is under way, so that the next snapshot need not wait for it."""
        if self._merging is not None and self._merging.done():
            self._merging.result()
            self._merging = None
        if self._merging is None:
            self._merging = asyncio.create_task(self._merge())
