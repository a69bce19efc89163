"""Snapshots hold what was stored at one moment, and cost what has changed."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from contracts.files import chunks_of
from hypothesis import given
from hypothesis import strategies as st
from support.backups import (
    MemoryTarget,
    Reports,
    back_up,
    maker_of,
    restored,
    snapshots_of,
    source_of,
    verified,
)
from support.bit_rot import rot
from support.store_samples import contents, document, fill

from pysync.backup import make, pack, source
from pysync.backup.make import BackupMaker
from pysync.backup.source import (
    FileParts,
    FolderSnapshotSource,
    ListedSnapshotSource,
    PositionLost,
    Rows,
    SnapshotSource,
)
from pysync.errors import StoreUnavailable
from pysync.migrate.reading import SCRUB_KEY, VERIFY_KEY
from pysync.store import DAMAGED_REASON, RESTORE_KEY, DamagedFile, OpenFile, Store
from pysync.store.local import capture
from pysync.store.local.capture import CapturedRow
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore


class Backed(NamedTuple):
    """A store and the source that reads it."""

    store: Store
    source: SnapshotSource
    folder: Path


@pytest.fixture(params=["folder", "listed"])
async def backed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backed]:
    if request.param == "listed":
        store: Store = MemoryStore()
        source = source_of(store)
    else:
        store = await LocalStore.open_folder(tmp_path / "data")
        source = source_of(store, tmp_path / "data")
    yield Backed(store, source, tmp_path / "data")
    await source.close()
    await store.close()


async def test_snapshot_has_everything_and_restores_to_the_same(backed: Backed) -> None:
    await fill(backed.store)
    await backed.store.put("_pysync/projections/p", b'{"after":"1"}')
    for key in (SCRUB_KEY, VERIFY_KEY, RESTORE_KEY):
        await backed.store.put(key, b"{}")
    target = MemoryTarget()
    report = await back_up(backed.source, target)
    expected = await contents(backed.store)
    del expected[SCRUB_KEY], expected[VERIFY_KEY], expected[RESTORE_KEY]
    assert await restored(target) == expected
    assert report.objects == len(expected)
    assert report.unreadable == 0


async def test_second_backup_costs_what_has_changed(backed: Backed) -> None:
    await fill(backed.store)
    target = MemoryTarget()
    await back_up(backed.source, target)
    await backed.store.put("notes/a", document(b'{"text":"two"}'))
    await backed.store.put("notes/new", document(b'{"text":"new"}'))
    await backed.store.delete("files/b/c")
    report = await back_up(backed.source, target)
    assert report.objects == 3
    assert report.bytes_read < 1000
    assert report.bytes_written < 2000
    assert await restored(target) == await contents(backed.store)
    assert (await back_up(backed.source, target)).objects == 0


async def test_one_maker_makes_backup_after_backup(backed: Backed) -> None:
    await fill(backed.store, 100)
    target = MemoryTarget()
    async with maker_of(backed.source, target) as maker:
        await maker.make()
        assert await maker.make(only_changes=True) is None
        for n in range(40):
            await backed.store.put(f"n/{n % 7}", document(b'{"n":%d}' % n))
            if n % 5 == 0:
                await backed.store.delete(f"n/{n % 3}")
            await backed.store.write("file", chunks_of(b"%d" % n), "text/plain")
            assert await maker.make(only_changes=True) is not None
            assert await restored(target) == await contents(backed.store)


async def test_bytes_that_occur_twice_are_stored_once(backed: Backed) -> None:
    content = os.urandom(300_000)
    for n in range(5):
        await backed.store.write(f"files/{n}", chunks_of(content), "image/png")
    target = MemoryTarget()
    report = await back_up(backed.source, target)
    assert 300_000 < report.bytes_written < 310_000
    await backed.store.write("files/again", chunks_of(content), "image/png")
    assert (await back_up(backed.source, target)).bytes_written < 2_000


async def test_file_of_several_parts_is_stored_once(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (make, source):
        monkeypatch.setattr(module, "PART_BYTES", 10_000)
    content = os.urandom(95_000)
    await backed.store.write("files/a", chunks_of(content), "image/png")
    target = MemoryTarget()
    await back_up(backed.source, target)
    await backed.store.write("files/b", chunks_of(content), "image/png")
    assert (await back_up(backed.source, target)).bytes_written < 3_000
    assert await restored(target) == await contents(backed.store)
    assert (await verified(target)).damaged == 0


async def test_compressed_content_is_not_compressed_again(backed: Backed) -> None:
    await backed.store.write("photo", chunks_of(b"\0" * 100_000), "image/png")
    raw = await back_up(backed.source, MemoryTarget())
    assert raw.bytes_written > 100_000
    await backed.store.write("photo", chunks_of(b"\0" * 100_000), "text/plain")
    assert (await back_up(backed.source, MemoryTarget())).bytes_written < 2_000
    await backed.store.write("photo", chunks_of(os.urandom(100_000)), "application/octet-stream")
    assert (await back_up(backed.source, MemoryTarget())).bytes_written > 100_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_snapshot_is_of_one_moment_while_writes_go_on(tmp_path: Path, seed: int) -> None:
    """Each round writes documents and files one after another: at each moment they differ by one at most."""
    keys = ["a/first", "files/second", "b", "files/deep/third", "a/last"]
    store = await LocalStore.open_folder(tmp_path / "data")
    target = MemoryTarget()
    is_over = False

    async def write() -> None:
        n = 0
        while not is_over:
            n += 1
            for key in keys:
                if key.startswith("files/"):
                    await store.write(key, chunks_of(b"%d" % n), "text/plain")
                else:
                    await store.put(key, document(b'{"n":%d}' % n))
                await store.put(f"other/{n % 500}", document(b"{}"))

    async def check(maker: BackupMaker) -> None:
        snapshot = await maker.make()
        held = await restored(target, snapshot)
        numbers = [_number(held[key][1]) if key in held else 0 for key in keys]
        assert numbers == sorted(numbers, reverse=True), "a later one is newer than an earlier one"
        assert numbers[0] - numbers[-1] <= 1, "one is older than the moment"

    writing = asyncio.ensure_future(write())
    source = source_of(store, tmp_path / "data")
    try:
        async with maker_of(source, target) as maker:
            for _ in range(4):
                await check(maker)
        for _ in range(3):
            async with maker_of(source, target) as fresh:
                await check(fresh)
    finally:
        is_over = True
        await writing
        await source.close()
        await store.close()


def _number(stored: bytes) -> int:
    return int(stored.partition(b'"n":')[2].partition(b"}")[0]) if stored.startswith(b"{") else int(stored)


async def test_backup_that_fails_at_any_step_is_continued(
    backed: Backed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "CHECKPOINT_ENTRIES", 5)
    monkeypatch.setattr(pack, "PACK_BYTES", 100_000)
    await fill(backed.store, 500)
    target = MemoryTarget()
    await back_up(backed.source, target)
    steps, everything = target.calls, await contents(backed.store)
    for step in range(steps):
        target = MemoryTarget()
        target.fails_after = step
        with suppress(StoreUnavailable):  # a claim that could not be removed is no error
            await back_up(backed.source, target)
        target.fails_after = 1 << 60
        await back_up(backed.source, target)
        assert await restored(target) == everything, step
        assert (await verified(target)).damaged == 0


async def test_killed_backup_continues_where_it_was(backed: Backed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "CHECKPOINT_ENTRIES", 50)
    monkeypatch.setattr(source, "_PAGE", 100)
    monkeypatch.setattr("pysync.store.local.capture.PAGE", 100)
    for n in range(1000):
        await backed.store.put(f"n/{n:04}", document(b'{"n":%d}' % n))
    target = MemoryTarget()
    whole = await back_up(backed.source, target)
    calls, target = target.calls, MemoryTarget()
    target.fails_after = 3 * calls // 4
    with pytest.raises(StoreUnavailable):
        await back_up(backed.source, target)
    target.fails_after = 1 << 60
    assert await target.list_files("snapshots") == {}
    assert (await back_up(backed.source, target)).objects < whole.objects / 2
    assert await restored(target) == await contents(backed.store)


async def test_two_backups_at_once_are_both_whole(backed: Backed) -> None:
    await fill(backed.store, 500)
    target = MemoryTarget()
    await back_up(source_of(MemoryStore()), target)
    folder = backed.folder if isinstance(backed.source, FolderSnapshotSource) else None
    other = source_of(backed.store, folder)
    await asyncio.gather(back_up(backed.source, target), back_up(other, target))
    if folder is not None:
        await other.close()
    _, *snapshots = await snapshots_of(target)
    assert len(snapshots) == 2
    for snapshot in snapshots:
        assert await restored(target, snapshot) == await contents(backed.store)


async def test_backup_continues_from_the_newest_snapshot_that_is_not_damaged(backed: Backed) -> None:
    await fill(backed.store, 20)
    target, reports = MemoryTarget(), Reports()
    await back_up(backed.source, target)
    await backed.store.put("notes/a", document(b'{"text":"two"}'))
    await back_up(backed.source, target)
    newest = max(await target.list_files("snapshots"))
    target.files[newest] = b"damaged"
    async with maker_of(backed.source, target, reports=reports) as maker:
        await maker.make()
        assert maker.report.objects == 1, "what the damaged snapshot had changed"
    assert [newest in why for _, why in reports] == [True]
    assert await restored(target) == await contents(backed.store)


async def test_file_that_is_too_long_is_named_and_the_rest_is_stored(
    backed: Backed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "MAX_PARTS", 2)
    monkeypatch.setattr(make, "PART_BYTES", 1_000)
    target, reports = MemoryTarget(), Reports()
    for size in (2_000, 2_001):
        await backed.store.write(f"files/{size}", chunks_of(os.urandom(size)), "image/png")
    async with maker_of(backed.source, target, reports=reports) as maker:
        await maker.make()
        assert maker.report.unreadable == 1
    assert reports == [("files/2001", "the file has 2001 bytes, and a backup takes no more than 2000")]
    found, expected = await restored(target, reports=reports), await contents(backed.store)
    assert found["files/2000"] == expected["files/2000"]


class Rotten(MemoryStore):
    """A store with one file that is known to be damaged."""

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        if key == "files/a.parquet":
            raise DamagedFile(DAMAGED_REASON, "e")
        return await super().open(key, start, end)


async def test_file_that_the_store_calls_damaged_is_named_and_the_rest_is_stored() -> None:
    store, reports, target = Rotten(), Reports(), MemoryTarget()
    await fill(store, 100)
    async with maker_of(source_of(store), target, reports=reports) as maker:
        await maker.make()
        assert maker.report.unreadable == 1
    assert reports == [("files/a.parquet", DAMAGED_REASON)]
    assert (await restored(target, reports=reports))["files/b/c"][1] == b"c"
    assert [key for key, _ in reports] == ["files/a.parquet"] * 2


class Overtaken(ListedSnapshotSource):
    """A store that changed so much after it was listed that it must be listed again: `gone` is removed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._overtaken = store

    async def changes(self, *, exclusive: bool, also: Sequence[str] = ()) -> Rows:
        if await self._overtaken.get("gone") is not None:
            await self._overtaken.delete("gone")
            raise PositionLost
        async for rows in super().changes(exclusive=exclusive, also=also):
            yield rows


