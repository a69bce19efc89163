"""Files below `files` that no row names: what an earlier version failed to delete, or somebody put there.

An upload gets its row before its name, and the file of a deletion is in the journal until it is gone. So what
neither a row nor the journal names is of no write under way.
"""

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import orjson

from pysync._core import split_key
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.local.disk import FileTree, in_thread, translate_os_errors
from pysync.store.local.tables import PENDING
from pysync.store.types import PAGE, Leftover

_UNNAMED: Final = """
    SELECT value FROM json_each(?) WHERE NOT EXISTS(
        SELECT 1 FROM object WHERE parent = ? AND name = value AND sha256 IS NOT NULL)"""

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
