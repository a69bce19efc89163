"""The tables of the local store, and the writes to them, each a function for `GroupCommit`."""

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self, TypeVar

import orjson

from pysync._core import split_key
from pysync.clock import HybridTimestamp
from pysync.errors import StoreUnavailable
from pysync.sqlite import changelog
from pysync.sqlite.changelog import ChangeRows, insert_changes
from pysync.sqlite.database_file import Schema
from pysync.store.local import claims, counters
from pysync.store.local.disk import FileFingerprint, FileTree, TempFile, translate_os_errors
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.types import (
    ANY,
    Etag,
    EtagMismatch,
    Precondition,
    check_precondition,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_BYTES: Final = 256 * 1024
"""Bytes above which a body that was written is not kept in memory."""

# A document's row has a body; a file's has sha256 and the fingerprint. The body comes last, so that the
# columns before it are read without its overflow pages. `arriving` and `doomed` are the journal of
# `RenameJournal`. Nothing is written to `merge` and `came` any more: `old_merges.py` reads what 0.1.0 left.
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
        counters.TABLES,
        # A server of 0.1.0, which had the database open when it was upgraded, would lose what is written
        # during its merges without the triggers. One that is under way ends: its file counts as written
        # meanwhile. No other one can begin.
        """
    INSERT OR REPLACE INTO came SELECT parent, name FROM merge;
    DROP TRIGGER came_new;
    DROP TRIGGER came_changed;
    DROP TRIGGER came_gone;
    CREATE TRIGGER merge_unrecorded BEFORE INSERT ON merge
        WHEN NOT EXISTS(SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = 'came_new')
        BEGIN SELECT RAISE(ABORT, 'this server has an earlier version than the database: restart it'); END
    """,
        # The checksum of a file, NULL until a file of an earlier version was found right.
        "ALTER TABLE object ADD COLUMN xxh3 TEXT",
        claims.TABLE,
    )
)

GET_FILE: Final = """
    SELECT etag, content_type, modified_ms, sha256, size, mtime_ns, inode, xxh3
    FROM object WHERE parent = ? AND name = ? AND sha256 IS NOT NULL"""
