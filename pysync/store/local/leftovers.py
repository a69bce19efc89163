"""Leftovers in the folder of a local store: files that no row names, and a merge of version 0.1.0 that was
killed.

An upload gets its row before its name, and the file of a deletion is in the journal until it is gone. So a
file below `files` that neither a row nor the journal names is of no write under way: an earlier version
failed to delete it, or somebody put it there.

A process of version 0.1.0 that was killed in a merge of files left:

    DIR/merging/<id>   the folder that it built; after the exchange, the old one
    DIR/merging/lock   locked by the process that merges

Version 0.1.0 wrote a row of `merge`, built a second folder with the merged file and links to all files that
stay, exchanged the two folders, and then wrote the rows of their files. If the merged file does not lie in
the folder that it built, the folders were exchanged.
"""

import fcntl
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from pysync._core import split_key
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import make_private_dir
from pysync.store.local.disk import FileFingerprint, FileTree, in_thread, translate_os_errors
from pysync.store.local.tables import PENDING, PUT_FILE
from pysync.store.types import PAGE, Leftover

_UNNAMED: Final = """
    SELECT value FROM json_each(?) WHERE NOT EXISTS(
        SELECT 1 FROM object WHERE parent = ? AND name = value AND sha256 IS NOT NULL)"""
_AT_KEY: Final = "SELECT 1 FROM object WHERE parent = ? AND name = ?"
_DELETE_MERGED: Final = """
    DELETE FROM object WHERE parent = ? AND (name, sha256) IN (SELECT key, value FROM json_each(?))"""

_Rows = Callable[..., list[Any]]


async def remove_unnamed_files(
    files: FileTree, writer: GroupCommit, reader: SnapshotReader, before_ms: float, *, dry_run: bool
) -> list[Leftover]:
    """Remove the files that no row names and nobody has changed since `before_ms`. Returns what was removed
    or, with `dry_run`, what would be. A file whose path is no valid key is left alone. Raises
    StoreUnavailable."""
    found = list[Leftover]()
    pages = _pages(files)
    while (page := await in_thread(next, pages, None)) is not None:
        unnamed = list(_find(reader.rows, files, *page, before_ms))
        if unnamed and not dry_run:
            unnamed = await writer.submit(_remove, files, *page, before_ms)
        found += unnamed
    return found


def _pages(files: FileTree) -> Iterator[tuple[str, list[str]]]:
    """Yield folders and names of some of their files."""
    for parent, names in files.walk():
        keys = [name for name in names if _is_key(f"{parent}/{name}" if parent else name)]
        for at in range(0, len(keys), PAGE):
            yield parent, keys[at : at + PAGE]


def _is_key(path: str) -> bool:
    try:
        split_key(path)
    except ValueError:
        return False
    return True


def _find(
    rows: _Rows, files: FileTree, parent: str, names: list[str], before_ms: float
) -> Iterator[Leftover]:
    """Yield those of these files that no row names, as the database is now. They were listed before."""
    for (name,) in rows(_UNNAMED, orjson.dumps(names).decode(), parent):
        key = f"{parent}/{name}" if parent else name
        if rows(PENDING, key):
            continue
        with translate_os_errors(), suppress(FileNotFoundError, NotADirectoryError):
            found = os.lstat(files.path(key))
            if stat.S_ISREG(found.st_mode) and found.st_ctime * 1000 < before_ms:
                yield Leftover("files", key, found.st_size)


def _remove(
    cursor: sqlite3.Cursor, files: FileTree, parent: str, names: list[str], before_ms: float
) -> list[Leftover]:
    """Find them again, and remove them. Nobody writes meanwhile."""

    def rows(statement: str, *values: Any) -> list[Any]:
        return cursor.execute(statement, values).fetchall()

    found = list(_find(rows, files, parent, names, before_ms))
    with translate_os_errors():
        for leftover in found:
            files.remove(leftover.name)
    return found


async def end_old_merges(files: FileTree, writer: GroupCommit, reader: SnapshotReader) -> None:
    """Finish or undo the merge, and remove the folder `merging`. Does nothing while a process of that version
    merges. Raises StoreUnavailable."""
    folder = files.root.with_name("merging")
    if not await in_thread(os.path.lexists, folder) and not reader.rows("SELECT 1 FROM merge LIMIT 1"):
        return
    lock = await in_thread(_try_lock, folder)
    if lock is None:
        return
    try:
        await writer.submit(_end_merges, files, folder)
        await in_thread(shutil.rmtree, folder)
    finally:
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Return the lock file, locked; None while another process holds it."""
    make_private_dir(folder)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _end_merges(cursor: sqlite3.Cursor, files: FileTree, folder: Path) -> None:
    for id_, parent, name, values, merged in cursor.execute("SELECT * FROM merge").fetchall():
        path = files.path(f"{parent}/{name}")
        is_exchanged = os.path.exists(path) and not (folder / id_ / name).exists()
        if is_exchanged and not cursor.execute(_AT_KEY, (parent, name)).fetchone():
            with translate_os_errors():
                fingerprint = FileFingerprint.of(path)
            cursor.execute(_DELETE_MERGED, (parent, merged))
            cursor.execute(PUT_FILE, (parent, name, *orjson.loads(values), *fingerprint, None, None, None))
    for change in ("new", "changed", "gone"):
        cursor.execute(f"DROP TRIGGER IF EXISTS came_{change}")
    cursor.execute("DELETE FROM merge")
    cursor.execute("DELETE FROM came")
