"""Database files: creation, schema upgrades, opening, checks that they are sound and in their place, and
writing them anew without what was deleted."""

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger("pysync.sqlite")

_REMEDY: Final = (
    "Restore it from a backup, or save what can be read of it with the command .dump of sqlite3: "
    "docs/how-to/repair-damage.md has the commands"
)
_REMEDIES: Final = {
    "coordinator.db": "Stop all servers, then delete it with coordinator.db-wal and -shm. That loses rate "
    "counters, the idempotency keys of the last ten minutes and, if the store is a bucket, the change log"
}

BUSY_TIMEOUT_MS: Final = 5_000
"""Time that a write waits for the transaction of another process before it fails."""

_FULL_BELOW_BYTES: Final = 65_536
"""Free space that the files of an open database do not fit into."""

READ_BUSY_TIMEOUT_MS: Final = 100
"""Readers of a WAL database wait only while another process recovers it. They run on the event loop."""

CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two checks that an idle database is still at its path."""

PURGE_WAIT_S: Final = 60.0
"""Seconds for which a purge waits for the transactions of other processes."""
_ATTEMPT_S: Final = 0.5
"""Seconds of one attempt, which cannot be interrupted while it waits."""

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = "the database was deleted or replaced: restart the server"

DATABASE_ERRORS: Final = (sqlite3.Error, MemoryError)
"""Errors of SQLite, which raises MemoryError where it has no memory. They may leave a write half made."""


class Schema(NamedTuple):
    """The schema of a database file, as a list of upgrades. Each step has the statements that upgrade a file
    by one version, the first those that create it. A file has its version in `user_version`."""

    steps: tuple[str, ...]

    @property
    def version(self) -> int:
        """The version of a file that has all steps."""
        return len(self.steps)


class DatabaseMoved(sqlite3.OperationalError):
    """The open database is no longer the file at its path."""


class DatabaseFile:
    """A database of this process, with the files that belong to it. One thread calls `check`; any thread may
    use the rest.

    SQLite continues to use a file that was deleted or replaced, as every program does that has it open.
    Writes to such a file are lost when the last process closes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved = False
        """Stays set even if the file is put back: another process may have written to it meanwhile."""
        self.damage: str | None = None
        """SQLite's message about the first damage that was found."""
        self._watched: list[tuple[str, int, int]] = []
        self.watch(path)

    def watch(self, *paths: Path) -> None:
        """Watch the files that are now at `paths`. Raises OSError."""
        for path in map(str, paths):
            found = os.stat(path)
            self._watched.append((path, found.st_dev, found.st_ino))

    def check(self, first: int | None = None) -> None:
        """Raise DatabaseMoved if a watched file, or one of the `first` watched ones, is no longer at its
        path. The first time is logged."""
        for watched in self._watched[:first]:
            if not self.moved and not _is_same_file(*watched):
                self.moved = True
                log.critical(
                    "the database %s was deleted or replaced while this process has it open: reads and "
                    "writes fail until a restart. Acknowledged writes are in the file that is still open: "
                    "save it before you stop the server, as docs/how-to/repair-damage.md says",
                    self.path,
                )
        self.raise_if_moved()

    def raise_if_moved(self) -> None:
        """Raise DatabaseMoved if an earlier `check` did."""
        if self.moved:
            raise DatabaseMoved(_GONE)

    def record_error(self, error: BaseException) -> None:
        """Record an error of SQLite that reports damage. An error of the disk may look the same."""
        if self.damage is None and is_damage(error):
            self.damage = str(error)
            log.critical(
                "SQLite reports damage of the database %s: %s. If dmesg has errors of the disk, repair it "
                "and restart; otherwise restore the database from a backup",
                self.path,
                error,
            )

    @property
    def fault(self) -> str | None:
        """The reason why the database is unusable until a restart; None if it is usable."""
        if self.moved:
            return _GONE
        return None if self.damage is None else f"SQLite reports damage of {self.path}: {self.damage}"


class Database(NamedTuple):
    """An open database: `reader` is for the event loop, `writer` for `GroupCommit`."""

    reader: sqlite3.Connection
    writer: sqlite3.Connection
    file: DatabaseFile
    is_durable: bool = True
    """True if commits survive the loss of power."""

    def close(self) -> None:
        """Close both connections."""
        self.writer.close()
        self.reader.close()


def make_private_dir(path: Path, *, may_be_link: bool = False) -> None:
    """Create `path` and its missing parents, closed to other users. Raises OSError, also if `path` is a
    symbolic link, unless `may_be_link` is set."""
    if not may_be_link and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not path.is_dir():
        make_private_dir(path.parent, may_be_link=True)  # `parents` of mkdir would leave them open to others
        path.mkdir(mode=0o700, exist_ok=True)


