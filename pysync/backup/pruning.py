"""Removes old snapshots, and in a second step the files that no snapshot refers to any more.

A backup that runs meanwhile may refer to a file that no finished snapshot names. So `prune` first only notes
which files are unreferenced, below `expired/`. A later one deletes those that still are, a day after the
note. A backup reads the notes before it writes a snapshot, and does not refer to a file that is named there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.backup.repository import EXPIRED, PACKS, PAGES, BackupDamaged, Repository, Snapshot, path_of
from pysync.concurrency import gather_bounded

GRACE_MS: Final = 86_400_000
"""Time from the note that a file is unreferenced to its deletion."""
_CONCURRENT_DELETES: Final = 16


class KeepRules(NamedTuple):
    """The snapshots that are kept: the newest ones, and the newest one of each of the last hours, days,
    weeks, months and years that have any."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0


@dataclass(slots=True)
class PruneReport:
    """The number of snapshots kept and removed, of files deleted, and of files that a later `prune` may
    delete."""

    kept: int = 0
    removed: int = 0
    deleted: int = 0
    expired: int = 0


def kept_snapshots(snapshots: Sequence[Snapshot], rules: KeepRules) -> list[Snapshot]:
    """Return the snapshots, oldest first, that the rules keep; always the newest one."""
    kept: set[int] = {len(snapshots) - 1} if snapshots else set()
    for count, period_of in zip(rules, _PERIODS, strict=True):
        periods: dict[object, int] = {}
        for at in range(len(snapshots) - 1, -1, -1):
            time = datetime.fromtimestamp(snapshots[at].taken_ms / 1000, UTC)
            periods.setdefault(period_of(time, at), at)
        kept.update([*periods.values()][:count])
    return [snapshots[at] for at in sorted(kept)]


_PERIODS: Final[tuple[Callable[[datetime, int], object], ...]] = (
    lambda _, at: at,
    lambda time, _: (time.date(), time.hour),
    lambda time, _: time.date(),
    lambda time, _: time.isocalendar()[:2],
    lambda time, _: (time.year, time.month),
    lambda time, _: time.year,
)


class DamagedSnapshot(BackupDamaged):
    """The file `name` of a snapshot is damaged, so nobody knows what the snapshot refers to."""

    def __init__(self, name: str, why: BackupDamaged) -> None:
        super().__init__(str(why))
        self.name = name


async def prune(repository: Repository, rules: KeepRules, now_ms: int) -> PruneReport:
    """Remove the snapshots that `rules` do not keep. Backups may run meanwhile. Raises BackupDamaged, before
    anything is removed, if it cannot be read what a snapshot refers to, as DamagedSnapshot if its own file is
    damaged; StoreUnavailable."""
    report = PruneReport()
    await repository.target.delete_leftovers()
    snapshots = []
    for name in await repository.snapshot_names():
        try:
            snapshots += await repository.find_snapshots([name])
        except BackupDamaged as error:
            raise DamagedSnapshot(name, error) from None
    complete = [snapshot for snapshot in snapshots if snapshot.is_complete]
    kept = kept_snapshots(complete, rules)
    # What an interrupted backup has stored is of use until the next one ends, and one may be running.
    kept += [one for one in snapshots if not one.is_complete and now_ms - one.taken_ms < GRACE_MS]
    used = await referenced(repository, kept)
    names = {one.name for one in kept}
    removed = [one.name for one in snapshots if one.name not in names]
    await gather_bounded(_CONCURRENT_DELETES, removed, repository.target.delete)
    # Those that were written meanwhile.
    newer = [
        name for name in await repository.snapshot_names() if name not in {one.name for one in snapshots}
    ]
    used |= await referenced(repository, await repository.find_snapshots(newer))
    stored = {*await repository.target.names(PACKS), *await repository.target.names(PAGES)}
    unused = stored - used
    noted: set[str] = set()
    for name, at_ms, expired in await expired_files(repository):
        if now_ms - at_ms < GRACE_MS:
            noted |= expired & unused
            continue
        gone = sorted(expired & unused)
        await gather_bounded(_CONCURRENT_DELETES, gone, repository.target.delete)
        await repository.target.delete(name)
        report.deleted += len(gone)
        unused -= expired
    if fresh := sorted(unused - noted):
        await repository.put_note(now_ms, fresh)
    report.kept, report.removed = len(kept), len(removed)
    report.expired = len(unused)
    return report


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


async def referenced(repository: Repository, snapshots: Iterable[Snapshot]) -> set[str]:
    """Return the paths of all pages and packs that these snapshots refer to. Raises BackupDamaged."""
    pages = {page for snapshot in snapshots for run in snapshot.runs for page in run.pages}
    packs: set[str] = set()
    for page in sorted(pages):
        packs.update(await repository.packs_of(page))
    return {path_of(PAGES, page) for page in pages} | {path_of(PACKS, pack) for pack in packs}
