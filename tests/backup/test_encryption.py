"""Nobody opens an encrypted backup without its key."""

import os

import pytest
from support.backups import MemoryTarget, maker_of, newest, restored, source_of
from support.store_samples import contents, document, fill

from pysync.backup.encryption import BackupKey, WrongKey
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import BackupDamaged, Repository
from pysync.store.memory import MemoryStore


async def encrypted(store: MemoryStore, key: BackupKey) -> MemoryTarget:
    """An encrypted backup with two snapshots, made without the private key."""
    target = MemoryTarget()
    repository = await Repository.open(target, key.without_private(), create=True)
    for _ in range(2):
        async with maker_of(source_of(store), target, repository=repository) as maker:
            await maker.make()
    return target


async def test_encrypted_backup_opens_with_its_private_key_alone() -> None:
    store, key, other = MemoryStore(), BackupKey.generate(), BackupKey.generate()
    await fill(store, 200)
    await store.put("secret", document(b'{"text":"attack at dawn"}'))
    target = await encrypted(store, key)
    assert not any(b"secret" in body or b"dawn" in body for body in target.files.values())
    assert await restored(target, key=key) == await contents(store)
    sealed = await Repository.open(target, key.without_private())
    with pytest.raises(WrongKey, match="private key"):
        await Restorer(sealed, MemoryStore(), print).restore(await newest(sealed))
    for wrong in (None, other, other.without_private()):
        with pytest.raises(ValueError, match="the backup is encrypted"):
            await Repository.open(target, wrong)
    forged = await Repository.open(target, key._replace(metadata=os.urandom(32)))
    with pytest.raises(BackupDamaged, match="not the key of the backup"):
        await forged.read_snapshot(max(await target.list_files("snapshots")))
    with pytest.raises(WrongKey):
        key.open_pack(other.seal_pack(b"x"))


async def test_second_encrypted_backup_costs_what_has_changed() -> None:
    store, key = MemoryStore(), BackupKey.generate()
    await fill(store, 200)
    target = await encrypted(store, key)
    assert len(await target.list_files("snapshots")) == 2
    makers = {name.split("-")[1] for name in await target.list_files("packs")}
    assert len(makers) == 1, "the first one"


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"public":"00","metadata":"11"}', b'{"public":1}'])
def test_malformed_key_is_reported(text: bytes) -> None:
    with pytest.raises(ValueError, match="key of a backup"):
        BackupKey.parse(text)


def test_a_key_is_read_as_it_was_written() -> None:
    key = BackupKey.generate()
    assert BackupKey.parse(key.text()) == key
    assert BackupKey.parse(key.without_private().text()).private is None
