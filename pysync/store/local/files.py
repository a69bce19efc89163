"""The files of the local store: their rows in the database, and the files on disk."""

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from mimetypes import MimeTypes
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

from pysync._core import split_key
from pysync.cache import CACHED_ENTRIES
from pysync.errors import StoreUnavailable
from pysync.protocol import OCTET_STREAM
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import DATABASE_ERRORS
from pysync.store.local import tables
from pysync.store.local.disk import (
    TEMP_FOLDER,
    FileDigest,
    FileFingerprint,
    FileTree,
    TempFile,
    in_thread,
    sha256_of,
    translate_os_errors,
    xxh3_of,
)
from pysync.store.local.file_reader import STEP_BYTES, FileReader
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.local.tables import GET_FILE, FileRow, file_row
from pysync.store.types import DAMAGED_REASON, DamagedFile, FileStat, Leftover, OpenFile, Pace, clamp_range

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CHECKED_BYTES: Final = 1_048_576
"""Length up to which a file is checked whenever it is read. A longer one is checked when its size, time or
inode is another, and by `verify`."""
LOST_REASON: Final = "the file is lost: push it again, or copy it from a backup"
_OF_ONE_FILE: Final = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE)
"""Errors of reading what lies at the path of one file: a broken block, or something that is no file."""
TEMP_MAX_AGE_MS: Final = 86_400_000
"""Age from which a temporary file that no process writes is removed when the folder is opened."""
FULL_BELOW_BYTES: Final = 1_048_576
"""Free space below which a disk counts as full: the server does not wait until nothing can be written."""
FREE_FROM_BYTES: Final = 4 * FULL_BELOW_BYTES
"""Free space that a disk needs after that, so that readiness does not come and go with every write."""


class StagedFile(NamedTuple):
    """A file that was received completely. It survives a power failure once a row names it."""

    temp_file: TempFile
    sha256: str
    fingerprint: FileFingerprint
    xxh3: str


def _commit(
    cursor: sqlite3.Cursor,
    write: Callable[[sqlite3.Cursor, RenameJournal, TempFile, tuple[Any, ...], *Ts], T],
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    *args: *Ts,
) -> T:
    """Return the result of `write`. If it raises, the staged file is discarded here, because the caller may
    have been cancelled. If it was, raises StoreUnavailable: another process may have replaced the file since.
    """
    if temp_file.is_abandoned:
        temp_file.discard()
        raise StoreUnavailable("the caller has given up")
    try:
        return write(cursor, renames, temp_file, row, *args)
    except DATABASE_ERRORS:
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


