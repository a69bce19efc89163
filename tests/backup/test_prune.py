"""Old snapshots are removed with their files, and every snapshot that is kept stays what it is."""

import os
from contextlib import suppress

import pytest
from contracts.files import chunks_of
from support.backups import (
    MemoryTarget,
    back_up,
    maker_of,
    newest,
    nothing,
    pruned,
    restored,
    snapshots_of,
    source_of,
    verified,
)
from support.faulty_store import FaultyStore
from support.store_samples import contents, document, log_objects, put_all

from pysync.backup import pack
from pysync.backup.encryption import BackupKey
from pysync.backup.prune import KeepRules, Pruner
from pysync.backup.restore import Restorer, find_snapshot_at
from pysync.backup.snapshot import CLAIMS, PACKS, Repository
from pysync.errors import StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DAY_MS = 86_400_000
RULES = KeepRules(last=2)
Contents = dict[str, tuple[str, bytes]]


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_BYTES", 4_000)


def copy_of(target: MemoryTarget) -> MemoryTarget:
    """Another target with the same files."""
    copied = MemoryTarget()
    copied.files = dict(target.files)
    return copied


async def aged(key: BackupKey | None = None, days: int = 6) -> tuple[MemoryStore, MemoryTarget, FakeClock]:
    """A store of which half the documents change, its backup with a snapshot a day, and the clock."""
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await put_all(store, log_objects(20))
    for day in range(days):
        for n in range(40):
            if day == 0 or n % 2 == 0:
                await store.put(f"n/{n:02}", document(b'{"v":"%b"}' % os.urandom(100).hex().encode()))
        await store.write("file", chunks_of(os.urandom(3_000)), "image/png")
        if day:
            await store.delete(f"n/{2 * day + 1:02}")
        repository = await Repository.open(target, key, create=True)
        async with maker_of(source_of(store), target, clock, repository=repository) as maker:
            await maker.make()
        clock.now_ms += DAY_MS
    return store, target, clock


async def held_by(target: MemoryTarget, key: BackupKey | None = None) -> list[Contents]:
    """What each snapshot restores to, oldest first, of a backup that lacks nothing."""
    assert (await verified(target, key)).damaged == 0
    return [await restored(target, one, key) for one in await snapshots_of(target, key)]


def pack_bytes(target: MemoryTarget) -> int:
    return sum(len(body) for name, body in target.files.items() if name.startswith(PACKS))


async def test_rules_keep_the_newest_of_each_period() -> None:
    clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
    for day in range(40):
        for _ in range(2):
            await store.put("a", document(b'{"day":%d}' % day))
            await back_up(source_of(store), target, clock)
            clock.now_ms += DAY_MS // 2
    report = await pruned(target, KeepRules(daily=7, weekly=4), clock)
    assert report.kept == 7 + 3, "the newest week has its newest day"
    assert report.removed == 80 - report.kept
    assert await restored(target) == await contents(store)


@pytest.mark.parametrize("key", [None, BackupKey.generate()], ids=["plain", "encrypted"])
async def test_dead_bytes_go_and_every_snapshot_stays_what_it_is(key: BackupKey | None) -> None:
    store, target, clock = await aged(key)
    before, size = await held_by(target, key), pack_bytes(target)
    report = await pruned(target, RULES, clock, key)
    assert report.rewritten > 3
    assert (report.kept, report.removed, report.not_rewritten) == (2, 4, 0)
    assert report.deleted > 0
    assert await held_by(target, key) == before[-2:]
    assert (await verified(target, key)).unreferenced == 0
    again = await pruned(target, RULES, clock, key)
    assert (again.rewritten, again.deleted) == (0, 0), "nothing is left to do"
    assert before[-1] == await contents(store)
    live = sum(len(body) for _, body in before[-1].values())
    assert pack_bytes(target) < min(0.6 * size, 2 * live)


