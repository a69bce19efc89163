"""The journal of renames and deletions of files.

A rename and a database commit cannot be made atomic. The row of a file is therefore committed together with a
journal entry (table `arriving`) for the pending rename, and the file is renamed afterwards; recovery replays
the journal. The deletion of a row adds an entry (table `doomed`) likewise, and the file is unlinked
afterwards.

Entries are removed many at a time, when the folders are flushed: until then a power failure may undo a
rename.
"""

import logging
import sqlite3
from contextlib import suppress
from typing import Final

from pysync._core import split_key
from pysync.errors import KeyConflict, StoreUnavailable
from pysync.store.local.disk import FileTree, TempFile, translate_os_errors

log = logging.getLogger(__name__)

FLUSH_EVERY: Final = 64
"""Number of entries of this process after which it flushes the folders and removes the entries."""

_GET_RENAME = "SELECT name FROM arriving WHERE key = ?"
_RENAMES_BELOW = "SELECT 1 FROM arriving WHERE key > ? AND key < ?"
_ADD_RENAME = "INSERT OR REPLACE INTO arriving VALUES(?, ?)"
_IS_FILE = "SELECT 1 FROM object WHERE parent = ? AND name = ? AND sha256 IS NOT NULL"


class RenameJournal:
    """The pending renames and deletions in `files`, as commit hooks of `GroupCommit`. Its methods are called
    in the thread that commits. Those with a cursor run within a transaction, so no other process writes
    meanwhile."""

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
        """Rename the file to `key` once the transaction, which writes its row, is committed. Raises
        KeyConflict."""
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
        """Record that the file at `key` is deleted with its row. Call `unlink` in the next transaction: a
        crash must not leave the row without its file."""
        self.has_work = True
        with translate_os_errors():
            self._cancel(cursor, key)
        cursor.execute("DELETE FROM arriving WHERE key = ?", (key,))
        cursor.execute("INSERT OR IGNORE INTO doomed VALUES(?)", (key,))
        self._staged_deletes.add(key)

    def unlink(self, cursor: sqlite3.Cursor, key: str) -> None:
        """Unlink the file at `key`, unless another one has been written there."""
        if key not in self._staged_deletes and not _is_file(cursor, key):
            with translate_os_errors():
                self._files.remove(key)
        self._unlinked += 1
        self.has_work = True

    def is_staged(self, key: str) -> bool:
        """Return True if this very transaction writes a file to `key`."""
        return key in self._staged_renames

    def is_pending(self, cursor: sqlite3.Cursor, key: str) -> bool:
        """Return True if the file of `key` is still to be renamed: after `recover`, by this very transaction
        or because it failed."""
        return cursor.execute(_GET_RENAME, (key,)).fetchone() is not None

    def recover(self, cursor: sqlite3.Cursor) -> None:
        """Finish the committed renames and deletions of all processes, and remove their entries. Afterwards
        every file that has a row lies at its key, except those of this transaction, which may still be rolled
        back. A rename or deletion that fails is logged, and its entry stays."""
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
            self._files.flush(key for key, *_ in (*arrived, *gone))
        cursor.executemany("DELETE FROM arriving WHERE key = ? AND name = ?", arrived)
        cursor.executemany("DELETE FROM doomed WHERE key = ?", gone)

    def before_commit(self, cursor: sqlite3.Cursor) -> None:
        """Flush the folders if enough entries have piled up, and the names of the staged files."""
        if len(self._moved) + self._unlinked >= FLUSH_EVERY:
            try:
                self.recover(cursor)
            except StoreUnavailable as error:
                cause = error.__cause__
                log.error("failed to flush the folders of files: %s", cause)
        if self._staged_renames:
            self._files.flush_temp_folder()

    def after_commit(self) -> None:
        """Rename the staged files to their keys."""
        for key, incoming in self._staged_renames.items():
            if self._move(incoming.name, key):
                self._moved.add(incoming.name)
            incoming.close()
        for incoming in (*self._superseded, *self._uncertain):
            with suppress(OSError):
                incoming.discard()
        self._uncertain = []
        self._reset()

    def after_rollback(self) -> None:
        """Keep the staged files until the next commit succeeds.

        A commit that failed in its last step may reappear after a crash, until another one overwrites it.
        """
        self._uncertain += [*self._staged_renames.values(), *self._superseded]
        self._reset()

    def _reset(self) -> None:
        self._staged_renames, self._superseded, self._staged_deletes = {}, [], set()
        self.has_work = bool(self._uncertain) or len(self._moved) + self._unlinked >= FLUSH_EVERY

    def _has_path_conflict(self, cursor: sqlite3.Cursor, key: str) -> bool:
        """Return True if a file with a pending rename will lie above or below `key`."""
        if cursor.execute(_RENAMES_BELOW, (key + "/", key + "0")).fetchone():
            return True
        above = key.rpartition("/")[0]
        while above:
            if cursor.execute(_GET_RENAME, (above,)).fetchone():
                return True
            above = above.rpartition("/")[0]
        return False

    def _cancel(self, cursor: sqlite3.Cursor, key: str) -> None:
        """Ensure that no pending rename of any process moves a file to `key` later."""
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
            log.error("could not rename %s to %r; will retry: %r", name, key, error)
            return False
        return True

    def _remove(self, key: str) -> bool:
        try:
            self._files.remove(key)
        except OSError as error:
            log.error("could not remove the file of %r; will retry: %r", key, error)
            return False
        return True


def _is_file(cursor: sqlite3.Cursor, key: str) -> bool:
    return cursor.execute(_IS_FILE, split_key(key)).fetchone() is not None
