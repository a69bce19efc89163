"""What the commands of backups print, and how they end."""

import json
import subprocess
from pathlib import Path

from support.backups import back_up, source_of
from support.bit_rot import rot
from support.cli_runner import Shell
from support.places import Commands, held
from support.store_samples import fill

from pysync.backup.claim import BackupClaim
from pysync.backup.format import Snapshot
from pysync.backup.snapshot import Repository
from pysync.backup.target import FolderTarget
from pysync.cli.backup import removal_command
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def test_backup_is_made_listed_verified_pruned_and_restored(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    store = await LocalStore.open_folder(data)
    await fill(store, 50)
    await store.close()
    expected = await held(data)
    keygen = ("backup", "keygen", "--out", "key")
    assert await commands.shell.run_async(*keygen) == (0, "", "")
    assert (await commands.shell.run_async(*keygen))[0] == 1
    public = ("--key", "key.pub")
    first = (await commands.back_up(*public)).counts
    assert first["objects"] == len(expected)
    assert (await commands.back_up(*public)).counts["objects"] == 0
    listed = (await commands.list(*public)).lines
    assert [(each["store"], each["number"]) for each in listed] == [("file:data", 1), ("file:data", 2)]
    assert listed[0]["time"] == first["time"]
    assert (await commands.verify(*public)).counts["snapshots"] == 2
    await commands.prune(*public, status=2)
    assert (await commands.prune(*public, "--keep-last", "1")).counts["removed"] == 1
    await commands.restore(*public, status=1)
    restored = await commands.restore("--key", "key", "--at", listed[1]["time"])
    assert (restored.counts["objects"], restored.errors) == (len(expected), "")
    assert await held(tmp_path / "restored") == expected


async def test_impossible_command_is_reported(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("not a backup")
    for arguments, status, error in (
        (("--store", "file:data"), 2, "the following arguments are required: --to"),
        (("--store", "file:no", "--to", "file:b"), 1, "file:no: there is no store"),
        (("--store", "file:data", "--to", "file:data"), 1, "file:data lies in a store"),
        (("--store", "file:data", "--to", "file:data/b"), 1, "file:data/b lies in a store"),
        (("--store", "file:data", "--to", "file:data/files/b"), 1, "file:data/files/b lies in a store"),
        (("--store", "file:data", "--to", "file:other"), 1, "something else lies there: file"),
        (("--store", "file:data", "--to", "memory:"), 1, "a backup lies in file:DIR or s3://"),
        (("--store", "file:data", "--to", "data2"), 1, "data2: a backup lies in file:DIR or s3://"),
        (("--store", "file:data", "--to", "file:b", "--every", "0"), 2, "--every must be more than 0"),
        (
            ("--store", "file:data", "--to", "file:b", "--key", "other/file"),
            1,
            "other/file: this is no key",
        ),
        (("list", "--from", "file:nothing"), 1, "file:nothing: there is no backup"),
        (("list", "--from", "file:other"), 1, "file:other: there is no backup"),
        (("list", "--from", "file:data"), 1, "file:data is a store, not a backup"),
    ):
        got, output, errors = await shell.run_async("backup", *arguments)
        assert (got, output) == (status, ""), arguments
        assert error in errors


async def test_prune_names_the_command_that_gives_up_a_damaged_snapshot(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store, 3)
    await store.close()
    for _ in range(3):
        assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:my backup"))[0] == 0
    damaged = sorted(tmp_path.glob("my backup/snapshots/*"))[1]
    rot(damaged, 20)
    prune_ = ("backup", "prune", "--from", "file:my backup", "--keep-last", "1")
    status, output, errors = await shell.run_async(*prune_)
    assert (status, output) == (1, "")
    assert f"{damaged.name} is damaged" in errors
    command = f"rm 'my backup/snapshots/{damaged.name}'"
    assert f"or give it up with `{command}`" in errors
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    status, output, errors = await shell.run_async(*prune_)
    assert (status, json.loads(output)["removed"], errors) == (0, 1, "")


def test_file_in_a_bucket_is_removed_without_the_options_of_the_bucket() -> None:
    command = removal_command("s3://my-backup/sync/?region=eu-central-1", "snapshots/a")
    assert command == "aws s3 rm s3://my-backup/sync/snapshots/a"


async def test_mistaken_prune_or_restore_changes_nothing(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store, 3)
    await store.close()
    for _ in range(2):
        assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:b"))[0] == 0
    kept = sorted(tmp_path.rglob("*"))
    restore = ("restore", "--from", "file:b")
    for arguments, status, error in (
        (("prune", "--from", "file:b", "--keep-daily", "-7"), 2, "--keep-daily must not be negative"),
        ((*restore, "--to", "file:b"), 1, f"file:b lies in the backup {tmp_path}/b: name another folder"),
        ((*restore, "--to", "memory:"), 2, "a memory: store ends with this command"),
        ((*restore, "--to", "file:new", "--at", "2020-01-01"), 1, "no snapshot of that time"),
        ((*restore, "--to", "file:new", "--coordinator", "no"), 1, "coordinator"),
        ((*restore, "--to", "s3://bucket/data"), 2, "name the coordinator of the servers of the bucket"),
    ):
        got, output, errors = await shell.run_async("backup", *arguments)
        assert (got, output) == (status, ""), arguments
        assert error in errors
        assert sorted(tmp_path.rglob("*")) == kept


async def test_restore_says_which_snapshots_there_are_instead(shell: Shell, tmp_path: Path) -> None:
    async def said(*options: str) -> str:
        restore = ("backup", "restore", "--from", "file:b", "--to", "file:new")
        status, output, errors = await shell.run_async(*restore, *options)
        assert (status, output) == (1, "")
        return errors

    target, store, clock = FolderTarget(tmp_path / "b"), MemoryStore(), FakeClock(1_700_000_000_000)
    await Repository.open(target, create=True)
    assert await said() == "pysync: the backup has no snapshot yet: make one with `pysync backup`\n"
    repository = await Repository.open(target)
    claim = BackupClaim(repository, clock)
    await claim.renew(Snapshot(1, "00000000", clock()))
    assert await said() == (
        "pysync: the backup has no finished snapshot yet, only an unfinished one of "
        "2023-11-14T22:13:20.000Z: `pysync backup` continues it\n"
    )
    await claim.release()
    for _ in range(2):
        clock.now_ms += 1000
        await back_up(source_of(store), target, clock)
    assert await said("--at", "2020-01-01") == (
        "pysync: the backup has no snapshot of that time or before it: the first is of "
        "2023-11-14T22:13:21.000Z; see `pysync backup list`\n"
    )
