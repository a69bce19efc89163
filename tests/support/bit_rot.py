"""Files whose bytes change behind the store's back."""

import os
from pathlib import Path

from pysync.migrate import Damage, Verifier
from pysync.store import Store


def rot(path: Path, at: int = 0, bit: int = 1) -> None:
    """Flip a bit, as a disk does: size and times stay."""
    found = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


async def damages(store: Store) -> list[Damage]:
    """Return the findings of a verifier of the store."""
    found: list[Damage] = []
    await Verifier(store, found.append).run()
    return found
