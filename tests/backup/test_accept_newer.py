"""`pysync backup restore --accept-newer` marks that store alone for devices that have more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.backups import MemoryTarget, back_up, newest, snapshots_of, source_of
from support.faulty_store import FaultyStore
from support.places import Commands
from support.store_samples import contents, document

from pysync.backup.format import parse_time
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import Repository
from pysync.changelog import Change
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.restored import restored_ms
from pysync.erase.record import ErasureRecord
from pysync.errors import StoreUnavailable
from pysync.store import ERASED_KEY, RESTORED_KEY, Write
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

CHANGE = Change(b'{"collection":"notes","params":{},"hash":"","timestamp":1}')


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def write(store: LocalStore, key: str) -> str:
    """Write a document, and return the newest id of the change log."""
    await store.commit(Write(key, document(b"{}"), changes=[CHANGE]))
    return await store.change_log.last_id()


@pytest.fixture
async def follower(commands: Commands, data: Path) -> str:
    """The cursor of a device that followed a store until after its last snapshot."""
    store = await LocalStore.open_folder(data)
    await write(store, "notes/a")
    await commands.back_up()
    cursor = await write(store, "notes/b")
    await store.close()
    return cursor


async def test_cursors_of_before_the_restore_are_told_the_time_of_the_snapshot(
    commands: Commands, tmp_path: Path, follower: str
) -> None:
    restored = await commands.restore("--accept-newer")
    async with opened(tmp_path / "restored") as store:
        assert await restored_ms(store, follower) == parse_time(restored.counts["time"])
        later = [await store.change_log.last_id(), await write(store, "notes/c")]
        assert [await restored_ms(store, cursor) for cursor in later] == [None, None]


async def test_a_restore_without_the_flag_leaves_no_mark(
    commands: Commands, tmp_path: Path, follower: str
) -> None:
    await commands.restore()
    async with opened(tmp_path / "restored") as store:
        assert await restored_ms(store, follower) is None


@pytest.mark.parametrize("way", ["backup", "copy"])
async def test_what_is_made_of_a_marked_store_has_no_mark(
    commands: Commands, tmp_path: Path, follower: str, way: str
) -> None:
    """Else a later restore would have devices send back what was removed in between."""
    await commands.restore("--accept-newer")
    if way == "copy":
        assert (await commands.shell.run_async("copy", "file:restored", "file:again"))[0] == 0
    else:
        await commands.back_up("--adopt", store="file:restored")
        await commands.restore(to="again")
    async with opened(tmp_path / "restored") as store:
        assert await restored_ms(store, follower) is not None
    async with opened(tmp_path / "again") as store:
        assert await store.get(RESTORED_KEY) is None
        assert await store.get("notes/a") is not None


async def test_of_two_restores_each_cursor_is_told_the_time_of_the_last(
    commands: Commands, tmp_path: Path, follower: str
) -> None:
    await commands.restore("--accept-newer")
    async with opened(tmp_path / "restored") as store:
        between = await write(store, "notes/c")
    await commands.back_up("--adopt", store="file:restored")
    again = await commands.restore("--accept-newer", to="again")
    async with opened(tmp_path / "again") as store:
        expected = parse_time(again.counts["time"])
        assert [await restored_ms(store, cursor) for cursor in (follower, between)] == [expected] * 2


async def test_a_restore_that_is_continued_without_the_flag_leaves_no_mark() -> None:
    source, target, into = MemoryStore(), MemoryTarget(), FaultyStore(MemoryStore())
    await source.put("notes/a", document(b"{}"))
    await back_up(source_of(source), target)
    repository = await Repository.open(target)
    snapshot = await newest(repository)
    log = MemoryCoordinator()
    into.fail("delete", times=1)
    with pytest.raises(StoreUnavailable):
        await Restorer(repository, into, print, log, accepts_newer=True).restore(snapshot)
    assert RESTORED_KEY in await contents(into)
    await Restorer(repository, into, print, log).restore(snapshot)
    assert await contents(into) == await contents(source)


async def test_the_marked_store_knows_what_was_erased_after_the_snapshot() -> None:
    """So that no device brings it back."""
    source, target = MemoryStore(), MemoryTarget()
    await source.put("notes/a", document(b"{}"))
    await back_up(source_of(source), target)
    record = ErasureRecord.decode(None)
    record.add(["key notes/a"], until_ms=1000)
    await source.put(ERASED_KEY, record.encode())
    await back_up(source_of(source), target)
    repository = await Repository.open(target)
    older, _ = await snapshots_of(target)
    for accepts_newer in (False, True):
        into = MemoryStore()
        restorer = Restorer(repository, into, print, MemoryCoordinator(), accepts_newer=accepts_newer)
        await restorer.restore(older)
        assert (await ErasureRecord.load(into)).has("notes/a", 1000) is accepts_newer
