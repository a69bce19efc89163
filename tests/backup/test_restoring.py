"""Backups are verified, restored and pruned; nobody opens an encrypted one without its key."""

import asyncio
import json
import os
import random
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from components import S3Server
from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, maker_of, nothing, restored, source_of
from support.bit_rot import damages, rot
from support.cli_runner import Shell
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix, opened
from support.store_samples import contents, document, fill

from pysync.backup import restoring
from pysync.backup.checking import BackupVerification, BackupVerifier
from pysync.backup.encryption import BackupKey, WrongKey
from pysync.backup.making import BackupMaker
from pysync.backup.notes import GRACE_MS
from pysync.backup.pruning import KeepRules, prune
from pysync.backup.repository import PAGES, SNAPSHOTS, BackupDamaged, Repository, Snapshot, path_of
from pysync.backup.restoring import RestoreClock, Restorer, find_snapshot_at, parse_time
from pysync.backup.source import ListedSnapshotSource
from pysync.backup.target import BackupTarget, BucketTarget, FolderTarget
from pysync.changelog import Change
from pysync.cli.backup import removal_command
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import StoreUnavailable
from pysync.store import RESTORE_KEY, ListEntry, Store, StoredObject, Write, open_store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DAY_MS = 86_400_000


async def verified(target: BackupTarget, key: BackupKey | None = None) -> BackupVerification:
    verifier = BackupVerifier(await Repository.open(target, key), lambda name, why: None)
    await verifier.run()
    return verifier.report


async def filled() -> tuple[MemoryStore, MemoryTarget]:
    """A store with something of everything, and a backup of it."""
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 200)
    await back_up(ListedSnapshotSource(store), target)
    await store.put("notes/later", document(b'{"text":"later"}'))
    await back_up(ListedSnapshotSource(store), target)
    return store, target


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_every_flipped_missing_or_extra_byte_is_found(is_encrypted: bool) -> None:
    store, target = await filled()
    key = BackupKey.generate() if is_encrypted else None
    if key is not None:
        target = await _encrypted(store, key)
    keys = [key, key.without_private()] if key else [None]
    for each in keys:
        assert (await verified(target, each)).damaged == 0
    names = [name for name in target.files if name != "format.json"]
    assert {name.partition("/")[0] for name in names} == {"packs", "pages", "snapshots"}
    chosen = random.Random(1)
    for name in names:
        body = target.files[name]
        at = chosen.randrange(len(body))
        for damage in (
            body[:at] + bytes([body[at] ^ 1 << chosen.randrange(8)]) + body[at + 1 :],
            body + b"\0",
            body[:-1],
            None,
        ):
            if damage is None:
                del target.files[name]
            else:
                target.files[name] = damage
            for each in keys:
                found = await verified(target, each)
                # Nothing refers to a snapshot. It is missing from the list alone.
                assert found.damaged or (damage is None and name.startswith("snapshots/")), name
            target.files[name] = body
    target.files["packs/junk"] = b"junk"
    assert (await verified(target, keys[0])).damaged == 1


async def _encrypted(store: MemoryStore, key: BackupKey) -> MemoryTarget:
    """An encrypted backup, made without the private key."""
    target = MemoryTarget()
    repository = await Repository.open(target, key.without_private(), create=True)
    for _ in range(2):
        async with maker_of(ListedSnapshotSource(store), target, repository=repository) as maker:
            await maker.make()
    return target


async def test_an_encrypted_backup_opens_with_its_private_key_alone() -> None:
    store, _ = await filled()
    key, other = BackupKey.generate(), BackupKey.generate()
    await store.put("secret", document(b'{"text":"attack at dawn"}'))
    target = await _encrypted(store, key)
    assert not any(b"secret" in body or b"dawn" in body for body in target.files.values())
    assert await restored(target, key=key) == await contents(store)
    sealed = await Repository.open(target, key.without_private())
    newest = await sealed.newest()
    assert newest is not None
    with pytest.raises(WrongKey, match="private key"):
        await Restorer(sealed, MemoryStore(), print).restore(newest)
    for wrong in (None, other, other.without_private()):
        with pytest.raises(ValueError, match="the backup is encrypted"):
            await Repository.open(target, wrong)
    forged = key._replace(metadata=os.urandom(32))
    with pytest.raises(BackupDamaged, match="not the key of the backup"):
        await (await Repository.open(target, forged)).newest()
    with pytest.raises(WrongKey):
        key.open_pack(other.seal_pack(b"x"))


