"""Packs of which little is live are stored anew, and every snapshot stays what it is."""

import asyncio
import os
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from contracts.files import chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backups import MemoryTarget, maker_of, nothing, restored
from support.faulty_store import FaultyStore
from support.store_samples import contents, document, fill

from pysync.backup import encoding, packing, repacking
from pysync.backup.checking import BackupVerifier
from pysync.backup.encryption import BackupKey
from pysync.backup.making import BackupMaker
from pysync.backup.notes import GRACE_MS, expired_files
from pysync.backup.pruning import KeepRules, PruneReport, prune
from pysync.backup.repository import PACKS, PAGES, SNAPSHOTS, Repository, Snapshot, time_in
from pysync.backup.restoring import Restorer, find_snapshot_at
from pysync.backup.source import ListedSnapshotSource
from pysync.errors import StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DAY_MS = 86_400_000
RULES = KeepRules(last=2)
Contents = dict[str, tuple[str, bytes]]


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 4_000)
    monkeypatch.setattr(encoding, "PAGE_ENTRIES", 10)
    monkeypatch.setattr(repacking, "_WORTHWHILE", 1000)


def copy_of(target: MemoryTarget) -> MemoryTarget:
    """Another target with the same files."""
    copied = MemoryTarget()
    copied.files = dict(target.files)
    return copied


async def aged(key: BackupKey | None = None, days: int = 6) -> tuple[MemoryStore, MemoryTarget, FakeClock]:
    """A store of which half the documents change, its backup with a snapshot a day, and the clock."""
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await fill(store, 20)
    for day in range(days):
        for n in range(40):
            if day == 0 or n % 2 == 0:
                await store.put(f"n/{n:02}", document(b'{"v":"%b"}' % os.urandom(100).hex().encode()))
        await store.write("file", chunks_of(os.urandom(3_000)), "image/png")
        if day:
            await store.delete(f"n/{2 * day + 1:02}")
        opened = await Repository.open(target, key, create=True)
        async with maker_of(ListedSnapshotSource(store), target, clock, repository=opened) as maker:
            await maker.make()
        clock.now_ms += DAY_MS
    return store, target, clock


async def snapshots_of(target: MemoryTarget, key: BackupKey | None = None) -> dict[str, Contents]:
    """What each complete snapshot restores to, by its time. Two of one time are alike."""
    found: dict[str, Contents] = {}
    opened = await Repository.open(target, key)
    for snapshot in await opened.find_snapshots(await opened.snapshot_names()):
        if snapshot.is_complete:
            held = await restored(target, snapshot, key)
            assert found.setdefault(time_in(snapshot.name), held) == held
    return found


async def check_whole(target: MemoryTarget, key: BackupKey | None = None) -> None:
    """Nothing that a snapshot refers to is missing."""
    problems: list[tuple[str, str]] = []
    verifier = BackupVerifier(
        await Repository.open(target, key), lambda name, why: problems.append((name, why))
    )
    await verifier.run()
    assert problems == []


async def pruned(
    target: MemoryTarget, now_ms: int, rules: KeepRules = RULES, key: BackupKey | None = None
) -> PruneReport:
    return await prune(await Repository.open(target, key), rules, now_ms)


def pack_bytes(target: MemoryTarget) -> int:
    return sum(len(body) for name, body in target.files.items() if name.startswith(PACKS))


@pytest.mark.parametrize("key", [None, BackupKey.generate()], ids=["plain", "encrypted"])
async def test_dead_bytes_go_and_every_snapshot_stays_what_it_is(key: BackupKey | None) -> None:
    store, target, clock = await aged(key)
    times = sorted(await snapshots_of(target, key))[-2:]
    before = {time: held for time, held in (await snapshots_of(target, key)).items() if time in times}
    size = pack_bytes(target)
    first = await pruned(target, clock(), key=key)
    assert first.repacked > 3
    assert first.not_repacked == 0
    await check_whole(target, key)
    assert await snapshots_of(target, key) == before
    again = await pruned(target, clock() + GRACE_MS, key=key)
    assert again.repacked == 0, "nothing is left to do"
    assert again.deleted > 0
    await check_whole(target, key)
    assert await snapshots_of(target, key) == before
    assert before[times[-1]] == await contents(store)
    live = sum(len(body) for _, body in before[times[-1]].values())
    assert pack_bytes(target) < min(0.6 * size, 2 * live)


async def test_repacking_makes_no_file_that_another_prune_may_be_deleting() -> None:
    """Such as one that a killed prune has made, and that was noted a day ago."""
    _, target, clock = await aged()
    twin = copy_of(target)
    await pruned(twin, clock())
    made = {name for name in twin.files.keys() - target.files.keys() if name.startswith((PACKS, PAGES))}
    assert made
    await (await Repository.open(target)).put_note(clock() - GRACE_MS, sorted(made))
    assert (await pruned(target, clock())).repacked > 3
    assert made.isdisjoint(target.files)


