"""Database files: how they are created, brought to their schema, opened and checked for damage."""

import errno
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from pysync.sqlite.connection import Database, DatabaseFile, is_damage

_REMEDY: Final = (
    "Restore it from a backup, or save what can be read of it with the command .recover of sqlite3"
)
_REMEDIES: Final = {
    "coordinator.db": "Stop all servers and delete it, and coordinator.db-wal and -shm: rate counters and "
    "idempotency keys of ten minutes are lost with it, and where the store is a bucket the log of changes"
}

BUSY_TIMEOUT_MS: Final = 5_000
"""How long a write waits for another process's transaction before it is refused."""

READ_BUSY_TIMEOUT_MS: Final = 100
"""Readers of a WAL database wait only while another process recovers it; they run on the event loop."""


class Schema(NamedTuple):
    """The tables of a database file, as they came to be: each step is the statements that bring a file of the
    version before it to the next, the first of them a new file. A file's version is in its `user_version`."""

    steps: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.steps)


def make_private_dir(path: Path, *, may_be_link: bool = False) -> None:
    """Make `path` and its parents, closed to other users. Raises OSError, also for a symbolic link, unless it
    may be one."""
    if not may_be_link and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not path.is_dir():
        make_private_dir(path.parent, may_be_link=True)  # `parents` of mkdir would leave them open to others
        path.mkdir(mode=0o700, exist_ok=True)


def open_database(path: Path, schema: Schema, synchronous: str, traces: Sequence[Path] = ()) -> Database:
    """`create_database`, and open it. `synchronous` is SQLite's: FULL survives the loss of power."""
    create_database(path, schema, traces)
    file = DatabaseFile(path)
    reader, writer = connect_reader(path), connect_writer(path, synchronous)
    for connection in (reader, writer):
        connection.execute("SELECT 1 FROM sqlite_master").fetchall()  # opens the files beside
    real = os.path.realpath(path)  # SQLite has them beside the file that a link leads to
    file.watch(Path(f"{real}-wal"), Path(f"{real}-shm"))
    file.check()
    return Database(reader, writer, file, is_durable=synchronous == "FULL")


def create_database(path: Path, schema: Schema, traces: Sequence[Path] = ()) -> None:
    """Bring the file at `path` to `schema`, in any number of processes at once: all steps that it lacks, or
    none.

    Raises ValueError if a newer version wrote it, or if it is gone although one of `traces`, which are made
    after it, exists; sqlite3.Error or OSError if it cannot be used.
    """
    # Turning a database to WAL ignores the busy timeout, so that step needs a lock of its own.
    with open(path.with_suffix(".lock"), "ab", opener=_open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or not path.stat().st_size:
            _check_is_new(path, traces)
            # Only a new file: closing one ends the locks that this process has on it.
            open(path, "ab", opener=_open_private).close()
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > schema.version:
                raise ValueError(
                    f"{path} has schema {version}, and this version of pysync knows {schema.version}: "
                    "it was written by a newer one"
                )
            if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise ValueError(
                    f"{path} has tables and no version, as what the command .dump of sqlite3 writes: give it "
                    f"that of the original, with PRAGMA user_version = {schema.version} if this version of "
                    "pysync is the version that wrote it"
                )
            if version < schema.version:
                connection.execute("PRAGMA journal_mode = WAL")
                steps = ";".join(schema.steps[version:])
                connection.executescript(
                    f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {schema.version}; COMMIT;"
                )
        finally:
            connection.close()
        fsync_dir(path.parent)
        fsync_dir(path.parent.parent)


def _check_is_new(path: Path, traces: Sequence[Path]) -> None:
    for trace in traces:
        if trace.exists():
            raise ValueError(
                f"{path} is missing or empty, but {trace} is there, which was made with it: put the database "
                f"back, or restore it from a backup. To begin with an empty store, move {path.parent} away"
            )


def _open_private(path: str, flags: int) -> int:
    """Open a file that other users cannot read, whatever its folder; not through a symbolic link. SQLite
    gives its own files the same mode."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def fsync_dir(path: str | Path) -> None:
    """Make the names in a folder survive the loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection for short reads on the event loop's thread."""
    connection = _connect(path, READ_BUSY_TIMEOUT_MS)
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect_writer(path: Path, synchronous: str) -> sqlite3.Connection:
    """A connection for `GroupCommit`. `synchronous` is SQLite's: FULL survives the loss of power."""
    connection = _connect(path, BUSY_TIMEOUT_MS)
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _connect(path: Path, busy_timeout_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=busy_timeout_ms / 1000, check_same_thread=False
    )
    connection.execute("PRAGMA cache_size = -8192")
    return connection


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
        if not is_damage(error):
            return None
        found = str(error)
    if found == "ok":
        return None
    return f"{path} is damaged: {' '.join(found.split())}. {_REMEDIES.get(path.name, _REMEDY)}"
