"""Damage in a backup is not for good: the next backup stores anew what the store still has."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.backups import MemoryTarget, back_up, maker_of, pruned, restored, source_of, verified
from support.cli_runner import running
from support.places import Commands, cut, flip, held, lists, packs, write
from support.store_samples import contents, document, fill

from pysync.backup.make import LIST_MS
from pysync.backup.prune import KeepRules
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

NOTES = {f"notes/{n}": f"text {n}" for n in range(50)}
FILES = pytest.mark.parametrize("files", [packs, lists])
Files = Callable[[Path], list[Path]]


@FILES
async def test_backup_stores_lost_files_anew(
    commands: Commands, data: Path, place: Path, tmp_path: Path, files: Files
) -> None:
    await write(data, NOTES)
    await commands.back_up()
    for path in files(place):
        path.unlink()
    await write(data, {"notes/0": "changed"})
    await commands.back_up()
    await commands.prune("--keep-last", "1")
    assert (await commands.verify()).counts["damaged"] == 0
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


@FILES
async def test_backup_stores_shortened_files_anew(
    commands: Commands, data: Path, place: Path, tmp_path: Path, files: Files
) -> None:
    await write(data, NOTES)
    await commands.back_up()
    for path in files(place):
        cut(path)
    await commands.back_up()
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


@FILES
async def test_backup_stores_files_anew_that_verify_found_damaged(
    commands: Commands, data: Path, place: Path, tmp_path: Path, files: Files
) -> None:
    await write(data, NOTES)
    await commands.back_up()
    for path in files(place):
        flip(path)
    assert "pysync backup" in (await commands.verify(status=1)).errors, "the command that heals it"
    await commands.back_up()
    await commands.prune("--keep-last", "1")  # only the snapshots before need what is damaged
    assert (await commands.verify()).counts["damaged"] == 0
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


@pytest.mark.parametrize("folders", [("packs/",), ("pages/", "lists/")], ids=["packs", "lists"])
async def test_backup_of_a_listed_store_stores_lost_files_anew(folders: tuple[str, ...]) -> None:
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 50)
    expected = await contents(store)
    await back_up(source_of(store), target)
    target.files = {name: body for name, body in target.files.items() if not name.startswith(folders)}
    reports: list[tuple[str, str]] = []
    async with maker_of(source_of(store), target, reports=reports) as maker:
        await maker.make()
    assert all("listed anew" in why for _, why in reports)
    assert await restored(target) == expected


async def test_maker_stores_anew_within_an_hour_what_the_place_lost_of_its_own_snapshots() -> None:
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await fill(store, 50)
    async with maker_of(source_of(store), target, clock) as maker:
        await maker.make()
        before = {*target.files}
        await store.put("notes/later", document(b'{"text":"later"}'))
        await maker.make()
        for name in target.files.keys() - before:
            if name.startswith("packs/"):
                del target.files[name]
        clock.now_ms += 2 * LIST_MS
        await maker.make(only_changes=True)
    assert await restored(target) == await contents(store)


async def test_prune_keeps_the_last_snapshot_that_could_supply_what_is_lost(
    commands: Commands, data: Path, place: Path
) -> None:
    await write(data, {"notes/a": "older"})
    await commands.back_up()
    older = {*packs(place)}
    await write(data, {"notes/a": "newer"})
    await commands.back_up()
    for path in {*packs(place)} - older:
        path.unlink()
    shutil.rmtree(data)
    pruned = await commands.prune("--keep-last", "1")
    assert len((await commands.list()).lines) == 2
    assert pruned.counts["needed"] == 1


@pytest.mark.process
@FILES
async def test_follower_stores_lost_files_anew_when_it_starts(
    commands: Commands, data: Path, place: Path, tmp_path: Path, files: Files
) -> None:
    await write(data, NOTES)
    await commands.back_up()
    for path in files(place):
        path.unlink()
    await write(data, {"notes/0": "changed"})
    locations = ("--store", "file:data", "--to", "file:backup")
    async with running("backup", *locations, "--follow", "--every", "0.05") as follower:
        assert follower.stdout is not None
        assert json.loads(await follower.stdout.readline())["objects"] >= 1
        follower.terminate()
        await follower.wait()
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


async def test_backup_leaves_no_list_behind_that_names_lost_packs() -> None:
    """The list of the second backup names a pack only in an entry that the third one replaces."""
    store, target = MemoryStore(), MemoryTarget()
    for n in range(20):
        await store.put(f"notes/{n}", document(b'{"n":%d}' % n))
    await back_up(source_of(store), target)
    before = {*target.files}
    for text in (b'{"text":"second"}', b'{"text":"third"}'):
        await store.put("notes/0", document(text))
        await back_up(source_of(store), target)
        after, before = {*target.files} - before, {*target.files}
        if b"second" in text:
            lost = [name for name in after if name.startswith("packs/")]
    for name in lost:
        del target.files[name]
    await back_up(source_of(store), target)
    await pruned(target, KeepRules(last=1), FakeClock())
    assert (await verified(target)).damaged == 0
    assert await restored(target) == await contents(store)
