"""The files of the embedded store: what their rows say, and what lies on disk."""

import asyncio
import errno
import hashlib
import logging
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

from pysync.sqlite.connection import GroupCommit
from pysync.store.base import ROTTEN, DamagedFile, File, FileStat, Pace, split_key, within
from pysync.store.local import file_merge, tables
from pysync.store.local.disk import FileTree, Incoming, Outgoing, Stamp, disk_errors, in_thread
from pysync.store.local.rename_journal import Arrivals
from pysync.store.local.tables import GET_FILE, FileRow, file_row

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PART_BYTES: Final = 1_048_576
"""How much of a file that comes in is gathered before a thread takes it to the disk: most files at once."""
LOST: Final = "the file is lost: push it again, or copy it from a backup"
RECENT_ROWS: Final = 1_024
"""Rows that are kept while nobody writes."""


class Flushed(NamedTuple):
    """A file that has come in whole, and survives the loss of power once a row names it."""

    incoming: Incoming
    sha256: str
    stamp: Stamp


def _placed(
    cursor: sqlite3.Cursor,
    write: Callable[[sqlite3.Cursor, Arrivals, Incoming, tuple[Any, ...], *Ts], T],
    arrivals: Arrivals,
    incoming: Incoming,
    row: tuple[Any, ...],
    *args: *Ts,
) -> T:
    """The result of `write`. What came in goes where it is refused: who sent it may have left meanwhile."""
    try:
        return write(cursor, arrivals, incoming, row, *args)
    except sqlite3.Error:
        raise  # the group is undone, and `rename_journal` knows what becomes of the file
    except Exception:
        incoming.discard()
        raise


