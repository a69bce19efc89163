"""Merges in a store that has no step for them: a journal says what to count, and what to finish."""

from collections import Counter

import pytest
from contracts.files import chunks_of, read_file
from support.faulty_store import FaultyStore

from pysync.errors import StoreUnavailable
from pysync.store import EtagMismatch, MergeRejected, Store, merge_journal
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

WRITES = 6
"""The file, which waits for its journal, three removals, and that of the journal."""


async def written(store: Store) -> dict[str, str]:
    return {f"e/{n}": await store.write(f"e/{n}", chunks_of(b"%d" % n), "text/plain") for n in range(4)}


async def merge(store: Store, merged: dict[str, str]) -> None:
    await store.merge("e/2-", chunks_of(b"012"), "text/plain", merged)


async def counted(store: Store) -> Counter[str]:
    """What is counted by whoever heeds the journals."""
    keys = {f"e/{name}" for name in await store.list("e", None, 100)}
    for merge in await merge_journal.pending_merges(store):
        if merge.key in keys:
            keys -= merge.merged.keys()
    texts = [(await read_file(store, key))[1].decode() for key in keys]
    return Counter("".join(texts))


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("after", range(WRITES))
async def test_a_crash_at_any_step_counts_nothing_twice_and_is_finished(
    clock: FakeClock, after: int, done: bool
) -> None:
    inner = MemoryStore(clock)
    merged = await written(inner)
    del merged["e/3"]
    crashed = FaultyStore(inner, clock)
    crashed.crash(after, done=done)
    with pytest.raises(StoreUnavailable):
        await merge(crashed, merged)
    assert await counted(inner) == Counter("0123")

    store = FaultyStore(inner, clock)
    await store.recover_merges()
    assert await counted(store) == Counter("0123")
    clock.now_ms += merge_journal.ABANDONED_MS
    await store.recover_merges()
    assert await merge_journal.pending_merges(store) == []
    assert await counted(store) == Counter("0123")
    names = await store.list("e", None, 100)
    assert names == (["2-", "3"] if after > 1 else [*"0123"])
    if "2-" not in names:
        await merge(store, merged)
    assert await counted(store) == Counter("0123")
    assert {listed.key async for listed in store.walk("")} == {"e/2-", "e/3"}


async def test_merge_of_another_process_is_left_to_it(clock: FakeClock) -> None:
    inner = MemoryStore(clock)
    merged = await written(inner)
    first, second = FaultyStore(inner, clock), FaultyStore(inner, clock)
    first.crash(1, done=True)
    with pytest.raises(StoreUnavailable):
        await merge(first, merged)
    overlapping = {"e/3": merged["e/3"], "e/2": merged["e/2"]}
    with pytest.raises(MergeRejected, match="another process merges some of these files"):
        await second.merge("e/2+", chunks_of(b"23"), "text/plain", overlapping)
    assert len(await merge_journal.pending_merges(second)) == 1
    clock.now_ms += merge_journal.ABANDONED_MS
    await second.merge("e/2+", chunks_of(b"23"), "text/plain", overlapping)
    assert await counted(second) == Counter("0123")


async def test_of_another_file_at_its_key_a_merge_is_not_finished(clock: FakeClock) -> None:
    """Two processes may choose the same key for groups that are not the same."""
    inner = MemoryStore(clock)
    merged = await written(inner)
    del merged["e/3"]
    died = FaultyStore(inner, clock)
    died.crash(1, done=True)
    with pytest.raises(StoreUnavailable):
        await merge(died, merged)
    await inner.write("e/2-", chunks_of(b"12"), "text/plain")
    store = FaultyStore(inner, clock)
    await store.recover_merges()
    assert await store.list("e", None, 100) == ["0", "1", "2", "2-", "3"]
    clock.now_ms += merge_journal.ABANDONED_MS
    with pytest.raises(EtagMismatch):
        await merge(store, merged)