PUT_FILE: Final = """
    INSERT OR REPLACE INTO object(
        parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode, xxh3, owner)
    VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_SET_CHECKED = """
    UPDATE object SET size = ?, mtime_ns = ?, inode = ?, xxh3 = ?
    WHERE parent = ? AND name = ? AND etag = ? AND sha256 IS NOT NULL"""
_ADOPT = """
    UPDATE object SET etag = ?, modified_ms = ?, sha256 = ?, size = ?, mtime_ns = ?, inode = ?, xxh3 = ?
    WHERE parent = ? AND name = ?"""
PENDING: Final = "SELECT 1 FROM arriving WHERE key = ?1 UNION ALL SELECT 1 FROM doomed WHERE key = ?1"
_CURRENT = "SELECT etag, sha256 IS NOT NULL FROM object WHERE parent = ? AND name = ?"
_DELETE = "DELETE FROM object WHERE parent = ? AND name = ?"
_COUNT_UNCHANGED = """
    SELECT count(*) FROM json_each(?) AS said
    JOIN object AS o ON o.parent = ? AND o.name = said.key AND o.sha256 = said.value"""


OwnerOf = Callable[[sqlite3.Cursor, str, int], int | None]
"""Returns the owner that counts a file of this key and size (`counters.py`). May raise QuotaExceeded."""


class PutStatements(NamedTuple):
    """The statements that put a document, for each precondition and over a file."""

    absent: str
    any: str
    etag: str
    over_file: str

    @classmethod
    def of(cls, *columns: str) -> Self:
        """Return the statements that write these columns. A row that is not counted has no owner."""
        insert = f"""
            INSERT INTO object({", ".join(columns)}, parent, name) VALUES({"?, " * len(columns)}?, ?)
            ON CONFLICT(parent, name) DO """
        excluded = [f"{column} = excluded.{column}" for column in columns]
        values = [f"{column} = ?" for column in columns]
        if "owner" not in columns:
            excluded.append("owner = NULL")
            values.append("owner = NULL")
        update = f"UPDATE object SET {', '.join(values)}"  # noqa: S608
        key = "WHERE parent = ? AND name = ?"
        return cls(
            f"{insert} NOTHING",
            f"{insert} UPDATE SET {', '.join(excluded)} WHERE sha256 IS NULL",
            f"{update} {key} AND etag = ? AND sha256 IS NULL",
            f"{update}, sha256 = NULL, mtime_ns = NULL, inode = NULL {key}",
        )


PUT: Final = PutStatements.of("etag", "content_type", "modified_ms", "body")
PUT_COUNTED: Final = PutStatements.of(
    "etag", "content_type", "modified_ms", "body", "size", "owner", "elements"
)


def _append(*columns: str) -> str:
    """Return the statement that stores a document behind all others of its folder. Its parameters are these
    columns, the folder, and the time and the suffix of the name."""
    folder, at_ms, suffix = (f"?{len(columns) + n}" for n in (1, 2, 3))
    return f"""
        INSERT INTO object({", ".join(columns)}, parent, name)
        SELECT {", ".join(f"?{n + 1}" for n in range(len(columns)))}, {folder},
            printf('%016d00000000', max({at_ms}, 1 + coalesce((
                SELECT CAST(substr(max(name), 1, 16) AS INTEGER) FROM object WHERE parent = {folder}), 0)))
            || {suffix}"""  # noqa: S608


APPEND: Final = _append("etag", "content_type", "modified_ms", "body")
APPEND_COUNTED: Final = _append("etag", "content_type", "modified_ms", "body", "size", "owner", "elements")


class FileRow(NamedTuple):
    """The metadata of a file. `fingerprint` is that of the file on disk when its content was last checked,
    but always with the size of what was written. `is_damaged` is True if that content was not what was
    written; the table marks such a row by a negative inode. `xxh3` is the checksum of what was written, None
    if it is not known yet.
    """

    etag: str
    content_type: str
    modified_ms: int
    sha256: str
    fingerprint: FileFingerprint
    xxh3: str | None
    is_damaged: bool = False


def file_row(rows: Sequence[Any]) -> FileRow | None:
    """Return the row that `GET_FILE` found, None without one."""
    for etag, content_type, modified_ms, sha256, size, mtime_ns, inode, xxh3 in rows:
        stamp = FileFingerprint(size, mtime_ns, abs(inode))
        return FileRow(etag, content_type, modified_ms, sha256, stamp, xxh3, is_damaged=inode < 0)
    return None


Put = tuple[Any, ...]
"""`put`, or a function like it, and its arguments without the cursor."""


def put(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    row: tuple[Any, ...],
    expect: Precondition,
    changes: ChangeRows,
    statements: PutStatements = PUT,
) -> tuple[bool, int]:
    """Store a document and its changes. `row` has the values of the columns that `statements` write (etag,
    content type, time and body), parent and name. Returns True if it replaced a file, which is then staged
    for deletion, and the id of the last change."""
    if isinstance(expect, Etag):
        replaces_file = not _execute_put(cursor, statements.etag, (*row, expect.value))
    else:
        statement = statements.any if expect == ANY else statements.absent
        replaces_file = not _execute_put(cursor, statement, row)
    if replaces_file:
        parent, name = row[-2:]
        found = cursor.execute(_CURRENT, (parent, name)).fetchone()
        check_precondition(expect, found and found[0])
        renames.stage_delete(cursor, f"{parent}/{name}" if parent else name)
        _execute_put(cursor, statements.over_file, row)
    return replaces_file, insert_changes(cursor, changes)


def _execute_put(cursor: sqlite3.Cursor, statement: str, values: tuple[Any, ...]) -> int:
    """Execute a statement whose fourth value is a body, and return the number of rows that it changed."""
    changed = cursor.execute(statement, values).rowcount
    if len(values[3]) > LARGE_BYTES:
        # The connection keeps the statement, which keeps a copy of the body until it is executed again.
        with suppress(sqlite3.IntegrityError):
            cursor.execute(statement, (None,) * len(values))
    return changed


Rows = Sequence[tuple[Any, ...]]
"""Rows of appended objects: etag, content type, time, body, folder, time and suffix of the name."""


def put_with(
    cursor: sqlite3.Cursor,
    also: Rows,
    renames: RenameJournal,
    row: tuple[Any, ...],
    expect: Precondition,
    changes: ChangeRows,
) -> tuple[bool, int]:
    """Call `put`, and append objects in its transaction."""
    done = put(cursor, renames, row, expect, changes)
    append_objects(cursor, also)
    return done


def append_objects(cursor: sqlite3.Cursor, also: Rows) -> None:
    """Append objects in the transaction of another write."""
    for row in also:
        cursor.execute(APPEND, row)


def check_current(cursor: sqlite3.Cursor, parent: str, name: str, expect: Precondition) -> None:
    """Raise EtagMismatch unless what is stored satisfies `expect`."""
    found = cursor.execute(_CURRENT, (parent, name)).fetchone()
    check_precondition(expect, found and found[0])


def put_together(
    cursor: sqlite3.Cursor, path: tuple[str, str], expect: Precondition, puts: Sequence[Put]
) -> tuple[bool, int]:
    """Make these puts one after another, unless the precondition of the last one, which is at `path` (parent
    and name), is not met. Returns the result of the last one."""
    check_current(cursor, *path, expect)
    result = False, 0
    for put_, *args in puts:
        result = put_(cursor, *args)
    return result


def delete(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    parent: str,
    name: str,
    expect: Precondition,
    changes: ChangeRows,
    put_also: Callable[[sqlite3.Cursor], None] = lambda cursor: None,
) -> tuple[bool, int]:
    """Call `put_also` if there is one, remove the row of a key and add the changes. Returns True if it was a
    file, which is then staged for deletion, and the id of the last change."""
    found = cursor.execute(_CURRENT, (parent, name)).fetchone()
    check_precondition(expect, found and found[0])
    if found is None:
        return False, 0
    is_file = found[1]
    if is_file:
        renames.stage_delete(cursor, f"{parent}/{name}" if parent else name)
    put_also(cursor)
    cursor.execute(_DELETE, (parent, name))
    return bool(is_file), insert_changes(cursor, changes)


def delete_all(
    cursor: sqlite3.Cursor, renames: RenameJournal, paths: Sequence[tuple[str, str]], unannounced: ChangeRows
) -> list[str]:
    """Remove the rows of these keys, each a parent and a name. Returns the keys of those that were files."""
    return [
        f"{parent}/{name}" if parent else name
        for parent, name in paths
        if delete(cursor, renames, parent, name, ANY, unannounced)[0]
    ]


def insert_file(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    key: str,
    changes: ChangeRows,
    owner_of: OwnerOf | None = None,
) -> int:
    """Stage the rename of a file to `key`, and write its row and its changes. `row` is etag, content type,
    time, sha256, fingerprint and xxh3. Returns the id of the last change."""
    parent, name = split_key(key)
    owner = None if owner_of is None else owner_of(cursor, key, row[4])
    renames.stage_rename(cursor, temp_file, key)
    cursor.execute(PUT_FILE, (parent, name, *row, owner))
    return insert_changes(cursor, changes)


def insert_next_file(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    key_of: Callable[[HybridTimestamp], str],
    clock: Callable[[], int],
    rows_of: Callable[[HybridTimestamp], ChangeRows],
    insert_of: Callable[[HybridTimestamp], Callable[..., int]],
    owner_of: OwnerOf | None = None,
) -> tuple[HybridTimestamp, int]:
    """Call `insert_file`, or what else `insert_of` returns, with the next timestamp, and return both
    results."""
    tick = HybridTimestamp(*cursor.execute("SELECT ms, number FROM tick").fetchone()).next(clock())
    insert = insert_of(tick)
    last = insert(cursor, renames, temp_file, row, key_of(tick), rows_of(tick), owner_of)
    cursor.execute("UPDATE tick SET ms = ?, number = ?", tick)
    return tick, last


def adopt_file(cursor: sqlite3.Cursor, files: FileTree, row: FileRow, key: str) -> None:
    """Give the file at `key` this row, or change the row that it has, but for the content type and the owner.
    Raises ValueError if a document is stored there, and EtagMismatch if the file was written meanwhile."""
    path = split_key(key)
    with translate_os_errors():
        is_same = files.fingerprint(key) == row.fingerprint
    if not is_same or cursor.execute(PENDING, (key,)).fetchone() is not None:
        raise EtagMismatch
    found = file_row(cursor.execute(GET_FILE, path).fetchall())
    etag, content_type, modified_ms, sha256, stamp, xxh3, _ = row
    if found is not None:
        if found.fingerprint == stamp and not found.is_damaged:
            raise EtagMismatch
        cursor.execute(_ADOPT, (etag, modified_ms, sha256, *stamp, xxh3, *path))
    elif cursor.execute(_CURRENT, path).fetchone() is not None:
        raise ValueError("a document is stored at this key")
    else:
        cursor.execute(PUT_FILE, (*path, etag, content_type, modified_ms, sha256, *stamp, xxh3, None))


def merge_files(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    temp_file: TempFile,
    row: tuple[Any, ...],
    key: str,
    merged: Mapping[str, str],
) -> None:
    """Stage the rename of a file to `key` and the deletion of the files in `merged`, which maps keys in the
    same folder to the expected sha256, and write the rows. `RenameJournal.recover` deletes the files, once
    the new one has its name. Raises EtagMismatch."""
    parent, name = split_key(key)
    expected = orjson.dumps({split_key(other)[1]: sha256 for other, sha256 in merged.items()}).decode()
    (unchanged,) = cursor.execute(_COUNT_UNCHANGED, (expected, parent)).fetchone()
    if unchanged != len(merged) or cursor.execute(_CURRENT, (parent, name)).fetchone() is not None:
        raise EtagMismatch
    # A pending rename would have to be made before its deletion is staged, and might fail halfway.
    renames.recover(cursor)
    if any(renames.is_pending(cursor, other) for other in merged):
        raise EtagMismatch
    renames.stage_rename(cursor, temp_file, key)
    cursor.execute(PUT_FILE, (parent, name, *row, None))
    for other in merged:
        renames.stage_delete(cursor, other)
        cursor.execute(_DELETE, split_key(other))


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
    if renames.is_pending(cursor, key):
        raise StoreUnavailable()
    with translate_os_errors():
        stamp = files.fingerprint(key)
    return None if stamp == row.fingerprint else (row, stamp)


def set_file_checked(cursor: sqlite3.Cursor, key: str, row: FileRow) -> None:
    """Record what a check of the file at `key` has found, if it is still that version."""
    size, mtime_ns, inode = row.fingerprint
    values = (size, mtime_ns, -inode if row.is_damaged else inode, row.xxh3)
    cursor.execute(_SET_CHECKED, (*values, *split_key(key), row.etag))


def probe(cursor: sqlite3.Cursor, etag: str) -> None:
    """Do the writes of a push and undo them, and write a row that only probes use."""
    path = ("_pysync", "")  # no key has an empty name
    cursor.execute(PUT.any, (etag, "", 0, b"{}", *path))
    cursor.execute(_DELETE, path)
    changelog.probe(cursor)
    cursor.execute("INSERT OR REPLACE INTO probe VALUES(1, ?)", (etag,))