@contextmanager
def _told_of_links(key: str) -> Iterator[None]:
    """Log a symbolic link that was met on the way to a file."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            log.critical(
                "refused to follow a symbolic link on the way to the file at %r: %s", key, error.filename
            )
        raise


class LocalFiles:
    """The files below a folder, of a store whose rows `read` reads and `writer` writes. `version` is a number
    that stays the same while no row is written."""

    def __init__(
        self,
        tree: FileTree,
        arrivals: Arrivals,
        writer: GroupCommit,
        read: Callable[..., Sequence[Any]],
        version: Callable[[], int],
        new_etag: Callable[[], str],
        now_ms: Callable[[], int],
    ) -> None:
        self._tree = tree
        self._arrivals = arrivals
        self._writer = writer
        self._read = read
        self._version = version
        self._recent: dict[str, FileRow | None] = {}
        self._recent_at = -1
        self._new_etag = new_etag
        self._now_ms = now_ms

    async def settle(self) -> None:
        """Finish what processes that were killed left half done. Raises StoreUnavailable."""
        await self._writer.submit(self._arrivals.settle)
        named = {name for (name,) in self._read("SELECT name FROM arriving")}
        await in_thread(self._tree.clear, named)

    async def probe(self) -> None:
        """Raises StoreUnavailable where nothing can be written."""
        await in_thread(self._tree.probe, self._new_etag())

    def check(self, key: str) -> None:
        """Raise ValueError for a key that no file can have."""
        split_key(key)
        self._tree.path(key)

    async def stat(self, key: str) -> FileStat | None:
        row = self._row(key)
        if row is None:
            return None
        with disk_errors():
            stamp = self._tree.stamp(key)
        if stamp == row.stamp and not row.is_damaged:
            return FileStat(stamp.size, row.sha256, row.content_type, row.modified_ms, etag=row.etag)
        file = await self.open(key, 0, 0)
        if file is None:
            return None
        await file.chunks.aclose()
        return file.stat

    async def open(self, key: str, start: int, end: int | None) -> File | None:
        if (row := self._row(key)) is None:
            return None
        outgoing = Outgoing(self._tree.path(key))
        try:
            found = await self._found(key, row, outgoing)
            if found is not None and found.is_damaged:
                raise DamagedFile(ROTTEN, found.etag)
        except BaseException:
            outgoing.close()
            raise
        if found is None:
            outgoing.close()
            return None
        size = found.stamp.size
        begin, finish = within(size, start, end)
        outgoing.select(begin, finish)
        etag, content_type, modified_ms, sha256, *_ = found
        return File(size, sha256, content_type, modified_ms, begin, finish, outgoing, etag=etag)

    async def verify(self, key: str, pace: Pace) -> FileStat | None:
        if (row := self._row(key)) is None:
            return None
        outgoing = Outgoing(self._tree.path(key))
        try:
            found = await self._found(key, row, outgoing)
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
            await self._writer.submit(tables.mark_file, key, found.etag, is_damaged)
        if is_damaged:
            why = f"its sha256 is {digest.hexdigest()} and should be {found.sha256}"
            raise DamagedFile(why, found.etag)
        return FileStat(at, found.sha256, found.content_type, found.modified_ms, etag=found.etag)

    @asynccontextmanager
    async def incoming(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Flushed]:
        """The chunks, flushed to disk beside the files. Leaving discards what has not been placed."""
        incoming = self._tree.incoming(self._new_etag())
        try:
            pieces, size = list[bytes](), 0
            async for chunk in chunks:
                if pieces and size + len(chunk) > PART_BYTES:
                    await in_thread(incoming.append, pieces)
                    pieces, size = [], 0
                pieces.append(chunk)
                size += len(chunk)
            sha256, stamp = await in_thread(incoming.finish, pieces)
            yield Flushed(incoming, sha256, stamp)
        finally:
            if not incoming.is_given_away:
                await in_thread(incoming.discard)

    async def place(
        self,
        flushed: Flushed,
        write: Callable[[sqlite3.Cursor, Arrivals, Incoming, tuple[Any, ...], *Ts], T],
        content_type: str,
        *args: *Ts,
    ) -> T:
        """The result of one of the functions `writes.place_...`, which writes the row of what came in."""
        row = (flushed.incoming.name, content_type, self._now_ms(), flushed.sha256, *flushed.stamp)
        try:
            return await self._writer.submit(_placed, write, self._arrivals, flushed.incoming, row, *args)
        except asyncio.CancelledError:
            flushed.incoming.is_given_away = True  # the write goes on
            raise

    async def unlink(self, key: str) -> None:
        """Remove the doomed file at `key`."""
        await self._writer.submit(self._arrivals.unlink, key)

    def _row(self, key: str) -> FileRow | None:
        """The row of a file, None where there is none; looked up once while the database stays as it is."""
        version = self._version()
        if version != self._recent_at or len(self._recent) >= RECENT_ROWS:
            self._recent.clear()
            self._recent_at = version
        try:
            return self._recent[key]
        except KeyError:
            row = self._recent[key] = file_row(self._read(GET_FILE, *split_key(key)))
            return row

    async def _found(self, key: str, row: FileRow | None, outgoing: Outgoing) -> FileRow | None:
        """The row, beginning with `row`, of the file that `outgoing` now holds open; None where it is gone.
        A row that fits no file is corrected: whoever restores files gives them other stamps."""
        while row is not None:
            with disk_errors(), _told_of_links(key):
                if outgoing.open() == row.stamp:
                    return row
                self._tree.check_folders(key)
            # Written or deleted this very moment; or the one who did it was killed, or works slowly.
            unfitting = await self._writer.submit(file_merge.look, self._arrivals, self._tree, key)
            if unfitting is not None:
                row, stamp = unfitting
                if stamp is None:
                    self._tree.check()
                    raise DamagedFile(LOST, row.etag)
                with disk_errors(), _told_of_links(key):
                    is_same = outgoing.open() == stamp
                if is_same:
                    return await self._correct(key, row, stamp, outgoing)
            row = self._row(key)
        return None

    async def _correct(self, key: str, row: FileRow, stamp: Stamp, outgoing: Outgoing) -> FileRow:
        sha256 = await in_thread(outgoing.sha256)
        if sha256 != row.sha256:
            was, is_ = row.sha256, sha256
            log.warning("the file of %r was replaced on disk: its sha256 was %s and is %s now", key, was, is_)
        fitting = row._replace(etag=self._new_etag(), sha256=sha256, stamp=stamp, is_damaged=False)
        await self._writer.submit(tables.correct_file, key, fitting, row.etag)
        return fitting
