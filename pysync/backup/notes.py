"""Notes of the files that a later `prune` may delete."""

from typing import Final, NamedTuple

from pysync.backup.repository import EXPIRED, BackupDamaged, Repository

GRACE_MS: Final = 86_400_000
"""Time from the note that a file is unreferenced to its deletion."""


class ExpiredFiles(NamedTuple):
    """A note below `expired/`: its name, its time, and the files that it names. One that is damaged or gone
    names none, and has the time 0."""

    name: str
    at_ms: int
    files: set[str]


async def expired_files(repository: Repository) -> list[ExpiredFiles]:
    """Return the files that a `prune` may delete."""
    notes = []
    for name in await repository.target.names(EXPIRED):
        try:
            notes.append(ExpiredFiles(name, *await repository.read_note(name)))
        except BackupDamaged:
            notes.append(ExpiredFiles(name, 0, set()))
    return notes
