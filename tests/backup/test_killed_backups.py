"""A process that is killed at any step leaves a backup that is whole, and the next one finishes its work."""

import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.backups import back_up, restored, snapshots_of, source_of, verified
from support.cli_runner import Shell
from support.depth import depth
from support.killed_process import is_killed_at
from support.store_samples import contents, document, fill

from pysync.backup.format import new_id
from pysync.backup.snapshot import Repository
from pysync.backup.target import FolderTarget
from pysync.store import STORE_KEY
from pysync.store.local.store import LocalStore

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(depth(300, 1800))]

Contents = dict[str, tuple[str, bytes]]


class Killer:
    """Kills a command at steps that are far apart in a short run, and all of them in a long one."""

    def __init__(self, apart: int) -> None:
        self.count = 0
        self._apart = depth(apart, 1)
        self._step = random.randint(1, self._apart)

    async def kills(self, *arguments: str) -> bool:
        """Run a command; return False if it ends before the next step."""
        is_killed = await is_killed_at(self._step, *arguments)
        self._step += self._apart
        self.count += is_killed
        return is_killed


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    """A store that goes on while its backups are killed."""
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store, 100)
    yield store
    await store.close()


async def held_by(target: FolderTarget) -> list[Contents]:
    """What each snapshot holds, oldest first, of a backup without any damage."""
    assert (await verified(target)).damaged == 0
    return [await restored(target, snapshot) for snapshot in await snapshots_of(target)]


async def stored(store: LocalStore) -> Contents:
    """Everything in the store, apart from its id."""
    found = await contents(store)
    found.pop(STORE_KEY, None)
    return found


@pytest.mark.parametrize("is_first", [True, False])
async def test_killed_backup_is_finished_by_the_next(
    is_first: bool, store: LocalStore, tmp_path: Path, shell: Shell
) -> None:
    before, folder, held = tmp_path / "before", tmp_path / "backup", list[Contents]()
    before.mkdir()
    if not is_first:
        made = await shell.run_async("backup", "--store", f"file:{tmp_path}/data", "--to", f"file:{before}")
        assert made[::2] == (0, "")
        held.append(await stored(store))
    for n in range(20):
        await store.put(f"notes/new/{n}", document(b'{"n":%d}' % n))
    target, killer = FolderTarget(folder), Killer(20)
    command = ("backup", "--store", f"file:{tmp_path}/data", "--to", f"file:{folder}")
    while True:
        shutil.copytree(before, folder)
        now = await stored(store)
        if not await killer.kills(*command):
            break
        if (folder / "format.json").exists():
            assert await held_by(target) in (held, [*held, now])
        await store.put("notes/new/0", document(b'{"kill":%d}' % killer.count))
        assert (await shell.run_async(*command))[::2] == (0, "")
        assert (await held_by(target))[-1] == await stored(store)
        shutil.rmtree(folder)
    assert killer.count >= 2
    assert await held_by(target) == [*held, now]


@pytest.mark.parametrize("options", [(), ("--purge",)], ids=["prune", "purge"])
async def test_killed_prune_loses_nothing_that_is_kept_and_is_finished_by_the_next(
    options: tuple[str, ...], store: LocalStore, tmp_path: Path, shell: Shell
) -> None:
    before, folder = FolderTarget(tmp_path / "before"), tmp_path / "backup"
    (tmp_path / "before").mkdir()
    for n in range(3):
        for key in range(10):
            await store.put(f"notes/{key}", document(b'{"n":%d}' % n))
        await back_up(source_of(store, tmp_path / "data"), before)
        repository = await Repository.open(before)
        repository.claim_id = new_id()
        await repository.put_pack(b"of a killed backup %d" % n, 20)
    target, killer, now = FolderTarget(folder), Killer(8), await stored(store)
    command = ("backup", "prune", "--from", f"file:{folder}", "--keep-last", "1", *options)
    while True:
        shutil.copytree(tmp_path / "before", folder)
        is_killed = await killer.kills(*command)
        assert (await held_by(target))[-1] == now
        status, _, errors = await shell.run_async(*command)
        assert await held_by(target) == [now]
        if options and status:  # for a day a claim protects the packs that a killed purge has written
            assert "was killed less than a day ago" in errors
        else:
            assert (status, errors) == (0, "")
            assert (await verified(target)).unreferenced == 0
        if not is_killed:
            break
        shutil.rmtree(folder)
    assert killer.count >= 2


async def test_killed_restore_is_finished_by_the_next(
    store: LocalStore, tmp_path: Path, shell: Shell
) -> None:
    (tmp_path / "backup").mkdir()
    await back_up(source_of(store, tmp_path / "data"), FolderTarget(tmp_path / "backup"))
    folder, killer, expected = tmp_path / "new", Killer(10), await contents(store)
    command = ("backup", "restore", "--from", f"file:{tmp_path}/backup", "--to", f"file:{folder}")
    while await killer.kills(*command):
        status, _, errors = await shell.run_async(*command)
        if status == 0:
            assert errors == ""
        else:  # it was killed between its last step and its end
            assert "is not empty" in errors
        restored_store = await LocalStore.open_folder(folder)
        assert await contents(restored_store) == expected
        await restored_store.close()
        shutil.rmtree(folder)
    assert killer.count >= 2
