"""Removes what deleted data leaves in the files of a database.

SQLite reuses the space of deleted rows, and overwrites it only if `secure_delete` is set. Older versions of a
row, and copies that were made when pages were split, may therefore lie in free pages, between the rows of
other pages, and in the write-ahead log. Writing the whole database anew is the one way that is sure to leave
none of them.
"""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

WAIT_S: Final = 60.0
"""Seconds for which the transactions of other processes are waited for."""


def purge_database(path: Path) -> None:
    """Write the database at `path` anew, without free pages, and empty its write-ahead log. Blocks; writes of
    all processes wait meanwhile, reads do not. Needs free space of twice the size of the database.

    Raises sqlite3.Error, and TimeoutError if another process reads an old state of the database all the time.
    """
    deadline = time.monotonic() + WAIT_S
    with closing(sqlite3.connect(path, isolation_level=None, timeout=WAIT_S)) as connection:
        connection.execute("VACUUM")
        while True:
            ((is_busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not is_busy:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name}-wal is in use by a process that reads an old state")
