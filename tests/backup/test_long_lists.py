"""A list of objects that would be too long to be read again is never written."""

import os

import pytest
from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, maker_of, restored
from support.store_samples import contents, document

from pysync.backup import encoding, making
from pysync.backup.repository import PAGES
from pysync.backup.source import ListedSnapshotSource
from pysync.store.memory import MemoryStore


async def with_long_files(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store with a document and six files of ten parts each, some 6 KB of text."""
    monkeypatch.setattr("pysync.backup.source.PART_BYTES", 100)
    monkeypatch.setattr(encoding, "PART_BYTES", 100)
    store = MemoryStore()
    await store.put("n", document(b'{"n":1}'))
    for n in range(6):
        await store.write(f"files/{n}", chunks_of(os.urandom(1_000)), "image/png")
    return store


async def test_a_page_ends_before_its_text_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = await with_long_files(monkeypatch), MemoryTarget()
    monkeypatch.setattr(encoding, "PAGE_PARTS", 15)
    monkeypatch.setattr(encoding, "MAX_TEXT_BYTES", 3_000)
    await back_up(ListedSnapshotSource(store), target)
    assert len(await target.names(PAGES)) == 3
    assert await restored(target) == await contents(store)


async def test_a_file_that_no_page_can_list_is_named_and_the_rest_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, target, reports = await with_long_files(monkeypatch), MemoryTarget(), list[tuple[str, str]]()
    expected = await contents(store)
    await store.write("files/long", chunks_of(os.urandom(1_001)), "image/png")
    monkeypatch.setattr(making, "MAX_FILE_BYTES", 1_000)
    async with maker_of(ListedSnapshotSource(store), target, reports=reports) as maker:
        await maker.make()
        assert maker.report.unreadable == 1
    assert reports == [("files/long", "the file has 1001 bytes, and a backup takes no more than 1000")]
    assert await restored(target) == expected


async def test_a_text_that_is_too_long_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = await with_long_files(monkeypatch), MemoryTarget()
    before = MemoryStore()
    await before.put("n", document(b'{"n":1}'))
    await back_up(ListedSnapshotSource(before), target)
    monkeypatch.setattr(encoding, "MAX_TEXT_BYTES", 3_000)
    with pytest.raises(ValueError, match="longer than 3000 bytes"):
        await back_up(ListedSnapshotSource(store), target)
    assert await restored(target) == await contents(before)
