"""The folder or bucket of a backup holds whole files alone."""

import errno
import os
from pathlib import Path

import pytest
from components import S3Server
from support.backups import back_up, pruned, restored, source_of, verified
from support.faulty_disk import failing
from support.s3_stores import new_prefix, opened
from support.store_samples import contents, document, fill

from pysync.backup import target as target_module
from pysync.backup.prune import KeepRules
from pysync.backup.target import BucketTarget, FolderTarget
from pysync.errors import StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def test_folder_lists_whole_files_alone(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path / "backup")
    assert await target.list_files("packs") == {}
    await target.put("packs/ab/1", b"one")
    await target.put("packs/ab/1", b"other")
    assert await target.get("packs/ab/1") == b"other"
    assert await target.get("packs/ab/2") is None
    (tmp_path / "backup/~tmp/left").write_bytes(b"by a killed process")
    assert await target.list_files("") == {"packs/ab/1": 5}
    await target.delete("packs/ab/1")
    await target.delete("packs/ab/1")
    assert await target.list_files("") == {}


@pytest.mark.parametrize("command", ["backup", "prune"])
async def test_leftovers_of_killed_processes_are_deleted_a_day_later(command: str, tmp_path: Path) -> None:
    store, target = MemoryStore(), FolderTarget(tmp_path)
    await fill(store, 3)
    await back_up(source_of(store), target)
    old, new = tmp_path / "~tmp/old", tmp_path / "~tmp/new"
    old.write_bytes(b"by a killed process")
    os.utime(old, (0, old.stat().st_mtime - 90_000))
    new.write_bytes(b"by a process that may be running")
    if command == "backup":
        await back_up(source_of(store), target)
    else:
        await pruned(target, KeepRules(last=1), FakeClock())
    assert (old.exists(), new.exists()) == (False, True)
    assert (await verified(target)).damaged == 0


async def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FolderTarget(tmp_path)
    with (
        failing(monkeypatch, tmp_path, errno.ENOSPC, ("fsync",), target_module),
        pytest.raises(StoreUnavailable, match="No space left"),
    ):
        await target.put("a", b"x")
    assert await target.list_files("") == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moto", "radosgw"])
async def test_bucket_is_backed_up_into_a_bucket(name: str, request: pytest.FixtureRequest) -> None:
    server: S3Server = request.getfixturevalue(name)
    prefix = new_prefix()
    async with (
        opened(server, f"{prefix}/data") as store,
        opened(server, f"{prefix}/backup") as backup_store,
    ):
        await fill(store, 100)
        target = BucketTarget(backup_store)
        first = await back_up(source_of(store), target)
        await store.put("notes/a", document(b'{"text":"two"}'))
        await store.delete("files/b/c")
        second = await back_up(source_of(store), target)
        assert second.objects == 2
        assert second.bytes_written < first.bytes_written
        assert await restored(target) == await contents(store)
        assert (await verified(target)).damaged == 0
        assert (await pruned(target, KeepRules(last=1), FakeClock())).removed == 1
        assert await restored(target) == await contents(store)
