"""However long backups take or wait, whatever prunes run beside them and are killed, nothing is lost."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import pytest
from contracts.files import chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backups import (
    MemoryTarget,
    back_up,
    maker_of,
    nothing,
    pruned,
    restored,
    snapshots_of,
    source_of,
    verified,
)
from support.store_samples import contents, document

from pysync.backup import format, make, pack, source
from pysync.backup.make import BackupMaker
from pysync.backup.prune import KeepRules, Pruner
from pysync.backup.snapshot import LISTS, PACKS, SNAPSHOTS, Repository
from pysync.errors import StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
NEWEST = KeepRules(last=1)
Contents = dict[str, tuple[str, bytes]]


class Idle(NamedTuple):
    """A store, its backup, and a maker that has made one snapshot of it and waits."""

    store: MemoryStore
    target: MemoryTarget
    clock: FakeClock
    maker: BackupMaker

    async def write(self, *numbers: int) -> None:
        for n in numbers:
            self.clock.now_ms += 1
            await self.store.put(
                f"n/{n:02}", document(os.urandom(20).hex().encode().join((b'{"v":"', b'"}')))
            )

    async def make(self) -> None:
        """Make a snapshot, which has everything and lacks nothing."""
        await self.maker.make(only_changes=True)
        assert await restored(self.target) == await contents(self.store)
        assert (await verified(self.target)).damaged == 0


@pytest.fixture
async def idle() -> AsyncIterator[Idle]:
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    async with maker_of(source_of(store), target, clock) as maker:
        idle = Idle(store, target, clock, maker)
        await idle.write(*range(40))
        await idle.make()
        yield idle


@pytest.mark.parametrize("days", [0, 2])
async def test_maker_that_waited_does_not_continue_from_what_is_deleted(idle: Idle, days: int) -> None:
    """Another maker has replaced every list, and prunes removed all that the waiting one refers to."""
    await idle.write(*range(40))
    await back_up(source_of(idle.store), idle.target, idle.clock)
    idle.clock.now_ms += days * DAY_MS
    await pruned(idle.target, NEWEST, idle.clock)
    await idle.write(0)
    await idle.make()


@pytest.mark.parametrize("is_own", [True, False])
async def test_bytes_that_a_maker_knew_are_stored_anew_once_they_are_deleted(
    idle: Idle, is_own: bool
) -> None:
    content = os.urandom(5_000)
    await idle.store.write("file", chunks_of(content), "image/png")
    await idle.make()
    async with maker_of(source_of(idle.store), idle.target, idle.clock) as other:
        maker = idle.maker if is_own else other
        await maker.make()
        await idle.store.delete("file")
        await idle.write(*range(40))  # so many that lists are folded, and none names the file
        await maker.make()
        if is_own:
            idle.clock.now_ms += 2 * HOUR_MS  # until then its claim protects everything that it wrote
            await maker.make()
        else:
            await idle.maker.close()
        for _ in range(2):  # beside a maker the two newest snapshots stay
            await idle.write(*range(40))
            await maker.make()
        assert (await pruned(idle.target, NEWEST, idle.clock)).deleted > 0
        await idle.store.write("again", chunks_of(content), "image/png")
        await maker.make()
        assert await restored(idle.target) == await contents(idle.store)


@pytest.mark.parametrize("folder", [SNAPSHOTS, PACKS, LISTS])
async def test_prune_deletes_nothing_that_a_backup_stores_while_it_lists_files(
    idle: Idle, folder: str
) -> None:
    for _ in range(3):  # beside a maker the two newest snapshots stay
        await idle.write(*range(40))
        await idle.make()
    idle.clock.now_ms += 2 * HOUR_MS
    await idle.make()

    async def back_up_again(listed: str) -> None:
        if listed == folder:
            idle.target.after_files = nothing
            await idle.write(*range(20))
            await idle.maker.make()

    idle.target.after_files = back_up_again
    assert (await pruned(idle.target, NEWEST, idle.clock)).deleted > 0
    assert idle.target.after_files is nothing
    assert await restored(idle.target) == await contents(idle.store)
    assert (await verified(idle.target)).damaged == 0


async def test_backup_that_takes_days_loses_nothing_to_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file takes days, so no snapshot names the packs of its first parts meanwhile."""
    monkeypatch.setattr(pack, "PACK_BYTES", 4_000)
    for module in (make, source):
        monkeypatch.setattr(module, "PART_BYTES", 5_000)
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await store.put("n", document(b'{"n":1}'))
    await back_up(source_of(store), target, clock)
    await store.write("file", chunks_of(os.urandom(100_000)), "image/png")
    stored: list[str] = []

    async def prune_each_hour(name: str) -> None:
        if name.startswith(PACKS):
            stored.append(name)
            clock.now_ms += 5 * HOUR_MS
            await pruned(target, NEWEST, clock)

    target.after_put = prune_each_hour
    await back_up(source_of(store), target, clock)
    assert len(stored) > 10
    assert await restored(target) == await contents(store)
    assert (await verified(target)).damaged == 0