async def test_the_second_encrypted_backup_costs_what_has_changed() -> None:
    store, key = MemoryStore(), BackupKey.generate()
    await fill(store, 200)
    target = await _encrypted(store, key)
    assert sum(name.startswith("packs/") for name in target.files) == 1, "that of the first"


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"public":"00","metadata":"11"}', b'{"public":1}'])
def test_malformed_key_is_reported(text: bytes) -> None:
    with pytest.raises(ValueError, match="key of a backup"):
        BackupKey.parse(text)


def test_a_key_is_read_as_it_was_written() -> None:
    key = BackupKey.generate()
    assert BackupKey.parse(key.text()) == key
    assert BackupKey.parse(key.without_private().text()).private is None


async def test_an_interrupted_restore_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_CONCURRENT_PUTS", 1)
    store, target = await filled()
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    into = MemoryStore()
    failing = FaultyStore(into)
    failing.fail("put", times=1, after=20)
    with pytest.raises(StoreUnavailable):
        await Restorer(repository, failing, print).restore(snapshot)
    other, *_ = [await repository.read_snapshot(name) for name in await repository.snapshot_names()]
    with pytest.raises(ValueError, match=r"continue with --at 20.*Z, or name a new store"):
        await Restorer(repository, into, print).restore(other)
    again = Restorer(repository, into, print)
    await again.restore(snapshot)
    assert again.report.objects < len(await contents(store))
    assert await contents(into) == await contents(store)
    with pytest.raises(ValueError, match="not empty"):
        await Restorer(repository, into, print).restore(snapshot)


