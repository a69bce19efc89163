"""Merges of the local store: a new folder is built beside the existing one, and the two are swapped.

    DIR/merging/<id>   the folder being built; after the swap, the old one
    DIR/merging/lock   locked by the process that merges: one at a time

1. A transaction checks the files to merge and writes a row of `merge`. From now on triggers record in `came`
   the files of the folder that are created, changed or removed, until the row is deleted.
2. The new folder receives the merged file, and hard links to all files that stay.
3. A transaction, which excludes other writers, links the files that were created since, swaps the folders and
   writes the rows. Its duration does not depend on the size of the folder.

A crash leaves the row of `merge`. If the merged file still lies in the new folder, the swap has not happened,
and `FolderSwapMerger.recover` removes the leftovers. Otherwise the folders were swapped, and the first
process to notice that in a transaction writes the rows: `FolderSwapMerger.recover`, or `find_stale_row` for a
reader that misses a file. The old folder is kept for a moment, for readers that are listing it.

The swap of the two folders is atomic: a reader sees one or the other, and never none.
"""

import asyncio
import ctypes
import errno
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import orjson

from pysync._core import split_key
from pysync.errors import StoreUnavailable
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import fsync_dir, make_private_dir
from pysync.store.local.disk import FileFingerprint, FileTree, TempFile, in_thread, translate_os_errors
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.local.tables import GET_FILE, PUT_FILE, FileRow, file_row
from pysync.store.types import EtagMismatch, Leftover, MergeRejected

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def swap_folders(one: Path, other: Path) -> None:
    """Exchange the names of two folders atomically. Raises MergeRejected if the kernel or the file system
    does not support that, OSError for any other failure."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise MergeRejected("this system's C library has no renameat2") from None
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    error = OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))
    if number in _UNSUPPORTED:
        raise MergeRejected(f"the file system of {other} cannot exchange two folders in one step") from error
    raise error


GRACE_S: Final = 1.0
"""Seconds for which an old folder is kept, so that readers that have opened it can finish listing it."""
PURGE_S: Final = 60.0
"""Seconds for which the merges of other processes are waited for."""

_LOCK: Final = "lock"
_MERGES: Final = "SELECT id, parent, name, file, merged FROM merge"
_COUNT_UNCHANGED = """
    SELECT count(*) FROM json_each(?) AS said
    JOIN object AS o ON o.parent = ? AND o.name = said.key AND o.sha256 = said.value"""
_FILES_BELOW = "SELECT 1 FROM object WHERE parent > ? AND parent < ? AND sha256 IS NOT NULL LIMIT 1"
_AT_KEY = "SELECT 1 FROM object WHERE parent = ? AND name = ?"
_PENDING_RENAMES = "SELECT key FROM arriving WHERE key > ? AND key < ?"
_TOUCHED = """
    SELECT c.name, o.sha256 IS NOT NULL FROM came AS c
    LEFT JOIN object AS o ON o.parent = c.parent AND o.name = c.name WHERE c.parent = ?"""
# They exist only during a merge, because every write of a document runs them too: with them, the thread that
# commits takes an eighth more for a push.
_RECORD_CHANGES: Final = (
    """CREATE TRIGGER came_new AFTER INSERT ON object WHEN NEW.sha256 IS NOT NULL
        BEGIN INSERT OR REPLACE INTO came VALUES(NEW.parent, NEW.name); END""",
    """CREATE TRIGGER came_changed AFTER UPDATE ON object
        WHEN NEW.sha256 IS NOT NULL OR OLD.sha256 IS NOT NULL
        BEGIN INSERT OR REPLACE INTO came VALUES(NEW.parent, NEW.name); END""",
    """CREATE TRIGGER came_gone AFTER DELETE ON object WHEN OLD.sha256 IS NOT NULL
        BEGIN INSERT OR REPLACE INTO came VALUES(OLD.parent, OLD.name); END""",
)
_STOP_RECORDING: Final = tuple(f"DROP TRIGGER IF EXISTS came_{name}" for name in ("new", "changed", "gone"))
_DELETE_MERGED = """
    DELETE FROM object WHERE parent = ? AND (name, sha256) IN (SELECT key, value FROM json_each(?))"""


class MergePlan(NamedTuple):
    """One merge. `values` are the columns of the row of the merged file, without its fingerprint; `merged`
    maps the names of the files that it replaces to their sha256."""

    id: str
    parent: str
    name: str
    values: tuple[str, str, int, str]
    merged: Mapping[str, str]

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """Return the plan in a row of `merge`."""
        id_, parent, name, values, merged = row
        return cls(id_, parent, name, tuple(orjson.loads(values)), orjson.loads(merged))

    @property
    def key(self) -> str:
        """The key of the merged file."""
        return f"{self.parent}/{self.name}"

    @property
    def row(self) -> tuple[str, ...]:
        """The plan as a row of `merge`."""
        values, merged = orjson.dumps(self.values).decode(), orjson.dumps(dict(self.merged)).decode()
        return (self.id, self.parent, self.name, values, merged)


class FolderSwapMerger:
    """The merges of one local store."""

    def __init__(
        self, files: FileTree, renames: RenameJournal, writer: GroupCommit, reader: SnapshotReader
    ) -> None:
        self._folder = _folder(files)
        self._files = files
        self._renames = renames
        self._writer = writer
        self._reader = reader
        self._merge_lock = asyncio.Lock()
        self._replaced_at = 0.0

    async def merge(self, temp_file: TempFile, plan: MergePlan) -> None:
        """Replace the files that `plan` names by the received file. Raises as `Store.merge` does. Once
        started it runs to its end, even if the caller is cancelled."""
        merging = asyncio.ensure_future(self._merge(temp_file, plan))
        try:
            await asyncio.shield(merging)
        except asyncio.CancelledError:
            await asyncio.wait({merging})
            raise

    async def recover(self) -> None:
        """Finish or undo the merges of dead processes, and remove leftovers."""
        if not self._reader.rows(_MERGES + " LIMIT 1") and not self._folder.exists():
            return
        async with self._exclusive() as is_alone:
            if is_alone:
                await self._recover()
                await self._sweep()

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool) -> list[Leftover]:
        """See `Store.remove_leftovers`: folders of merges."""
        old = await in_thread(_old_leftovers, self._folder, before_ms)
        if old and not dry_run:
            await self.recover()
        return [leftover for path, leftover in old if dry_run or not path.exists()]

    async def purge_deleted(self) -> None:
        """Wait until merges have ended and their old folders are removed. Raises StoreUnavailable if that
        takes longer than `PURGE_S`."""
        for _ in range(round(PURGE_S / GRACE_S)):
            await self.recover()
            if not await in_thread(_leftovers, self._folder):
                return
            await asyncio.sleep(GRACE_S)
        raise StoreUnavailable("another process merges files")

    async def close(self) -> None:
        """Remove the old folders of this store's merges."""
        if self._replaced_at:
            await asyncio.sleep(self._replaced_at + GRACE_S - time.monotonic())
            async with self._exclusive() as is_alone:
                if is_alone:
                    await self._sweep()

    async def _merge(self, temp_file: TempFile, plan: MergePlan) -> None:
        async with self._exclusive() as is_alone:
            if not is_alone:
                raise MergeRejected("another process merges files of this store")
            await self._recover()
            await self._sweep()
            try:
                await self._writer.submit(_begin, self._renames, plan)
                await in_thread(_build, self._files, temp_file, plan)
                await self._writer.submit(_finish, self._renames, self._files, plan)
            finally:
                # A finished merge has no row any more.
                await self._recover()
            self._replaced_at = time.monotonic()

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[bool]:
        """Yield True if this process excludes all other merges and recoveries, False if another one is at
        work."""
        async with self._merge_lock:
            lock = await in_thread(_try_lock, self._folder)
            try:
                yield lock is not None
            finally:
                if lock is not None:
                    os.close(lock)

    async def _recover(self) -> None:
        for row in self._reader.rows(_MERGES):
            plan = MergePlan.of(row)
            await self._writer.submit(_recover_merge, self._files, plan)

    async def _sweep(self) -> None:
        await in_thread(_sweep, self._folder)


