"""What was erased, and what only removed snapshots had, leaves the backup: its bytes and its names."""

import json
from pathlib import Path

import aiohttp
import pytest
from support.cli_runner import Shell
from support.clients import Browser, Start
from support.collections import collection
from support.places import Commands, Outcome, files_with, held, packs, write

pytestmark = pytest.mark.usefixtures("hasty_erasures")

ANNE, SECRET = "anne-7f3e51", "5ecret-of-anne"
NOTES = {f"notes/{n}": f"text {n}" for n in range(200)}
SERVED = [collection("notes"), collection("diaries", "users/{user}/{id}")]


async def erase(commands: Commands, **members: str) -> Outcome:
    """Erase everything of Anne, with these members of `backup` in the configuration."""
    settings = {"version": 1, "store": "file:data", "collections": SERVED}
    Path("pysync.json").write_text(json.dumps({**settings, **({"backup": members} if members else {})}))
    status, output, errors = await commands.shell.run_async(
        "erase", "--config", "pysync.json", "--prefix", f"users/{ANNE}"
    )
    assert status == 0, errors
    return Outcome(status, [json.loads(output)], output + errors)


@pytest.fixture
async def erased(commands: Commands, data: Path) -> list[str]:
    """Two backups, between which Anne was erased: their times."""
    await write(data, {**NOTES, f"users/{ANNE}/diary": SECRET})
    first = (await commands.back_up()).counts["time"]
    await erase(commands)
    return [first, (await commands.back_up()).counts["time"]]


async def test_prune_deletes_the_files_of_removed_snapshots_at_once(
    commands: Commands, data: Path, place: Path
) -> None:
    await write(data, {"notes/a": "first"})
    await commands.back_up()
    before = {*packs(place)}
    await write(data, {"notes/a": "second"})
    await commands.back_up()
    assert (await commands.prune("--keep-last", "1")).counts["deleted"] >= 1
    assert before.isdisjoint(packs(place))


async def test_purge_leaves_no_byte_and_no_name_that_no_kept_snapshot_has(
    commands: Commands, data: Path, place: Path, tmp_path: Path, erased: list[str]
) -> None:
    assert files_with(place, ANNE)
    assert files_with(place, SECRET)
    pruned = await commands.prune("--keep-last", "1", "--purge")
    assert files_with(place, ANNE) == []
    assert files_with(place, SECRET) == []
    assert pruned.counts["rewritten"] >= 1
    assert pruned.counts["notRewritten"] == 0
    assert (await commands.verify()).counts["damaged"] == 0
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


async def test_purge_keeps_erased_objects_of_kept_snapshots_and_names_the_snapshots(
    commands: Commands, place: Path, erased: list[str]
) -> None:
    *held_erased, counts = (await commands.prune("--keep-last", "2", "--purge")).lines
    assert [(line["time"], line["erasedObjects"]) for line in held_erased] == [(erased[0], 1)]
    assert held_erased[0]["until"]
    assert counts["kept"] == 2
    assert files_with(place, SECRET)


async def test_purge_of_erased_objects_removes_them_from_kept_snapshots(
    commands: Commands,
    data: Path,
    place: Path,
    tmp_path: Path,
    erased: list[str],
    start: Start,
    session: aiohttp.ClientSession,
) -> None:
    *held_erased, counts = (await commands.prune("--keep-last", "2", "--purge", "--erased", "--yes")).lines
    assert held_erased == []
    assert counts["kept"] == 2
    assert files_with(place, ANNE) == []
    assert files_with(place, SECRET) == []
    assert [line["time"] for line in (await commands.list()).lines] == erased
    assert (await commands.verify()).counts["damaged"] == 0
    await commands.restore("--at", erased[0])
    browser = Browser(await start({"store": f"file:{tmp_path}/restored", "collections": SERVED}), session)
    assert (await browser.pull("notes/7")).json["data"] == {"text": "text 7"}
    assert (await browser.pull(f"users/{ANNE}/diary")).json["data"] in (None, {})


async def test_purge_of_erased_objects_needs_a_yes_where_nobody_can_be_asked(
    commands: Commands, place: Path, erased: list[str]
) -> None:
    before = sorted(place.rglob("*"))
    refused = await commands.prune("--keep-last", "2", "--purge", "--erased", status=None)
    assert refused.status != 0
    assert "--yes" in refused.errors
    assert sorted(place.rglob("*")) == before


async def test_backup_after_a_purge_does_not_bring_erased_objects_back(
    commands: Commands, data: Path, place: Path, erased: list[str]
) -> None:
    await commands.prune("--keep-last", "2", "--purge", "--erased", "--yes")
    await write(data, {"notes/0": "changed"})
    await commands.back_up()
    assert files_with(place, ANNE) == []
    assert files_with(place, SECRET) == []


async def test_purge_without_the_private_key_names_the_packs_that_stay(
    commands: Commands, data: Path, place: Path, tmp_path: Path, shell: Shell
) -> None:
    assert (await shell.run_async("backup", "keygen", "--out", "key"))[0] == 0
    await write(data, {**NOTES, f"users/{ANNE}/diary": SECRET})
    await commands.back_up("--key", "key.pub")
    old = {*packs(place)}
    await erase(commands)
    await commands.back_up("--key", "key.pub")
    purge = ("--keep-last", "1", "--purge", "--key")
    purged = await commands.prune(*purge, "key.pub", status=1)
    assert purged.counts["notRewritten"] >= len(old)
    assert all(path.name in purged.errors for path in old)
    assert (await commands.prune(*purge, "key")).counts["notRewritten"] == 0
    assert old.isdisjoint(packs(place))
    await commands.restore("--key", "key")
    assert await held(tmp_path / "restored") == await held(data)


async def test_erase_prints_the_command_that_finishes_it_in_the_backup(
    commands: Commands, data: Path
) -> None:
    await write(data, {f"users/{ANNE}/diary": SECRET})
    printed = (await erase(commands, to="file:backup")).errors
    (line,) = [line for line in printed.splitlines() if "pysync backup prune" in line]
    assert "--from file:backup" in line
    assert "--keep-" in line
    assert "--purge --erased" in line
