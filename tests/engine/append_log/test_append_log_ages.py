"""Logs over time: taken over from Starfish, expired, begun anew, swept."""

import asyncio
import json
from typing import Any

import pytest
from support import reference_append_log as twin
from support.append_log_nodes import (
    KEY,
    RULES,
    MakeNode,
    Node,
    keys_below,
    log_of,
    numbered,
    parsed,
    store_values,
)
from support.faulty_store import Verb

from pysync.engine.append_log import LogRange, LogSettings
from pysync.errors import DocumentCorrupt, StoreUnavailable
from pysync.store import Store, StoredObject
from pysync.testing import FakeClock

TTL_MS = 60_000
SHORT = LogSettings(ttl_ms=TTL_MS)


async def sweep(node: Node, rules: LogSettings = SHORT) -> int:
    listed = [each async for each in node.walk("logs") if each.key.count("/") == 1]
    return sum([await node.logs.delete_expired(each, rules) for each in listed])


# Logs of Starfish.


def starfish(log: twin.Log, layout: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    if layout == "document":
        return {KEY: twin.starfish_document(log, extra=extra)}
    return twin.starfish_chunks(log, KEY, 7, extra, behind=layout == "chunks behind")


layouts = pytest.mark.parametrize("layout", ["document", "chunks", "chunks behind"])


@layouts
@pytest.mark.parametrize("count", [2, 7, 8, 60])
async def test_a_log_of_starfish_is_read_and_nothing_rewritten(
    node: Node, store: Store, clock: FakeClock, layout: str, count: int
) -> None:
    log = log_of(numbered(count), clock.now_ms - 1000)
    await store_values(store, starfish(log, layout))
    for since in (None, 0, log.ts_ms - 10, log.ts_ms - 1, log.ts_ms):
        for newest in (None, 0, 1, 9, 100):
            assert await node.elements(since, newest) == log.within(since, newest)
        for oldest in (1, 9, 100):
            assert await node.elements(since, None, oldest) == log.within(since, None, oldest)
    assert await node.hash() == log.hash
    assert (node.calls["put"], node.calls["delete"]) == (0, 0)


async def test_others_run_while_a_big_log_of_starfish_is_read(
    node: Node, store: Store, clock: FakeClock
) -> None:
    log = log_of([{"text": "x" * 100}] * 40_000, clock.now_ms - 50_000)
    await store_values(store, starfish(log, "document"))
    reading = asyncio.create_task(node.elements(None, 1))
    ticks = 0
    while not reading.done():
        await asyncio.sleep(0)
        ticks += 1
    assert await reading == log.within(None, 1)
    assert ticks > 10


@layouts
@pytest.mark.parametrize("count", [2, 7, 8, 60])
async def test_the_first_append_takes_a_log_of_starfish_over(
    node: Node, make_node: MakeNode, store: Store, clock: FakeClock, layout: str, count: int
) -> None:
    log = log_of(numbered(count), clock.now_ms - 1000)
    await store_values(store, starfish(log, layout))
    for n in range(count, count + 20):
        [result] = await node.append({"n": n})
        assert result.hash == twin.log_hash(n + 1, {"n": n})
        assert await make_node().datas() == numbered(n + 1)
    assert (await node.elements())[:count] == log.within()


@layouts
async def test_unknown_members_next_to_starfish_elements_stay(
    node: Node, make_node: MakeNode, store: Store, clock: FakeClock, layout: str
) -> None:
    extra = {"title": "é", "n": [1, {"items": []}], "big": 2**60}
    await store_values(store, starfish(log_of(numbered(9), clock.now_ms - 1000), layout, extra))
    for count in (9, 10, 30):
        await node.append(*numbered(count - len(await node.datas()), len(await node.datas())))
        tail = await make_node().logs.read(KEY, LogRange(), RULES)
        before, after = tail.envelope("items")
        assert json.loads(before + await tail.text() + after) == {
            **extra, "items": await node.elements(),
        }  # fmt: skip


@layouts
async def test_a_rejected_append_leaves_a_log_of_starfish_as_it_is(
    node: Node, store: Store, clock: FakeClock, layout: str
) -> None:
    stored = starfish(log_of(numbered(9), clock.now_ms - 1000), layout)
    await store_values(store, stored)
    with pytest.raises(Exception, match="non_monotonic_timestamp"):
        await node.append(twin.Element(clock.now_ms - 1000, {}))
    for key, value in stored.items():
        found = await store.get(key)
        assert isinstance(found, StoredObject)
        assert json.loads(found.body) == value


@layouts
async def test_a_takeover_that_crashes_is_made_by_the_next_append(
    make_node: MakeNode, store: Store, clock: FakeClock, layout: str
) -> None:
    log = log_of(numbered(30), clock.now_ms - 1000)
    for after in range(6):
        for done in (False, True):
            await store_values(store, starfish(log, layout))
            dying, other = make_node(head_bytes=100), make_node(head_bytes=100)
            dying.crash(after, done=done)
            result = await asyncio.gather(dying.append({"n": 30}), return_exceptions=True)
            found = await other.datas()
            assert found in (numbered(30), numbered(31))
            assert isinstance(result[0], StoreUnavailable) or len(found) == 31
            await other.append({"last": 1})
            assert await make_node().datas() == [*found, {"last": 1}]
            await store.delete(KEY)


async def test_a_bounded_read_of_chunks_reads_those_that_hold_it(
    node: Node, store: Store, clock: FakeClock
) -> None:
    log = log_of(numbered(700), clock.now_ms - 1000)
    await store_values(store, starfish(log, "chunks"))
    for bounds, most in ((None, 3), 1), ((None, 14), 2), ((log.ts_ms - 10, None), 3), ((0, 1), 1):
        node.got.clear()
        assert await node.elements(*bounds) == log.within(*bounds)
        assert len(node.got) <= 1 + most


@pytest.mark.parametrize("lost", [0, 4, 8, range(9)])
async def test_a_log_that_lacks_chunks_is_corrupt_and_never_a_shorter_one(
    node: Node, store: Store, clock: FakeClock, lost: int | range
) -> None:
    await store_values(store, starfish(log_of(numbered(60), clock.now_ms - 1000), "chunks"))
    chunks = await keys_below(store, f"{KEY}__seg")
    for at in (lost,) if isinstance(lost, int) else lost:
        await store.delete(chunks[at])
    with pytest.raises(DocumentCorrupt):
        await node.elements()
    with pytest.raises(DocumentCorrupt):
        await node.append({"n": 60})
    assert node.calls["put"] == 0


async def test_log_keeps_its_elements_in_the_configured_field(
    node: Node, store: Store, clock: FakeClock
) -> None:
    log = log_of(numbered(5), clock.now_ms - 1000)
    await store_values(store, {KEY: twin.starfish_document(log, "entries", {"items": "else"})})
    rules = LogSettings(field="entries")
    await node.append({"n": 5}, rules=rules)
    assert await node.datas(rules=rules) == numbered(6)
    before, after = (await node.logs.read(KEY, LogRange(), rules)).envelope("entries")
    assert json.loads(before + after) == {"items": "else", "entries": []}


# Expiry.


async def test_a_log_reads_as_missing_once_its_last_append_is_too_old(
    node: Node, make_node: MakeNode, clock: FakeClock
) -> None:
    await node.append(*numbered(50), rules=SHORT)
    clock.now_ms += TTL_MS
    await node.append({"n": 50}, rules=SHORT)
    clock.now_ms += TTL_MS
    for reader in (node, make_node()):
        assert await reader.datas(rules=SHORT) == numbered(51)
    clock.now_ms += 1
    for reader in (node, make_node()):
        assert (await reader.datas(rules=SHORT), await reader.hash(SHORT)) == ([], "")
        assert await reader.datas() == numbered(51)


async def test_an_append_by_a_clock_that_is_behind_makes_no_log_look_older(make_node: MakeNode) -> None:
    node, behind = make_node(), make_node(ahead_ms=-2 * TTL_MS)
    await node.append({"n": 0}, rules=SHORT)
    await behind.append({"n": 1}, rules=SHORT)
    assert await node.datas(rules=SHORT) == numbered(2)


async def test_an_append_to_an_expired_log_begins_it_anew(
    node: Node, make_node: MakeNode, clock: FakeClock
) -> None:
    rules = LogSettings(ttl_ms=TTL_MS, max_items=60)
    await node.append(*numbered(60), rules=rules)
    clock.now_ms += TTL_MS + 1
    for n, appender in enumerate([node, make_node(), node] * 10):
        [result] = await appender.append({"new": n}, rules=rules)
        assert result.hash == twin.log_hash(n + 1, {"new": n})
    assert await node.datas(rules=rules) == [{"new": n} for n in range(30)]


async def test_a_new_log_may_be_dated_before_the_expired_one(node: Node, clock: FakeClock) -> None:
    await node.append({}, rules=SHORT)
    clock.now_ms += TTL_MS + 1
    [result] = await node.append(twin.Element(5, {}), rules=SHORT)
    assert result.timestamp_ms == 5


async def test_nothing_stays_of_expired_logs_that_were_begun_anew(
    make_node: MakeNode, store: Store, clock: FakeClock
) -> None:
    for long in (True, False, True, False, False):
        node = make_node()
        await node.append(*numbered(60 if long else 1), rules=SHORT)
        await node.logs.close()
        clock.now_ms += TTL_MS + 1
    node = make_node()
    for _ in range(2):
        await node.append({}, rules=SHORT)
        await node.logs.close()
    assert await keys_below(store, "_pysync") == []


async def test_expired_logs_are_deleted_by_a_later_append_though_deleting_failed(
    make_node: MakeNode, store: Store, clock: FakeClock
) -> None:
    await make_node().append(*numbered(60), rules=SHORT)
    clock.now_ms += TTL_MS + 1
    node = make_node()
    node.fail("walk")
    node.fail("delete", after=2)
    for _ in range(5):
        await node.append({}, rules=SHORT)
        await node.logs.close()
    assert await node.datas(rules=SHORT) == [{}] * 5
    assert await keys_below(store, "_pysync") == []


async def test_a_reader_of_a_log_that_is_begun_anew_meanwhile_sees_no_part_of_it(
    node: Node, make_node: MakeNode, clock: FakeClock
) -> None:
    await node.append(*numbered(60), rules=SHORT)
    tail = await node.logs.read(KEY, LogRange(), SHORT)
    clock.now_ms += TTL_MS + 1
    other = make_node()
    await other.append({}, {}, rules=SHORT)
    await other.logs.close()
    with pytest.raises(StoreUnavailable):
        parsed(await tail.text())


# Sweeping.


async def test_a_sweep_deletes_expired_logs_whole_and_nothing_else(
    node: Node, store: Store, clock: FakeClock
) -> None:
    await node.append(*numbered(60), rules=SHORT, key="logs/old")
    await node.append({}, rules=SHORT, key="logs/small")
    await node.append(*numbered(60), rules=SHORT, key="logs/deeper/old")
    await store.put("other/doc", b"{}")
    clock.now_ms += TTL_MS
    await node.append(*numbered(60), rules=SHORT, key="logs/new")
    clock.now_ms += 1
    kept = await keys_below(store, "_pysync")
    assert await sweep(node) == 2
    assert await keys_below(store, "logs") == ["logs/deeper/old", "logs/new"]
    assert await keys_below(store, "other") == ["other/doc"]
    assert await node.datas(rules=SHORT, key="logs/new") == numbered(60)
    assert await node.datas(key="logs/deeper/old") == numbered(60)
    assert len(await keys_below(store, "_pysync")) == len(kept) * 2 // 3
    assert await sweep(node) == 0


async def test_a_sweep_that_crashes_is_finished_by_the_next(
    make_node: MakeNode, store: Store, clock: FakeClock
) -> None:
    for after in (0, 1, 5, 12, 13):
        await make_node().append(*numbered(60), rules=SHORT)
        clock.now_ms += TTL_MS + 1
        dying, other = make_node(), make_node()
        dying.crash(after, done=False)
        await asyncio.gather(sweep(dying), return_exceptions=True)
        assert await other.datas(rules=SHORT) == []
        clock.now_ms += TTL_MS + 1
        await sweep(other)
        assert await keys_below(store, "") == []


@layouts
async def test_a_sweep_deletes_logs_of_starfish_whole(
    node: Node, store: Store, clock: FakeClock, layout: str
) -> None:
    await store_values(store, starfish(log_of(numbered(30), clock.now_ms - 1000), layout))
    clock.now_ms += TTL_MS + 1
    assert await sweep(node) == 1
    assert await keys_below(store, "") == []


async def test_a_log_that_lives_by_the_clock_of_its_writer_is_not_swept(
    make_node: MakeNode, clock: FakeClock
) -> None:
    ahead = make_node(ahead_ms=10_000)
    await ahead.append(*numbered(60), rules=SHORT)
    clock.now_ms += TTL_MS - 5000
    assert await ahead.datas(rules=SHORT) == numbered(60)
    assert await sweep(ahead) == 0
    assert await ahead.datas(rules=SHORT) == numbered(60)


@pytest.mark.parametrize("count", [1, 60])
@pytest.mark.parametrize(
    ("verb", "after"), [("get", 0), ("put", 0), ("walk", 1), ("delete", 0), ("delete", 3)]
)
async def test_an_append_during_a_sweep_is_not_swept_away(
    make_node: MakeNode, clock: FakeClock, verb: Verb, after: int, count: int
) -> None:
    """By the clock of the node that appends, the log has not expired yet."""
    sweeper, behind = make_node(), make_node(ahead_ms=-10_000)
    await sweeper.append(*numbered(count), rules=SHORT)
    clock.now_ms += TTL_MS + 1
    assert await behind.datas(rules=SHORT) == numbered(count)
    release = asyncio.Event()
    arrived = asyncio.ensure_future(sweeper.delay(verb, release, after=after).wait())
    sweeping = asyncio.ensure_future(sweep(sweeper))
    await asyncio.wait([sweeping, arrived], return_when=asyncio.FIRST_COMPLETED)
    arrived.cancel()
    [result] = await behind.append({"new": 1}, rules=SHORT)
    release.set()
    await sweeping
    found = await behind.elements(rules=SHORT)
    assert found[-1] == {"ts": result.timestamp_ms, "data": {"new": 1}}
    assert result.hash == await behind.hash(SHORT) == twin.log_hash(len(found), {"new": 1})


async def test_a_sweep_reads_no_log_that_was_written_lately(node: Node, clock: FakeClock) -> None:
    await node.append({}, rules=SHORT)
    clock.now_ms += TTL_MS
    gets = node.calls["get"]
    assert (await sweep(node), node.calls["get"] - gets) == (0, 0)
    clock.now_ms += 1
    assert (await sweep(node), node.calls["get"] - gets) == (1, 1)


async def test_a_sweep_deletes_what_a_crash_stored_before_a_head_led_to_it(
    node: Node, make_node: MakeNode, store: Store, clock: FakeClock
) -> None:
    await node.append({"text": "x" * 400}, rules=SHORT)
    node.fail("put", after=1)
    with pytest.raises(StoreUnavailable):
        await node.append({"text": "x" * 400}, rules=SHORT)
    assert len(await keys_below(store, "_pysync/logs")) == 1
    clock.now_ms += TTL_MS + 1
    assert await sweep(make_node()) == 1
    assert await keys_below(store, "") == []