def open_database(path: Path, schema: Schema, synchronous: str, traces: Sequence[Path] = ()) -> Database:
    """Create or upgrade the database as `create_database` does, then open it. `synchronous` is that of
    SQLite: FULL survives the loss of power. Raises as `create_database`."""
    create_database(path, schema, traces)
    file = DatabaseFile(path)
    with ExitStack() as opened:
        reader = opened.enter_context(closing(_connect(path, READ_BUSY_TIMEOUT_MS)))
        writer = opened.enter_context(closing(connect_writer(path, synchronous)))
        reader.execute("PRAGMA query_only = ON")
        for connection in (reader, writer):
            connection.execute("SELECT 1 FROM sqlite_master").fetchall()  # opens the WAL and SHM files
        real = os.path.realpath(path)  # SQLite creates them next to the target of a symbolic link
        file.watch(Path(f"{real}-wal"), Path(f"{real}-shm"))
        file.check()
        opened.pop_all()
    return Database(reader, writer, file, synchronous == "FULL")


def create_database(path: Path, schema: Schema, traces: Sequence[Path] = ()) -> None:
    """Create the file at `path` or upgrade it to `schema`, in WAL mode: all missing steps are applied, or
    none. Any number of processes may call this at once.

    Raises ValueError if a newer version of pysync wrote the file, or if the file is gone although one of
    `traces`, which are created after it, exists. Raises sqlite3.Error or OSError if it cannot be used.
    """
    # Turning a database to WAL ignores the busy timeout, so that step needs a lock of its own.
    with open(path.with_suffix(".lock"), "ab", opener=_open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or not path.stat().st_size:
            _check_is_new(path, traces)
            # Only for a new file: closing an existing one would release the locks of this process on it.
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
            # The connections need it. A file that sqlite3 recovered, for example, has another mode.
            connection.execute("PRAGMA journal_mode = WAL")
            if version < schema.version:
                steps = ";".join(schema.steps[version:])
                connection.executescript(
                    f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {schema.version}; COMMIT;"
                )
        finally:
            connection.close()
        fsync_dir(path.parent)
        fsync_dir(path.parent.parent)


def reason_of(error: Exception, folder: str | Path) -> str:
    """Return why a database in `folder` could not be opened, and what to do. SQLite says `disk I/O error` for
    a full disk."""
    if getattr(error, "errno", None) == errno.EROFS:
        return (
            f"the file system is read-only ({error}). If it was not mounted so, `dmesg` says why; mount it "
            "read-write, and start again"
        )
    with suppress(OSError):
        if shutil.disk_usage(folder).free < _FULL_BELOW_BYTES:
            return f"the disk is full ({error})"
    return str(error)


def _check_is_new(path: Path, traces: Sequence[Path]) -> None:
    for trace in traces:
        if trace.exists():
            raise ValueError(
                f"{path} is missing or empty, but {trace} is there, which was made with it: put the database "
                f"back, or restore it from a backup. To begin with an empty store, move {path.parent} away"
            )


def _open_private(path: str, flags: int) -> int:
    """Open a file that other users cannot read, whatever the mode of its folder, and not through a symbolic
    link. SQLite gives its own files the same mode."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def fsync_dir(path: str | Path) -> None:
    """Make the names in a folder survive the loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def connect_writer(path: Path, synchronous: str) -> sqlite3.Connection:
    """Return a connection for `GroupCommit`. `synchronous` is that of SQLite: FULL survives the loss of
    power."""
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
    """Return sentences that say how the database at `path` is damaged, and what to do. Returns None if
    `quick_check`, which reads all of it, finds nothing or cannot run; opening the database then reports the
    reason. `with_indexes` also compares indexes with their tables, which takes longer."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            pragma = "integrity_check" if with_indexes else "quick_check"
            ((found,),) = connection.execute(f"PRAGMA {pragma}(1)").fetchall()
    except sqlite3.Error as error:
        if not is_damage(error):
            return None
        found = str(error)
    if found == "ok":
        return None
    return f"{path} is damaged: {' '.join(str(found).split())}. {_REMEDIES.get(path.name, _REMEDY)}"


async def purge_database(path: Path) -> None:
    """Write the database at `path` anew, without free pages, and empty its write-ahead log. Writes of all
    processes wait meanwhile, reads do not. Needs free space of twice the size of the database. If it is
    cancelled, the database stays as it was.

    SQLite reuses the space of deleted rows, and overwrites it only if `secure_delete` is set. Older versions
    of a row, and copies that were made when pages were split, may therefore lie in free pages, between the
    rows of other pages, and in the write-ahead log. Writing all of it anew is the one way that is sure to
    leave none of them.

    Raises sqlite3.Error, and TimeoutError if another process uses the database all the time.
    """
    connection = sqlite3.connect(path, isolation_level=None, timeout=_ATTEMPT_S, check_same_thread=False)
    with closing(connection):
        running = asyncio.ensure_future(asyncio.to_thread(_purge, connection))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            connection.interrupt()
            await asyncio.wait({running})
            raise


def _purge(connection: sqlite3.Connection) -> None:
    deadline = time.monotonic() + PURGE_WAIT_S
    is_new = False
    while True:
        try:
            if not is_new:
                connection.execute("VACUUM")
                is_new = True
            ((is_busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not is_busy:
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        if time.monotonic() > deadline:
            raise TimeoutError("other processes use it all the time, or read an old state of it")


def is_damage(error: BaseException) -> bool:
    """Return True if SQLite raised this error because the file is damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def _is_same_file(path: str, device: int, inode: int) -> bool:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # an error of the disk does not show that the file was taken away
    return found.st_ino == inode and found.st_dev == device
