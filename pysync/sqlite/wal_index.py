"""The header of the index of a write-ahead log, which every commit of any process changes.

SQLite keeps the index in memory that all processes share: the file `-shm`, which each of them has mapped
(https://www.sqlite.org/walformat.html#the_wal_index_file_format). To compare the header with an earlier one
takes no system call, where a transaction takes two.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

HEADER_BYTES: Final = 48
"""The length of a header: a counter of commits, the number of frames, checksums and more."""
FORMAT: Final = (3_007_000).to_bytes(4, sys.byteorder)
"""The beginning of a header: the version of the only format that SQLite has."""


def wal_index_header(index: Path) -> Callable[[], bytes] | None:
    """Return a function that returns the header of the index that SQLite has mapped from the file `index`;
    None if it cannot be found. Do not call it after this process has closed the database.

    This does not open the file, because to close it would release the locks that SQLite holds on it.
    """
    address = _address(index)
    if address is None:
        return None
    header = memoryview((ctypes.c_char * HEADER_BYTES).from_address(address))
    return header.tobytes if header.tobytes().startswith(FORMAT) else None


def _address(index: Path) -> int | None:
    """Return where the beginning of a file is mapped."""
    try:
        inode = os.stat(index).st_ino
        mappings = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    for mapping in mappings:
        # 7f0c1a2b3000-7f0c1a2bb000 rw-s 00000000 fe:00 393230   /data/pysync.db-shm
        addresses, _, offset, _, mapped, *path = mapping.split(maxsplit=5)
        if path == [str(index)] and int(mapped) == inode and int(offset, 16) == 0:
            return int(addresses.partition("-")[0], 16)
    return None