@pytest.mark.parametrize("name", ["file", "memory", pytest.param("moto", marks=pytest.mark.slow)])
async def test_objects_keep_the_times_at_which_they_were_written(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """So `ttlMs` does not begin anew."""
    written, target, clock = FakeClock(), MemoryTarget(), RestoreClock(FakeClock(FakeClock()() + DAY_MS))
    source = MemoryStore(written)
    await source.put("notes/a", document(b"{}"))
    written.now_ms += 1234
    await source.write("files/a", chunks_of(b"bytes"), "text/plain")
    await back_up(ListedSnapshotSource(source), target)
    if name == "file":
        into: Store = await LocalStore.open_folder(tmp_path / "new", clock)
    elif name == "memory":
        into = MemoryStore(clock)
    else:
        server: S3Server = request.getfixturevalue(name)
        into = await open_store(server.store(new_prefix()), clock)
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    await Restorer(repository, into, print, None, clock).restore(snapshot)
    note, file = await into.get("notes/a"), await into.stat("files/a")
    assert isinstance(note, StoredObject)
    assert file is not None
    assert (note.modified_ms, file.modified_ms) == (FakeClock()(), FakeClock()() + 1234)
    await into.put("notes/b", document(b"{}"))
    later = await into.get("notes/b")
    assert isinstance(later, StoredObject)
    assert later.modified_ms >= FakeClock()() + DAY_MS
    await into.close()


@pytest.mark.parametrize("key", ["notes/a", "files/a"])
async def test_a_restore_replaces_nothing_that_is_written_meanwhile(key: str) -> None:
    source, target, into, reports = MemoryStore(), MemoryTarget(), MemoryStore(), list[str]()
    await source.put("notes/a", document(b'{"of":"the backup"}'))
    await source.write("files/a", chunks_of(b"of the backup"), "text/plain")
    await back_up(ListedSnapshotSource(source), target)
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    release, slow = asyncio.Event(), FaultyStore(into)
    noted = slow.delay("put", release)  # of the note that a restore is under way
    restorer = Restorer(repository, slow, lambda key, why: reports.append(key))
    running = asyncio.create_task(restorer.restore(snapshot))
    await noted.wait()
    if key == "notes/a":
        await into.put(key, document(b'{"of":"a client"}'))
    else:
        await into.write(key, chunks_of(b"of a client"), "text/plain")
    expected = (await contents(into))[key]
    release.set()
    await running
    assert (await contents(into))[key] == expected
    assert reports == [key]
    assert (restorer.report.objects, restorer.report.damaged) == (1, 1)


async def test_a_backup_of_a_store_that_is_being_restored_can_be_restored() -> None:
    source, target = MemoryStore(), MemoryTarget()
    await source.put("notes/a", document(b"{}"))
    await source.put(RESTORE_KEY, b'{"snapshot":"snapshots/of-another-backup"}')
    await back_up(ListedSnapshotSource(source), target)
    assert (await restored(target)).keys() == {"notes/a"}


async def test_parts_missing_from_a_damaged_backup_are_reported_and_the_rest_restored() -> None:
    store, target = await filled()
    repository, reports = await Repository.open(target), dict[str, str]()
    snapshot = await repository.newest()
    assert snapshot is not None
    (lost,) = [entry for entry in await repository.entries(snapshot) if entry.key == "notes/later"]
    del target.files[path_of("packs", lost.parts[0].pack)]
    into = MemoryStore()
    restorer = Restorer(repository, into, reports.__setitem__)
    await restorer.restore(snapshot)
    assert reports.keys() == {"notes/later"}
    assert "is missing" in reports["notes/later"]
    assert restorer.report.damaged == 1
    everything = await contents(store)
    del everything["notes/later"]
    assert await contents(into) == everything


async def test_a_backup_whose_newest_snapshot_is_damaged_is_made_whole() -> None:
    store, target = await filled()
    for name in [name for name in target.files if name.startswith("pages/")]:
        del target.files[name]
    reports: list[tuple[str, str]] = []
    async with maker_of(ListedSnapshotSource(store), target, reports=reports) as maker:
        snapshot = await maker.make()
    assert [key for key, _ in reports] == [""]
    assert "everything is stored anew" in reports[0][1]
    assert await restored(target, snapshot) == await contents(store)


async def test_follower_of_the_old_store_receives_a_reset(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.commit(Write("a", document(b"{}"), changes=[Change(b"{}")]))
    target, source = MemoryTarget(), source_of(store, tmp_path / "data")
    await back_up(source, target)
    await source.close()
    known = await store.change_log.last_id()
    for n in range(50):
        await store.commit(Write("a", document(b'{"n":%d}' % n), changes=[Change(b"{}")]))
    later = await store.change_log.last_id()
    await store.close()
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    assert snapshot.change == known
    clock = FakeClock(0)  # far behind that of the old store
    new = await LocalStore.open_folder(tmp_path / "new", clock)
    await Restorer(repository, new, print).restore(snapshot)
    for n in range(100):
        await new.commit(Write("a", document(b'{"new":%d}' % n), changes=[Change(b"{}")]))
    assert await new.change_log.read(known, 10) is None
    assert await new.change_log.read(later, 10) is None
    await new.close()


async def test_the_change_log_of_a_bucket_begins_anew() -> None:
    _, target = await filled()
    log = MemoryCoordinator()
    known = await log.append([Change(b"{}")])
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    await Restorer(repository, MemoryStore(), print, log).restore(snapshot)
    assert await log.read(known, 10) is None


async def test_times_name_the_newest_snapshot_before_them() -> None:
    assert parse_time("2026-11-23T12:00:00Z") == parse_time("2026-11-23T12:00:00")
    assert parse_time("2026-11-23T12:00:00+01:00") == parse_time("2026-11-23T11:00:00Z")
    assert parse_time("20261123T120000123Z"[:15]) == parse_time("2026-11-23 12:00")
    with pytest.raises(ValueError, match="write a time as"):
        parse_time("noon")
    with pytest.raises(ValueError, match="no snapshot"):
        await find_snapshot_at(await Repository.open(MemoryTarget(), create=True), parse_time("now"), print)


async def test_a_verification_reports_no_snapshot_that_is_removed_meanwhile() -> None:
    _, target = await filled()

    async def remove_oldest(_: str) -> None:
        target.after_names = nothing
        await target.delete((await target.names(SNAPSHOTS))[0])

    target.after_names = remove_oldest
    found = await verified(target)
    assert (found.snapshots, found.damaged) == (1, 0)


class TestPruning:
    async def test_rules_keep_the_newest_of_each_period(self) -> None:
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        for day in range(40):
            await store.put("a", document(b'{"day":%d}' % day))
            await back_up(ListedSnapshotSource(store), target, clock)
            clock.now_ms += DAY_MS // 2
            await back_up(ListedSnapshotSource(store), target, clock)
            clock.now_ms += DAY_MS // 2
        repository = await Repository.open(target)
        report = await prune(repository, KeepRules(daily=7, weekly=4), clock())
        assert report.kept == 7 + 3, "the newest week has its newest day"
        assert report.removed == 80 - report.kept
        assert await restored(target) == await contents(store)

    async def test_files_of_removed_snapshots_are_deleted_a_day_later(self) -> None:
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        for n in range(5):
            await store.write("file", chunks_of(os.urandom(50_000)), "image/png")
            await store.put(f"n/{n}", document(b"{}"))
            await back_up(ListedSnapshotSource(store), target, clock)
            clock.now_ms += 1
        repository = await Repository.open(target)
        size = sum(map(len, target.files.values()))
        first = await prune(repository, KeepRules(last=1), clock())
        assert (first.kept, first.removed, first.deleted) == (1, 4, 0)
        assert first.expired > 0
        assert (await prune(repository, KeepRules(last=1), clock() + GRACE_MS - 1)).deleted == 0
        later = await prune(repository, KeepRules(last=1), clock() + GRACE_MS)
        assert later.deleted == first.expired
        assert sum(map(len, target.files.values())) < size
        assert await restored(target) == await contents(store)
        found = await verified(target)
        assert (found.damaged, found.unreferenced) == (0, 0)

    async def _prune_what_held(
        self, content: bytes, maker: BackupMaker, store: MemoryStore, target: MemoryTarget, clock: FakeClock
    ) -> Repository:
        """Back up a file, delete it, and remove the snapshots that had it. Returns the backup."""
        await store.write("file", chunks_of(content), "image/png")
        await maker.make()
        await store.delete("file")
        for n in range(40):
            clock.now_ms += 1
            await store.put("n", document(b'{"n":%d}' % n))
            await maker.make()
        repository = await Repository.open(target)
        await prune(repository, KeepRules(last=1), clock())
        return repository

    async def test_a_running_backup_does_not_refer_to_what_a_prune_deletes(self) -> None:
        """It knows bytes of a snapshot that is removed meanwhile, and finds them in the store again."""
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        content = os.urandom(50_000)
        async with maker_of(ListedSnapshotSource(store), target, clock) as maker:
            repository = await self._prune_what_held(content, maker, store, target, clock)
            await store.write("again", chunks_of(content), "image/png")
            await maker.make()
            await prune(repository, KeepRules(last=1), clock() + GRACE_MS)
            await prune(repository, KeepRules(last=1), clock() + 2 * GRACE_MS)
            assert await restored(target) == await contents(store)
            assert (await verified(target)).damaged == 0

    async def test_a_running_backup_does_not_refer_to_what_a_prune_has_deleted(self) -> None:
        """The note that named the bytes is gone, too, when the store has the same bytes again."""
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        content = os.urandom(50_000)
        async with maker_of(ListedSnapshotSource(store), target, clock) as maker:
            repository = await self._prune_what_held(content, maker, store, target, clock)
            clock.now_ms += GRACE_MS
            await maker.make()
            await prune(repository, KeepRules(last=1), clock())
            await store.write("again", chunks_of(content), "image/png")
            await maker.make()
            assert await restored(target) == await contents(store)
            assert (await verified(target)).damaged == 0

    async def test_a_prune_does_not_delete_what_a_backup_stores_meanwhile(self) -> None:
        """A document has the bytes that it had in a snapshot that was removed."""
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        for text in (b'{"n":1}', b'{"n":2}'):
            await store.put("n", document(text))
            await back_up(ListedSnapshotSource(store), target, clock)
            clock.now_ms += 1
        repository = await Repository.open(target)
        assert (await prune(repository, KeepRules(last=1), clock())).expired > 0
        clock.now_ms += GRACE_MS

        async def back_up_again(folder: str) -> None:
            if folder == PAGES:
                target.after_names = nothing
                await store.put("n", document(b'{"n":1}'))
                await back_up(ListedSnapshotSource(store), target, clock)

        target.after_names = back_up_again
        assert (await prune(repository, KeepRules(last=1), clock())).deleted > 0
        assert await restored(target) == await contents(store)
        assert (await verified(target)).damaged == 0

    async def test_a_prune_just_before_a_snapshot_is_written_does_not_hold_up_later_ones(self) -> None:
        """It takes the files of this snapshot for files that nothing refers to."""
        clock, target, store = FakeClock(), MemoryTarget(), MemoryStore()
        repository = await Repository.open(target, create=True)

        async def prune_first(name: str) -> None:
            if name.startswith(SNAPSHOTS):
                target.before_put = nothing
                assert (await prune(repository, KeepRules(last=1), clock())).expired > 0

        target.before_put = prune_first
        await store.put("a", document(b'{"n":1}'))
        await back_up(ListedSnapshotSource(store), target, clock)
        await store.put("b", document(b'{"n":1}'))
        await back_up(ListedSnapshotSource(store), target, clock)
        assert (await prune(repository, KeepRules(last=1), clock() + GRACE_MS)).kept == 1
        assert await restored(target) == await contents(store)
        assert (await verified(target)).damaged == 0

    @pytest.mark.parametrize("step_ms", [-30 * DAY_MS, 30 * DAY_MS])
    async def test_a_step_of_the_clock_loses_nothing(self, step_ms: int) -> None:
        store, target = await filled()
        clock = FakeClock()
        for day in range(4):
            clock.now_ms += DAY_MS + (step_ms if day == 1 else 0)
            await store.put("notes/later", document(b'{"day":%d}' % day))
            await back_up(ListedSnapshotSource(store), target, clock)
            await prune(await Repository.open(target), KeepRules(daily=2), clock())
            assert await restored(target) == await contents(store)
            assert (await verified(target)).damaged == 0

    async def test_a_prune_that_fails_at_any_step_loses_nothing(self) -> None:
        store, made = await filled()
        expected = await contents(store)
        for step in range(60):
            target = MemoryTarget()
            target.files = dict(made.files)
            for round_ in range(3):
                repository = await Repository.open(target)
                target.fails_after = step if round_ < 2 else 1 << 60
                try:
                    await prune(repository, KeepRules(last=1), (FakeClock()() + (round_ + 2) * GRACE_MS))
                except StoreUnavailable:
                    assert round_ < 2
                target.fails_after = 1 << 60
            assert await restored(target) == expected


class TestTargets:
    async def test_a_folder_keeps_whole_files_alone(self, tmp_path: Path) -> None:
        target = FolderTarget(tmp_path / "backup")
        assert await target.names("packs") == []
        await target.put("packs/ab/1", b"one")
        await target.put("packs/ab/1", b"two")
        assert await target.get("packs/ab/1") == b"two"
        assert await target.get("packs/ab/2") is None
        (tmp_path / "backup/~tmp/left").write_bytes(b"by a killed process")
        assert await target.names("") == ["packs/ab/1"]
        await target.delete("packs/ab/1")
        await target.delete("packs/ab/1")
        assert await target.names("") == []

    @pytest.mark.parametrize("command", ["backup", "prune"])
    async def test_leftovers_of_killed_processes_are_deleted_a_day_later(
        self, command: str, tmp_path: Path
    ) -> None:
        store, target = MemoryStore(), FolderTarget(tmp_path)
        await fill(store, 3)
        await back_up(ListedSnapshotSource(store), target)
        old, new = tmp_path / "~tmp/old", tmp_path / "~tmp/new"
        old.write_bytes(b"by a killed process")
        os.utime(old, (0, old.stat().st_mtime - 90_000))
        new.write_bytes(b"by a process that may be running")
        if command == "backup":
            await back_up(ListedSnapshotSource(store), target)
        else:
            await prune(await Repository.open(target), KeepRules(last=1), 0)
        assert (old.exists(), new.exists()) == (False, True)
        assert (await verified(target)).damaged == 0

    async def test_a_full_disk_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fsync(fd: int) -> None:
            raise OSError(28, "No space left on device")

        target = FolderTarget(tmp_path)
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreUnavailable, match="No space left"):
            await target.put("a", b"x")
        monkeypatch.undo()
        assert await target.names("") == []

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["moto", "radosgw"])
    async def test_a_bucket_is_backed_up_into_a_bucket(
        self, name: str, request: pytest.FixtureRequest
    ) -> None:
        server: S3Server = request.getfixturevalue(name)
        prefix = new_prefix()
        async with (
            opened(server, f"{prefix}/data") as store,
            opened(server, f"{prefix}/backup") as backup_store,
        ):
            await fill(store, 100)
            target = BucketTarget(backup_store)
            first = await back_up(ListedSnapshotSource(store), target)
            await store.put("notes/a", document(b'{"text":"two"}'))
            await store.delete("files/b/c")
            second = await back_up(ListedSnapshotSource(store), target)
            assert second.objects == 2
            assert second.bytes_written < first.bytes_written
            assert await restored(target) == await contents(store)
            assert (await verified(target)).damaged == 0


