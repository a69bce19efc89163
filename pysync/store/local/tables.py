"""The tables of the local store, and the writes to them: each is a function for `GroupCommit`."""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from pysync._core import split_key
from pysync.clock import HybridTimestamp
from pysync.errors import StoreUnavailable
from pysync.sqlite import changelog
from pysync.sqlite.changelog import ChangeRows, insert_changes
from pysync.sqlite.database_file import Schema
from pysync.store.base import (
    ANY,
    Etag,
    ExistingFileFilter,
    FileAlreadyExists,
    Precondition,
    check_precondition,
)
from pysync.store.local.disk import FileFingerprint, FileTree, TempFile, translate_os_errors
from pysync.store.local.rename_journal import RenameJournal

# A document's row has a body; a file's has sha256 and the fingerprint. The body comes last, so that the
# columns before it are read without its overflow pages. `arriving` and `doomed` are the journal of
# `RenameJournal`; `merge` and `came` belong to `file_merge.py`.
SCHEMA: Final = Schema(
    (
        """
    CREATE TABLE object(
        id INTEGER PRIMARY KEY,
        parent TEXT NOT NULL,
        name TEXT NOT NULL,
        etag TEXT NOT NULL,
        content_type TEXT NOT NULL,
        modified_ms INTEGER NOT NULL,
        sha256 TEXT,
        size INTEGER,
        mtime_ns INTEGER,
        inode INTEGER,
        body BLOB,
        UNIQUE(parent, name)
    );
    CREATE TABLE doomed(key TEXT PRIMARY KEY) WITHOUT ROWID;
    CREATE TABLE probe(id INTEGER PRIMARY KEY, etag TEXT NOT NULL)
    """,
        changelog.TABLE,
        """
    CREATE TABLE arriving(key TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE tick(id INTEGER PRIMARY KEY CHECK(id = 1), ms INTEGER NOT NULL, number INTEGER NOT NULL);
    INSERT INTO tick VALUES(1, 0, 0)
    """,
        """
    CREATE TABLE merge(
        id TEXT PRIMARY KEY,
        parent TEXT NOT NULL,
        name TEXT NOT NULL,
        file TEXT NOT NULL,
        merged TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE came(parent TEXT, name TEXT, PRIMARY KEY(parent, name)) WITHOUT ROWID;
    CREATE TRIGGER came_new AFTER INSERT ON object
        WHEN NEW.sha256 IS NOT NULL AND EXISTS(SELECT 1 FROM merge)
        BEGIN INSERT OR REPLACE INTO came VALUES(NEW.parent, NEW.name); END;
    CREATE TRIGGER came_changed AFTER UPDATE ON object
        WHEN (NEW.sha256 IS NOT NULL OR OLD.sha256 IS NOT NULL) AND EXISTS(SELECT 1 FROM merge)
        BEGIN INSERT OR REPLACE INTO came VALUES(NEW.parent, NEW.name); END;
    CREATE TRIGGER came_gone AFTER DELETE ON object
        WHEN OLD.sha256 IS NOT NULL AND EXISTS(SELECT 1 FROM merge)
        BEGIN INSERT OR REPLACE INTO came VALUES(OLD.parent, OLD.name); END
    """,
        changelog.ADD_ORIGIN_SQL,
    )
)

GET_FILE: Final = """
    SELECT etag, content_type, modified_ms, sha256, size, mtime_ns, inode
    FROM object WHERE parent = ? AND name = ? AND sha256 IS NOT NULL"""
_INSERT = """
    INSERT INTO object(etag, content_type, modified_ms, body, parent, name) VALUES(?, ?, ?, ?, ?, ?)
    ON CONFLICT(parent, name) """
_PUT_ABSENT = _INSERT + "DO NOTHING"
_PUT_ANY = (
    _INSERT
    + """
    DO UPDATE SET etag = excluded.etag, content_type = excluded.content_type,
        modified_ms = excluded.modified_ms, body = excluded.body
    WHERE sha256 IS NULL"""
)
_PUT_ETAG = """
    UPDATE object SET etag = ?, content_type = ?, modified_ms = ?, body = ?
    WHERE parent = ? AND name = ? AND etag = ? AND sha256 IS NULL"""
_PUT_OVER_FILE = """
    UPDATE object SET etag = ?, content_type = ?, modified_ms = ?, body = ?,
        sha256 = NULL, size = NULL, mtime_ns = NULL, inode = NULL
    WHERE parent = ? AND name = ?"""
