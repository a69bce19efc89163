"""Damage in a backup costs what it hits: everything else is restored, and what is not is named."""

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import collection
from support.places import Commands, flip, held, lists, packs, snapshots, write

SERVED = [collection("notes")]
Files = Callable[[Path], list[Path]]


@pytest.fixture
async def letters(commands: Commands, data: Path) -> dict[str, list[str]]:
    """Three backups, each of which adds ten documents: their keys by the letter that they begin with."""
    keys = {letter: [f"notes/{letter}{n}" for n in range(10)] for letter in "abc"}
    for added in keys.values():
        await write(data, {key: f"text of {key}" for key in added})
        await commands.back_up()
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("files", [packs, lists])
async def test_damaged_file_costs_only_the_objects_in_it(
    commands: Commands, data: Path, place: Path, tmp_path: Path, letters: dict[str, list[str]], files: Files
) -> None:
    count = len(await held(data))
    for n, path in enumerate(files(place)):
        flip(path)
        restored = await commands.restore(to=f"restored{n}", status=None)
        flip(path)
        assert restored.counts["objects"] >= count - 10
        assert restored.counts["objects"] == count or restored.counts["damaged"] == 10
        assert (path.name in restored.errors) == (restored.status == 1), (
            "older snapshots have lists of their own"
        )


@pytest.mark.parametrize("files", [packs, lists])
async def test_damaged_file_leaves_the_objects_of_others_whole(
    commands: Commands,
    place: Path,
    tmp_path: Path,
    letters: dict[str, list[str]],
    files: Files,
    start: Start,
    session: aiohttp.ClientSession,
) -> None:
    flip(files(place)[0])
    await commands.restore(status=None)
    browser = Browser(await start({"store": f"file:{tmp_path}/restored", "collections": SERVED}), session)
    whole = []
    for letter, keys in letters.items():
        pulled = [await browser.pull(key) for key in keys]
        if all(reply.status == 200 and reply.json["data"] for reply in pulled):
            whole.append(letter)
    assert len(whole) >= 2


async def test_restore_names_the_older_snapshots_that_have_what_is_damaged(
    commands: Commands, data: Path, place: Path
) -> None:
    await write(data, {"notes/a": "first", "notes/b": "whole"})
    first = (await commands.back_up()).counts["time"]
    before = {*packs(place)}
    await write(data, {"notes/a": "second"})
    await commands.back_up()
    (newer,) = {*packs(place)} - before
    flip(newer)
    restored = await commands.restore(status=1)
    assert restored.counts["damaged"] == 1
    (line,) = [line for line in restored.errors.splitlines() if "notes/a" in line]
    assert first in line


async def test_restored_store_answers_500_for_what_the_backup_could_not_supply(
    commands: Commands,
    data: Path,
    place: Path,
    tmp_path: Path,
    start: Start,
    session: aiohttp.ClientSession,
) -> None:
    await write(data, {"notes/a": "first", "notes/b": "whole"})
    await commands.back_up()
    before = {*packs(place)}
    await write(data, {"notes/a": "second"})
    await commands.back_up()
    (newer,) = {*packs(place)} - before
    newer.unlink()
    await commands.restore(status=1)
    browser = Browser(await start({"store": f"file:{tmp_path}/restored", "collections": SERVED}), session)
    assert (await browser.pull("notes/a")).error == (500, "document_corrupt")
    assert (await browser.pull("notes/b")).json["data"] == {"text": "whole"}


async def test_damaged_snapshot_does_not_end_a_restore(
    commands: Commands, data: Path, place: Path, letters: dict[str, list[str]]
) -> None:
    newest = snapshots(place)[-1]
    flip(newest)
    restored = await commands.restore(status=1)
    assert newest.name in restored.errors
    assert restored.counts["objects"] >= len(await held(data)) - 10


@pytest.mark.parametrize("files", [lists, snapshots])
async def test_rebuild_makes_damaged_lists_anew_from_packs(
    commands: Commands,
    data: Path,
    place: Path,
    tmp_path: Path,
    letters: dict[str, list[str]],
    files: Files,
) -> None:
    for path in files(place):
        flip(path)
    rebuilt = await commands.rebuild()
    await commands.prune("--keep-last", "9")  # removes the damaged files that nothing needs any more
    assert rebuilt.counts["missing"] == 0
    assert (await commands.verify()).counts["damaged"] == 0
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


async def test_rebuild_needs_nothing_but_packs(
    commands: Commands, data: Path, place: Path, tmp_path: Path, letters: dict[str, list[str]]
) -> None:
    for path in (*lists(place), *snapshots(place)):
        path.unlink()
    assert (await commands.rebuild()).counts["snapshots"] >= 1
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


async def test_prune_removes_nothing_from_a_place_whose_snapshots_are_all_lost(
    commands: Commands, data: Path, place: Path, tmp_path: Path, letters: dict[str, list[str]]
) -> None:
    for path in snapshots(place):
        path.unlink()
    assert "rebuild" in (await commands.prune("--keep-last", "9", status=1)).errors
    await commands.rebuild()
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)
