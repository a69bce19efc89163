"""Nobody takes a store for whole that a killed restore has written only in part."""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from components import S3Server
from support.backups import MemoryTarget, back_up, newest, source_of
from support.cli_runner import Shell
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix
from support.server_process import serving
from support.store_samples import contents, fill

from pysync.backup.restore import Restorer
from pysync.backup.snapshot import Repository
from pysync.backup.target import FolderTarget
from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.store import Store, open_store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

MESSAGE = "a restore into this store has not ended: run `pysync backup restore` into it again, or delete it"


async def begin_restore(repository: Repository, into: Store) -> None:
    """A restore that ends after some objects, as if it were killed."""
    failing = FaultyStore(into)
    failing.fail("put", times=1, after=5)
    with pytest.raises(StoreUnavailable):
        await Restorer(repository, failing, print).restore(await newest(repository))


@pytest.fixture
async def source(tmp_path: Path) -> MemoryStore:
    """A store whose backup, in the folder `backup`, is restored in part into the folder `data`."""
    store, target = MemoryStore(), FolderTarget(tmp_path / "backup")
    await fill(store, 200)
    await back_up(source_of(store), target)
    half = await LocalStore.open_folder(tmp_path / "data")
    await begin_restore(await Repository.open(target), half)
    await half.close()
    return store


async def test_every_command_names_it_and_another_restore_ends_it(
    shell: Shell, tmp_path: Path, source: MemoryStore
) -> None:
    whole = await LocalStore.open_folder(tmp_path / "whole")
    await whole.close()
    (tmp_path / "empty.json").write_text('{"version":1}')
    store = ("--store", "file:data")
    for arguments in (
        ("verify", *store),
        ("gc", *store),
        ("erase", "--config", "empty.json", *store, "--key", "notes/1", "--dry-run"),
        ("stats", *store),
        ("copy", "file:data", "file:other"),
        ("copy", "file:whole", "file:data"),
        ("backup", *store, "--to", "file:backup"),
    ):
        status, _, errors = await shell.run_async(*arguments)
        assert (status, MESSAGE in errors) == (1, True), arguments
        assert "file:data: " in errors
    status, _, errors = await shell.run_async(
        "backup", "restore", "--from", "file:backup", "--to", "file:data"
    )
    assert (status, errors) == (0, "")
    restored = await LocalStore.open_folder(tmp_path / "data")
    assert await contents(restored) == await contents(source)
    await restored.close()
    assert (await shell.run_async("verify", *store))[0] == 0


@pytest.mark.process
@pytest.mark.parametrize("workers", ["1", "3"])
async def test_no_server_serves_it(
    workers: str, shell: Shell, tmp_path: Path, source: MemoryStore, session: aiohttp.ClientSession
) -> None:
    location = f"file:{tmp_path}/data"
    options = ("--store", location, "--port", "0", "--workers", workers)
    command = [sys.executable, "-m", "pysync", "serve", *options]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.count(MESSAGE) == 1
    assert (await shell.run_async("backup", "restore", "--from", "file:backup", "--to", location))[0] == 0
    async with (
        serving(tmp_path, server={"workers": int(workers)}) as service,
        session.get(f"{service.base}/health/ready") as response,
    ):
        assert response.status == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moto", "radosgw"])
async def test_a_bucket_is_not_opened_either(name: str, request: pytest.FixtureRequest) -> None:
    server: S3Server = request.getfixturevalue(name)
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 60)
    await back_up(source_of(store), target)
    repository = await Repository.open(target)
    config: StoreConfig = server.store(new_prefix())
    half = await open_store(config)
    await begin_restore(repository, half)
    await half.close()
    with pytest.raises(ValueError, match="has not ended"):
        await open_store(config)
    half = await open_store(config, accepts_unfinished_restore=True)
    await Restorer(repository, half, print).restore(await newest(repository))
    await half.close()
    opened = await open_store(config)
    assert await contents(opened) == await contents(store)
    await opened.close()