def _unreadable(error: StoreUnavailable) -> str | None:
    """Return why the file at one path cannot be read; None if other files cannot be read either."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _OF_ONE_FILE:
        return f"it cannot be read: {cause.strerror}"
    return None


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
        self._probe_bytes = FULL_BELOW_BYTES

    async def recover(self) -> None:
        """Finish the operations that killed processes left unfinished. Raises StoreUnavailable."""
        await self._writer.submit(self._renames.recover)
        try:
            await self.remove_leftovers(self._now_ms() - TEMP_MAX_AGE_MS)
        except StoreUnavailable as error:  # such as a file of another user
            log.warning("failed to remove incomplete files: %s", error.__cause__)

    async def purge_deleted(self) -> None:
        """Finish all deletions, and remove the temporary files of dead processes. Raises StoreUnavailable."""
        await self._writer.submit(self._renames.recover)
        await self.remove_leftovers(inf)

    async def remove_leftovers(self, before_ms: float, *, dry_run: bool = False) -> list[Leftover]:
        """See `Store.remove_leftovers`: temporary files of dead processes."""
        locked = await in_thread(self._tree.lock_abandoned)
        found = list[Leftover]()
        try:
            # Read once they are locked: a file that no row names now is never committed.
            named = {name for (name,) in self._reader.rows("SELECT name FROM arriving")}
            for name in locked.keys() - named:
                stat = os.fstat(locked[name])
                if stat.st_mtime * 1000 < before_ms:
                    found.append(Leftover("temporary_files", f"{TEMP_FOLDER}/{name}", stat.st_size))
                    if not dry_run:
                        await in_thread(self._tree.remove_temp_file, name)
            return found
        finally:
            for fd in locked.values():
                os.close(fd)

    async def probe(self) -> None:
        """Raise StoreUnavailable if nothing can be written, or the disk is nearly full."""
        size, self._probe_bytes = self._probe_bytes, FREE_FROM_BYTES
        await in_thread(self._tree.probe, self._new_etag(), size)
        self._probe_bytes = FULL_BELOW_BYTES

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
        reader = FileReader(self._tree.path(key))
        try:
            found = await self._locate(key, row, reader)
            if found is None:
                reader.close()
                return None
            row, stamp = found
            if stamp.size <= CHECKED_BYTES:
                await self._check_body(key, row, stamp, await reader.read(stamp.size))
            else:
                await self._check_file(key, row, stamp, reader)
        except BaseException:
            reader.close()
            raise
        begin, finish = clamp_range(stamp.size, start, end)
        reader.select(begin, finish)
        etag, content_type, modified_ms, sha256, *_ = row
        size = stamp.size
        return OpenFile(size, sha256, content_type, modified_ms, begin, finish, reader, reader, etag=etag)

    async def verify(self, key: str, pace: Pace) -> FileStat | None:
        """See `Store.verify`."""
        if (row := self._row(key)) is None:
            return None
        reader = FileReader(self._tree.path(key))
        try:
            found = await self._locate(key, row, reader)
            if found is None:
                return None
            digest, at = FileDigest(), 0
            while size := await in_thread(reader.hash_into, digest, at):
                at += size
                await pace(size)
        except StoreUnavailable as error:
            if (why := _unreadable(error)) is not None:
                raise DamagedFile(why, row.etag) from error
            raise
        finally:
            reader.close()
        row, stamp = found
        await self._record(key, row, stamp, digest.sha256, digest.xxh3)
        return FileStat(at, row.sha256, row.content_type, row.modified_ms, etag=row.etag)

    async def adopt(self, key: str) -> str:
        """See `TransactionalStore.adopt`."""
        self.check_key(key)
        reader = FileReader(self._tree.path(key))
        try:
            with translate_os_errors(), _log_symlinks(key):
                self._tree.check_folders(key)
                stamp = reader.open()
            if stamp is None:
                raise ValueError("there is no file")
            digest = await in_thread(reader.digest)
            await in_thread(reader.flush)
        except StoreUnavailable as error:
            if (why := _unreadable(error)) is not None:
                raise ValueError(why) from error
            raise
        finally:
            reader.close()
        await in_thread(self._tree.flush, [key])
        content_type = MimeTypes().guess_type(key)[0] or OCTET_STREAM
        row = FileRow(self._new_etag(), content_type, self._now_ms(), digest.sha256, stamp, digest.xxh3)
        await self._writer.submit(tables.adopt_file, self._tree, row, key)
        return digest.sha256

    @asynccontextmanager
    async def stage(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[StagedFile]:
        """Yield the chunks as a file, flushed to disk beside the others. Leaving the context discards a file
        that was not committed."""
        temp_file = self._tree.temp_file(self._new_etag())
        try:
            pieces, size = list[bytes](), 0
            async for chunk in chunks:
                if pieces and size + len(chunk) > STEP_BYTES:
                    await in_thread(temp_file.append, pieces)
                    pieces, size = [], 0
                pieces.append(chunk)
                size += len(chunk)
            digest, stamp = await in_thread(temp_file.finish, pieces)
            yield StagedFile(temp_file, digest.sha256, stamp, digest.xxh3)
        finally:
            if not temp_file.is_committed:
                await in_thread(temp_file.discard)

    async def commit(
        self,
        staged: StagedFile,
        write: Callable[[sqlite3.Cursor, RenameJournal, TempFile, tuple[Any, ...], *Ts], T],
        content_type: str,
        *args: *Ts,
    ) -> T:
        """Return the result of `tables.insert_file` or its like, which writes the row of a staged file. If it
        is cancelled before the transaction begins, nothing is written."""
        _, sha256, stamp, xxh3 = staged
        row = (staged.temp_file.name, content_type, self._now_ms(), sha256, *stamp, xxh3)
        try:
            return await self._writer.submit(_commit, write, self._renames, staged.temp_file, row, *args)
        except asyncio.CancelledError:
            # The write may have begun, and is given up otherwise. It discards the file.
            staged.temp_file.is_committed = staged.temp_file.is_abandoned = True
            raise

    async def unlink(self, key: str) -> None:
        """Remove the file at `key`, which was staged for deletion."""
        await self._writer.submit(self._renames.unlink, key)

    def _row(self, key: str) -> FileRow | None:
        """Return the row of a file, None if there is none. Cached while the database does not change."""
        version = self._reader.version()
        if version != self._row_cache_version or len(self._row_cache) >= CACHED_ENTRIES:
            self._row_cache.clear()
            self._row_cache_version = version
        try:
            return self._row_cache[key]
        except KeyError:
            row = self._row_cache[key] = file_row(self._reader.rows(GET_FILE, *split_key(key)))
            return row

    async def _locate(
        self, key: str, row: FileRow | None, reader: FileReader
    ) -> tuple[FileRow, FileFingerprint] | None:
        """Open the file at `key` in `reader`, and return its row, beginning with `row`, and its fingerprint;
        None if the file is gone. Raises DamagedFile if it is lost."""
        while row is not None:
            with translate_os_errors(), _log_symlinks(key):
                if (stamp := reader.open()) is not None and stamp == row.fingerprint:
                    return row, stamp
                self._tree.check_folders(key)
            # It is being written or deleted right now, or the process that did so was killed, or is slow.
            unfitting = await self._writer.submit(tables.find_stale_row, self._renames, self._tree, key)
            if unfitting is not None:
                row, stamp = unfitting
                if stamp is None:
                    self._tree.check()
                    raise DamagedFile(LOST_REASON, row.etag)
                with translate_os_errors(), _log_symlinks(key):
                    is_same = reader.open() == stamp
                if is_same:
                    return row, stamp
            row = self._row(key)
        return None

    async def _check_body(self, key: str, row: FileRow, stamp: FileFingerprint, body: bytes) -> None:
        """Raise DamagedFile unless `body` is the content that was written."""
        xxh3 = xxh3_of(body)
        if xxh3 != row.xxh3:
            await self._record(key, row, stamp, await in_thread(sha256_of, body), xxh3)
        elif row.is_damaged or stamp != row.fingerprint:
            await self._record(key, row, stamp, row.sha256, xxh3)

    async def _check_file(self, key: str, row: FileRow, stamp: FileFingerprint, reader: FileReader) -> None:
        """Raise DamagedFile unless the file in `reader` is what was written, or has not been touched since it
        was found right."""
        if row.is_damaged and stamp[1:] == row.fingerprint[1:]:
            raise DamagedFile(DAMAGED_REASON, row.etag)
        if stamp != row.fingerprint:
            digest = await in_thread(reader.digest)
            await self._record(key, row, stamp, digest.sha256, digest.xxh3)

    async def _record(self, key: str, row: FileRow, stamp: FileFingerprint, sha256: str, xxh3: str) -> None:
        """Record the hashes of the file that has this fingerprint. Raises DamagedFile if it is not what was
        written."""
        if is_damaged := sha256 != row.sha256:
            kept = stamp._replace(size=row.fingerprint.size)
            checked = row._replace(fingerprint=kept, is_damaged=True)
        else:
            checked = row._replace(fingerprint=stamp, xxh3=xxh3, is_damaged=False)
        if checked != row:
            with suppress(StoreUnavailable):  # a full disk is still readable
                await self._writer.submit(tables.set_file_checked, key, checked)
        if is_damaged:
            raise DamagedFile(f"its sha256 is {sha256} and should be {row.sha256}", row.etag)
