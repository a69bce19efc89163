"""The tables of the local store, and the writes to them, each a function for `GroupCommit`."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson

from pysync._core import split_key
from pysync.clock import HybridTimestamp
from pysync.errors import StoreUnavailable
from pysync.protocol import JSON_TYPE
from pysync.sqlite import changelog
from pysync.sqlite.changelog import ChangeRows, insert_changes
from pysync.sqlite.database_file import Schema
from pysync.store.ledger import Charge
from pysync.store.local import claims, feed, ledger
from pysync.store.local.disk import FileFingerprint, FileTree, TempFile, translate_os_errors
from pysync.store.local.ledger import OwnerOf, Owners, amounts_of
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.types import (
    ANY,
    AppendedObject,
    Etag,
    EtagMismatch,
    Precondition,
    Write,
    check_precondition,
)

LARGE_BYTES: Final = 256 * 1024
"""Bytes above which a body that was written is not kept in memory."""

# A document's row has a body; a file's has sha256 and the fingerprint. The body comes last, so that the
# columns before it are read without its overflow pages. `arriving` and `doomed` are the journal of
# `RenameJournal`. Nothing is written to `merge` and `came` any more: `leftovers.py` reads what 0.1.0 left.
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
        ledger.TABLES,
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
        changelog.ADD_EPOCHS_SQL,
        feed.TABLES,
    )
)

GET_FILE: Final = """
    SELECT etag, content_type, modified_ms, sha256, size, mtime_ns, inode, xxh3
    FROM object WHERE parent = ? AND name = ? AND sha256 IS NOT NULL"""
PUT_FILE: Final = """
    INSERT OR REPLACE INTO object(
        parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode, xxh3, owner, seq)
    VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, coalesce(
        (SELECT max(id) FROM change) + ?12, (SELECT seq FROM object WHERE parent = ?1 AND name = ?2)))"""
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


_COUNTED = ("etag", "content_type", "modified_ms", "body", "size", "owner", "elements")
_COLUMNS = (*_COUNTED, "hash", "changed_ms")
"""The columns of an object that is no file. `size`, `owner` and `elements` are NULL if it is not counted, the
last two if its version is unknown. Then comes `seq`: the number of its changes, NULL for none."""
_SEQ = "(SELECT max(id) FROM change) + ?"
_INSERT = f"""
    INSERT INTO object({", ".join(_COLUMNS)}, seq, parent, name) VALUES({"?, " * len(_COLUMNS)}{_SEQ}, ?, ?)
    ON CONFLICT(parent, name) DO """
_UPDATE = (
    f"UPDATE object SET {', '.join(f'{column} = ?' for column in _COLUMNS)}, seq = coalesce({_SEQ}, seq)"  # noqa: S608
)
_PUT_ABSENT = f"{_INSERT} NOTHING"
_PUT_ANY = f"""
    {_INSERT} UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in _COLUMNS)},
    seq = coalesce(excluded.seq, seq) WHERE sha256 IS NULL"""
_PUT_ETAG = f"{_UPDATE} WHERE parent = ? AND name = ? AND etag = ? AND sha256 IS NULL"
_PUT_OVER_FILE = f"{_UPDATE}, sha256 = NULL, mtime_ns = NULL, inode = NULL WHERE parent = ? AND name = ?"
# Behind all others of its folder. The last three parameters are the folder, and the time and the suffix of
# the name.
_APPEND = f"""
    INSERT INTO object({", ".join(_COUNTED)}, parent, name)
    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8,
        printf('%016d00000000', max(?9, 1 + coalesce((
            SELECT CAST(substr(max(name), 1, 16) AS INTEGER) FROM object WHERE parent = ?8), 0))) || ?10"""  # noqa: S608


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


Counted = tuple[Owners, Charge]
"""The owners of a store that tracks usage, and what a write counts as."""


def put(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    write: Write,
    etag: str,
    changes: ChangeRows,
    counted: Counted | None,
) -> tuple[bool, int]:
    """Store an object with its segments, what is appended and its changes. Returns True if it replaced a
    file, which is then staged for deletion, and the id of the last change. Raises EtagMismatch, and
    QuotaExceeded if the precondition holds."""
    body = write.body
    assert body is not None, "this is a removal"
    now_ms = changes[0]
    location = split_key(write.key)
    owner = history_owner = elements = None
    if counted is not None:
        owner, history_owner = _find_owners(cursor, write, len(body), location, counted)
        elements = counted[1].elements
    if write.segments:  # they are stored before what may reject the write
        check_current(cursor, location, write.expect)
    for n, (key, segment) in enumerate(write.segments):
        columns = _columns(f"{etag}s{n}", JSON_TYPE, now_ms, segment, owner, 0)
        _put_row(cursor, renames, (*columns, None, None, None, *split_key(key)), ANY)
    columns = _columns(etag, write.content_type, now_ms, body, owner, elements)
    hash_, changed_ms = write.version or ("", None)
    row = (*columns, bytes.fromhex(hash_) or None, changed_ms, len(changes[1]) or None, *location)
    replaced_file = _put_row(cursor, renames, row, write.expect)
    _append(cursor, write.also, etag, now_ms, history_owner)
    return replaced_file, insert_changes(cursor, changes)


def delete(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    write: Write,
    etag: str,
    changes: ChangeRows,
    counted: Counted | None,
) -> tuple[bool, int]:
    """Remove the row of a key, and add what is appended and the changes; nothing of it if there is no row.
    Returns True if it was a file, which is then staged for deletion, and the id of the last change. Raises
    EtagMismatch."""
    location = split_key(write.key)
    is_file = check_current(cursor, location, write.expect)
    if is_file is None:
        return False, 0
    if is_file:
        renames.stage_delete(cursor, write.key)
    if write.also:
        owner = None
        if counted is not None:
            owners, charge = counted
            owner = owners.owner_of_replaced(cursor, *location, owners.find(cursor, charge.account)[0])
        _append(cursor, write.also, etag, changes[0], owner)
    cursor.execute(_DELETE, location)
    last = insert_changes(cursor, changes)
    if last:
        feed.add_removal(cursor, last, location, write.version and write.version[1], changes)
    return is_file, last


def check_current(cursor: sqlite3.Cursor, location: tuple[str, str], expect: Precondition) -> bool | None:
    """Return True if a file is stored at a parent and name, False for another object, None for nothing.
    Raises EtagMismatch unless it satisfies `expect`."""
    found = cursor.execute(_CURRENT, location).fetchone()
    check_precondition(expect, found and found[0])
    return None if found is None else bool(found[1])


def _find_owners(
    cursor: sqlite3.Cursor, write: Write, size: int, location: tuple[str, str], counted: Counted
) -> tuple[int, int]:
    """Return the owner of an object of `size` bytes and of its segments, and that of the earlier version that
    is appended with it. Raises QuotaExceeded if the precondition holds."""
    owners, charge = counted
    size += sum(len(segment.body) for segment in write.segments)
    all_bytes = size + sum(len(each.body) for each in write.also)
    owner, has_room = owners.find(cursor, charge.account, amounts_of(all_bytes, charge.elements))
    before = owner
    if write.also or not charge.checked:
        before = owners.owner_of_replaced(cursor, *location, owner)
    if not charge.checked:
        return before, before
    if not has_room:
        check_current(cursor, location, write.expect)
        wanted = amounts_of(all_bytes if before == owner else size, charge.elements)
        owners.make_room(cursor, owner, wanted, *location)
    return owner, before


def _columns(
    etag: str, content_type: str, now_ms: int, body: bytes, owner: int | None, elements: int | None
) -> tuple[Any, ...]:
    """Return the values of `_COUNTED`."""
    if owner is None:
        return etag, content_type, now_ms, body, None, None, None
    return etag, content_type, now_ms, body, len(body), owner, elements


def _put_row(
    cursor: sqlite3.Cursor, renames: RenameJournal, row: tuple[Any, ...], expect: Precondition
) -> bool:
    """Write a row: the values of `_COLUMNS`, the number of changes, parent and name. Returns True if it
    replaced a file, which is then staged for deletion. Raises EtagMismatch."""
    if isinstance(expect, Etag):
        changed = _execute_put(cursor, _PUT_ETAG, (*row, expect.value))
    else:
        changed = _execute_put(cursor, _PUT_ANY if expect == ANY else _PUT_ABSENT, row)
    if changed:
        return False
    parent, name = location = row[-2:]
    check_current(cursor, location, expect)
    renames.stage_delete(cursor, f"{parent}/{name}" if parent else name)
    _execute_put(cursor, _PUT_OVER_FILE, row)
    return True


def _execute_put(cursor: sqlite3.Cursor, statement: str, values: tuple[Any, ...]) -> int:
    """Execute a statement whose fourth value is a body, and return the number of rows that it changed."""
    changed = cursor.execute(statement, values).rowcount
    if len(values[3]) > LARGE_BYTES:
        # The connection keeps the statement, which keeps a copy of the body until it is executed again.
        with suppress(sqlite3.IntegrityError):
            cursor.execute(statement, (None,) * len(values))
    return changed


def _append(
    cursor: sqlite3.Cursor, also: Sequence[AppendedObject], etag: str, now_ms: int, owner: int | None
) -> None:
    """Append objects in the transaction of another write, whose etag is `etag`."""
    for n, each in enumerate(also):
        columns = _columns(f"{etag}a{n}", JSON_TYPE, now_ms, each.body, owner, 0)
        cursor.execute(_APPEND, (*columns, each.folder, each.at_ms, each.suffix))


def delete_all(
    cursor: sqlite3.Cursor, renames: RenameJournal, keys: Sequence[str], unannounced: ChangeRows
) -> list[str]:
    """Remove the rows of these keys. Returns the keys of those that were files."""
    return [key for key in keys if delete(cursor, renames, Write(key, None), "", unannounced, None)[0]]


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
    cursor.execute(PUT_FILE, (parent, name, *row, owner, len(changes[1]) or None))
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
    location = split_key(key)
    with translate_os_errors():
        is_same = files.fingerprint(key) == row.fingerprint
    if not is_same or cursor.execute(PENDING, (key,)).fetchone() is not None:
        raise EtagMismatch
    found = file_row(cursor.execute(GET_FILE, location).fetchall())
    etag, content_type, modified_ms, sha256, stamp, xxh3, _ = row
    if found is not None:
        if found.fingerprint == stamp and not found.is_damaged:
            raise EtagMismatch
        cursor.execute(_ADOPT, (etag, modified_ms, sha256, *stamp, xxh3, *location))
    elif cursor.execute(_CURRENT, location).fetchone() is not None:
        raise ValueError("a document is stored at this key")
    else:
        cursor.execute(
            PUT_FILE, (*location, etag, content_type, modified_ms, sha256, *stamp, xxh3, None, None)
        )


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
    cursor.execute(PUT_FILE, (parent, name, *row, None, None))
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
    location = ("_pysync", "")  # no key has an empty name
    cursor.execute(_PUT_ANY, (*_columns(etag, "", 0, b"{}", None, None), None, None, None, *location))
    cursor.execute(_DELETE, location)
    changelog.probe(cursor)
    cursor.execute("INSERT OR REPLACE INTO probe VALUES(1, ?)", (etag,))
