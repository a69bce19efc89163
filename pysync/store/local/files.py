"""The files of the local store: their rows in the database, and the files on disk."""

import asyncio
import errno
import hashlib
import logging
import os
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from io import FileIO
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar, TypeVarTuple

from pysync._core import split_key
from pysync.errors import StoreUnavailable
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import DATABASE_ERRORS
from pysync.store.local import file_merge, tables
from pysync.store.local.disk import (
    TEMP_FOLDER,
    FileFingerprint,
    FileTree,
    TempFile,
    in_thread,
    translate_os_errors,
)
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.local.tables import GET_FILE, FileRow, file_row
from pysync.store.types import DAMAGED_REASON, DamagedFile, FileStat, Leftover, OpenFile, Pace, clamp_range

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CHUNK_BYTES: Final = 262_144
SEND_BYTES: Final = 1_048_576
"""Number of bytes per `sendfile` call."""
WRITE_CHUNK_BYTES: Final = 1_048_576
"""Bytes of an upload that are collected before a thread writes them to disk. Most files fit at once."""
LOST_REASON: Final = "the file is lost: push it again, or copy it from a backup"
CACHED_ROWS: Final = 1_024
"""Maximum number of cached rows. Any write clears the cache."""
FULL_BELOW_BYTES: Final = 1_048_576
"""Free space below which a disk counts as full: the server does not wait until nothing can be written."""
FREE_FROM_BYTES: Final = 4 * FULL_BELOW_BYTES
"""Free space that a disk needs after that, so that readiness does not come and go with every write."""
_CACHE_SAMPLE_STRIDE: Final = 65_536
"""Distance of the samples. The kernel caches and evicts files in ranges of about this length."""


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


class FileReader:
    """An open file: an asynchronous iterator over the bytes of a range.

    It keeps reading the file that it opened, even if the key is overwritten. Iterate to the end, or call
    `aclose`.
    """

    def __init__(self, path: str | Path, *, follows_links: bool = False) -> None:
        self._path = path
        self._flags = 0 if follows_links else os.O_NOFOLLOW
        self._file: FileIO | None = None
        self._at = self._end = 0

    def open(self) -> FileFingerprint | None:
        """Open the file at the path and return its fingerprint, or None if there is no file. Raises
        OSError."""
        self.close()
        try:
            self._file = open(self._path, "rb", buffering=0, opener=self._open)  # noqa: SIM115 - closed by close
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileFingerprint.of(self._file.fileno())

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | self._flags)

    def sha256(self) -> str:
        """Return the hex digest of the whole file, read anew."""
        assert self._file is not None
        return hashlib.file_digest(self._file, "sha256").hexdigest()

    def hash_into(self, digest: "hashlib._Hash", at: int) -> int:
        """Add the next bytes from `at` on to `digest`, and return their number, 0 at the end."""
        assert self._file is not None
        chunk = os.pread(self._file.fileno(), CHUNK_BYTES, at)
        digest.update(chunk)
        return len(chunk)

    def select(self, start: int, end: int) -> None:
        """Set the range of bytes to yield, [start, end)."""
        self._at, self._end = start, end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._file is None or self._at >= self._end:
            self.close()
            raise StopAsyncIteration
        fd, at, wanted = self._next(CHUNK_BYTES)
        if _is_cached(fd, at, wanted):
            with translate_os_errors():
                chunk = os.pread(fd, wanted, at)
        else:
            chunk = await in_thread(os.pread, fd, wanted, at)
        if not chunk:
            raise StoreUnavailable()  # truncated by someone else: abort the response, never shorten it
        self._at += len(chunk)
        return chunk

    async def ensure_cached(self) -> None:
        """Read the bytes that `send` sends next into memory, so that it does not wait for the disk. Raises
        StoreUnavailable."""
        fd, at, wanted = self._next(SEND_BYTES)
        if not _is_cached(fd, at, wanted):
            await in_thread(os.pread, fd, wanted, at)

    def send(self, connection: int) -> int:
        """Have the kernel send the next bytes to a socket, without copying them here. Returns the number of
        bytes sent, 0 once all are. Raises BlockingIOError if the socket accepts no bytes now, OSError if it
        fails, and StoreUnavailable if the file has become shorter."""
        fd, at, wanted = self._next(SEND_BYTES)
        if not wanted:
            return 0
        sent = os.sendfile(connection, fd, at, wanted)
        if not sent:
            raise StoreUnavailable()
        self._at += sent
        return sent

    def _next(self, max_bytes: int) -> tuple[int, int, int]:
        """Return the descriptor, and the position and number of the next bytes, at most `max_bytes`."""
        assert self._file is not None
        return self._file.fileno(), self._at, min(max_bytes, self._end - self._at)

    async def aclose(self) -> None:
        """Close the file. Harmless if it is closed."""
        self.close()

    def close(self) -> None:
        """Close the file. Harmless if it is closed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_cached(fd: int, start: int, size: int) -> bool:
    """Return True if these bytes of a file can probably be read without waiting for the disk. Only samples
    are checked: a non-blocking read of them all would be exact, but cost as much as the read itself."""
    byte = bytearray(1)
    try:
        for at in (*range(start, start + size - 1, _CACHE_SAMPLE_STRIDE), start + size - 1):
            os.preadv(fd, [byte], at, os.RWF_NOWAIT)
    except OSError:
        return False  # it would block, or the file system does not support the flag
    return True


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
        named = {name for (name,) in self._reader.rows("SELECT name FROM arriving")}
        await in_thread(self._tree.clear, named, self._now_ms())

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
            found = await self._reconcile(key, row, reader)
            if found is not None and found.is_damaged:
                raise DamagedFile(DAMAGED_REASON, found.etag)
        except BaseException:
            reader.close()
            raise
        if found is None:
            reader.close()
            return None
        size = found.fingerprint.size
        begin, finish = clamp_range(size, start, end)
        reader.select(begin, finish)
        etag, content_type, modified_ms, sha256, *_ = found
        return OpenFile(size, sha256, content_type, modified_ms, begin, finish, reader, reader, etag=etag)

    async def verify(self, key: str, pace: Pace) -> FileStat | None:
        """See `Store.verify`."""
        if (row := self._row(key)) is None:
            return None
        reader = FileReader(self._tree.path(key))
        try:
            found = await self._reconcile(key, row, reader)
            if found is None:
                return None
            digest, at = hashlib.sha256(), 0
            while size := await in_thread(reader.hash_into, digest, at):
                at += size
                await pace(size)
        finally:
            reader.close()
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
        temp_file = self._tree.temp_file(self._new_etag())
        try:
            pieces, size = list[bytes](), 0
            async for chunk in chunks:
                if pieces and size + len(chunk) > WRITE_CHUNK_BYTES:
                    await in_thread(temp_file.append, pieces)
                    pieces, size = [], 0
                pieces.append(chunk)
                size += len(chunk)
            sha256, stamp = await in_thread(temp_file.finish, pieces)
            yield StagedFile(temp_file, sha256, stamp)
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
        row = (staged.temp_file.name, content_type, self._now_ms(), staged.sha256, *staged.fingerprint)
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
