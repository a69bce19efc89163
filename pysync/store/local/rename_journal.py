"""Files on their way to their keys, and those on their way out.

What a file is renamed to cannot be told to the disk together with the row that names it. So the row comes
first, and with it the note that its file is arriving, under which name; then the rename. Whatever happens in
between, the note says how it goes on. A file whose row is gone is noted as doomed, and then unlinked.

Notes are removed many at a time, when the folders are flushed: until then the loss of power may undo a
rename.
"""

import logging
import sqlite3
from contextlib import suppress
from typing import Final

from pysync.errors import KeyConflict, StoreUnavailable
from pysync.store.base import split_key
from pysync.store.local.disk import FileTree, TempFile, translate_os_errors

log = logging.getLogger(__name__)

FLUSH_EVERY: Final = 64
"""Notes of this process after which it flushes the folders and removes them."""

_GET_RENAME = "SELECT name FROM arriving WHERE key = ?"
_RENAMES_BELOW = "SELECT 1 FROM arriving WHERE key > ? AND key < ?"
_ADD_RENAME = "INSERT OR REPLACE INTO arriving VALUES(?, ?)"
_IS_FILE = "SELECT 1 FROM object WHERE parent = ? AND name = ? AND sha256 IS NOT NULL"


class RenameJournal:
    """The moves of files in `files`, for `GroupCommit`: its methods are called in the thread that commits,
    and those with a cursor within a transaction, so that no other process writes."""

    def __init__(self, files: FileTree) -> None:
        self._files = files
        self._staged_renames: dict[str, TempFile] = {}
        self._superseded: list[TempFile] = []
        self._staged_deletes: set[str] = set()
        self._uncertain: list[TempFile] = []
        self._moved: set[str] = set()
        self._unlinked = 0
        self.has_work = False

    def stage_rename(self, cursor: sqlite3.Cursor, temp_file: TempFile, key: str) -> None:
        """Have the incoming file moved to `key` when the transaction, which writes its row, is committed.
        Raises KeyConflict."""
        if self._has_path_conflict(cursor, key):
            raise KeyConflict()
        self.has_work = True
        with translate_os_errors():
            self._files.make_parents(key)
            self._cancel(cursor, key)
        cursor.execute(_ADD_RENAME, (key, temp_file.name))
        temp_file.is_committed = True
        self._staged_renames[key] = temp_file

    def stage_delete(self, cursor: sqlite3.Cursor, key: str) -> None:
        """Note that the file at `key` goes with its row. `unlink` is to be called in the next transaction: a
        crash must not find the row without its file."""
        self.has_work = True
        with translate_os_errors():
            self._cancel(cursor, key)
        cursor.execute("DELETE FROM arriving WHERE key = ?", (key,))
        cursor.execute("INSERT OR IGNORE INTO doomed VALUES(?)", (key,))
        self._staged_deletes.add(key)

    def unlink(self, cursor: sqlite3.Cursor, key: str) -> None:
        """Unlink the doomed file at `key`, unless another has been written there."""
        if key not in self._staged_deletes and not _is_file(cursor, key):
            with translate_os_errors():
                self._files.remove(key)
        self._unlinked += 1
        self.has_work = True

    def is_staged(self, key: str) -> bool:
        """Whether a file comes to `key` with this very transaction."""
        return key in self._staged_renames

    def is_stuck(self, cursor: sqlite3.Cursor, key: str) -> bool:
        """Whether the file of `key` could not be moved there, after `recover`."""
        return cursor.execute(_GET_RENAME, (key,)).fetchone() is not None

    def recover(self, cursor: sqlite3.Cursor) -> None:
        """Finish what has been committed, by whichever process, and remove the notes of it. Afterwards every
        file that a row names lies at its key, but those of this transaction, which may yet be undone. What
        cannot be finished is told to the operator, and its note stays."""
        moved, self._moved, self._unlinked = self._moved, set(), 0
        arrived = [
            (key, name)
            for key, name in cursor.execute("SELECT key, name FROM arriving").fetchall()
            if name in moved or (key not in self._staged_renames and self._move(name, key))
        ]
        gone = [
            (key,)
            for (key,) in cursor.execute("SELECT key FROM doomed").fetchall()
            if key not in self._staged_deletes and (_is_file(cursor, key) or self._remove(key))
        ]
        with translate_os_errors():
            for folder in {folder for key, *_ in (*arrived, *gone) for folder in self._files.folders(key)}:
                self._files.flush(folder)
        cursor.executemany("DELETE FROM arriving WHERE key = ? AND name = ?", arrived)
        cursor.executemany("DELETE FROM doomed WHERE key = ?", gone)

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        if len(self._moved) + self._unlinked >= FLUSH_EVERY:
            try:
                self.recover(cursor)
            except StoreUnavailable as error:
                log.error("the folders of files cannot be flushed: %s", error.__cause__)
        if self._staged_renames:
            self._files.flush_temp_folder()

    def after_commit(self) -> None:
        for key, incoming in self._staged_renames.items():
            if self._move(incoming.name, key):
                self._moved.add(incoming.name)
        for incoming in (*self._superseded, *self._uncertain):
            with suppress(OSError):
                incoming.discard()
        self._uncertain = []
        self._reset()

    def after_rollback(self) -> None:
        # A commit that failed in its last step may come back after a crash, until another has overwritten it.
        self._uncertain += [*self._staged_renames.values(), *self._superseded]
        self._reset()

    def _reset(self) -> None:
        self._staged_renames, self._superseded, self._staged_deletes = {}, [], set()
        self.has_work = bool(self._uncertain) or len(self._moved) + self._unlinked >= FLUSH_EVERY

    def _has_path_conflict(self, cursor: sqlite3.Cursor, key: str) -> bool:
        """Whether a file that may not be at its key yet will lie above `key` or below."""
        if cursor.execute(_RENAMES_BELOW, (key + "/", key + "0")).fetchone():
            return True
        above = key.rpartition("/")[0]
        while above:
            if cursor.execute(_GET_RENAME, (above,)).fetchone():
                return True
            above = above.rpartition("/")[0]
        return False

    def _cancel(self, cursor: sqlite3.Cursor, key: str) -> None:
        """See to it that no file moves to `key` any more, in whichever process."""
        mine = self._staged_renames.pop(key, None)
        if mine is not None:
            self._superseded.append(mine)
            return
        for (name,) in cursor.execute(_GET_RENAME, (key,)).fetchall():
            self._files.move(name, key)

    def _move(self, name: str, key: str) -> bool:
        try:
            self._files.move(name, key)
        except (OSError, KeyConflict) as error:
            log.error("the file %s is not moved to its key %r yet: %r", name, key, error)
            return False
        return True

    def _remove(self, key: str) -> bool:
        try:
            self._files.remove(key)
        except OSError as error:
            log.error("the file of %r is not removed yet: %r", key, error)
            return False
        return True


def _is_file(cursor: sqlite3.Cursor, key: str) -> bool:
    return cursor.execute(_IS_FILE, split_key(key)).fetchone() is not None
