"""The tables of the embedded store, and the writes to them, each a function for `GroupCommit`."""

import sqlite3
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pysync import sqlite_changes
from pysync.clock import Tick
from pysync.sqlite import Schema
from pysync.sqlite_changes import Rows, append
from pysync.store import ANY, Etag, Expect, check_expectation, split_key
from pysync.store.files import FileTree, Incoming, Stamp, disk_errors

# A document's row has a body; a file's has sha256 and the stamp. The body comes last: the columns before it
# are then read without its overflow pages. `doomed` names files whose rows are gone and that are to be
# unlinked, so that a crash in between leaves nothing behind.
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
        sqlite_changes.TABLE,
        """
    CREATE TABLE tick(id INTEGER PRIMARY KEY CHECK(id = 1), ms INTEGER NOT NULL, number INTEGER NOT NULL);
    INSERT INTO tick VALUES(1, 0, 0)
    """,
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
_PUT_FILE = """
    INSERT OR REPLACE INTO object(
        parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode)
    VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_CORRECT_FILE = """
    UPDATE object SET etag = ?, sha256 = ?, size = ?, mtime_ns = ?, inode = ?
    WHERE parent = ? AND name = ? AND etag = ?"""
_CURRENT = "SELECT etag, sha256 IS NOT NULL FROM object WHERE parent = ? AND name = ?"
_DELETE = "DELETE FROM object WHERE parent = ? AND name = ?"


class FileRow(NamedTuple):
    """What is known of a file; `stamp` is that of the one on disk that it is known of."""

    etag: str
    content_type: str
    modified_ms: int
    sha256: str
    stamp: Stamp


def put(cursor: sqlite3.Cursor, row: tuple[Any, ...], expect: Expect) -> bool:
    """Store a document, `row` being etag, content type, time, body, parent and name; True where it took the
    place of a file, which is then doomed."""
    if isinstance(expect, Etag):
        cursor.execute(_PUT_ETAG, (*row, expect.value))
    else:
        cursor.execute(_PUT_ANY if expect == ANY else _PUT_ABSENT, row)
    if cursor.rowcount:
        return False
    parent, name = row[-2:]
    found = cursor.execute(_CURRENT, (parent, name)).fetchone()
    check_expectation(expect, found and found[0])
    _doom(cursor, parent, name)
    cursor.execute(_PUT_OVER_FILE, row)
    return True


def put_changed(cursor: sqlite3.Cursor, row: tuple[Any, ...], expect: Expect, rows: Rows) -> tuple[bool, int]:
    """`put`, and the changes; the id of the last of them too."""
    return put(cursor, row, expect), append(cursor, rows)


def delete(cursor: sqlite3.Cursor, parent: str, name: str, expect: Expect) -> bool:
    """Remove what is at a key; True where it was a file, which is then doomed."""
    found = cursor.execute(_CURRENT, (parent, name)).fetchone()
    if found is None:
        return False
    etag, is_file = found
    check_expectation(expect, etag)
    if is_file:
        _doom(cursor, parent, name)
    cursor.execute(_DELETE, (parent, name))
    return bool(is_file)


def _doom(cursor: sqlite3.Cursor, parent: str, name: str) -> None:
    cursor.execute("INSERT OR IGNORE INTO doomed VALUES(?)", (f"{parent}/{name}" if parent else name,))


def unlink_doomed(cursor: sqlite3.Cursor, files: FileTree, key: str) -> None:
    """Unlink the file of a row that is gone. In a transaction of its own, after the row's: a crash must not
    find the row without its file. Within one, so that no file written meanwhile is met."""
    if cursor.execute(GET_FILE, split_key(key)).fetchone() is None:
        with disk_errors():
            files.remove(key)
    cursor.execute("DELETE FROM doomed WHERE key = ?", (key,))


def place_file(
    cursor: sqlite3.Cursor, files: FileTree, incoming: Incoming, key: str, values: tuple[Any, ...]
) -> None:
    """Bring what has come in to its place, and write its row in that of another there: etag, content type,
    time, sha256 and stamp are its `values`."""
    with disk_errors():
        files.place(incoming, key)
    cursor.execute(_PUT_FILE, (*split_key(key), *values))


def place_changed(
    cursor: sqlite3.Cursor,
    files: FileTree,
    incoming: Incoming,
    key: str,
    values: tuple[Any, ...],
    rows: Rows,
) -> int:
    """`place_file`, and the changes; the id of the last of them."""
    place_file(cursor, files, incoming, key, values)
    return append(cursor, rows)


def place_next(
    cursor: sqlite3.Cursor,
    files: FileTree,
    incoming: Incoming,
    key_of: Callable[[Tick], str],
    values: tuple[Any, ...],
    clock: Callable[[], int],
    rows_of: Callable[[Tick], Rows],
) -> tuple[Tick, int]:
    """`place_changed` at the next tick, and that."""
    tick = Tick(*cursor.execute("SELECT ms, number FROM tick").fetchone()).next(clock())
    cursor.execute("UPDATE tick SET ms = ?, number = ?", tick)
    return tick, place_changed(cursor, files, incoming, key_of(tick), values, rows_of(tick))


def correct_file(cursor: sqlite3.Cursor, key: str, row: FileRow, before: str) -> None:
    """Make a file's row fit what lies on disk, unless another write has."""
    cursor.execute(_CORRECT_FILE, (row.etag, row.sha256, *row.stamp, *split_key(key), before))


def probe(cursor: sqlite3.Cursor, etag: str) -> None:
    """Write something that nobody else reads."""
    cursor.execute("INSERT OR REPLACE INTO probe VALUES(1, ?)", (etag,))