def find_stale_row(
    cursor: sqlite3.Cursor, renames: RenameJournal, files: FileTree, key: str
) -> tuple[FileRow, FileFingerprint | None] | None:
    """Return the row of a file that does not match the file on disk, although no rename or merge is pending,
    and the actual fingerprint (None if the file is missing). Returns None if they match. Raises
    StoreUnavailable if a pending rename fails."""
    for pending in cursor.execute(_MERGES).fetchall():
        plan = MergePlan.of(pending)
        with translate_os_errors():
            if _is_swapped(cursor, files, plan):
                _write_rows(cursor, files, plan)
    renames.recover(cursor)
    row = file_row(cursor.execute(GET_FILE, split_key(key)).fetchall())
    if row is None or renames.is_staged(key):
        return None
    if renames.is_stuck(cursor, key):
        raise StoreUnavailable()
    with translate_os_errors():
        stamp = files.fingerprint(key)
    return None if stamp == row.fingerprint else (row, stamp)


def _begin(cursor: sqlite3.Cursor, renames: RenameJournal, plan: MergePlan) -> None:
    """Check that the files may be merged, and start to record changes in their folder."""
    _check_folder(cursor, plan)
    # A file change that is not recorded from here on is finished now, or still pending when the merge ends.
    renames.recover(cursor)
    cursor.execute("DELETE FROM came")
    for statement in _RECORD_CHANGES:
        cursor.execute(statement)
    cursor.execute("INSERT INTO merge VALUES(?, ?, ?, ?, ?)", plan.row)


