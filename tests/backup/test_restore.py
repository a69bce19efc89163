"""A restore writes what was stored, and nothing else."""

import asyncio
from pathlib import Path

import pytest
from components import S3Server
from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, newest, snapshots_of, source_of
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix
from support.store_samples import contents, document, fill

from pysync.backup.format import parse_time
from pysync.backup.restore import RestoreClock, Restorer, find_snapshot_at
from pysync.backup.snapshot import Repository
from pysync.changelog import Change
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import StoreUnavailable
from pysync.store import Store, StoredObject, Write, open_store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DAY_MS = 86_400_000


@pytest.fixture
async def store() -> MemoryStore:
    """A store with something of everything."""
    store = MemoryStore()
    await fill(store, 200)
    return store


@pytest.fixture
async def target(store: MemoryStore) -> MemoryTarget:
    """The backup of the store, with two snapshots."""
    target = MemoryTarget()
    await back_up(source_of(store), target)
    await store.put("notes/later", document(b'{"text":"later"}'))
    await back_up(source_of(store), target)
    return target


async def test_interrupted_restore_is_continued(store: MemoryStore, target: MemoryTarget) -> None:
    repository = await Repository.open(target)
    older, snapshot = await snapshots_of(target)
    into = MemoryStore()
    failing = FaultyStore(into)
    failing.fail("put", times=1000, after=20)
    with pytest.raises(StoreUnavailable):
        await Restorer(repository, failing, print).restore(snapshot)
    with pytest.raises(ValueError, match=r"continue with --at 20.*Z, or name a new store"):
        await Restorer(repository, into, print).restore(older)
    again = Restorer(repository, into, print)
    await again.restore(snapshot)
    assert again.report.objects < len(await contents(store))
    assert await contents(into) == await contents(store)
    with pytest.raises(ValueError, match="not empty"):
        await Restorer(repository, into, print).restore(snapshot)


@pytest.mark.parametrize("name", ["file", "memory", pytest.param("moto", marks=pytest.mark.slow)])
async def test_objects_keep_the_times_at_which_they_were_written(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """So `ttlMs` does not begin anew."""
    written, target, clock = FakeClock(), MemoryTarget(), RestoreClock(FakeClock(FakeClock()() + DAY_MS))
    source = MemoryStore(written)
    await source.put("notes/a", document(b"{}"))
    written.now_ms += 1234
    await source.write("files/a", chunks_of(b"bytes"), "text/plain")
    await back_up(source_of(source), target)
    if name == "file":
        into: Store = await LocalStore.open_folder(tmp_path / "new", clock)
    elif name == "memory":
        into = MemoryStore(clock)
    else:
        server: S3Server = request.getfixturevalue(name)
        into = await open_store(server.store(new_prefix()), clock)
    repository = await Repository.open(target)
    snapshot = await newest(repository)
    await Restorer(repository, into, print, None, clock).restore(snapshot)
    note, file = await into.get("notes/a"), await into.stat("files/a")
    assert isinstance(note, StoredObject)
    assert file is not None
    assert (note.modified_ms, file.modified_ms) == (FakeClock()(), FakeClock()() + 1234)
    await into.put("notes/b", document(b"{}"))
    later = await into.get("notes/b")
    assert isinstance(later, StoredObject)
    assert later.modified_ms >= FakeClock()() + DAY_MS
    await into.close()


@pytest.mark.parametrize("key", ["notes/a", "files/a"])
async def test_restore_replaces_nothing_that_is_written_meanwhile(key: str) -> None:
    source, target, into, reports = MemoryStore(), MemoryTarget(), MemoryStore(), list[str]()
    await source.put("notes/a", document(b'{"of":"the backup"}'))
    await source.write("files/a", chunks_of(b"of the backup"), "text/plain")
    await back_up(source_of(source), target)
    repository = await Repository.open(target)
    snapshot = await newest(repository)
    release, slow = asyncio.Event(), FaultyStore(into)
    noted = slow.delay("put", release)  # of the note that a restore is under way
    restorer = Restorer(repository, slow, lambda key, why: reports.append(key))
    running = asyncio.create_task(restorer.restore(snapshot))
    await noted.wait()
    if key == "notes/a":
        await into.put(key, document(b'{"of":"a client"}'))
    else:
        await into.write(key, chunks_of(b"of a client"), "text/plain")
    expected = (await contents(into))[key]
    release.set()
    await running
    assert (await contents(into))[key] == expected
    assert reports == [key]
    assert (restorer.report.objects, restorer.report.damaged) == (1, 1)


async def test_follower_of_the_old_store_receives_a_reset(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.commit(Write("a", document(b"{}"), changes=[Change(b"{}")]))
    target, source = MemoryTarget(), source_of(store, tmp_path / "data")
    await back_up(source, target)
    await source.close()
    known = await store.change_log.last_id()
    for n in range(50):
        await store.commit(Write("a", document(b'{"n":%d}' % n), changes=[Change(b"{}")]))
    later = await store.change_log.last_id()
    await store.close()
    repository = await Repository.open(target)
    snapshot = await newest(repository)
    assert snapshot.change == known
    clock = FakeClock(0)  # far behind that of the old store
    new = await LocalStore.open_folder(tmp_path / "new", clock)
    await Restorer(repository, new, print).restore(snapshot)
    for n in range(100):
        await new.commit(Write("a", document(b'{"new":%d}' % n), changes=[Change(b"{}")]))
    assert await new.change_log.read(known, 10) is None
    assert await new.change_log.read(later, 10) is None
    await new.close()


async def test_change_log_of_a_bucket_begins_anew(target: MemoryTarget) -> None:
    log = MemoryCoordinator()
    known = await log.append([Change(b"{}")])
    repository = await Repository.open(target)
    snapshot = await newest(repository)
    await Restorer(repository, MemoryStore(), print, log).restore(snapshot)
    assert await log.read(known, 10) is None


async def test_times_name_the_newest_snapshot_before_them() -> None:
    assert parse_time("2026-11-23T12:00:00Z") == parse_time("2026-11-23T12:00:00")
    assert parse_time("2026-11-23T12:00:00+01:00") == parse_time("2026-11-23T11:00:00Z")
    assert parse_time("20261123T120000123Z"[:15]) == parse_time("2026-11-23 12:00")
    with pytest.raises(ValueError, match="write a time as"):
        parse_time("noon")
    with pytest.raises(ValueError, match="no snapshot"):
        await find_snapshot_at(await Repository.open(MemoryTarget(), create=True), parse_time("now"), print)
