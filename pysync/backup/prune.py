"""Removes old snapshots, and the files that no snapshot refers to any more.

Backups and other prunes may run meanwhile: their claims protect what they write. See `BackupClaim` for
the order in which things are removed.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.backup.claim import Outdated, read_claims
from pysync.backup.format import BackupEntry, Snapshot, inflated_size, iso_time, parse_snapshot_name
from pysync.backup.purge import Rewriter, read_erased
from pysync.backup.snapshot import (
    DAMAGED,
    LISTS,
    PACKS,
    SNAPSHOTS,
    BackupDamaged,
    Repository,
    path_of,
)
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.errors import StoreUnavailable

_SPARSE: Final = 5
"""A pack is stored anew if more than one byte in so many is dead."""
_WORTHWHILE: Final = 20
"""One byte in so many must be saved: all lists are written anew."""
_ATTEMPTS: Final = 5
"""Attempts to rewrite also the snapshots that are made meanwhile."""
_HOUR_MS: Final = 3_600_000
_CLAIMED: Final = "because a backup or a prune is running, or was killed less than a day ago"


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
    """The number of snapshots kept, of those among them that are `needed` only because later ones have lost
    something, and of those removed; of files deleted, of packs rewritten, of those that hold something that
    nothing refers to and were not rewritten, and of erased objects that went from snapshots that are kept."""

    kept: int = 0
    needed: int = 0
    removed: int = 0
    deleted: int = 0
    rewritten: int = 0
    not_rewritten: int = 0
    erased: int = 0


class ErasedObjects(NamedTuple):
    """A snapshot that has objects which a later one records as erased, and until when the rules keep it if
    one snapshot is made in each period."""

    snapshot: Snapshot
    objects: int
    until: str


class DamagedSnapshot(BackupDamaged):
    """The file `name` of a snapshot is damaged, so nobody knows what the snapshot refers to."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def sound_times(snapshots: Sequence[Snapshot]) -> list[int]:
    """Return the times of snapshots, which are in the order in which they were made. The times of as many as
    possible count as sound. Where the clock was wrong, the time is that of the next snapshot with a sound
    one."""
    times = [one.taken_ms for one in snapshots]
    tails: list[int] = []
    lengths: list[int] = []
    for time in times:
        at = bisect_right(tails, time)
        tails[at : at + 1] = [time]
        lengths.append(at + 1)
    sound: list[int] = []
    length, limit = len(tails), max(times, default=0)
    for time, own in zip(reversed(times), reversed(lengths), strict=True):
        if own == length and time <= limit:
            length, limit = length - 1, time
            sound.append(time)
        else:
            sound.append(limit)
    return sound[::-1]


def kept_snapshots(snapshots: Sequence[Snapshot], rules: KeepRules) -> list[Snapshot]:
    """Return the snapshots, in the order in which they were made, that the rules keep; always the newest."""
    times = [datetime.fromtimestamp(ms / 1000, UTC) for ms in sound_times(snapshots)]
    kept: set[int] = {len(snapshots) - 1} if snapshots else set()
    for count, (_, period_of) in zip(rules, _PERIODS, strict=True):
        periods: dict[object, int] = {}
        for at in range(len(snapshots) - 1, -1, -1):
            periods.setdefault(period_of(times[at], at), at)
        kept.update([*periods.values()][:count])
    return [snapshots[at] for at in sorted(kept)]


_PERIODS: Final[tuple[tuple[int, Callable[[datetime, int], object]], ...]] = (
    (0, lambda _, at: at),
    (1, lambda time, _: (time.date(), time.hour)),
    (24, lambda time, _: time.date()),
    (168, lambda time, _: time.isocalendar()[:2]),
    (744, lambda time, _: (time.year, time.month)),
    (8784, lambda time, _: time.year),
)
"""The hours of a period, and what is equal for the snapshots in one."""