def _check_folder(cursor: sqlite3.Cursor, plan: MergePlan) -> None:
    (as_said,) = cursor.execute(_COUNT_UNCHANGED, (plan.row[-1], plan.parent)).fetchone()
    at_key = cursor.execute(_AT_KEY, (plan.parent, plan.name)).fetchone()
    if as_said != len(plan.merged) or at_key is not None:
        raise EtagMismatch
    if cursor.execute(_FILES_BELOW, _key_range(plan.parent)).fetchone():
        raise _subfolder_error(plan)


def _build(files: FileTree, temp_file: TempFile, plan: MergePlan) -> None:
    """Create the new folder: the merged file, and links to all files that stay. The merged file comes first,
    because recovery decides by its location."""
    source, folder = Path(files.path(plan.parent)), _folder(files) / plan.id
    files.check_folders(plan.key)
    folder.mkdir(mode=0o700)
    _move_in(files, temp_file, folder / plan.name)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                raise _subfolder_error(plan)
            if entry.name not in plan.merged:
                _link(source / entry.name, folder / entry.name)
    os.chmod(folder, source.stat().st_mode & 0o7777)
    fsync_dir(folder)
    fsync_dir(folder.parent)


def _finish(cursor: sqlite3.Cursor, renames: RenameJournal, files: FileTree, plan: MergePlan) -> None:
    """Swap the folders and write the rows. Nothing has changed if it raises."""
    below = _key_range(plan.parent)
    # Files written in this very transaction are renamed after the swap.
    came: dict[str, int] = dict(cursor.execute(_TOUCHED, (plan.parent,)).fetchall())
    came.update((key.removeprefix(below[0]), 1) for (key,) in cursor.execute(_PENDING_RENAMES, below))
    if plan.name in came or not came.keys().isdisjoint(plan.merged):
        raise EtagMismatch
    is_below = cursor.execute("SELECT 1 FROM came WHERE parent > ? AND parent < ?", below).fetchone()
    if is_below or any("/" in name for name in came):
        raise _subfolder_error(plan)
    renames.recover(cursor)
    source, folder = Path(files.path(plan.parent)), _folder(files) / plan.id
    with translate_os_errors():
        for name, is_there in came.items():
            (folder / name).unlink(missing_ok=True)
            if is_there:
                _link(source / name, folder / name)
        if came:
            fsync_dir(folder)
        swap_folders(folder, source)
        try:
            fsync_dir(folder.parent)
            fsync_dir(source.parent)
            _write_rows(cursor, files, plan)
        except BaseException:
            swap_folders(folder, source)
            raise