async def test_a_head_that_is_newer_than_the_listing_has_its_segments() -> None:
    """The store is listed before an append seals a segment, and the head is read after it."""
    from support.store_samples import LOG, log_objects, put_all

    class Late(MemoryStore):
        """A store that is written to after it was listed for the first time."""

        is_listed = False

        async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
            async for entry in super().walk(prefix, after):
                yield entry
            if not self.is_listed:
                self.is_listed = True
                await put_all(self, log_objects(300))

    store, target = Late(), MemoryTarget()
    await put_all(store, log_objects(40))
    await back_up(ListedSnapshotSource(store), target)
    into = MemoryStore()
    repository = await Repository.open(target)
    snapshot = await repository.newest()
    assert snapshot is not None
    await Restorer(repository, into, print).restore(snapshot)
    assert await damages(into) == []
    assert (await contents(into))[LOG] == (await contents(store))[LOG]


class TestCommands:
    async def test_a_backup_is_made_listed_verified_pruned_and_restored(
        self, shell: Shell, tmp_path: Path
    ) -> None:
        store = await LocalStore.open_folder(tmp_path / "data")
        await fill(store, 50)
        expected = await contents(store)
        await store.close()
        shell_ = shell.run_async
        assert await shell_("backup", "keygen", "--out", "key") == (0, "", "")
        assert (await shell_("backup", "keygen", "--out", "key"))[0] == 1
        make = ("backup", "--store", "file:data", "--to", "file:backup", "--key", "key.pub")
        status, output, errors = await shell_(*make)
        assert (status, errors) == (0, "")
        first = json.loads(output)
        assert first["objects"] == len(expected)
        arguments = ("--from", "file:backup", "--key", "key.pub")
        assert json.loads((await shell_(*make))[1])["objects"] == 0
        status, output, _ = await shell_("backup", "list", *arguments)
        listed = [json.loads(line) for line in output.splitlines()]
        assert [each["store"] for each in listed] == ["file:data"] * 2
        assert listed[0]["time"] == first["time"]
        status, output, _ = await shell_("backup", "verify", *arguments)
        assert (status, json.loads(output)["snapshots"]) == (0, 2)
        assert (await shell_("backup", "prune", *arguments))[0] == 2
        status, output, _ = await shell_("backup", "prune", *arguments, "--keep-last", "1")
        assert (status, json.loads(output)["removed"]) == (0, 1)
        restore = ("backup", "restore", "--from", "file:backup", "--to", "file:new")
        assert (await shell_(*restore, "--key", "key.pub"))[0] == 1
        status, output, errors = await shell_(*restore, "--key", "key", "--at", listed[1]["time"])
        assert (status, errors) == (0, "")
        assert json.loads(output)["objects"] == len(expected)
        new = await LocalStore.open_folder(tmp_path / "new")
        assert await contents(new) == expected
        await new.close()

    async def test_impossible_command_is_reported(self, shell: Shell, tmp_path: Path) -> None:
        store = await LocalStore.open_folder(tmp_path / "data")
        await store.close()
        (tmp_path / "other").mkdir()
        (tmp_path / "other/file").write_text("not a backup")
        for arguments, status, error in (
            (("--store", "file:data"), 2, "the following arguments are required: --to"),
            (("--store", "file:no", "--to", "file:b"), 1, "file:no: there is no store"),
            (("--store", "file:data", "--to", "file:data"), 1, "file:data is a store"),
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

    async def test_a_prune_names_the_command_that_gives_up_a_damaged_snapshot(
        self, shell: Shell, tmp_path: Path
    ) -> None:
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
        assert f"give up this snapshot with `{command}`" in errors
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        status, output, errors = await shell.run_async(*prune_)
        assert (status, json.loads(output)["removed"], errors) == (0, 1, "")

    def test_a_file_in_a_bucket_is_removed_without_the_options_of_the_bucket(self) -> None:
        command = removal_command("s3://my-backup/sync/?region=eu-central-1", "snapshots/a")
        assert command == "aws s3 rm s3://my-backup/sync/snapshots/a"

    async def test_a_mistaken_prune_or_restore_changes_nothing(self, shell: Shell, tmp_path: Path) -> None:
        store = await LocalStore.open_folder(tmp_path / "data")
        await fill(store, 3)
        await store.close()
        for _ in range(2):
            assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:b"))[0] == 0
        kept = sorted(tmp_path.rglob("*"))
        restore = ("restore", "--from", "file:b")
        for arguments, status, error in (
            (("prune", "--from", "file:b", "--keep-daily", "-7"), 2, "--keep-daily must not be negative"),
            ((*restore, "--to", "file:b"), 1, f"file:b: a backup lies in {tmp_path}/b: name another folder"),
            ((*restore, "--to", "memory:"), 1, "a memory: store ends with this command"),
            ((*restore, "--to", "file:new", "--at", "2020-01-01"), 1, "no snapshot of that time"),
            ((*restore, "--to", "file:new", "--coordinator", "no"), 1, "coordinator"),
            ((*restore, "--to", "s3://bucket/data"), 2, "name the coordinator of the servers of the bucket"),
        ):
            got, output, errors = await shell.run_async("backup", *arguments)
            assert (got, output) == (status, ""), arguments
            assert error in errors
            assert sorted(tmp_path.rglob("*")) == kept

    async def test_a_restore_says_which_snapshots_there_are_instead(
        self, shell: Shell, tmp_path: Path
    ) -> None:
        restore = ("backup", "restore", "--from", "file:b", "--to", "file:new")
        repository = await Repository.open(FolderTarget(tmp_path / "b"), create=True)
        none = "the backup has no snapshot yet: make one with `pysync backup`"
        assert await shell.run_async(*restore) == (1, "", f"pysync: {none}\n")
        unfinished = Snapshot(1_700_000_000_000, [], is_complete=False)
        await repository.put_snapshot(unfinished)
        said = (
            "the backup has no finished snapshot yet, only an unfinished one of 2023-11-14T22:13:20.000Z: "
            "`pysync backup` continues it"
        )
        assert await shell.run_async(*restore) == (1, "", f"pysync: {said}\n")
        await repository.put_snapshot(Snapshot(1_700_000_001_000, []))
        await repository.put_snapshot(Snapshot(1_700_000_002_000, []))
        said = (
            "the backup has no snapshot of that time or before it: the first is of 2023-11-14T22:13:21.000Z; "
            "see `pysync backup list`"
        )
        assert await shell.run_async(*restore, "--at", "2020-01-01") == (1, "", f"pysync: {said}\n")

    async def test_neither_a_restore_nor_a_backup_goes_into_the_other(
        self, shell: Shell, tmp_path: Path
    ) -> None:
        store = await LocalStore.open_folder(tmp_path / "data")
        await fill(store, 3)
        await store.close()
        assert (await shell.run_async("backup", "--store", "file:data", "--to", "file:b"))[0] == 0
        (tmp_path / "link").symlink_to(tmp_path / "b")
        for folder in ("b/packs/new", "link/new", "link"):
            restore = ("backup", "restore", "--from", "file:b", "--to", f"file:{folder}")
            said = f"pysync: file:{folder}: a backup lies in {tmp_path}/b: name another folder\n"
            assert await shell.run_async(*restore) == (1, "", said)
        (tmp_path / "files").symlink_to(tmp_path / "data/files")
        make = ("backup", "--store", "file:data", "--to", "file:files/b")
        status, output, errors = await shell.run_async(*make)
        assert (status, output) == (1, "")
        assert "file:files/b lies in a store, and would be lost with it: name another folder" in errors