@pytest.mark.parametrize("days", [0, 2])
async def test_prune_keeps_what_an_interrupted_backup_has_stored_for_a_day(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "CHECKPOINT_ENTRIES", 50)
    monkeypatch.setattr(source, "_PAGE", 100)
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await back_up(source_of(store), target, clock)
    for n in range(1000):
        await store.put(f"n/{n:04}", document(b'{"n":%d}' % n))
    target.fails_after = 60
    with pytest.raises(StoreUnavailable):
        await back_up(source_of(store), target, clock)
    target.fails_after = 1 << 60
    clock.now_ms += days * DAY_MS
    assert ((await pruned(target, NEWEST, clock)).deleted > 0) == (days > 0)
    report = await back_up(source_of(store), target, clock)
    assert (report.objects < 1000) == (days == 0)
    assert await restored(target) == await contents(store)


class SlowTarget(MemoryTarget):
    """Lets others go first now and then. It has the files of another one."""

    def __init__(self, files: dict[str, bytes], rng: random.Random) -> None:
        super().__init__()
        self.files = files
        self._rng = rng

    async def get(self, name: str) -> bytes | None:
        await self._wait()
        return await super().get(name)

    async def put(self, name: str, body: bytes) -> None:
        await self._wait()
        await super().put(name, body)

    async def list_files(self, folder: str) -> dict[str, int]:
        await self._wait()
        found = await super().list_files(folder)
        await self._wait()
        return found

    async def delete(self, name: str) -> None:
        await self._wait()
        await super().delete(name)

    async def _wait(self) -> None:
        for _ in range(self._rng.choice((0, 0, 1, 5, 30))):
            await asyncio.sleep(0)


