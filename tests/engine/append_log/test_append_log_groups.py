"""Appends to one log at once: which of them share a put, how large it gets, and what they are refused on."""

import asyncio
from collections.abc import Awaitable
from math import inf
from pathlib import Path

import pytest
from support.append_log_nodes import (
    KEY,
    RULES,
    MakeNode,
    Node,
    element,
    keys_below,
    log_of,
    nothing,
    numbered,
    repeatable,
    store_values,
)
from support.reference_append_log import starfish_document

from pysync import concurrency
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogSettings, append
from pysync.errors import AppendLimitExceeded, StoreUnavailable
from pysync.model import WriteResult
from pysync.store import Store, StoredObject
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock


async def put_sizes(node: Node, *datas: object) -> list[int]:
    """The bytes of each put, in turn, that it takes to append these at once."""

    async def append_all() -> None:
        results = await node.append_at_once(datas)
        assert [type(outcome) for outcome in results] == [WriteResult] * len(datas)

    return await sizes_of_puts(node, append_all())


async def sizes_of_puts(node: Node, work: Awaitable[None]) -> list[int]:
    """The bytes of each put, in turn, that some work makes."""
    count = len(node.put_sizes)
    await work
    return node.put_sizes[count:]


async def test_appends_at_once_under_different_rules_each_keep_to_their_own(node: Node) -> None:
    """Two collections may hold one key: in two namespaces, say."""
    few, many = LogSettings(max_items=2), LogSettings()
    appends = [asyncio.ensure_future(node.append({"n": n}, rules=many if n % 2 else few)) for n in range(6)]
    results = await asyncio.gather(*appends, return_exceptions=True)
    rejected = [n for n, outcome in enumerate(results) if isinstance(outcome, AppendLimitExceeded)]
    assert rejected == [2, 4]
    assert await node.datas() == [{"n": n} for n in (0, 1, 3, 5)]


async def test_a_group_is_as_large_as_one_put_should_be(make_node: MakeNode) -> None:
    node = make_node(head_bytes=None)
    large = [{"text": "x" * 60_000, "n": n} for n in range(12)]
    assert max(await put_sizes(node, *large)) < 2 * append.MAX_GROUP_BYTES
    assert await node.datas() == large
    await node.append_at_once(numbered(append.MAX_GROUP_SIZE + 1))
    assert len(await node.datas()) == 12 + append.MAX_GROUP_SIZE + 1


async def test_a_group_is_of_so_many_appends_at_most(make_node: MakeNode) -> None:
    node = make_node(head_bytes=100_000_000)
    assert len(await put_sizes(node, *numbered(2 * append.MAX_GROUP_SIZE))) == 2


async def test_appends_of_several_ticks_share_a_put_if_as_many_did_before(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "GATHER_S", inf)
    node = make_node(head_bytes=100_000_000)
    await node.append_at_once(numbered(8))

    async def append_after(ticks: int) -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        await node.append({"after": ticks})

    async def appends() -> None:
        await asyncio.gather(*map(append_after, range(8)))

    assert len(await sizes_of_puts(node, appends())) == 1


async def test_a_head_leaves_room_for_what_is_added(make_node: MakeNode, store: Store) -> None:
    node = make_node(head_bytes=4000)
    for n in range(50):
        await node.append({"n": n, "text": "x" * 1000})
        head = await store.get(KEY)
        assert isinstance(head, StoredObject)
        assert len(head.body) < 4000


async def test_a_log_that_is_gone_rejects_nothing_from_memory(node: Node, store: Store) -> None:
    rules = LogSettings(max_items=1)
    await node.append({"n": 0}, rules=rules)
    await store.delete(KEY)
    assert [type(results) for results in await node.append({"n": 1}, rules=rules)] == [WriteResult]
    assert await node.datas(rules=rules) == [{"n": 1}]


async def test_deleted_log_is_not_stored_again_from_a_cached_head(make_node: MakeNode, store: Store) -> None:
    node = make_node(head_bytes=4000)
    await node.append({"text": "x" * 3000})
    await store.delete(KEY)
    await node.append({"text": "y" * 3000})
    assert await node.datas() == [{"text": "y" * 3000}]
    assert await keys_below(store, "_pysync/logs") == []


async def test_attempts_to_take_a_log_over_leave_nothing_behind(
    make_node: MakeNode, store: Store, clock: FakeClock
) -> None:
    """Each stores the log's elements anew, where the one before did: its head never came to be."""
    await store_values(store, {KEY: starfish_document(log_of(numbered(60), clock.now_ms - 1000))})
    objects = []
    for _ in range(2):
        node = make_node()
        node.fail("put", after=1)
        with pytest.raises(StoreUnavailable):
            await node.append({"n": 60})
        objects.append(await keys_below(store, "_pysync/logs"))
    await make_node().append({"n": 60})
    objects.append(await keys_below(store, "_pysync/logs"))
    assert objects[0] == objects[1] == objects[2] != []


async def test_a_node_that_collides_eight_times_appends_once(make_node: MakeNode) -> None:
    one, other = make_node(), make_node()
    await one.append({"n": 0})
    collisions: list[dict[str, int]] = []

    async def put_by_other(key: str) -> None:
        if key == KEY and len(collisions) < 8:
            collisions.append({"other": len(collisions)})
            await other.append(collisions[-1])

    one.before_put = put_by_other
    await one.append({"n": 1})
    assert await one.datas() == [{"n": 0}, *collisions, {"n": 1}]
    assert len(collisions) == 8


async def test_unforeseen_failure_is_raised_to_all_that_wait_and_ends_with_them(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:

    async def fail(_: str) -> None:
        node.before_put = nothing
        raise RuntimeError("broken")

    node.before_put = fail
    results = await node.append_at_once(numbered(3))
    assert [type(outcome) for outcome in results] == [RuntimeError] * 3
    assert "failed to append to 'logs/a'" in caplog.text
    assert [type(outcome) for outcome in await node.append_at_once(numbered(3))] == [WriteResult] * 3
    assert await node.datas() == numbered(3)


async def test_full_share_of_anonymous_callers_rejects_only_their_appends(
    tmp_path: Path, clock: FakeClock
) -> None:
    store = await LocalStore.open_folder(tmp_path, clock, max_claims=4)
    logs = AppendLogs(store, MemoryCoordinator(clock), clock)

    def append_as(caller: str, n: int) -> Awaitable[WriteResult]:
        body = element({"n": n})
        return logs.append(KEY, body, RULES, request=repeatable(f"{caller} {KEY} {n}", body))

    for n in range(3):
        await append_as("", n)
    anonymous, signed = await asyncio.gather(append_as("", 3), append_as("ab", 4), return_exceptions=True)
    assert isinstance(anonymous, StoreUnavailable)
    assert signed == await append_as("ab", 4)
    await logs.close()
    await store.close()