class Pruner:
    """Removes what `rules` do not keep of each store. With `purges` every pack and list is written anew that
    has bytes or names to which no kept snapshot refers, and with `erases` also what is recorded as erased
    goes from the snapshots that are kept. `on_problem` is called with what could not be done."""

    def __init__(
        self,
        repository: Repository,
        rules: KeepRules,
        now_ms: Callable[[], int],
        on_problem: Callable[[str], None],
        *,
        purges: bool = False,
        erases: bool = False,
    ) -> None:
        self.report = PruneReport()
        self.is_complete = True
        """False if files that nothing needs are left, or after a purge bytes or names."""
        self.erased_objects: list[ErasedObjects] = []
        self._repository = repository
        self._rules = rules
        self._now_ms = now_ms
        self._on_problem = on_problem
        self._purges = purges
        self._erases = erases
        self._packs: dict[str, set[str]] = {}
        self._unread: set[str] = set()
        self._published: set[str] = set()
        """The packs and pages of the snapshots that were there first. No claim protects them for long."""

    async def run(self) -> None:
        """Prune. Raises DamagedSnapshot, before anything is removed, if it cannot be read what a snapshot
        refers to; BackupDamaged if there is none, or if a purge cannot read a list; and StoreUnavailable."""
        repository, report = self._repository, self.report
        await repository.target.delete_leftovers()
        kept, removed = await self._choose()
        if not kept:
            raise BackupDamaged("there is no snapshot, so nothing is removed: see `pysync backup rebuild`")
        gone = {*await repository.target.list_files(SNAPSHOTS)} & removed
        await gather_bounded(CONCURRENT, sorted(gone), repository.target.delete)
        report.kept, report.removed = len(kept), len(gone)
        try:
            for store_id in sorted({one.store_id for one in kept}):
                own = [one for one in kept if one.store_id == store_id]
                await (self._purge(own) if self._purges else self._repack(own))
        except (Outdated, BackupDamaged) as error:
            left = await repository.target.list_files(SNAPSHOTS)
            if isinstance(error, BackupDamaged) and left.keys() >= {one.name for one in kept}:
                raise
            raise StoreUnavailable("another prune has just changed the backup: run it again") from None
        await self._delete_unused()

    async def _choose(self) -> tuple[list[Snapshot], set[str]]:
        """Return the snapshots to keep, and the names of those to remove, with replaced revisions."""
        repository = self._repository
        names = {*await repository.target.list_files(SNAPSHOTS)}
        claims = await read_claims(repository, self._now_ms())
        snapshots = await repository.snapshots(_fail)
        kept: list[Snapshot] = []
        for store_id in sorted({one.store_id for one in snapshots}):
            own = [one for one in snapshots if one.store_id == store_id]
            for one, sound_ms in zip(own, sound_times(own), strict=True):
                if one.taken_ms != sound_ms:
                    times = f"{iso_time(one.taken_ms)} counts as one of {iso_time(sound_ms)}"
                    self._on_problem(f"a clock was wrong: the snapshot of {times}")
            chosen = {one.name for one in kept_snapshots(own, self._rules)}
            if claims and own[-2:] and own[-2:][0].name not in chosen:
                # The newest one may be taken back by its maker, which then continues the one before it.
                chosen.add(own[-2:][0].name)
                self._on_problem("the two newest snapshots are kept, " + _CLAIMED)
            kept += [one for one in own if one.name in chosen]
        await self._note_published(snapshots)
        kept_names = {one.name for one in kept}
        needed = await self._needed(kept, [one for one in snapshots if one.name not in kept_names])
        self.report.needed = len(needed)
        for one in needed:
            self._on_problem(
                f"the snapshot of {iso_time(one.taken_ms)} is kept: later ones lack something that it has; "
                "run `pysync backup` first, which stores anew what the store has"
            )
        kept = sorted([*kept, *needed], key=lambda one: (one.number, one.id))
        ids = {one for claim in claims.values() for one in claim.ids}
        written = {(one.number, one.id) for one in kept if not ids.isdisjoint(_claim_ids(one))}
        replaced = {name for name in names if (parse_snapshot_name(name) or ())[:2] in written}
        return kept, names - {one.name for one in kept} - replaced

    async def _note_published(self, snapshots: Iterable[Snapshot]) -> None:
        for page in {page for snapshot in snapshots for one in snapshot.lists for page in one.pages}:
            self._published.add(page)
            with suppress(BackupDamaged):
                self._published |= await self._packs_of([page])

    async def _needed(self, kept: Sequence[Snapshot], others: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots of `others` that alone have objects which those to be kept have lost."""
        repository = self._repository
        whole = await repository.whole()
        if all([not one.unreadable and await self._refers_only_to(whole, one) for one in kept]):
            return []

        def is_intact(entry: BackupEntry) -> bool:
            return not entry.reason and all(part.pack in whole for part in entry.parts)

        entries = {(is_intact(entry), entry.key) for one in kept async for entry in repository.entries(one)}
        missing = {key for intact, key in entries if not intact and (True, key) not in entries}
        has_gaps = any([await repository.gaps(one.lists) for one in kept])
        needed: list[Snapshot] = []
        for one in reversed(others):
            has = {
                entry.key
                async for entry in repository.entries(one)
                if entry.key in missing and is_intact(entry)
            }
            is_whole = has_gaps and not await repository.gaps(one.lists)
            if has or is_whole:
                needed.append(one)
            missing -= has
            has_gaps &= not is_whole
        return needed

    async def _refers_only_to(self, whole: set[str], snapshot: Snapshot) -> bool:
        pages = {page for one in snapshot.lists for page in one.pages}
        try:
            return pages <= whole and await self._packs_of(pages) <= whole
        except BackupDamaged:
            return False

    async def _repack(self, kept: Sequence[Snapshot]) -> None:
        """Write sparse packs anew, if that saves enough."""
        async with Rewriter(self._repository, kept, self._now_ms) as rewriter:
            try:
                live = await rewriter.live_bytes()
            except BackupDamaged as error:
                self._on_problem(f"no pack is written anew: {error}")
                return
            dead = {pack: inflated_size(pack) - size for pack, size in live.items()}
            sparse = [pack for pack in live if _SPARSE * dead[pack] > inflated_size(pack)]
            if not sparse or _WORTHWHILE * sum(dead[one] for one in sparse) < sum(map(inflated_size, live)):
                return
            if self._repository.is_readable:
                await rewriter.rewrite(sparse, checks_names=False)
                self._count(rewriter)
            else:
                self.report.not_rewritten += len(sparse)

    async def _purge(self, kept: Sequence[Snapshot]) -> None:
        """Write everything anew that has something to which no snapshot refers."""
        can_read = self._repository.is_readable or self._erases
        erased = await read_erased(self._repository, kept[-1]) if can_read else None
        if erased is None and self._erases:
            self._on_problem(
                "the newest snapshot records no erasure: make a backup after `pysync erase` first"
            )
            self.is_complete = False
        for _ in range(_ATTEMPTS):
            async with Rewriter(
                self._repository, kept, self._now_ms, erased if self._erases else None
            ) as rewriter:
                live = await rewriter.live_bytes()
                self.report.erased += rewriter.erased
                written = await rewriter.rewrite(live, checks_names=True)
                self._count(rewriter)
            found = await self._repository.snapshots(_fail)
            kept = [one for one in found if one.store_id == kept[-1].store_id]
            if {one.name for one in kept} <= written:
                break
        else:
            self._on_problem(
                "snapshots are made meanwhile, and keep old files: stop the backup, and purge again"
            )
            self.is_complete = False
        if erased is not None and not self._erases:
            entries = self._repository.entries
            stays = {(one.key, one.etag) async for one in entries(kept[-1])}
            for snapshot in kept:
                count = 0
                async for entry in entries(snapshot):
                    is_erased = erased.has(entry.key, entry.modified_ms)
                    count += is_erased and (entry.key, entry.etag) not in stays
                if count:
                    until = _kept_until(snapshot, self._rules)
                    self.erased_objects.append(ErasedObjects(snapshot, count, until))

    def _count(self, rewriter: Rewriter) -> None:
        self.report.rewritten += rewriter.rewritten
        for pack in rewriter.unreadable.keys() - self._unread:
            self._on_problem(f"{path_of(PACKS, pack)} is not written anew: {rewriter.unreadable[pack]}")
        self._unread |= rewriter.unreadable.keys()
        self.report.not_rewritten = len(self._unread)
        self.is_complete &= not (self._purges and self._unread)

    async def _delete_unused(self) -> None:
        """Delete the files that no snapshot and no claim refers to. What a claim protects stays, too."""
        target = self._repository.target
        files = [*await target.list_files(PACKS), *await target.list_files(LISTS)]
        claims = await read_claims(self._repository, self._now_ms())
        ids = {one for claim in claims.values() for one in claim.ids}
        used = await self._repository.revisions(_fail)
        used += [claim.progress for claim in claims.values() if claim.progress is not None]
        pages = {page for snapshot in used for one in snapshot.lists for page in one.pages}
        try:
            needed = pages | await self._packs_of(pages)
        except BackupDamaged as error:
            self._on_problem(f"no file is deleted, because some may be needed: {error}")
            self.is_complete = False
            return
        names = {path: path.rpartition("/")[2] for path in files}
        rest = {path for path, name in names.items() if name not in needed}
        claimed = {
            path
            for path in rest
            if names[path] not in self._published and not ids.isdisjoint(names[path].split("-")[1:2])
        }
        unused = sorted(rest - claimed)
        if self._purges and (claimed or any(claim.progress for claim in claims.values())):
            self._on_problem(
                f"{len(claimed)} files that no snapshot needs are left, {_CLAIMED}: run it again then"
            )
            self.is_complete = False
        await gather_bounded(CONCURRENT, unused, target.delete)
        self.report.deleted = len(unused)
        left = {*names.values()} - {names[path] for path in unused}
        marks = [mark for mark in await target.list_files(DAMAGED) if mark.partition("/")[2] not in left]
        await gather_bounded(CONCURRENT, marks, target.delete)

    async def _packs_of(self, pages: Iterable[str]) -> set[str]:
        """Return the packs that pages refer to. Each page is read once. Raises BackupDamaged."""
        for page in pages:
            if page not in self._packs:
                entries = await self._repository.read_page(page)
                self._packs[page] = {part.pack for entry in entries for part in entry.parts}
        return {pack for page in pages for pack in self._packs[page]}


def _claim_ids(snapshot: Snapshot) -> set[str]:
    """Return the ids of the claims of those who wrote the lists of a snapshot."""
    return {page.split("-")[1] for one in snapshot.lists for page in one.pages}


def _fail(name: str, why: str) -> None:
    raise DamagedSnapshot(name, why)


def _kept_until(snapshot: Snapshot, rules: KeepRules) -> str:
    """Return until when the rules keep a snapshot if one is made in each period."""
    hours = max(count * hours for count, (hours, _) in zip(rules, _PERIODS, strict=True))
    if hours:
        return iso_time(snapshot.taken_ms + hours * _HOUR_MS)
    return f"there are {rules.last} newer ones"
