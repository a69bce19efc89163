"""The list of damaged files of a bucket."""

from pysync.store import FileStat
from pysync.store.memory import MemoryStore
from pysync.store.s3.damaged_files import DamagedFiles


async def test_a_later_write_of_the_same_bytes_with_the_same_etag_is_not_damaged() -> None:
    """A small file has the first etag again if it is pushed twice more."""
    objects = MemoryStore()
    first = FileStat(3, "ab" * 32, "image/png", 1_000, etag="e")
    later = FileStat(3, "ab" * 32, "image/png", 2_000, etag="e")
    damaged = DamagedFiles(objects)
    await damaged.record("pics/a", first, is_damaged=True)
    for reader in (damaged, DamagedFiles(objects)):
        assert await reader.contains("pics/a", first)
        assert not await reader.contains("pics/a", later)
    await damaged.record("pics/a", later, is_damaged=True)
    assert not await damaged.contains("pics/a", first)
    await damaged.record("pics/a", later, is_damaged=False)
    assert not await damaged.contains("pics/a", later)