async def test_packs_of_which_little_is_dead_are_left() -> None:
    store, target = MemoryStore(), MemoryTarget()
    for n in range(200):
        await store.put(f"n/{n:03}", document(b'{"v":"%b"}' % os.urandom(100).hex().encode()))
    await back_up(source_of(store), target)
    await store.put("n/100", document(b"{}"))
    await back_up(source_of(store), target)
    assert (await pruned(target, KeepRules(last=1), FakeClock())).rewritten == 0
    assert await restored(target) == await contents(store)


async def test_without_the_private_key_packs_are_left_and_counted() -> None:
    key = BackupKey.generate()
    store, target, clock = await aged(key)
    report = await pruned(target, RULES, clock, key.without_private())
    assert report.rewritten == 0
    assert report.not_rewritten > 3
    assert (await held_by(target, key))[-1] == await contents(store)


async def test_damaged_pack_is_named_and_left() -> None:
    _, target, clock = await aged()
    await pruned(whole := copy_of(target), RULES, clock)
    packs = {name for name in target.files if name.startswith(PACKS)}
    for damaged in sorted(packs - whole.files.keys()):
        one, said = copy_of(target), list[str]()
        one.files[damaged] = bytes(len(one.files[damaged]))
        pruner = Pruner(await Repository.open(one), RULES, clock, said.append)
        await pruner.run()
        if pruner.report.not_rewritten:
            break
    assert [damaged in why for why in said] == [True]
    assert damaged in one.files
    assert pruner.report.rewritten > 0


@pytest.mark.slow
async def test_prune_that_fails_at_any_step_loses_nothing_and_ends_the_same_when_run_again() -> None:
    _, made, clock = await aged(days=4)
    expected = (await held_by(made))[-2:]
    whole = copy_of(made)
    assert (await pruned(whole, RULES, clock)).rewritten > 2
    for step in range(0, whole.calls, 2):
        target = copy_of(made)
        target.fails_after = step
        with suppress(StoreUnavailable):  # a claim that could not be removed is no error
            await pruned(target, RULES, clock)
        target.fails_after = 1 << 60
        assert (await held_by(target))[-2:] == expected
        clock.now_ms += DAY_MS  # the claim of the killed one
        await pruned(target, RULES, clock)
        assert await held_by(target) == expected
        assert (await verified(target)).unreferenced == 0
        assert await target.list_files(CLAIMS) == {}
        assert pack_bytes(target) < 1.3 * pack_bytes(whole), "up to a fifth of a pack may be dead"


async def test_prune_says_that_another_one_changed_the_backup() -> None:
    _, target, clock = await aged()
    expected = (await held_by(target))[-2:]

    async def prune_too(name: str) -> None:
        if name.startswith(PACKS):
            target.after_put = nothing
            await pruned(target, RULES, clock)

    target.after_put = prune_too
    with pytest.raises(StoreUnavailable, match="another prune"):
        await pruned(target, RULES, clock)
    assert await held_by(target) == expected


async def test_restore_finds_the_snapshot_that_replaces_the_one_it_was_about_to_read() -> None:
    _, target, clock = await aged()
    repository = await Repository.open(target)
    before = await newest(repository)

    async def prune_once(_: str) -> None:
        target.after_files = nothing
        await pruned(target, RULES, clock)

    target.after_files = prune_once
    found = await find_snapshot_at(repository, clock(), print)
    assert (found.number, found.id, found.revision) == (before.number, before.id, 1)
    assert await target.get(before.name) is None


async def test_restore_that_was_interrupted_continues_after_a_prune() -> None:
    store, target, clock = await aged()
    into = FaultyStore(MemoryStore())

    async def restore() -> None:
        repository = await Repository.open(target)
        found = await find_snapshot_at(repository, clock(), print)
        await Restorer(repository, into, print).restore(found)

    into.fail("put", times=1000, after=29)
    with pytest.raises(StoreUnavailable):
        await restore()
    into.reset()
    assert (await pruned(target, RULES, clock)).rewritten > 3
    await restore()
    assert await contents(into) == await contents(store)