class History:
    """A store that is written to, its backup, and what each snapshot must restore to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store, self.clock = MemoryStore(), FakeClock()
        self.files: dict[str, bytes] = {}
        self.expected: dict[tuple[int, str], Contents] = {}
        self._texts = [self.rng.randbytes(60).hex().encode() for _ in range(30)]

    def target(self) -> SlowTarget:
        return SlowTarget(self.files, self.rng)

    async def write(self) -> None:
        """Write and delete some documents. Their texts return again and again."""
        self.clock.now_ms += 1000
        for _ in range(self.rng.randrange(8)):
            key = f"n/{self.rng.randrange(40):02}"
            if self.rng.random() < 0.1:
                await self.store.delete(key)
            else:
                await self.store.put(key, document(b'{"v":"%b"}' % self.rng.choice(self._texts)))

    async def make(self, maker: BackupMaker) -> None:
        """Make a snapshot, and note what it must have."""
        expected = await contents(self.store)
        snapshot = await maker.make(only_changes=True)
        if snapshot is not None:
            self.expected[snapshot.number, snapshot.id] = expected

    async def prune(self, *, is_killed: bool = False) -> None:
        """Prune with some rules. It may be killed at some step."""
        target = self.target()
        if is_killed:
            target.fails_after = self.rng.randrange(400)
        rules = KeepRules(last=self.rng.randrange(1, 6), daily=self.rng.randrange(4))
        with suppress(StoreUnavailable):  # killed, or another prune has changed the backup
            await Pruner(await Repository.open(target), rules, self.clock, lambda why: None).run()

    async def check(self) -> None:
        """Every snapshot is whole, and restores to what was stored when it was made."""
        plain = MemoryTarget()
        plain.files = dict(self.files)
        assert (await verified(plain)).damaged == 0
        for snapshot in await snapshots_of(plain):
            made = snapshot.number, snapshot.id
            expected = self.expected.setdefault(made, await contents(self.store))  # of a killed backup
            assert await restored(plain, snapshot) == expected


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_BYTES", 4_000)
    monkeypatch.setattr(format, "PAGE_BYTES", 4_000)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("seed", range(6))
async def test_backups_and_prunes_at_once_lose_nothing(seed: int) -> None:
    """A follower and prunes, of which some are killed, go on for days beside each other."""
    history = History(seed)
    rng = history.rng

    async def rounds(maker: BackupMaker, count: int) -> None:
        for _ in range(count):
            await history.make(maker)

    async with maker_of(source_of(history.store), history.target(), history.clock) as follower:
        await history.make(follower)
        for _ in range(8):
            for _ in range(rng.randrange(20)):
                await history.write()
                await rounds(follower, 1)
            await history.write()
            prunes = [history.prune(is_killed=rng.random() < 0.4) for _ in range(rng.choice((1, 1, 2)))]
            await asyncio.gather(rounds(follower, rng.randrange(6)), *prunes)
            await history.check()
            history.clock.now_ms += DAY_MS + rng.randrange(3) * 1000
        await history.write()
        await rounds(follower, 1)
        await history.check()
    assert await restored(history.target()) == await contents(history.store)


STEPS = st.lists(
    st.sampled_from(
        ["write", "one", "other", "prune", "killed prune", "killed backup", "hour", "day", "back"]
    ),
    max_size=40,
)


@settings(max_examples=25)
@given(steps=STEPS, seed=st.integers(0, 1 << 20))
async def test_whatever_happened_each_snapshot_that_is_kept_restores_to_what_was_stored(
    steps: list[str], seed: int
) -> None:
    """Two makers of one backup, prunes with any rules, kills at any step and steps of the clock."""
    history = History(seed)
    makers = [
        BackupMaker(
            source_of(history.store),
            await Repository.open(history.target(), create=True),
            history.clock,
            lambda key, why: None,
        )
        for _ in range(2)
    ]
    try:
        await history.make(makers[0])
        for step in steps:
            match step:
                case "write":
                    await history.write()
                case "one" | "other":
                    await history.make(makers[step == "one"])
                case "prune" | "killed prune":
                    await history.prune(is_killed=step != "prune")
                case "killed backup":
                    target = history.target()
                    target.fails_after = history.rng.randrange(1, 20)
                    with suppress(StoreUnavailable):
                        async with maker_of(source_of(history.store), target, history.clock) as killed:
                            await history.make(killed)
                case "back":
                    history.clock.step(-3 * DAY_MS)
                case _:
                    history.clock.now_ms += DAY_MS if step == "day" else HOUR_MS
            await history.check()
    finally:
        for maker in makers:
            await maker.close()


async def test_purge_removes_the_revision_that_a_killed_one_has_left() -> None:
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await store.put("n", document(b'{"n":1}'))
    await back_up(source_of(store), target, clock)

    async def die(name: str) -> None:
        raise StoreUnavailable("killed")

    async def purge() -> int:
        with suppress(StoreUnavailable):
            await Pruner(await Repository.open(target), NEWEST, clock, pytest.fail, purges=True).run()
        return len(await target.list_files(SNAPSHOTS))

    target.before_delete = die
    assert await purge() == 2
    target.before_delete = nothing
    assert await purge() == 1
    assert await restored(target) == await contents(store)
