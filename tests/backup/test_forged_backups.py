"""However a backup is damaged or forged: it is named as damaged, and nothing wrong is restored."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from contracts.files import chunks_of
from support.backups import MemoryTarget, Reports, maker_of, source_of, verified
from support.depth import depth
from support.store_samples import contents, document, fill

from pysync.backup.claim import BackupClaim
from pysync.backup.encryption import BackupKey
from pysync.backup.format import FORMAT, compress_text, hash_name, inflate
from pysync.backup.prune import KeepRules, Pruner
from pysync.backup.rebuild import rebuild
from pysync.backup.repair import Repairer
from pysync.backup.restore import Restorer, find_snapshot_at
from pysync.backup.snapshot import CLAIMS, LISTS, PACKS, SNAPSHOTS, BackupDamaged, Repository, path_of
from pysync.backup.target import FORMAT_FILE
from pysync.migrate import Damage
from pysync.store import RESTORE_KEY
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

NOW = 1 << 62


async def made(key: BackupKey | None = None) -> tuple[MemoryStore, MemoryTarget]:
    """A store, and a backup of it with two snapshots, and what a killed backup has left."""
    store, target, clock = MemoryStore(), MemoryTarget(), FakeClock()
    await fill(store, 40)
    await store.write("files/long", chunks_of(b"x" * 5_000_000), "application/zip")
    repository = await Repository.open(target, key, create=True)
    for text in (b'"one"', b'"two"'):
        await store.put("notes/later", document(b'{"text":%b}' % text))
        clock.now_ms += 1000
        async with maker_of(source_of(store), target, clock, repository=repository) as maker:
            snapshot = await maker.make()
    await BackupClaim(repository, clock).renew(snapshot)
    folders = {name.partition("/")[0] for name in target.files}
    assert folders == {FORMAT_FILE, PACKS, LISTS, SNAPSHOTS, CLAIMS}
    return store, target


async def restored(repository: Repository) -> tuple[dict[str, Any], Reports]:
    """What the newest snapshot restores, and what is reported."""
    store, reports = MemoryStore(), Reports()

    def note(key: str, why: str) -> None:
        reports.append((key, why))

    await Restorer(repository, store, note).restore(await find_snapshot_at(repository, NOW, note))
    return await contents(store), reports


async def repaired(repository: Repository) -> None:
    store = MemoryStore()
    await store.put("notes/later", b"damaged")
    await Repairer(repository, store, lambda key, why: None).repair([Damage("notes/later", "document", "")])


async def backed_up(repository: Repository) -> None:
    store = MemoryStore()
    await fill(store, 5)
    async with maker_of(source_of(store), repository.target, reports=[], repository=repository) as maker:
        await maker.make()


async def pruned(repository: Repository) -> None:
    await Pruner(repository, KeepRules(last=1), FakeClock(), lambda why: None, purges=True).run()


async def verify(repository: Repository) -> None:
    await verified(repository.target, repository.key)


async def rebuilt(repository: Repository) -> None:
    await rebuild(repository, FakeClock(), lambda key, why: None)
    await restored(repository)


USES: tuple[Callable[[Repository], Awaitable[Any]], ...] = (
    verify, restored, repaired, backed_up, pruned, rebuilt,
)  # fmt: skip


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
        except ValueError as error:
            # `format.json` is damaged, so it may name another key, or gone; or no snapshot is left.
            text = orjson.dumps({"format": FORMAT, "publicKey": key and key.public.hex()})
            if target.files.get(FORMAT_FILE) == text and "snapshot yet" not in str(error):
                raise
            continue
        if work is restored and expected is not None:
            objects, reports = found
            assert reports or objects == expected


@pytest.mark.slow
@pytest.mark.timeout(depth(120, 1800))
@pytest.mark.parametrize("key", [None, BackupKey.generate()], ids=["plain", "encrypted"])
async def test_flipped_cut_and_exchanged_files(key: BackupKey | None) -> None:
    store, target = await made(key)
    whole, expected = dict(target.files), await contents(store)
    chosen = random.Random(18)
    for name, body in whole.items():
        kind = name.partition("/")[0]
        others = [other for path, other in whole.items() if path.startswith(kind) and path != name]
        for _ in range(depth(1, 10)):
            at = chosen.randrange(len(body))
            flipped = body[:at] + bytes([body[at] ^ 1 << chosen.randrange(8)]) + body[at + 1 :]
            for damage in (flipped, body[:at], body + b"\0", b"", *others[:1]):
                target.files = {**whole, name: damage}
                await use(target, key, expected)
    # A snapshot that is gone leaves no trace, so an earlier one may be restored.
    for name in [name for name in whole if not name.startswith(SNAPSHOTS)]:
        target.files = {**whole}
        del target.files[name]
        await use(target, key, expected)


def forge(target: MemoryTarget, path: str, text: bytes, stored: bytes | None = None) -> str:
    """Put a text, or `stored`, in the place of a file, under the name that its hash gives. Return that."""
    stored = compress_text(text) if stored is None else stored
    folder, _, old = path.partition("/")
    if folder == SNAPSHOTS:
        name = "-".join([*old.split("-")[:3], hash_name(stored), str(len(stored))])
        new = f"{folder}/{name}"
    elif folder == CLAIMS:
        new = path
        name = old
    else:
        claim = old.split("-")[1]
        size = old.split("-")[2] if folder == PACKS else len(text)
        name = f"{hash_name(stored)}-{claim}-{size}-{len(stored)}"
        new = path_of(folder, name)
    del target.files[path]
    target.files[new] = stored
    return name


def forge_first_page(target: MemoryTarget, edit: Callable[[Any], Any]) -> None:
    """Let the first page of the newest snapshot say something else."""
    newest = max(name for name in target.files if name.startswith(SNAPSHOTS))
    snapshot = orjson.loads(inflate(target.files[newest]))
    _, _, pages = snapshot["lists"][0]
    path = path_of(LISTS, pages[0])
    pages[0] = forge(target, path, orjson.dumps(edit(orjson.loads(inflate(target.files[path])))))
    forge(target, newest, orjson.dumps(snapshot))


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
@pytest.mark.timeout(depth(120, 1800))
@pytest.mark.parametrize("kind", [LISTS, SNAPSHOTS, CLAIMS, PACKS])
async def test_forged_texts_with_the_right_hashes(kind: str) -> None:
    """A forged page is one that the newest snapshot refers to. The index of a forged pack is all that is left
    of what the lists said."""
    _, target = await made()
    whole = dict(target.files)
    chosen = random.Random(kind)
    for _ in range(depth(60, 1500)):
        target.files = dict(whole)
        if kind == LISTS:
            forge_first_page(target, lambda page: mutated(page, chosen))
        elif kind == PACKS:
            name = chosen.choice([name for name in whole if name.startswith(PACKS)])
            stored = whole[name]
            end = len(stored) - 4 - int.from_bytes(stored[-4:])
            text = compress_text(orjson.dumps(mutated(orjson.loads(inflate(stored[end:-4])), chosen)))
            forge(target, name, b"", stored[:end] + text + len(text).to_bytes(4))
            for other in [name for name in whole if name.startswith((LISTS, SNAPSHOTS))]:
                del target.files[other]
        else:
            name = max(name for name in whole if name.startswith(kind))
            forge(target, name, orjson.dumps(mutated(orjson.loads(inflate(whole[name])), chosen)))
        await use(target, None, None)


async def test_renamed_snapshot_is_found_and_not_restored() -> None:
    _, target = await made()
    newest = max(name for name in target.files if name.startswith(SNAPSHOTS))
    target.files[f"{SNAPSHOTS}/{7:012}-{newest.partition('-')[2]}"] = target.files.pop(newest)
    assert (await verified(target)).damaged == 1
    objects, reports = await restored(await Repository.open(target))
    assert ["another number than its text" in why for _, why in reports] == [True]
    assert objects["notes/later"][1] == document(b'{"text":"one"}')


async def test_forged_key_of_a_restore_is_not_restored() -> None:
    """Otherwise it would end the restore of a store that is not whole."""
    source, target = MemoryStore(), MemoryTarget()
    await source.put("notes/a", document(b"{}"))
    async with maker_of(source_of(source), target) as maker:
        await maker.make()

    def edit(page: Any) -> Any:
        page["rows"][0][0] = RESTORE_KEY
        return page

    forge_first_page(target, edit)
    objects, reports = await restored(await Repository.open(target))
    assert objects == {}
    assert [key for key, _ in reports] == [RESTORE_KEY]