async def test_without_the_private_key_packs_are_left_and_counted() -> None:
    key = BackupKey.generate()
    store, target, clock = await aged(key)
    report = await pruned(target, clock(), key=key.without_private())
    assert report.repacked == 0
    assert report.not_repacked > 3
    await check_whole(target, key)
    assert await restored(target, key=key) == await contents(store)


async def test_a_damaged_pack_is_left_and_counted() -> None:
    _, target, clock = await aged()
    whole = copy_of(target)
    await pruned(whole, clock())
    opened = await Repository.open(whole)
    noted = {name for note in await expired_files(opened) for name in note.files if name.startswith(PACKS)}
    unused = {name for name in noted if copy_of(target).files.get(name)}
    for damaged in sorted(unused):
        one = copy_of(target)
        one.files[damaged] = b"R" + bytes(20)
        report = await pruned(one, clock())
        if report.not_repacked:
            break
    assert report.not_repacked == 1
    assert report.repacked > 0
    assert damaged in one.files
    notes = await expired_files(await Repository.open(one))
    assert all(damaged not in note.files for note in notes)


async def test_a_backup_that_was_interrupted_is_continued_first() -> None:
    _, target, clock = await aged()
    opened = await Repository.open(target)
    newest = await opened.newest()
    assert newest is not None
    await opened.put_snapshot(replace(newest, taken_ms=clock() - 1, is_complete=False))
    assert (await pruned(target, clock())).repacked == 0
    assert (await pruned(target, clock() + GRACE_MS)).repacked > 3


async def test_packs_are_left_if_little_would_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target, clock = await aged()
    monkeypatch.setattr(repacking, "_WORTHWHILE", 1)
    assert (await pruned(target, clock())).repacked == 0


@pytest.mark.slow
async def test_a_prune_that_is_killed_at_any_step_ends_the_same_when_run_again() -> None:
    _, made, clock = await aged(days=4)
    newest = sorted(await snapshots_of(made))[-2:]
    expected = {time: held for time, held in (await snapshots_of(made)).items() if time in newest}
    whole = copy_of(made)
    assert (await pruned(whole, clock())).repacked > 2
    end, live = whole.calls, None
    for step in range(0, end, 2):
        target = copy_of(made)
        target.fails_after = step
        with pytest.raises(StoreUnavailable):
            await pruned(target, clock())
        target.fails_after = 1 << 60
        await check_whole(target)
        held = await snapshots_of(target)
        assert {time: held[time] for time in newest} == expected
        for day in range(1, 4):
            await pruned(target, clock() + day * GRACE_MS)
        await check_whole(target)
        assert await snapshots_of(target) == expected
        assert len(await target.names(SNAPSHOTS)) == 2
        assert not await expired_files(await Repository.open(target))
        live = live or pack_bytes(target)
        assert pack_bytes(target) < 1.3 * live, "up to a fifth of a pack may be dead"


async def test_a_killed_repack_with_a_damaged_new_list_loses_nothing() -> None:
    """Of two snapshots with one time `prune` keeps the one that is whole."""
    _, made, clock = await aged(days=4)
    target = copy_of(made)

    async def keep_snapshots(name: str) -> None:
        if name.startswith(SNAPSHOTS) and target.files[name] in kept:
            raise StoreUnavailable("killed")

    kept = [made.files[name] for name in sorted(await made.names(SNAPSHOTS))[-2:]]
    target.before_delete = keep_snapshots
    with pytest.raises(StoreUnavailable):
        await pruned(target, clock())
    target.before_delete = nothing
    assert len(await target.names(SNAPSHOTS)) == 4
    expected = await snapshots_of(target)
    new = [name for name in await target.names(PACKS) if name not in made.files]
    assert new
    del target.files[new[0]]
    for day in range(3):
        await pruned(target, clock() + day * GRACE_MS)
    assert await snapshots_of(target) == expected


async def test_a_restore_finds_the_snapshot_that_replaces_the_one_it_was_about_to_read() -> None:
    _, target, clock = await aged()
    opened = await Repository.open(target)
    before = await opened.newest()
    assert before is not None

    async def prune_once(_: str) -> None:
        target.after_names = nothing
        await pruned(target, clock())

    target.after_names = prune_once
    found = await find_snapshot_at(opened, clock(), lambda key, why: None)
    assert (found.taken_ms, found.generation) == (before.taken_ms, 1)
    assert await target.get(before.name) is None


