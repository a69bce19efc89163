"""However a backup is damaged or forged: it is named as damaged, and nothing wrong is restored."""

import hashlib
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, maker_of
from support.depth import depth
from support.store_samples import contents, document, fill

from pysync.backup import encoding
from pysync.backup.checking import BackupVerification, BackupVerifier
from pysync.backup.encoding import compress, decompress_text
from pysync.backup.encryption import BackupKey
from pysync.backup.notes import GRACE_MS
from pysync.backup.pruning import KeepRules, prune
from pysync.backup.repairing import Repairer
from pysync.backup.repository import (
    FORMAT_FILE,
    PACKS,
    PAGES,
    SNAPSHOTS,
    BackupDamaged,
    Repository,
    path_of,
    time_text,
)
from pysync.backup.restoring import Restorer, find_snapshot_at
from pysync.backup.source import ListedSnapshotSource
from pysync.migrate import Damage
from pysync.store import RESTORE_KEY
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

NOW = 1 << 62
LATER = FakeClock()() + 10 * GRACE_MS


async def made(key: BackupKey | None = None) -> tuple[MemoryStore, MemoryTarget]:
    """A store, and a backup of it with two snapshots, and with a note of files that nothing refers to."""
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 40)
    await store.write("files/long", chunks_of(b"x" * 5_000_000), "application/zip")
    clock = FakeClock()
    for text in (b'"one"', b'"two"', b'"three"'):
        await store.put("notes/later", document(b'{"text":%b}' % text))
        clock.now_ms += 1000
        repository = await Repository.open(target, key, create=True)
        async with maker_of(ListedSnapshotSource(store), target, clock, repository=repository) as maker:
            await maker.make()
    repository = await Repository.open(target, key)
    await repository.put_pack(compress(b"of a killed backup"), 18)
    await prune(repository, KeepRules(last=2), clock())
    assert {name.partition("/")[0] for name in target.files} == {
        FORMAT_FILE, PACKS, PAGES, SNAPSHOTS, "expired",
    }  # fmt: skip
    return store, target


async def verified(repository: Repository) -> BackupVerification:
    verifier = BackupVerifier(repository, lambda name, why: None)
    await verifier.run()
    return verifier.report


async def restored(repository: Repository) -> tuple[dict[str, Any], list[str]]:
    """What the newest snapshot restores, and what is reported."""
    store, reports = MemoryStore(), list[str]()

    def note(key: str, why: str) -> None:
        reports.append(f"{key} {why}")

    await Restorer(repository, store, note).restore(await find_snapshot_at(repository, NOW, note))
    return await contents(store), reports


async def repaired(repository: Repository) -> None:
    store = MemoryStore()
    await store.put("notes/later", b"damaged")
    await Repairer(repository, store, lambda key, why: None).repair([Damage("notes/later", "document", "")])


async def backed_up(repository: Repository) -> None:
    store = MemoryStore()
    await fill(store, 5)
    async with maker_of(
        ListedSnapshotSource(store), repository.target, reports=[], repository=repository
    ) as maker:
        await maker.make()


async def pruned(repository: Repository) -> None:
    await prune(repository, KeepRules(last=1), LATER)


USES: tuple[Callable[[Repository], Awaitable[Any]], ...] = (verified, restored, repaired, backed_up, pruned)


