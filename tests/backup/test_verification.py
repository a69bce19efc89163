"""A verification finds every damaged byte of a backup."""

import random

import pytest
from support.backups import MemoryTarget, maker_of, nothing, source_of, verified
from support.store_samples import document, fill

from pysync.backup.encryption import BackupKey
from pysync.backup.snapshot import Repository
from pysync.store.memory import MemoryStore


async def backed_up(key: BackupKey | None) -> MemoryTarget:
    """A backup with two snapshots of a store with something of everything."""
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 200)
    repository = await Repository.open(target, key and key.without_private(), create=True)
    for text in (b'{"text":"first"}', b'{"text":"later"}'):
        await store.put("notes/later", document(text))
        async with maker_of(source_of(store), target, repository=repository) as maker:
            await maker.make()
    return target


@pytest.mark.parametrize("key", [None, BackupKey.generate()], ids=["plain", "encrypted"])
async def test_every_flipped_missing_or_extra_byte_is_found(key: BackupKey | None) -> None:
    target = await backed_up(key)
    keys = [key, key.without_private()] if key else [None]
    for each in keys:
        assert (await verified(target, each)).damaged == 0
    whole, chosen = dict(target.files), random.Random(1)
    names = [name for name in whole if name != "format.json"]
    assert {name.partition("/")[0] for name in names} == {"packs", "lists", "snapshots"}
    for name in names:
        body = whole[name]
        at = chosen.randrange(len(body))
        flipped = body[:at] + bytes([body[at] ^ 1 << chosen.randrange(8)]) + body[at + 1 :]
        for damage in (flipped, body + b"\0", body[:-1], None):
            target.files = {**whole, name: damage or b""}
            if damage is None:
                del target.files[name]
            for each in keys:
                found = await verified(target, each)
                # Nothing refers to a snapshot. It is missing from the list alone.
                assert found.damaged or (damage is None and name.startswith("snapshots/")), name
    target.files = {**whole, "packs/junk": b"junk"}
    assert (await verified(target, keys[0])).damaged == 1


async def test_snapshot_that_is_removed_meanwhile_is_no_damage() -> None:
    target = await backed_up(None)

    async def remove_oldest(_: str) -> None:
        target.after_files = nothing
        await target.delete(min(await target.list_files("snapshots")))

    target.after_files = remove_oldest
    found = await verified(target)
    assert (found.snapshots, found.damaged) == (1, 0)
