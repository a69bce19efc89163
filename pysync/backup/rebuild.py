"""Finds in packs what damaged lists and snapshots said, and makes these anew."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from pysync.backup.claim import BackupClaim, Outdated
from pysync.backup.format import (
    MAX_INTEGER,
    BackupEntry,
    Order,
    Part,
    Snapshot,
    index_part,
    new_id,
    parse_snapshot_name,
)
from pysync.backup.snapshot import PACKS, BackupDamaged, Gap, Repository
from pysync.errors import StoreUnavailable

OnProblem = Callable[[str, str], None]


@dataclass(slots=True)
class RebuildReport:
    """The number of snapshots that were made anew, of the objects in them, and of those that damaged lists
    name and no pack describes."""

    snapshots: int = 0
    objects: int = 0
    missing: int = 0


class _Described(NamedTuple):
    """An entry in the index of a pack. The greatest one of a key is the newest."""

    age: tuple[int, int, int]
    entry: BackupEntry


async def recover(
    repository: Repository, store_id: str, gaps: Sequence[Gap], on_problem: OnProblem
) -> dict[str, list[BackupEntry]]:
    """Return the entries that packs have for damaged pages, by the name of the page. What was removed and has
    left no trace in a pack may be among them. Raises WrongKey without the private key, and StoreUnavailable.
    """
    repository.check_readable()
    found: dict[str, dict[Order, _Described]] = {gap.page: {} for gap in gaps}
    for path in await repository.target.list_files(PACKS) if gaps else ():
        name = path.rpartition("/")[2]
        try:
            _, index = await repository.read_pack(name)
        except BackupDamaged as error:
            on_problem("", str(error))
            continue
        for one in index.entries if index.store_id == store_id else ():
            order = one.entry.order
            for gap in gaps:
                if gap.has(one.number, order):
                    # Of two backups that used one number the first one was killed or taken back.
                    described = _Described((one.number, index.taken_ms, one.step), _in_pack(one.entry, name))
                    found[gap.page][order] = max(found[gap.page].get(order, described), described)
    return {page: [entries[order].entry for order in sorted(entries)] for page, entries in found.items()}


async def count_lost(
    repository: Repository, snapshot: Snapshot, recovered: Mapping[str, list[BackupEntry]]
) -> int:
    """Return the number of entries in the damaged lists of a snapshot that were not recovered."""
    if not recovered:
        return 0
    lost = sum(one.entries for one in snapshot.lists) - sum(map(len, recovered.values()))
    for page in [page for one in snapshot.lists for page in one.pages if page not in recovered]:
        lost -= len(await repository.read_page(page))
    return max(lost, 0)


def _in_pack(entry: BackupEntry, name: str) -> BackupEntry:
    """Return an entry of the index of a pack as a list has it."""
    parts = tuple(Part(part.pack or name, *part[1:]) for part in entry.parts)
    is_apart = all(part.pack != name for part in parts)
    return entry._replace(parts=(*parts, index_part(name)) if is_apart else parts)


async def rebuild(repository: Repository, now_ms: Callable[[], int], on_problem: OnProblem) -> RebuildReport:
    """Make the lists of all snapshots anew that have damaged ones, and the snapshots whose files are damaged;
    if none is left, the newest state that packs have. Backups may run meanwhile. Raises WrongKey without the
    private key, and StoreUnavailable."""
    report = RebuildReport()
    damaged: list[str] = []
    claim = BackupClaim(repository, now_ms)
    await claim.renew()
    try:
        snapshots = await repository.snapshots(lambda name, _: damaged.append(name))
        for snapshot in snapshots:
            if gaps := await repository.gaps(snapshot.lists):
                recovered = await recover(repository, snapshot.store_id, gaps, on_problem)
                pages = repository.merged(snapshot.lists, recovered=recovered)
                await _replace(repository, claim, snapshot, pages, report)
                report.missing += await count_lost(repository, snapshot, recovered)
        for name in damaged or ([] if snapshots else [""]):
            lost = await _lost_snapshot(repository, name)
            if lost is not None:
                everything = Gap("", "", -1, lost.number, None, None)
                recovered = await recover(repository, lost.store_id, [everything], on_problem)
                await _replace(repository, claim, lost, _stored(recovered[""]), report)
    except Outdated:
        raise StoreUnavailable("a prune has just changed the backup: run it again") from None
    finally:
        await claim.release()
    return report


async def _lost_snapshot(repository: Repository, name: str) -> Snapshot | None:
    """Return what is known of the snapshot whose file of this name is damaged, with `""` of the newest one;
    None if no pack is of its time or earlier. Its time is that of the newest pack."""
    number, id_, revision = parse_snapshot_name(name) or (MAX_INTEGER, new_id(), 0)
    newest: tuple[int, int, str] | None = None
    for path in await repository.target.list_files(PACKS):
        with suppress(BackupDamaged):
            _, index = await repository.read_pack(path.rpartition("/")[2])
            last = max((one.number for one in index.entries if one.number <= number), default=0)
            newest = max(newest or (0, 0, ""), (last, index.taken_ms, index.store_id))
    if newest is None:
        return None
    last, taken_ms, store_id = newest
    own = number if name else last
    return Snapshot(own, id_, taken_ms, store_id=store_id, revision=revision, name=name)


async def _replace(
    repository: Repository,
    claim: BackupClaim,
    snapshot: Snapshot,
    pages: AsyncIterator[list[BackupEntry]],
    report: RebuildReport,
) -> None:
    """Store a snapshot with these entries in the place of a damaged one."""
    found = await repository.put_list(snapshot.number, pages)
    lists = () if found is None else (found,)
    new = dataclasses.replace(snapshot, lists=lists, revision=snapshot.revision + 1)
    await claim.publish(new, *filter(None, [snapshot.name]))
    if snapshot.name:
        await repository.target.delete(snapshot.name)
    report.snapshots += 1
    report.objects += sum(one.entries for one in lists)


async def _stored(entries: list[BackupEntry]) -> AsyncIterator[list[BackupEntry]]:
    yield [entry for entry in entries if entry.etag]
