"""Removes old snapshots, and in a second step the files that no snapshot refers to any more.

A backup that runs meanwhile may refer to a file that no finished snapshot names. So `prune` first only notes
which files are unreferenced, below `expired/`. A later one deletes those that still are, a day after the
note. A backup reads the notes before it writes a snapshot, and does not refer to a file that is named there.
Packs of which little is needed are stored anew in between: see `repacking`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.backup.notes import GRACE_MS, expired_files
from pysync.backup.repacking import Repacker
from pysync.backup.repository import (
    MAX_CONCURRENT,
    PACKS,
    PAGES,
    BackupDamaged,
    Repository,
    Snapshot,
    path_of,
)
from pysync.concurrency import gather_bounded

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
    """The number of snapshots kept and removed, of files deleted, of files that a later `prune` may delete,
    of packs that were repacked, and of those that were not because they cannot be read."""

    kept: int = 0
    removed: int = 0
    deleted: int = 0
    expired: int = 0
    repacked: int = 0
    not_repacked: int = 0


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
    snapshots = await _read_snapshots(repository)
    references = _References(repository)
    kept = kept_snapshots(await _one_of_each_time(repository, references, snapshots), rules)
    # What an interrupted backup has stored is of use until the next one ends, and one may be running.
    kept += [one for one in snapshots if not one.is_complete and now_ms - one.taken_ms < GRACE_MS]
    await references.of(kept)
    names = {one.name for one in kept}
    removed = [one for one in snapshots if one.name not in names]
    # A restore may be reading these, so what they refer to stays for another day, whatever a note says.
    in_use = await references.readable_of(removed)
    await gather_bounded(_CONCURRENT_DELETES, [one.name for one in removed], repository.target.delete)
    unused = await _unreferenced(repository, references)
    noted: set[str] = set()
    repository.expired = unused.copy()
    for name, at_ms, expired in await expired_files(repository):
        repository.expired |= expired  # another prune may be deleting them, too
        if now_ms - at_ms < GRACE_MS:
            noted |= expired
            continue
        gone = sorted(expired & unused - in_use)
        await gather_bounded(_CONCURRENT_DELETES, gone, repository.target.delete)
        await repository.target.delete(name)
        report.deleted += len(gone)
        unused.difference_update(gone)
    await _note(repository, now_ms, unused - noted)
    if all(one.is_complete for one in kept):
        packs = await references.packs_of(kept)
        report.repacked, report.not_repacked = await Repacker(repository, kept, packs).run()
        if report.repacked:
            before, unused = unused, await _unreferenced(repository, references)
            await _note(repository, now_ms, unused - before)
    report.kept, report.removed = len(kept), len(removed)
    report.expired = len(unused)
    return report


async def _read_snapshots(repository: Repository) -> list[Snapshot]:
    snapshots = []
    for name in await repository.snapshot_names():
        try:
            snapshots += await repository.find_snapshots([name])
        except BackupDamaged as error:
            raise DamagedSnapshot(name, error) from None
    return snapshots


async def _one_of_each_time(
    repository: Repository, references: "_References", snapshots: Iterable[Snapshot]
) -> list[Snapshot]:
    """Return the complete snapshots, oldest first. A repack that was interrupted leaves two with the same
    time: return the latest that is whole."""
    found: dict[int, Snapshot] = {}
    generations = sorted(snapshots, key=lambda one: (one.taken_ms, one.generation, one.name))
    for one in generations:
        if one.is_complete and (
            one.taken_ms not in found or await references.readable_of([one]) <= await repository.stored()
        ):
            found[one.taken_ms] = one
    return [*found.values()]


async def _unreferenced(repository: Repository, references: "_References") -> set[str]:
    """Return the paths of all packs and pages that no snapshot refers to. Raises BackupDamaged."""
    used = await references.of(await repository.find_snapshots(await repository.snapshot_names()))
    return await repository.stored() - used


async def _note(repository: Repository, now_ms: int, files: Iterable[str]) -> None:
    if fresh := sorted(files):
        await repository.put_note(now_ms, fresh)


class _References:
    """What snapshots refer to. Pages never change, so each is read once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._packs: dict[str, set[str]] = {}

    async def of(self, snapshots: Iterable[Snapshot]) -> set[str]:
        """Return the paths of all pages and packs that these snapshots refer to. Raises BackupDamaged."""
        packs = {path_of(PACKS, pack) for pack in await self.packs_of(snapshots)}
        return packs | {path_of(PAGES, page) for page in _pages_of(snapshots)}

    async def readable_of(self, snapshots: Iterable[Snapshot]) -> set[str]:
        """Return what `of` does, without the packs to which only damaged pages refer."""
        files: set[str] = set()
        for page in _pages_of(snapshots):
            files.add(path_of(PAGES, page))
            with suppress(BackupDamaged):
                files |= {path_of(PACKS, pack) for pack in await self._read(page)}
        return files

    async def packs_of(self, snapshots: Iterable[Snapshot]) -> set[str]:
        """Return the names of all packs that these snapshots refer to. Raises BackupDamaged."""
        found = await gather_bounded(MAX_CONCURRENT, _pages_of(snapshots), self._read)
        return {pack for packs in found for pack in packs}

    async def _read(self, page: str) -> set[str]:
        if page not in self._packs:
            self._packs[page] = await self._repository.packs_of(page)
        return self._packs[page]


def _pages_of(snapshots: Iterable[Snapshot]) -> list[str]:
    return sorted({page for snapshot in snapshots for run in snapshot.runs for page in run.pages})
