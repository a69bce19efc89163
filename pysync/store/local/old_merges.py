"""Ends a merge of files that a process of version 0.1.0 was killed in.

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
from pathlib import Path
from typing import Final

import orjson

from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import make_private_dir
from pysync.store.local.disk import FileFingerprint, FileTree, in_thread, translate_os_errors
from pysync.store.local.tables import PUT_FILE

_AT_KEY: Final = "SELECT 1 FROM object WHERE parent = ? AND name = ?"
_DELETE_MERGED: Final = """
    DELETE FROM object WHERE parent = ? AND (name, sha256) IN (SELECT key, value FROM json_each(?))"""


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
            cursor.execute(PUT_FILE, (parent, name, *orjson.loads(values), *fingerprint, None, None))
    for change in ("new", "changed", "gone"):
        cursor.execute(f"DROP TRIGGER IF EXISTS came_{change}")
    cursor.execute("DELETE FROM merge")
    cursor.execute("DELETE FROM came")
