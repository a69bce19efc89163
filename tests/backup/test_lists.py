"""Lists of changes are merged: the newest entry of each key counts. No list is too long to be read again."""

import hashlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.backups import MemoryTarget

from pysync._core import split_key
from pysync.backup import format
from pysync.backup.format import (
    MAX_PARTS,
    MAX_TEXT_BYTES,
    PART_BYTES,
    BackupEntry,
    EntryList,
    IndexedEntry,
    PackIndex,
    Part,
    encode_index,
    encode_page,
    pages_of,
)
from pysync.backup.snapshot import Repository

KEYS = st.sampled_from(["a", "b", "a/b", "a/b/c", "a-b", "b/a", "é", "a/é"])
LISTS = st.lists(st.dictionaries(KEYS, st.booleans(), min_size=1), min_size=1, max_size=6)
PACK = f"{'0' * 32}-{'1' * 8}-12345678-12345678"


def entry(key: str, n: int, is_removed: bool) -> BackupEntry:
    """The entry that list `n` has of a key."""
    if is_removed:
        return BackupEntry(key)
    sha256 = hashlib.sha256(b"%d" % n).hexdigest()
    return BackupEntry(key, f"etag{n}", "text/plain", n, 3, sha256, False, (Part(PACK, n, 3, sha256),))


async def page_of(entries: list[BackupEntry]) -> AsyncIterator[list[BackupEntry]]:
    yield entries


@given(LISTS, st.integers(1, 3))
async def test_merge_has_the_newest_entry_of_each_key(changes: list[dict[str, bool]], page_size: int) -> None:
    repository = await Repository.open(MemoryTarget(), create=True)
    repository.claim_id = "0" * 8
    lists: list[EntryList] = []
    newest: dict[str, BackupEntry] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "PAGE_BYTES", 420 * page_size)
        for n, change in enumerate(changes):
            added = [entry(key, n, change[key]) for key in sorted(change, key=split_key)]

            one = await repository.put_list(n, page_of(added))
            assert one is not None
            lists.append(one)
            newest |= {each.key: each for each in added}
        everything = [newest[key] for key in sorted(newest, key=split_key)]
        expected = [each for each in everything if each.etag]
        for some in (lists, await repository.fold(lists)):
            assert [each async for page in repository.merged(some) for each in page] == expected
        kept = repository.merged(lists, keeps_removed=True)
        assert [each async for page in kept for each in page] == everything


def test_each_page_of_long_entries_can_be_read_again() -> None:
    sha256 = "f" * 64
    packs = [f"{n:032}-{'1' * 8}-12345678-12345678" for n in range(MAX_PARTS)]
    parts = tuple(Part(pack, PART_BYTES, PART_BYTES, sha256[:-5] + f"{n:05}") for n, pack in enumerate(packs))
    size = MAX_PARTS * PART_BYTES
    longest = BackupEntry("\U0001f600" * 256, "e" * 64, "t" * 200, 1 << 53, size, sha256, True, parts)
    short = BackupEntry("k" * 1024, "e" * 64, "text/plain", 1, 3, sha256, False, parts[:1])
    for page in pages_of([*[short] * 3000, longest, *[short] * 3000, *[longest] * 2]):
        assert len(encode_page(page)) <= MAX_TEXT_BYTES
    for rows in pages_of([IndexedEntry(1 << 40, 1 << 40, each) for each in [*[short] * 3000, longest]]):
        assert len(encode_index(PackIndex(1 << 41, "i" * 32, rows))) <= MAX_TEXT_BYTES