async def test_object_that_is_removed_before_a_store_is_listed_again_is_not_stored() -> None:
    store, target = MemoryStore(), MemoryTarget()
    for key in ("gone", "kept"):
        await store.put(key, document(b"{}"))
    await back_up(Overtaken(store), target)
    assert (await restored(target)).keys() == {"kept"}


class CountedParts:
    """An open file that its source counts."""

    def __init__(self, source: "CountedSource", file: FileParts) -> None:
        self._source = source
        self._file = file
        self.read = file.read

    def close(self) -> None:
        self._source.open_files -= 1
        self._file.close()


class CountedSource:
    """Another source, whose open files are counted."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self.follow, self.list_pages, self.load = source.follow, source.list_pages, source.load
        self.trim, self.close = source.trim, source.close
        self.open_files = self.most_open = 0

    def changes(self, *, exclusive: bool, also: Sequence[str] = ()) -> Rows:
        return self._source.changes(exclusive=exclusive, also=also)

    async def open(self, row: CapturedRow) -> FileParts | None:
        file = await self._source.open(row)
        assert file is not None
        self.open_files += 1
        self.most_open = max(self.most_open, self.open_files)
        return CountedParts(self, file)

    @property
    def change(self) -> str:
        return self._source.change


def replaced_by(put: Callable[[Path], None]) -> Callable[[Path], None]:
    """Replaces a file by something else."""

    def replace(path: Path) -> None:
        path.unlink()
        put(path)

    return replace


class TestFolders:
    """What only a store in a folder does."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[LocalStore]:
        store = await LocalStore.open_folder(tmp_path / "data")
        yield store
        await store.close()

    @pytest.mark.parametrize(
        "damage",
        [
            Path.unlink,
            lambda path: rot(path),
            replaced_by(os.mkdir),
            replaced_by(os.mkfifo),
            replaced_by(lambda path: path.symlink_to("elsewhere")),
        ],
        ids=["lost", "rotten", "folder", "fifo", "link"],
    )
    async def test_lost_or_damaged_file_is_named_and_the_rest_is_stored(
        self, store: LocalStore, tmp_path: Path, damage: Callable[[Path], None]
    ) -> None:
        await fill(store, 100)
        everything = await contents(store)
        damage(tmp_path / "data/files/files/b/c")
        source, reports, target = source_of(store, tmp_path / "data"), Reports(), MemoryTarget()
        async with maker_of(source, target, reports=reports) as maker:
            await maker.make()
            assert maker.report.unreadable == 1
        await source.close()
        found = await restored(target, reports=reports)
        assert [key for key, _ in reports] == ["files/b/c"] * 2
        assert found.pop("files/b/c") != everything.pop("files/b/c")
        assert found == everything

    async def test_few_files_are_open_at_once(self, store: LocalStore, tmp_path: Path) -> None:
        source, target = CountedSource(source_of(store, tmp_path / "data")), MemoryTarget()
        async with maker_of(source, target) as maker:
            await maker.make()
            for n in range(300):
                await store.write(f"files/{n}", chunks_of(b"%d" % n), "text/plain")
            await maker.make()
        await source.close()
        assert 200 < source.most_open <= 256
        assert source.open_files == 0
        assert await restored(target) == await contents(store)

    async def test_without_a_follower_a_folder_has_no_triggers(
        self, store: LocalStore, tmp_path: Path
    ) -> None:
        def triggers() -> list[str]:
            with closing(sqlite3.connect(tmp_path / "data/pysync.db")) as database:
                found = database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'touched%'")
                return [name for (name,) in found]

        one, other = (source_of(store, tmp_path / "data") for _ in range(2))
        assert triggers() == []
        await back_up(one, MemoryTarget())
        await back_up(other, MemoryTarget())
        await asyncio.sleep(0)
        assert len(triggers()) == 5
        await one.close()
        assert len(triggers()) == 5
        await other.close()
        await asyncio.sleep(0)
        assert triggers() == []

    async def test_slow_follower_lists_everything_again(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = "pysync.store.local.capture._CREATE"
        ring = (("1000000", "10"), ("1024", "4"))
        statements = list(capture._CREATE)
        for usual, small in ring:
            statements = [sql.replace(usual, small) for sql in statements]
        monkeypatch.setattr(create, statements)
        source, target = source_of(store, tmp_path / "data"), MemoryTarget()
        async with maker_of(source, target) as maker:
            for n in range(60):
                await store.put(f"n/{n}", document(b"{}"))
                if n % 20 == 0:
                    await maker.make()
            await maker.make()
            assert await restored(target) == await contents(store)
        await source.close()


NAMES = st.sampled_from(["a", "a/b", "a-b", "a/b/c", "a/b-c", "\xe4", "\U0001f600/x", "\uffff", "A/z"])
STEPS = st.lists(st.tuples(NAMES, st.sampled_from(["put", "delete", "backup"])), max_size=60)


@given(steps=STEPS)
async def test_each_snapshot_has_the_store_of_its_time(
    steps: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store, target = MemoryStore(), MemoryTarget()
    source = source_of(store)
    held = []
    async with maker_of(source, target) as maker:
        for n, (key, step) in enumerate(steps):
            if step == "put":
                await store.put(key, document(b'{"n":%d}' % n))
            elif step == "delete":
                await store.delete(key)
            else:
                await maker.make()
                held.append(await contents(store))
    assert [await restored(target, snapshot) for snapshot in await snapshots_of(target)] == held