async def use(target: MemoryTarget, key: BackupKey | None, expected: dict[str, Any] | None) -> None:
    """Do everything with the backup that can be done. Nothing fails but with BackupDamaged; what is restored
    without a report is what was stored."""
    files = dict(target.files)
    for work in USES:
        target.files = dict(files)
        try:
            found = await work(await Repository.open(target, key))
        except BackupDamaged:
            continue
        except ValueError:
            # `format.json` is damaged, so it may name another key, or gone.
            assert target.files.get(FORMAT_FILE) != orjson.dumps(
                {"format": 1, "publicKey": key and key.public.hex()}
            )
            continue
        if work is restored and expected is not None:
            objects, reports = found
            assert reports or objects == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_flipped_cut_and_exchanged_files(is_encrypted: bool) -> None:
    key = BackupKey.generate() if is_encrypted else None
    store, target = await made(key)
    whole, expected = dict(target.files), await contents(store)
    chosen = random.Random(18)
    for name, body in whole.items():
        kind = name.partition("/")[0]
        others = [other for path, other in whole.items() if path.startswith(kind) and path != name]
        for _ in range(depth(1, 10)):
            at = chosen.randrange(len(body))
            for damage in (
                body[:at] + bytes([body[at] ^ 1 << chosen.randrange(8)]) + body[at + 1 :],
                body[:at],
                body + b"\0",
                b"",
                *others[:1],
            ):
                target.files = {**whole, name: damage}
                await use(target, key, expected)
    # A snapshot that is gone leaves no trace, so an earlier one may be restored.
    for name in [name for name in whole if not name.startswith(SNAPSHOTS)]:
        target.files = {**whole}
        del target.files[name]
        await use(target, key, expected)


def forge(target: MemoryTarget, path: str, text: bytes) -> str:
    """Put a text in the place of another, under the name that its hash gives. Return that name."""
    stored = compress(text)
    name = hashlib.sha256(stored).hexdigest()
    folder, _, old = path.partition("/")
    time, dash, _ = old.rpartition("-")
    del target.files[path]
    target.files[f"{folder}/{time}-{name}" if dash else path_of(folder, name)] = stored
    return name


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 7, 1 << 62, 1.5, "", "x", "../x", "a//b", "\0", "f" * 64, [], [[]], {}, [1], {"a": 1},
)  # fmt: skip


def mutated(value: Any, chosen: random.Random) -> Any:
    """The value with something in it replaced, removed or doubled."""
    if isinstance(value, (dict, list)) and value and chosen.random() < 0.9:
        at = chosen.choice([*value]) if isinstance(value, dict) else chosen.randrange(len(value))
        what = chosen.random()
        if what < 0.1:
            if isinstance(value, dict):
                return {name: each for name, each in value.items() if name != at}
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return {**value, "more": value[at]} if isinstance(value, dict) else [*value, value[at]]
        changed = dict(value) if isinstance(value, dict) else [*value]
        changed[at] = mutated(value[at], chosen)
        return changed
    return chosen.choice(JUNK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PAGES, SNAPSHOTS, "expired"])
async def test_forged_texts_with_the_right_hashes(kind: str) -> None:
    """A forged page is one that the newest snapshot refers to."""
    _, target = await made()
    whole = dict(target.files)
    newest = max(name for name in whole if name.startswith(SNAPSHOTS))
    chosen = random.Random(kind)
    for _ in range(depth(60, 1500)):
        target.files = dict(whole)
        snapshot = orjson.loads(decompress_text(whole[newest]))
        if kind == PAGES:
            run = chosen.choice(snapshot["runs"])
            page = path_of(PAGES, run["pages"][0])
            forged = mutated(orjson.loads(decompress_text(whole[page])), chosen)
            run["pages"][0] = forge(target, page, orjson.dumps(forged))
            forge(target, newest, orjson.dumps(snapshot))
        elif kind == SNAPSHOTS:
            forge(target, newest, orjson.dumps(mutated(snapshot, chosen)))
        else:
            (note,) = [name for name in whole if name.startswith("expired")]
            forge(target, note, orjson.dumps(mutated(orjson.loads(decompress_text(whole[note])), chosen)))
        await use(target, None, None)


async def test_a_renamed_snapshot_is_found_and_not_restored() -> None:
    _, target = await made()
    old, new = sorted(name for name in target.files if name.startswith(SNAPSHOTS))
    target.files[f"{SNAPSHOTS}/{time_text(LATER)}-{old[-64:]}"] = target.files.pop(old)
    repository = await Repository.open(target)
    assert (await verified(repository)).damaged == 1
    with pytest.raises(BackupDamaged, match=r"another time than its text.*choose an earlier snapshot"):
        await restored(repository)
    reports: list[str] = []
    at_ms = (await repository.read_snapshot(new)).taken_ms
    assert (await find_snapshot_at(repository, at_ms, lambda key, why: reports.append(why))).name == new
    assert len(reports) == 1


