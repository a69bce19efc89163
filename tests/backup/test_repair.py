"""What is damaged in a store is replaced by the same version from a backup."""

import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from contracts.files import chunks_of
from support.append_log_nodes import keys_below
from support.backups import MemoryTarget, back_up, maker_of, source_of
from support.bit_rot import damages, rot, rot_rows
from support.cli_runner import Shell
from support.store_samples import REVOCATIONS, contents, document, fill

from pysync.backup.encryption import BackupKey, WrongKey
from pysync.backup.repair import Repairer
from pysync.backup.snapshot import Repository
from pysync.backup.target import FolderTarget
from pysync.config import BackupConfig, ScrubConfig
from pysync.coordinator.memory import MemoryCoordinator
from pysync.migrate import SCRUB_KEY, Damage
from pysync.server.process.background import Scrubber
from pysync.server.process.backup_process import repair_from
from pysync.store import DamagedFile, Store
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

PROJECTION = "_pysync/projections/p"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store, 200)
    await store.put(PROJECTION, b'{"after":"1"}')
    yield store
    await store.close()


@pytest.fixture
async def target(store: LocalStore, tmp_path: Path) -> MemoryTarget:
    """A backup of the store, in the second of two snapshots."""
    target, source = MemoryTarget(), source_of(store, tmp_path / "data")
    await back_up(source, target)
    await store.put("notes/a", document(b'{"text":"newer"}'))
    await back_up(source, target)
    await source.close()
    return target


async def repair(store: Store, target: MemoryTarget) -> dict[str, str | None]:
    """The outcomes for what is damaged in the store."""
    outcomes: dict[str, str | None] = {}
    repairer = Repairer(await Repository.open(target), store, outcomes.__setitem__)
    await repairer.repair(await damages(store))
    assert repairer.report.repaired == sum(why is None for why in outcomes.values())
    assert repairer.report.not_repaired == sum(why is not None for why in outcomes.values())
    return outcomes


async def test_all_kinds_of_damage_are_repaired(
    store: LocalStore, target: MemoryTarget, tmp_path: Path
) -> None:
    expected = await contents(store)
    segments = sorted(await keys_below(store, "_pysync/logs"))
    rot_rows(tmp_path / "data", "notes/a", "logs/a", segments[0], REVOCATIONS)
    await store.put(PROJECTION, b"{}")
    await store.delete(segments[1])
    rot(tmp_path / "data/files/files/a.parquet", 500)
    (tmp_path / "data/files/files/b/c").unlink()
    outcomes = await repair(store, target)
    assert {*outcomes} >= {"notes/a", "logs/a", REVOCATIONS, "files/a.parquet", "files/b/c"}
    assert {*outcomes.values()} == {None}
    while outcomes := await repair(store, target):  # what a damaged head names is found once it is right
        assert {*outcomes.values()} == {None}
    expected[PROJECTION] = "application/json", b"{}"
    assert await contents(store) == expected
    assert await damages(store) == []


async def test_file_that_was_asked_for_after_the_disk_cut_it_short_is_repaired(
    store: LocalStore, target: MemoryTarget, tmp_path: Path
) -> None:
    expected, path = await contents(store), tmp_path / "data/files/files/a.parquet"
    os.truncate(path, 500)
    with pytest.raises(DamagedFile):
        await store.open("files/a.parquet")
    unread, source = list[tuple[str, str]](), source_of(store, tmp_path / "data")
    async with maker_of(source, MemoryTarget(), reports=unread) as maker:
        await maker.make()
    await source.close()
    assert [key for key, _ in unread] == ["files/a.parquet"]
    assert await repair(store, target) == {"files/a.parquet": None}
    assert await contents(store) == expected
    assert await damages(store) == []


async def test_version_missing_from_the_backup_is_reported(
    store: LocalStore, target: MemoryTarget, tmp_path: Path
) -> None:
    await store.put("new", document(b"{}"))
    await store.put("top", document(b'{"text":"newer than the backup"}'))
    await store.write("files/b/c", chunks_of(b"newer than the backup"), "text/plain")
    rot_rows(tmp_path / "data", "new", "top")
    rot(tmp_path / "data/files/files/b/c")
    before = await store.get("top")
    other = "the backup has other versions of it, but not this one"
    assert await repair(store, target) == {
        "new": "the backup does not have it",
        "top": other,
        "files/b/c": other,
    }
    assert await store.get("top") == before


async def test_write_during_a_repair_stays(store: LocalStore, target: MemoryTarget, tmp_path: Path) -> None:
    rot_rows(tmp_path / "data", "top")
    rot(tmp_path / "data/files/files/b/c")
    found = await damages(store)
    await store.put("top", document(b'{"text":"mine"}'))
    await store.write("files/b/c", chunks_of(b"mine"), "text/plain")
    expected, outcomes = await contents(store), dict[str, str | None]()
    await Repairer(await Repository.open(target), store, outcomes.__setitem__).repair(found)
    assert outcomes.keys() == {"top", "files/b/c"}
    assert None not in outcomes.values()
    assert await contents(store) == expected


async def test_private_key_is_needed(store: LocalStore) -> None:
    target, key = MemoryTarget(), BackupKey.generate().without_private()
    with pytest.raises(WrongKey, match="private key"):
        await Repairer(await Repository.open(target, key, create=True), store, print).repair([])


async def test_scrub_of_a_service_repairs_from_its_backup(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await contents(store)
    source = source_of(store, tmp_path / "data")
    await back_up(source, FolderTarget(tmp_path / "backup"))
    await source.close()
    rot_rows(tmp_path / "data", "top")
    config = BackupConfig(to=f"file:{tmp_path}/backup")
    clock, coordinator, outcomes = FakeClock(), MemoryCoordinator(), list[Damage]()

    async def no_pause(seconds: float) -> None:
        return

    def scrubber(backup: BackupConfig) -> Scrubber:
        repair = partial(repair_from, backup, store)
        return Scrubber(
            store, coordinator, ScrubConfig(), outcomes.append, clock, repair=repair, sleep=no_pause
        )

    await scrubber(BackupConfig(to=f"file:{tmp_path}/nothing")).run_once()
    assert "there is no backup" in caplog.text
    assert [damage.key for damage in outcomes] == ["top"]
    await scrubber(config).run_once()
    assert "repaired 'top' from the backup" in caplog.text
    held = await contents(store)
    del held[SCRUB_KEY]
    assert held == expected


async def test_command_repairs(shell: Shell, store: LocalStore, tmp_path: Path) -> None:
    assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:backup"))[0] == 0
    rot_rows(tmp_path / "data", "top")
    verify = ("verify", "--store", "file:data")
    assert (await shell.run_async(*verify))[0] == 1
    status, output, errors = await shell.run_async(*verify, "--repair-from", "file:backup")
    assert (status, errors) == (0, "")
    *_, outcome, counts = map(json.loads, output.splitlines())
    assert outcome == {"key": "top", "repaired": True}
    assert (counts["damaged"], counts["repaired"]) == (1, 1)
    assert (await shell.run_async(*verify))[0] == 0
    await store.put("new", document(b"{}"))
    rot_rows(tmp_path / "data", "new")
    status, output, _ = await shell.run_async(*verify, "--repair-from", "file:backup")
    assert (status, json.loads(output.splitlines()[-1])["repaired"]) == (1, 0)
