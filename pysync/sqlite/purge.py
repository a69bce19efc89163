"""Removes what deleted data leaves in the files of a database.

SQLite reuses the space of deleted rows, and overwrites it only if `secure_delete` is set. Older versions of a
row, and copies that were made when pages were split, may therefore lie in free pages, between the rows of
other pages, and in the write-ahead log. Writing the whole database anew is the one way that is sure to leave
none of them.
"""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

WAIT_S: Final = 60.0
"""Seconds for which the transactions of other processes are waited for."""
_ATTEMPT_S: Final = 0.5
"""Seconds of one attempt, which cannot be interrupted while it waits."""


async def purge_database(path: Path) -> None:
    """Write the database at `path` anew, without free pages, and empty its write-ahead log. Writes of all
    processes wait meanwhile, reads do not. Needs free space of twice the size of the database. If it is
    cancelled, the database stays as it was.

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
    deadline = time.monotonic() + WAIT_S
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