async def test_a_damaged_old_snapshot_does_not_keep_the_newest_from_being_restored() -> None:
    store, target = await made()
    old, _ = sorted(name for name in target.files if name.startswith(SNAPSHOTS))
    target.files[old] = b"damaged"
    objects, reports = await restored(await Repository.open(target))
    assert objects == await contents(store)
    assert reports == [f" {old} is damaged"]


async def test_a_backup_continues_from_the_newest_snapshot_that_is_not_damaged() -> None:
    store, target = await made()
    newest = max(name for name in target.files if name.startswith(SNAPSHOTS))
    target.files[newest] = b"damaged"
    reports: list[tuple[str, str]] = []
    async with maker_of(ListedSnapshotSource(store), target, FakeClock(LATER), reports) as maker:
        await maker.make()
    assert reports == [("", f"{newest} is damaged")]
    assert maker.report.objects == 1, "what the damaged snapshot had changed"


async def test_a_damaged_note_of_expired_files_is_removed() -> None:
    _, target = await made()
    (note,) = [name for name in target.files if name.startswith("expired")]
    target.files[note] = b"damaged"
    repository = await Repository.open(target)
    assert (await prune(repository, KeepRules(last=2), LATER)).deleted == 0
    assert note not in target.files
    assert (await prune(repository, KeepRules(last=2), LATER + GRACE_MS)).deleted > 0
    assert (await verified(repository)).unreferenced == 0


def bomb(size: int) -> bytes:
    """A few bytes that decompress to many."""
    return compress(bytes(size))


async def test_a_bomb_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 64 * 1024 * 1024
    stored = bomb(512 * 1024 * 1024)
    monkeypatch.setattr(encoding, "MAX_TEXT_BYTES", 1_000_000)
    name = hashlib.sha256(stored).hexdigest()
    for kind in (PACKS, PAGES, SNAPSHOTS):
        _, target = await made()
        newest = max(path for path in target.files if path.startswith(SNAPSHOTS))
        snapshot = orjson.loads(decompress_text(target.files[newest]))
        if kind == SNAPSHOTS:
            del target.files[newest]
            target.files[f"{newest[:-64]}{name}"] = stored
        else:
            target.files[path_of(kind, name)] = stored
            page = path_of(PAGES, snapshot["runs"][0]["pages"][0])
            members = orjson.loads(decompress_text(target.files[page]))
            members["packs"] = [f"8388608-{name}"] * len(members["packs"])
            forged = name if kind == PAGES else forge(target, page, orjson.dumps(members))
            snapshot["runs"][0]["pages"][0] = forged
            forge(target, newest, orjson.dumps(snapshot))
        repository = await Repository.open(target)
        tracemalloc.start()
        try:
            assert (await verified(repository)).damaged
            if kind == PACKS:
                assert (await restored(repository))[1]
            else:
                with pytest.raises(BackupDamaged, match="longer than"):
                    await restored(repository)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < most, kind


async def test_a_forged_key_of_a_restore_is_not_restored() -> None:
    """Otherwise it would end the restore of a store that is not whole."""
    source, target = MemoryStore(), MemoryTarget()
    await source.put("notes/a", document(b"{}"))
    await back_up(ListedSnapshotSource(source), target)
    (path,) = [name for name in target.files if name.startswith(SNAPSHOTS)]
    snapshot = orjson.loads(decompress_text(target.files[path]))
    page = path_of(PAGES, snapshot["runs"][0]["pages"][0])
    members = orjson.loads(decompress_text(target.files[page]))
    members["entries"][0][0] = RESTORE_KEY
    snapshot["runs"][0] |= {"first": RESTORE_KEY, "last": RESTORE_KEY}
    snapshot["runs"][0]["pages"][0] = forge(target, page, orjson.dumps(members))
    forge(target, path, orjson.dumps(snapshot))
    objects, reports = await restored(await Repository.open(target))
    assert objects == {}
    assert [line.split()[0] for line in reports] == [RESTORE_KEY]