def _recover_merge(cursor: sqlite3.Cursor, files: FileTree, plan: MergePlan) -> None:
    """End a merge whose process died or failed: finish it if the folders were swapped, otherwise discard
    it."""
    with translate_os_errors():
        if _is_swapped(cursor, files, plan):
            _write_rows(cursor, files, plan)
        else:
            _delete_plan(cursor, plan)
            shutil.rmtree(_folder(files) / plan.id, ignore_errors=True)


def _is_swapped(cursor: sqlite3.Cursor, files: FileTree, plan: MergePlan) -> bool:
    """Return True if the folders of a merge were swapped and its rows are not written yet."""
    if (_folder(files) / plan.id / plan.name).exists() or not os.path.exists(files.path(plan.key)):
        return False
    return cursor.execute(_AT_KEY, (plan.parent, plan.name)).fetchone() is None


def _write_rows(cursor: sqlite3.Cursor, files: FileTree, plan: MergePlan) -> None:
    """Update the rows to the content of the new folder."""
    stamp = FileFingerprint.of(files.path(plan.key))
    cursor.execute(_DELETE_MERGED, (plan.parent, plan.row[-1]))
    cursor.execute(PUT_FILE, (plan.parent, plan.name, *plan.values, *stamp, None, None))
    _delete_plan(cursor, plan)


def _delete_plan(cursor: sqlite3.Cursor, plan: MergePlan) -> None:
    for statement in _STOP_RECORDING:
        cursor.execute(statement)
    cursor.execute("DELETE FROM merge WHERE id = ?", (plan.id,))
    cursor.execute("DELETE FROM came")


def _key_range(parent: str) -> tuple[str, str]:
    """Return the two strings between which all keys below `parent` lie."""
    return parent + "/", parent + "0"


def _subfolder_error(plan: MergePlan) -> MergeRejected:
    return MergeRejected(f"{plan.parent} holds folders beside the files")


def _folder(files: FileTree) -> Path:
    return files.root.with_name("merging")


def _move_in(files: FileTree, temp_file: TempFile, path: Path) -> None:
    """Move the received file into the new folder."""
    try:
        files.move_out(temp_file.name, path)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise MergeRejected(f"{files.root} and {path.parent} lie in different file systems") from error
        raise


def _link(path: Path, target: Path) -> None:
    """Link a file, if it still exists."""
    try:
        os.link(path, target, follow_symlinks=False)
    except FileNotFoundError:
        return


def _try_lock(folder: Path) -> int | None:
    """Return the lock file of the merges of a store, locked; None while another process holds it."""
    make_private_dir(folder)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _sweep(folder: Path) -> None:
    """Remove the folders of finished merges. The caller excludes other merges, and no row of `merge` is left.
    A folder's ctime is the time of its swap."""
    before = time.time() - GRACE_S
    for path in _leftovers(folder):
        if path.stat().st_ctime <= before:
            shutil.rmtree(path, ignore_errors=True)


def _old_leftovers(folder: Path, before_ms: int) -> list[tuple[Path, Leftover]]:
    """Return the leftovers that are older, with the bytes of their files that lie nowhere else."""
    found = []
    for path in _leftovers(folder):
        if path.stat().st_ctime * 1000 < before_ms:
            stats = [entry.lstat() for entry in path.iterdir()]
            size = sum(stat.st_size for stat in stats if stat.st_nlink == 1)
            found.append((path, Leftover("merges", f"{folder.name}/{path.name}", size)))
    return found


def _leftovers(folder: Path) -> list[Path]:
    """Return the folders of merges under way and of finished ones."""
    return [path for path in folder.iterdir() if path.name != _LOCK] if folder.exists() else []
