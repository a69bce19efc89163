"""What a node knows of logs without asking the store, and how much of it."""

import asyncio
import gc

import pytest
from support import reference_append_log as twin
from support.append_log_nodes import KEY, Node, log_of, numbered, store_values

from pysync.engine.append_log import LogSettings, head, retention
from pysync.errors import DocumentCorrupt
from pysync.store import Store
from pysync.testing import FakeClock


async def gets(node: Node, key: str) -> int:
    """How often an append to this log reads."""
    before = node.calls["get"]
    await node.append({}, key=key)
    return node.calls["get"] - before


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CACHED_BYTES", 20_000)


async def test_heads_of_recent_logs_are_cached_within_a_bound(small_cache: None, node: Node) -> None:
    keys = [f"logs/{n}" for n in range(40)]
    for key in keys:
        await node.append(*numbered(5), key=key)
    assert [await gets(node, key) for key in keys[-5:]] == [0] * 5
    assert [await gets(node, key) for key in keys[:5]] == [1] * 5
    for _ in range(100):
        await gets(node, keys[-1])
    assert [await gets(node, key) for key in (*keys[:5], keys[-1])] == [0] * 6, "each counts once"


@pytest.mark.slow
async def test_of_logs_that_expired_and_began_anew_a_node_remembers_few(
    node: Node, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "CACHED_ENTRIES", 4)
    rules = LogSettings(ttl_ms=1000)
    before = finished_tasks()
    for _ in range(2):
        for n in range(40):
            await node.append({}, rules=rules, key=f"logs/{n}")
        clock.now_ms += 2000
    assert finished_tasks() - before <= 6


def finished_tasks() -> int:
    """How many tasks are done and not let go of."""
    gc.collect()
    return sum(isinstance(held, asyncio.Task) and held.done() for held in gc.get_objects())


async def test_a_chunk_of_starfish_that_is_listed_and_not_there_is_no_shorter_log(
    node: Node, store: Store, clock: FakeClock
) -> None:
    log = log_of(numbered(20), clock.now_ms - 1000)
    await store_values(store, twin.starfish_chunks(log, KEY, 7))
    names = await store.list(f"{KEY}__seg", None, 10)
    await store.delete(f"{KEY}__seg/{names[1]}")
    node.listed = names
    with pytest.raises(DocumentCorrupt):
        await node.elements()
    with pytest.raises(DocumentCorrupt):
        await node.append({})
    assert await node.datas(None, 3) == numbered(3, 17)


async def test_chunks_of_starfish_are_listed_page_by_page_apart_from_others(
    node: Node, store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "PAGE", 2)
    await store_values(store, twin.starfish_chunks(log_of(numbered(20), clock.now_ms - 1000), KEY, 3))
    await store_values(store, {f"{KEY}__seg/{name}": "other" for name in ("1", "note", "0" * 15 + "x")})
    assert await node.datas() == numbered(20)
    await node.append({"n": 20})
    assert await node.datas() == numbered(21)
