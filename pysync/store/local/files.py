"""The files of the local store: their rows in the database, and the files on disk."""

import asyncio
import errno
import hashlib
import logging
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

from pysync._core import split_key
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.base import DAMAGED_REASON, DamagedFile, FileStat, OpenFile, Pace, clamp_range
from pysync.store.local import file_merge, tables
from pysync.store.local.disk import (
    FileFingerprint,
    FileReader,
    FileTree,
    TempFile,
    in_thread,
    translate_os_errors,
)
from pysync.store.local.tables import GET_FILE, FileRow, RenameJournal, file_row

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WRITE_CHUNK_BYTES: Final = 1_048_576
"""Bytes of an upload that are collected before a thread writes them to disk. Most files fit at once."""
LOST_REASON: Final = "the file is lost: push it again, or copy it from a backup"
CACHED_ROWS: Final = 1_024
"""Maximum number of cached rows. Any write clears the cache."""


class StagedFile(NamedTuple):
    """A file that was received completely. It survives a power failure once a row names it."""

    temp_file: TempFile
    sha256: str
    fingerprint: FileFingerprint


def _commit(
    cursor: sqlite3.Cursor,
    write: Callable[[sqlite3.Cursor, RenameJournal, TempFile, tuple[Any, ...], *Ts], T],
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    *args: *Ts,
) -> T:
    """Return the result of `write`. If it raises, the staged file is discarded here, because the caller may
    have been cancelled."""
    try:
        return write(cursor, renames, temp_file, row, *args)
    except sqlite3.Error:
        raise  # the group is rolled back, and `RenameJournal` discards the file
    except Exception:
        temp_file.discard()
        raise


