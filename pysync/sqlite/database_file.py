"""The file of an open database: the check that it is still the one at its path, and that no damage was met in
it.

SQLite goes on with a file that was deleted or replaced, as every program does that holds it open. What is
written then is gone when the last process closes it.
"""

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

log = logging.getLogger("pysync.sqlite")

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_REMEDY: Final = (
    "Restore it from a backup, or save what can be read of it with the command .recover of sqlite3"
)
_REMEDIES: Final = {
    "coordinator.db": "Stop all servers and delete it, and coordinator.db-wal and -shm: rate counters and "
    "idempotency keys of ten minutes are lost with it, and where the store is a bucket the log of changes"
}

_GONE = "the database was deleted or replaced: restart the server"


class DatabaseMoved(sqlite3.OperationalError):
    """The database is not the one at its path any more."""


class DatabaseFile:
    """One database of this process, with the files that belong to it. `check` is called by one thread, the
    rest by any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved = False
        """Stays set even if the file is put back: another process may have written to it meanwhile."""
        self.damage: str | None = None
        """SQLite's message about the first damage that was met."""
        self._watched: list[tuple[str, int, int]] = []
        self.watch(path)

    def watch(self, *paths: Path) -> None:
        """Watch the files that are now at `paths`. Raises OSError."""
        for path in map(str, paths):
            found = os.stat(path)
            self._watched.append((path, found.st_dev, found.st_ino))

    def check(self, first: int | None = None) -> None:
        """Raise DatabaseMoved if a file, or one of the `first` that were watched, is not at its path any
        more; the operator is told once."""
        if not self.moved and not all(_is_same_file(*watched) for watched in self._watched[:first]):
            self.moved = True
            log.critical(
                "the database %s was deleted or replaced while this process has it open: reads and writes "
                "are refused until a restart. What was acknowledged is in the file that is still held open: "
                "save it before you stop the server, as docs/how-to/repair-damage.md says",
                self.path,
            )
        self.raise_if_moved()

    def raise_if_moved(self) -> None:
        """Raise DatabaseMoved where `check` found it."""
        if self.moved:
            raise DatabaseMoved(_GONE)

    def record_error(self, error: BaseException) -> None:
        """Remember what SQLite raised if it is damage; the operator is told once."""
        if self.damage is None and _is_damage(error):
            self.damage = str(error)
            log.critical("the database %s is damaged: %s; restore it from a backup", self.path, error)

    @property
    def fault(self) -> str | None:
        """The reason why the database is unusable until a restart."""
        if self.moved:
            return _GONE
        return None if self.damage is None else f"{self.path} is damaged: {self.damage}"


def quick_check(path: Path, *, with_indexes: bool = False) -> str | None:
    """Sentences that say how the database at `path` is damaged and what to do. None if `quick_check`, which
    reads all of it, finds nothing or cannot run: opening the database then says why. `with_indexes` compares
    indexes with their tables as well, which takes longer."""
    pragma = "integrity_check" if with_indexes else "quick_check"
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            ((found,),) = connection.execute(f"PRAGMA {pragma}(1)").fetchall()
    except sqlite3.Error as error:
        if not _is_damage(error):
            return None
        found = str(error)
    if found == "ok":
        return None
    return f"{path} is damaged: {' '.join(found.split())}. {_REMEDIES.get(path.name, _REMEDY)}"


def _is_damage(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def _is_same_file(path: str, device: int, inode: int) -> bool:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # the disk does not answer: no sign that anybody took the file away
    return found.st_ino == inode and found.st_dev == device