async def test_a_restore_that_was_interrupted_continues_after_a_prune() -> None:
    store, target, clock = await aged()
    into = FaultyStore(MemoryStore())

    async def restore() -> None:
        opened = await Repository.open(target)
        snapshot = await find_snapshot_at(opened, clock(), lambda key, why: None)
        await Restorer(opened, into, lambda key, why: None).restore(snapshot)

    into.fail("put", after=29)
    with pytest.raises(StoreUnavailable):
        await restore()
    assert (await pruned(target, clock())).repacked > 3
    await restore()
    assert await contents(into) == await contents(store)


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

    async def names(self, folder: str) -> list[str]:
        await self._wait()
        found = await super().names(folder)
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
        self.expected_at: dict[str, Contents] = {}
        self.repacked = 0
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
            assert self.expected_at.setdefault(time_in(snapshot.name), expected) == expected

    async def prune(self, *, is_killed: bool = False) -> None:
        """Prune with some rules. It may be killed at some step."""
        target = self.target()
        opened = await Repository.open(target)
        if is_killed:
            target.fails_after = self.rng.randrange(400)
        rules = KeepRules(last=self.rng.randrange(1, 6), daily=self.rng.randrange(4))
        try:
            self.repacked += (await prune(opened, rules, self.clock())).repacked
        except StoreUnavailable:
            assert is_killed

    async def check(self) -> None:
        """Every snapshot is whole, and restores to what was stored when it was made."""
        plain = MemoryTarget()
        plain.files = self.files
        await check_whole(plain)
        for time, held in (await snapshots_of(plain)).items():
            assert self.expected_at[time] == held


@pytest.mark.parametrize("seed", range(6))
async def test_backups_and_prunes_at_once_lose_nothing(seed: int) -> None:
    """A follower and prunes, of which some are killed, go on for days beside each other."""
    history = History(seed)
    rng = history.rng

    async def rounds(maker: BackupMaker, count: int) -> None:
        for _ in range(count):
            history.clock.now_ms += 1
            await history.make(maker)

    async with maker_of(ListedSnapshotSource(history.store), history.target(), history.clock) as follower:
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
    assert history.repacked > 0
    last: Snapshot | None = await (await Repository.open(history.target())).newest()
    assert last is not None
    assert history.expected_at[time_in(last.name)] == await contents(history.store)


STEPS = st.lists(
    st.sampled_from(["write", "one", "other", "prune", "killed prune", "killed backup", "hour", "day"]),
    max_size=40,
)


@settings(max_examples=25)
@given(steps=STEPS, seed=st.integers(0, 1 << 20))
async def test_whatever_happened_each_snapshot_that_is_kept_restores_to_what_was_stored(
    steps: list[str], seed: int
) -> None:
    """Two makers of one backup, prunes with any rules, and kills at any step, in any order."""
    history = History(seed)
    makers = [
        BackupMaker(
            ListedSnapshotSource(history.store),
            await Repository.open(history.target(), create=True),
            history.clock,
            lambda key, why: None,
        )
        for _ in range(2)
    ]
    try:
        for step in steps:
            history.clock.now_ms += 1
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
                    async with maker_of(ListedSnapshotSource(history.store), target, history.clock) as killed:
                        with suppress(StoreUnavailable):
                            await history.make(killed)
                case _:
                    history.clock.now_ms += DAY_MS if step == "day" else 3_600_000
            await history.check()
    finally:
        for maker in makers:
            await maker.close()


async def test_a_backup_made_at_the_same_time_as_another_is_kept_apart() -> None:
    """Two prunes at once replace the same snapshots."""
    store, target, clock = await aged()
    await asyncio.gather(*(pruned(target, clock()) for _ in range(3)))
    await check_whole(target)
    for day in range(1, 4):
        await pruned(target, clock() + day * GRACE_MS)
        await check_whole(target)
    assert await restored(target) == await contents(store)
    assert len(await target.names(SNAPSHOTS)) == 2


async def test_a_follower_continues_from_the_lists_that_a_prune_wrote() -> None:
    store, target, clock = await aged()
    async with maker_of(ListedSnapshotSource(store), target, clock) as follower:
        await follower.make()
        clock.now_ms += 1
        assert (await pruned(target, clock())).repacked > 3
        await store.put("n/later", document(b'{"v":1}'))
        await follower.make(only_changes=True)
        await pruned(target, clock() + GRACE_MS)
        await check_whole(target)
        assert await restored(target) == await contents(store)
        opened = await Repository.open(target)
        assert await opened.stored() == {
            file
            for one in await opened.find_snapshots(await opened.snapshot_names())
            for run in one.runs
            for page in run.pages
            for file in [
                f"pages/{page[:2]}/{page}",
                *(f"packs/{pack[-64:-62]}/{pack[-64:]}" for pack in await opened.packs_of(page)),
            ]
        } | {file for note in await expired_files(opened) for file in note.files}