@contextmanager
def _log_symlinks(key: str) -> Iterator[None]:
    """Log a symbolic link that was met on the path of a file."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            log.critical(
                "refused to follow a symbolic link on the way to the file at %r: %s", key, error.filename
            )
        raise


class LocalFiles:
    """The files below a folder, of a store whose rows `reader` reads and `writer` writes."""

    def __init__(
        self,
        tree: FileTree,
        renames: RenameJournal,
        writer: GroupCommit,
        reader: SnapshotReader,
        new_etag: Callable[[], str],
        now_ms: Callable[[], int],
    ) -> None:
        self._tree = tree
        self._renames = renames
        self._writer = writer
        self._reader = reader
        self._row_cache: dict[str, FileRow | None] = {}
        self._row_cache_version = -1
        self._new_etag = new_etag
        self._now_ms = now_ms

    async def recover(self) -> None:
        """Finish the operations that killed processes left unfinished. Raises StoreUnavailable."""
        await self._writer.submit(self._renames.recover)
        named = {name for (name,) in self._reader.rows("SELECT name FROM arriving")}
        await in_thread(self._tree.clear, named)

    async def probe(self) -> None:
        """Raise StoreUnavailable if nothing can be written."""
        await in_thread(self._tree.probe, self._new_etag())

    def check_key(self, key: str) -> None:
        """Raise ValueError for a key that no file can have."""
        split_key(key)
        self._tree.path(key)

    async def stat(self, key: str) -> FileStat | None:
        """See `Store.stat`."""
        row = self._row(key)
        if row is None:
            return None
        with translate_os_errors():
            stamp = self._tree.fingerprint(key)
        if stamp == row.fingerprint and not row.is_damaged:
            return FileStat(stamp.size, row.sha256, row.content_type, row.modified_ms, etag=row.etag)
        file = await self.open(key, 0, 0)
        if file is None:
            return None
        await file.chunks.aclose()
        return file.stat

    async def open(self, key: str, start: int, end: int | None) -> OpenFile | None:
        """See `Store.open`."""
        if (row := self._row(key)) is None:
            return None
        outgoing = FileReader(self._tree.path(key))
        try:
            found = await self._reconcile(key, row, outgoing)
            if found is not None and found.is_damaged:
                raise DamagedFile(DAMAGED_REASON, found.etag)
        except BaseException:
            outgoing.close()
            raise
        if found is None:
            outgoing.close()
            return None
        size = found.fingerprint.size
        begin, finish = clamp_range(size, start, end)
        outgoing.select(begin, finish)
        etag, content_type, modified_ms, sha256, *_ = found
        return OpenFile(size, sha256, content_type, modified_ms, begin, finish, outgoing, outgoing, etag=etag)

    async def verify(self, key: str, pace: Pace) -> FileStat | None:
        """See `Store.verify`."""
        if (row := self._row(key)) is None:
            return None
        outgoing = FileReader(self._tree.path(key))
        try:
            found = await self._reconcile(key, row, outgoing)
            if found is None:
                return None
            digest, at = hashlib.sha256(), 0
            while size := await in_thread(outgoing.hash_into, digest, at):
                at += size
                await pace(size)
        finally:
            outgoing.close()
        is_damaged = digest.hexdigest() != found.sha256
        if is_damaged != found.is_damaged:
            await self._writer.submit(tables.set_file_damaged, key, found.etag, is_damaged)
        if is_damaged:
            why = f"its sha256 is {digest.hexdigest()} and should be {found.sha256}"
            raise DamagedFile(why, found.etag)
        return FileStat(at, found.sha256, found.content_type, found.modified_ms, etag=found.etag)

    @asynccontextmanager
    async def stage(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[StagedFile]:
        """Yield the chunks as a file, flushed to disk beside the others. Leaving the context discards a file
        that was not committed."""
        incoming = self._tree.temp_file(self._new_etag())
        try:
            pieces, size = list[bytes](), 0
            async for chunk in chunks:
                if pieces and size + len(chunk) > WRITE_CHUNK_BYTES:
                    await in_thread(incoming.append, pieces)
                    pieces, size = [], 0
                pieces.append(chunk)
                size += len(chunk)
            sha256, stamp = await in_thread(incoming.finish, pieces)
            yield StagedFile(incoming, sha256, stamp)
        finally:
            if not incoming.is_committed:
                await in_thread(incoming.discard)

    async def commit(
        self,
        staged: StagedFile,
        write: Callable[[sqlite3.Cursor, RenameJournal, TempFile, tuple[Any, ...], *Ts], T],
        content_type: str,
        *args: *Ts,
    ) -> T:
        """Return the result of `tables.insert_file` or its like, which writes the row of a staged file."""
        row = (staged.temp_file.name, content_type, self._now_ms(), staged.sha256, *staged.fingerprint)
        try:
            return await self._writer.submit(_commit, write, self._renames, staged.temp_file, row, *args)
        except asyncio.CancelledError:
            staged.temp_file.is_committed = True  # the write continues
            raise

    async def unlink(self, key: str) -> None:
        """Remove the file at `key`, which was staged for deletion."""
        await self._writer.submit(self._renames.unlink, key)

    def _row(self, key: str) -> FileRow | None:
        """Return the row of a file, None if there is none. Cached while the database does not change."""
        version = self._reader.version()
        if version != self._row_cache_version or len(self._row_cache) >= CACHED_ROWS:
            self._row_cache.clear()
            self._row_cache_version = version
        try:
            return self._row_cache[key]
        except KeyError:
            row = self._row_cache[key] = file_row(self._reader.rows(GET_FILE, *split_key(key)))
            return row

    async def _reconcile(self, key: str, row: FileRow | None, reader: FileReader) -> FileRow | None:
        """Open the file at `key` in `reader`, and return its row, beginning with `row`; None if the file is
        gone. A row that does not match the file is corrected, because restoring files from a backup changes
        their fingerprints."""
        while row is not None:
            with translate_os_errors(), _log_symlinks(key):
                if reader.open() == row.fingerprint:
                    return row
                self._tree.check_folders(key)
            # It is being written or deleted right now, or the process that did so was killed, or is slow.
            unfitting = await self._writer.submit(file_merge.find_stale_row, self._renames, self._tree, key)
            if unfitting is not None:
                row, stamp = unfitting
                if stamp is None:
                    self._tree.check()
                    raise DamagedFile(LOST_REASON, row.etag)
                with translate_os_errors(), _log_symlinks(key):
                    is_same = reader.open() == stamp
                if is_same:
                    return await self._rehash(key, row, stamp, reader)
            row = self._row(key)
        return None

    async def _rehash(
        self, key: str, row: FileRow, fingerprint: FileFingerprint, reader: FileReader
    ) -> FileRow:
        sha256 = await in_thread(reader.sha256)
        if sha256 != row.sha256:
            was, is_ = row.sha256, sha256
            log.warning("the file of %r was replaced on disk: its sha256 was %s and is %s now", key, was, is_)
        etag = self._new_etag()
        fitting = row._replace(etag=etag, sha256=sha256, fingerprint=fingerprint, is_damaged=False)
        await self._writer.submit(tables.update_file, key, fitting, row.etag)
        return fitting