PUT_FILE: Final = """
    INSERT OR REPLACE INTO object(
        parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode)
    VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_UPDATE_FILE = """
    UPDATE object SET etag = ?, sha256 = ?, size = ?, mtime_ns = ?, inode = ?
    WHERE parent = ? AND name = ? AND etag = ?"""
_SET_FILE_DAMAGED = """
    UPDATE object SET inode = CASE WHEN ? THEN -abs(inode) ELSE abs(inode) END
    WHERE parent = ? AND name = ? AND etag = ? AND sha256 IS NOT NULL"""
_CURRENT = "SELECT etag, sha256 IS NOT NULL FROM object WHERE parent = ? AND name = ?"
_FIND_EXISTING = """
    SELECT name, sha256 FROM object
    WHERE parent = ? AND name > ? AND substr(name, ?) = ? AND sha256 IS NOT NULL LIMIT 1"""
_DELETE = "DELETE FROM object WHERE parent = ? AND name = ?"


class FileRow(NamedTuple):
    """The metadata of a file. `fingerprint` identifies the file on disk that it describes. `is_damaged` is
    True if the file was read and its hash was not `sha256`; the table marks such a row by a negative inode.
    """

    etag: str
    content_type: str
    modified_ms: int
    sha256: str
    fingerprint: FileFingerprint
    is_damaged: bool = False


def file_row(rows: Sequence[Any]) -> FileRow | None:
    """Return the row that `GET_FILE` found, None without one."""
    for etag, content_type, modified_ms, sha256, size, mtime_ns, inode in rows:
        stamp = FileFingerprint(size, mtime_ns, abs(inode))
        return FileRow(etag, content_type, modified_ms, sha256, stamp, is_damaged=inode < 0)
    return None


def put(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    row: tuple[Any, ...],
    expect: Precondition,
    changes: ChangeRows,
) -> tuple[bool, int]:
    """Store a document and its changes. `row` is etag, content type, time, body, parent and name. Returns
    True if it replaced a file, which is then staged for deletion, and the id of the last change."""
    if isinstance(expect, Etag):
        cursor.execute(_PUT_ETAG, (*row, expect.value))
    else:
        cursor.execute(_PUT_ANY if expect == ANY else _PUT_ABSENT, row)
    replaces_file = not cursor.rowcount
    if replaces_file:
        parent, name = row[-2:]
        found = cursor.execute(_CURRENT, (parent, name)).fetchone()
        check_precondition(expect, found and found[0])
        renames.stage_delete(cursor, f"{parent}/{name}" if parent else name)
        cursor.execute(_PUT_OVER_FILE, row)
    return replaces_file, insert_changes(cursor, changes)


def delete(
    cursor: sqlite3.Cursor, renames: RenameJournal, parent: str, name: str, expect: Precondition
) -> bool:
    """Remove the row of a key. Returns True if it was a file, which is then staged for deletion."""
    found = cursor.execute(_CURRENT, (parent, name)).fetchone()
    if found is None:
        return False
    etag, is_file = found
    check_precondition(expect, etag)
    if is_file:
        renames.stage_delete(cursor, f"{parent}/{name}" if parent else name)
    cursor.execute(_DELETE, (parent, name))
    return bool(is_file)


def insert_file(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    key: str,
    changes: ChangeRows,
) -> int:
    """Stage the rename of a file to `key`, and write its row and its changes. `row` is etag, content type,
    time, sha256 and fingerprint. Returns the id of the last change."""
    parent, name = split_key(key)
    renames.stage_rename(cursor, temp_file, key)
    cursor.execute(PUT_FILE, (parent, name, *row))
    return insert_changes(cursor, changes)


def insert_next_file(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    key_of: Callable[[HybridTimestamp], str],
    clock: Callable[[], int],
    rows_of: Callable[[HybridTimestamp], ChangeRows],
    unless: ExistingFileFilter | None = None,
) -> tuple[HybridTimestamp, int]:
    """Call `insert_file` with the next timestamp, and return both results. Raises FileAlreadyExists."""
    if unless is not None:
        found = cursor.execute(
            _FIND_EXISTING, (unless.folder, unless.after, -len(unless.suffix), unless.suffix)
        ).fetchone()
        if found is not None:
            raise FileAlreadyExists(*found)
    tick = HybridTimestamp(*cursor.execute("SELECT ms, number FROM tick").fetchone()).next(clock())
    last = insert_file(cursor, renames, temp_file, row, key_of(tick), rows_of(tick))
    cursor.execute("UPDATE tick SET ms = ?, number = ?", tick)
    return tick, last


def find_stale_row(
    cursor: sqlite3.Cursor, renames: RenameJournal, files: FileTree, key: str
) -> tuple[FileRow, FileFingerprint | None] | None:
    """Return the row of a file that does not match the file on disk, although no rename is pending, and the
    actual fingerprint (None if the file is missing). Returns None if they match. Raises StoreUnavailable if a
    pending rename fails."""
    renames.recover(cursor)
    row = file_row(cursor.execute(GET_FILE, split_key(key)).fetchall())
    if row is None or renames.is_staged(key):
        return None
    if renames.is_stuck(cursor, key):
        raise StoreUnavailable()
    with translate_os_errors():
        stamp = files.fingerprint(key)
    return None if stamp == row.fingerprint else (row, stamp)


def update_file(cursor: sqlite3.Cursor, key: str, row: FileRow, before: str) -> None:
    """Update the row of a file to match the file on disk, unless another write came first (`before` is the
    expected etag)."""
    cursor.execute(_UPDATE_FILE, (row.etag, row.sha256, *row.fingerprint, *split_key(key), before))


def set_file_damaged(cursor: sqlite3.Cursor, key: str, etag: str, is_damaged: bool) -> None:
    """Record whether the file at `key` is damaged, if it is still that version."""
    cursor.execute(_SET_FILE_DAMAGED, (is_damaged, *split_key(key), etag))


def probe(cursor: sqlite3.Cursor, etag: str) -> None:
    """Do the writes of a push and undo them, and write a row that only probes use."""
    place = ("_pysync", "")  # no key has an empty name
    cursor.execute(_PUT_ANY, (etag, "", 0, b"{}", *place))
    cursor.execute(_DELETE, place)
    changelog.probe(cursor)
    cursor.execute("INSERT OR REPLACE INTO probe VALUES(1, ?)", (etag,))
