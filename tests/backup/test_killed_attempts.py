"""What a killed backup has stored and no snapshot names neither comes back nor is forgotten by a purge."""

import pytest
from support.backups import MemoryTarget, back_up, maker_of, newest, nothing, restored, source_of
from support.faulty_store import FaultyStore
from support.store_samples import contents, document

from pysync.backup.prune import KeepRules, Pruner
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import Repository
from pysync.errors import StoreUnavailable
from pysync.migrate.reading import as_object
from pysync.store import ERASED_KEY
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


def note(text: str) -> bytes:
    return document(b'{"text":"%b"}' % text.encode())


async def kill_a_backup(store: MemoryStore, target: MemoryTarget, clock: FakeClock) -> None:
    """Make a backup that is killed before it writes its snapshot, and leaves its claim."""

    async def kill(name: str) -> None:
        if name.startswith("snapshots/"):
            raise KeyboardInterrupt

    async def keep(name: str) -> None:
        raise StoreUnavailable("it is killed")

    async with maker_of(source_of(store), target, clock) as maker:
        target.before_put, target.before_delete = kill, keep
        with pytest.raises(KeyboardInterrupt):
            await maker.make()
    target.before_put = target.before_delete = nothing


@pytest.fixture
async def killed() -> tuple[MemoryStore, MemoryTarget, FakeClock]:
    """A store with a backup, and a second one that was killed when the store had other objects."""
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await store.put("notes/a", note("a"))
    await back_up(source_of(store), target, clock)
    await store.put("notes/z", note("older"))
    await store.put("notes/gone", note("gone"))
    clock.now_ms += 1_000
    await kill_a_backup(store, target, clock)
    clock.now_ms += 1_000
    await store.delete("notes/gone")
    await store.put("notes/z", note("newer"))
    return store, target, clock


async def test_restore_takes_what_a_killed_backup_stored_for_older(
    killed: tuple[MemoryStore, MemoryTarget, FakeClock],
) -> None:
    store, target, clock = killed
    await back_up(source_of(store), target, clock)
    target.files = {name: body for name, body in target.files.items() if not name.startswith("lists/")}
    repository, into = await Repository.open(target), MemoryStore()
    await Restorer(repository, into, lambda *_: None).restore(await newest(repository))
    found = as_object(await into.get("notes/z"))
    assert found is not None
    assert found.body == (await contents(store))["notes/z"][1]


async def test_purge_says_that_the_files_of_a_killed_backup_are_left(
    killed: tuple[MemoryStore, MemoryTarget, FakeClock],
) -> None:
    store, target, clock = killed
    await back_up(source_of(store), target, clock)
    for days, is_complete in ((0, False), (2, True)):
        clock.now_ms += days * 86_400_000
        problems: list[str] = []
        pruner = Pruner(await Repository.open(target), KeepRules(last=1), clock, problems.append, purges=True)
        await pruner.run()
        assert pruner.is_complete is is_complete
        assert any("was killed" in why for why in problems) is not is_complete
    assert await restored(target) == await contents(store)


@pytest.mark.parametrize("record", [b"damaged", None])
async def test_purge_of_erased_objects_says_that_it_knows_of_none(record: bytes | None) -> None:
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await store.put("notes/a", note("a"))
    if record is not None:
        await store.put(ERASED_KEY, record)
    async with maker_of(source_of(store), target, clock, []) as maker:
        await maker.make()
    pruner = Pruner(
        await Repository.open(target), KeepRules(last=1), clock, lambda why: None, purges=True, erases=True
    )
    if record is None:
        await pruner.run()
        assert not pruner.is_complete
    else:
        with pytest.raises(ValueError, match="erased cannot be read"):
            await pruner.run()


async def test_restore_that_continues_names_again_what_the_backup_lost() -> None:
    store, target = MemoryStore(), MemoryTarget()
    await store.put("notes/a", note("a"))
    await back_up(source_of(store), target)
    target.files = {name: body for name, body in target.files.items() if not name.startswith("packs/")}
    repository, into = await Repository.open(target), FaultyStore(MemoryStore())
    into.fail("delete", times=1)  # of the note that the restore is under way
    with pytest.raises(StoreUnavailable):
        await Restorer(repository, into, lambda *_: None).restore(await newest(repository))
    restorer = Restorer(repository, into, lambda *_: None)
    await restorer.restore(await newest(repository))
    assert restorer.report.damaged == 1
