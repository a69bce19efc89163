"""Files and rows whose bytes change behind the store's back."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from pysync._core import split_key
from pysync.migrate import Damage, Verifier
from pysync.store import Store
from support.store_samples import flipped


def rot(path: Path, at: int = 0, bit: int = 1) -> None:
    """Flip a bit, as a disk does: size and times stay."""
    found = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def rot_rows(folder: Path, *keys: str) -> None:
    """Flip a bit of the rows of these documents in the store in a folder: their etags stay."""
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        for key in keys:
            parts = split_key(key)
            ((body,),) = database.execute("SELECT body FROM object WHERE parent = ? AND name = ?", parts)
            database.execute(
                "UPDATE object SET body = ? WHERE parent = ? AND name = ?", (flipped(body), *parts)
            )


async def damages(store: Store) -> list[Damage]:
    """Return the findings of a verifier of the store."""
    found: list[Damage] = []
    await Verifier(store, found.append).run()
    return found
