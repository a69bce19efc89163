"""However long a backup takes or waits, `prune` deletes nothing that its next snapshot refers to."""

import os
from collections.abc import AsyncIterator

import pytest
from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, maker_of, restored
from support.store_samples import contents, document

from pysync.backup import packing
from pysync.backup.checking import BackupVerifier
from pysync.backup.making import BackupMaker
from pysync.backup.notes import GRACE_MS
from pysync.backup.pruning import KeepRules, prune
from pysync.backup.repository import EXPIRED, PACKS, PAGES, Repository
from pysync.backup.runs import FAN_OUT
from pysync.backup.source import ListedSnapshotSource
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def check_whole(target: MemoryTarget) -> None:
    """Nothing that a snapshot refers to is missing."""
    problems: list[tuple[str, str]] = []
    verifier = BackupVerifier(await Repository.open(target), lambda name, why: problems.append((name, why)))
    await verifier.run()
    assert problems == []


async def prune_for_days(target: MemoryTarget, clock: FakeClock, days: int = 2) -> None:
    """Prune, and once again after each of these days."""
    await prune(await Repository.open(target), KeepRules(last=1), clock())
    for _ in range(days):
        clock.now_ms += GRACE_MS
        await prune(await Repository.open(target), KeepRules(last=1), clock())


class Idle:
    """A store, its backup, and a maker of one snapshot of it that waits."""

    def __init__(
        self, maker: BackupMaker, target: MemoryTarget, clock: FakeClock, store: MemoryStore
    ) -> None:
        self.maker = maker
        self.target = target
        self.clock = clock
        self.store = store

    async def write(self, key: str, n: int) -> None:
        self.clock.now_ms += 1
        await self.store.put(key, document(b'{"n":%d}' % n))

    async def make(self) -> None:
        """Make a snapshot, which has everything."""
        await self.maker.make(only_changes=True)
        assert await restored(self.target) == await contents(self.store)
        await check_whole(self.target)


@pytest.fixture
async def idle() -> AsyncIterator[Idle]:
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    for n in range(40):
        await store.put(f"n/{n:02}", document(b'{"n":%d}' % n))
    async with maker_of(ListedSnapshotSource(store), target, clock) as maker:
        await maker.make()
        yield Idle(maker, target, clock, store)


async def test_a_maker_that_waited_does_not_continue_from_what_is_deleted(idle: Idle) -> None:
    """Another maker has replaced every list since, and notes of what is deleted are gone as well."""
    for n in range(40):
        await idle.write(f"n/{n:02}", 100 + n)
    idle.clock.now_ms += 1
    await back_up(ListedSnapshotSource(idle.store), idle.target, idle.clock)
    await prune_for_days(idle.target, idle.clock)
    await idle.write("n/00", 1000)
    await idle.make()


async def test_a_maker_that_waited_does_not_use_lists_that_it_merged_before(idle: Idle) -> None:
    """It merges lists after a snapshot, so none names the new list until the next one."""
    for n in range(FAN_OUT - 1):
        await idle.write(f"n/{n:02}", 100 + n)
        await idle.maker.make(only_changes=True)
    pages = {*await idle.target.names(PAGES)}
    while {*await idle.target.names(PAGES)} == pages:
        await idle.write("n/00", len(idle.target.files))
        await idle.maker.make(only_changes=True)
        if idle.maker._merging is not None:
            await idle.maker._merging
    await prune_for_days(idle.target, idle.clock)
    await idle.write("n/01", 1000)
    await idle.make()


async def test_a_note_of_a_merged_list_does_not_make_a_maker_list_everything(idle: Idle) -> None:
    for n in range(3):
        await idle.write(f"n/{n:02}", 100 + n)
        await idle.maker.make(only_changes=True)
    idle.maker._runs[:] = await idle.maker._repository.merge(idle.maker._runs, is_all=True)
    await prune(await Repository.open(idle.target), KeepRules(last=1), idle.clock())
    assert await idle.target.names(EXPIRED) != []
    idle.clock.now_ms += GRACE_MS // 2
    read = idle.maker.report.objects
    await idle.write("n/00", 1000)
    await idle.make()
    assert idle.maker.report.objects == read + 1


async def test_bytes_that_a_maker_knew_are_stored_anew_once_they_are_deleted(idle: Idle) -> None:
    content = os.urandom(5_000)
    await idle.store.write("file", chunks_of(content), "image/png")
    await idle.maker.make()
    await idle.store.delete("file")
    for n in range(40):
        await idle.write("n/00", n)
        await idle.maker.make()
    await prune_for_days(idle.target, idle.clock)
    await idle.store.write("again", chunks_of(content), "image/png")
    await idle.make()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_backup_that_takes_days_loses_nothing_to_prune(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file takes days, so no snapshot names the packs of its first parts meanwhile."""
    monkeypatch.setattr(packing, "PACK_BYTES", 4_000)
    monkeypatch.setattr("pysync.backup.source.PART_BYTES", 5_000)
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    if not is_first:
        await store.put("n", document(b'{"n":1}'))
        await back_up(ListedSnapshotSource(store), target, clock)
    await store.write("file", chunks_of(os.urandom(40_000)), "image/png")
    stored: list[str] = []

    async def prune_after_some(name: str) -> None:
        if name.startswith(PACKS):
            stored.append(name)
            if len(stored) == 4:
                await prune_for_days(target, clock)
                assert await target.get(stored[0]) is None

    target.after_put = prune_after_some
    clock.now_ms += 1
    await back_up(ListedSnapshotSource(store), target, clock)
    assert await restored(target) == await contents(store)
    await check_whole(target)
