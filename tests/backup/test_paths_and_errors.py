"""Commands refuse places that would be lost or damaged, and their status says how they ended."""

import json
import tarfile
from pathlib import Path

import pytest
from support.cli_runner import Shell, running
from support.places import Commands, held, write

from pysync.erase import EraseRequest
from pysync.store import ERASURE_KEY
from pysync.store.local.store import LocalStore

OLD_FOLDER = Path(__file__).parents[1] / "upgrade/data/folder.tar.gz"


async def test_backup_below_the_linked_files_of_its_own_store_is_refused(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "text"})
    (data / "files").rename(tmp_path / "elsewhere")
    (data / "files").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place in ("elsewhere", "elsewhere/backup", "link/backup", "data/files/backup"):
        refused = await commands.run("backup", "--store", "file:data", "--to", f"file:{place}", status=1)
        assert "another folder" in refused.errors, place


async def test_restore_into_a_folder_of_the_backup_is_refused(
    commands: Commands, data: Path, place: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    (tmp_path / "link").symlink_to(place)
    before = sorted(place.rglob("*"))
    for to in ("backup", "backup/inside", "backup/packs/inside", "link/inside"):
        assert "another folder" in (await commands.restore(to=to, status=1)).errors, to
    assert sorted(place.rglob("*")) == before


async def test_restore_into_a_folder_above_the_backup_is_refused(
    commands: Commands, data: Path, place: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    (tmp_path / "above").mkdir()
    place.rename(tmp_path / "above/backup")
    place.symlink_to(tmp_path / "above/backup")
    assert "another folder" in (await commands.restore(to="above", status=1)).errors
    assert sorted(path.name for path in (tmp_path / "above").iterdir()) == ["backup"]


async def test_backup_of_a_store_that_lies_in_the_place_is_refused(
    commands: Commands, data: Path, place: Path
) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    data.rename(place / "data")
    data.symlink_to(place / "data")
    assert "another folder" in (await commands.back_up(status=1)).errors


@pytest.mark.process
async def test_follower_waits_for_a_key_file_that_is_away(
    commands: Commands, shell: Shell, data: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "text"})
    assert (await shell.run_async("backup", "keygen", "--out", "key"))[0] == 0
    (tmp_path / "key.pub").rename(tmp_path / "away")
    locations = ("--store", "file:data", "--to", "file:backup")
    async with running("backup", *locations, "--follow", "--key", "key.pub") as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        assert b"key.pub" in await follower.stderr.readline()
        (tmp_path / "away").rename(tmp_path / "key.pub")
        assert json.loads(await follower.stdout.readline())["objects"] >= 1
        follower.terminate()
        assert await follower.wait() == 0


async def test_store_of_an_older_schema_is_backed_up(commands: Commands, data: Path, tmp_path: Path) -> None:
    with tarfile.open(OLD_FOLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    assert (await commands.back_up()).counts["objects"] > 0
    await commands.restore()
    assert await held(tmp_path / "restored") == await held(data)


async def test_list_says_that_a_snapshot_has_an_unfinished_erasure(commands: Commands, data: Path) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    store = await LocalStore.open_folder(data)
    await store.put(ERASURE_KEY, json.dumps(EraseRequest("key", "notes/a").members).encode())
    await commands.back_up()
    await store.delete(ERASURE_KEY)
    await store.close()
    await commands.back_up()
    assert [line.get("erasing") for line in (await commands.list()).lines] == [None, True, None]
