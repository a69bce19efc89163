"""Append-only logs on a store: their rules one by one, and what appends and reads cost."""

import asyncio
import json

import pytest
from support import reference_append_log as twin
from support.append_log_nodes import (
    KEY,
    RULES,
    MakeNode,
    Node,
    element,
    keys_below,
    log_of,
    numbered,
    parsed,
    store_values,
)

from pysync.concurrency import MAX_WAITING
from pysync.engine.append_log import LogRange, LogSettings
from pysync.errors import (
    AppendLimitExceeded,
    DocumentCorrupt,
    NonMonotonicTimestamp,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.model import WriteResult
from pysync.store import Store, StoredObject
from pysync.testing import FakeClock


def at(ts_ms: int, n: int = 0) -> twin.Element:
    return twin.Element(ts_ms, {"n": n})


# The rules of an append.


async def test_each_element_is_dated_after_the_one_before(node: Node, clock: FakeClock) -> None:
    start = clock.now_ms
    results = await node.append(*numbered(2))
    clock.now_ms += 100
    results += await node.append({"n": 2})
    clock.now_ms -= 5000
    results += await node.append({"n": 3})
    assert [written.timestamp_ms - start for written in results] == [0, 1, 100, 101]
    assert [each["ts"] - start for each in await node.elements()] == [0, 1, 100, 101]


async def test_the_hash_is_of_the_count_and_the_newest_element(node: Node) -> None:
    assert await node.hash() == ""
    for n, data in enumerate(numbered(30)):
        [results] = await node.append(data)
        assert results.hash == await node.hash() == twin.log_hash(n + 1, data)


async def test_a_client_dates_an_element_later_than_the_last_and_not_far_ahead(
    node: Node, clock: FakeClock
) -> None:
    now_ms = clock.now_ms
    assert [results.timestamp_ms for results in await node.append(at(0), at(5), at(now_ms + 300_000))] == [
        0, 5, now_ms + 300_000,
    ]  # fmt: skip
    for ts_ms, error_type in [
        (now_ms + 300_001, TsTooFarAhead),
        (now_ms + 300_000, NonMonotonicTimestamp),
        (5, NonMonotonicTimestamp),
        (0, NonMonotonicTimestamp),
    ]:
        with pytest.raises(error_type):
            await node.append(at(ts_ms))
    [results] = await node.append({})
    assert results.timestamp_ms == now_ms + 300_001
    assert len(await node.elements()) == 4


async def test_a_full_log_takes_no_more(node: Node) -> None:
    rules = LogSettings(max_items=3)
    results = await node.append_at_once(numbered(5), rules)
    assert [type(outcome) for outcome in results] == [WriteResult] * 3 + [AppendLimitExceeded] * 2
    with pytest.raises(AppendLimitExceeded) as rejected:
        await node.append({}, rules=rules)
    assert rejected.value.extras == {"limit": 3}
    assert await node.datas() == numbered(3)


async def test_a_rejected_append_to_nothing_stores_nothing(
    node: Node, store: Store, clock: FakeClock
) -> None:
    with pytest.raises(TsTooFarAhead):
        await node.append(at(clock.now_ms + 300_001))
    assert await keys_below(store, "") == []


async def test_one_bad_element_never_fails_its_neighbours(node: Node, clock: FakeClock) -> None:
    ahead = clock.now_ms + 300_001
    results = await node.append_at_once([{"n": 0}, at(ahead, 1), {"n": 2}, at(3, 3), {"n": 4}, {"n": 5}])
    assert [type(outcome) for outcome in results] == [
        WriteResult, TsTooFarAhead, WriteResult, NonMonotonicTimestamp, WriteResult, WriteResult,
    ]  # fmt: skip
    assert await node.datas() == [{"n": 0}, {"n": 2}, {"n": 4}, {"n": 5}]
    assert node.calls["put"] == 1


async def test_rejection_is_decided_by_the_log_as_it_is_now(make_node: MakeNode) -> None:
    one, other = make_node(), make_node()
    rules = LogSettings(max_items=3)
    await one.append({"n": 0}, rules=rules)
    await other.append(*numbered(2, 1), rules=rules)
    with pytest.raises(AppendLimitExceeded):
        await one.append({"n": 3}, rules=rules)


async def test_element_that_is_not_persisted_is_answered_and_not_stored(
    node: Node, store: Store, clock: FakeClock
) -> None:
    rules = LogSettings(persist=False)
    content_hash = "43258cff783fe7036d8a43033f830adfc60ec037382473548ac742b888292777"
    assert await node.append({"b": 2, "a": 1}, rules=rules) == [WriteResult(content_hash, clock.now_ms)]
    [later] = await node.append(at(clock.now_ms + 7), rules=rules)
    assert later.timestamp_ms == clock.now_ms + 7
    with pytest.raises(TsTooFarAhead):
        await node.append(at(clock.now_ms + 300_001), rules=rules)
    assert (await node.elements(rules=rules), await node.hash(rules)) == ([], "")
    assert (node.calls["get"], await keys_below(store, "")) == (0, [])


async def test_elements_come_back_with_their_proofs(node: Node) -> None:
    wanted = [
        twin.Element(1, {"a": [1.5, 'é"\n']}, ("aa", "sig")),
        twin.Element(2, {"big": 2**63}),
        twin.Element(3, {}, ('k"ey', "\n")),
    ]
    await node.append(*wanted)
    assert await node.elements() == [each.members for each in wanted]


async def test_logs_are_apart(node: Node) -> None:
    for n in range(20):
        await node.append({"a": n}, key="logs/a")
        await node.append({"b": n}, key="logs/b")
    assert await node.datas(key="logs/a") == [{"a": n} for n in range(20)]
    assert await node.datas(key="logs/b") == [{"b": n} for n in range(20)]
    assert await node.datas(key="logs") == []


# What an append costs.


async def test_appends_that_wait_for_one_log_are_written_by_one_put(node: Node) -> None:
    await node.append({})
    release = asyncio.Event()
    arrived = node.delay("put", release)
    first = asyncio.ensure_future(node.append({"n": -1}))
    await arrived.wait()
    waiting = asyncio.gather(*(node.append(data) for data in numbered(200)))
    await asyncio.sleep(0)
    node.calls.clear()
    release.set()
    results = [await first, *await waiting]
    segments = await keys_below(node, "_pysync/logs")
    assert (node.calls["put"] - len(segments), node.calls["get"]) == (1, 1), (
        "one get before the tail is sealed"
    )
    assert [written.timestamp_ms for [written] in results] == [each["ts"] for each in await node.elements()][
        1:
    ]
    assert len({written.hash for [written] in results}) == 201


async def test_logs_do_not_wait_for_each_other(node: Node) -> None:
    release = asyncio.Event()
    arrived = node.delay("put", release)
    slow = asyncio.ensure_future(node.append({}, key="logs/slow"))
    await arrived.wait()
    await node.append({}, key="logs/quick")
    assert not slow.done()
    release.set()
    await slow


@pytest.mark.slow
async def test_an_append_reads_only_to_seal_and_puts_as_much_at_any_length(make_node: MakeNode) -> None:
    node = make_node(head_bytes=None)
    costs = []
    for length in (200, 12_000):
        while (missing := length - len(await node.elements())) > 0:
            await node.append_at_once([{"pad": "x" * 200}] * min(missing, 1000))
        await node.append({})  # seals what came at once
        before = sum(node.put_sizes), node.calls["put"], node.calls["get"]
        await node.append(*[{"pad": "x" * 200}] * 100)
        seals = node.calls["get"] - before[2]
        assert seals <= 10
        assert node.calls["put"] - before[1] <= 115
        costs.append(sum(node.put_sizes) - before[0])
    assert costs[1] < 1.3 * costs[0]


async def test_no_append_puts_more_than_a_segment_and_a_few_small_objects(node: Node, store: Store) -> None:
    for n in range(600):
        puts, put_bytes = node.calls["put"], sum(node.put_sizes)
        await node.append({"n": n})
        assert node.calls["put"] - puts <= 5
        assert sum(node.put_sizes) - put_bytes < 6000
    assert max([len(await body(store, key)) for key in await keys_below(store, "_pysync/logs")]) < 1000


async def body(store: Store, key: str) -> bytes:
    found = await store.get(key)
    assert isinstance(found, StoredObject)
    return found.body


async def test_sealed_segment_is_never_written_again(node: Node, store: Store) -> None:
    seen: dict[str, str] = {}
    for n in range(100):
        await node.append({"n": n})
        etags = {listed.key: listed.etag async for listed in store.walk("_pysync/logs")}
        assert etags.items() >= seen.items()
        seen = etags


async def test_a_chunk_size_bounds_the_tail(make_node: MakeNode, store: Store) -> None:
    node = make_node(head_bytes=100_000)
    await node.append(*numbered(21), rules=LogSettings(chunk_size=5))
    assert len(await keys_below(store, "_pysync/logs")) == 4


async def test_too_many_waiting_appends_are_rejected_and_not_queued(node: Node) -> None:
    results = await node.append_at_once(numbered(MAX_WAITING + 100))
    rejected = [outcome for outcome in results if not isinstance(outcome, WriteResult)]
    assert {type(outcome) for outcome in rejected} == {StoreUnavailable}
    assert len(rejected) == 100
    assert await node.datas() == numbered(MAX_WAITING)
    await node.append({})


async def test_closing_finishes_the_appends_that_wait(make_node: MakeNode) -> None:
    node = make_node()
    waiting = [asyncio.ensure_future(node.append({"n": n})) for n in range(50)]
    await asyncio.sleep(0)
    await node.logs.close()
    assert all(one.done() for one in waiting)
    await asyncio.gather(*waiting)
    assert await make_node().datas() == numbered(50)


async def test_cancelled_append_leaves_its_neighbours_alone(node: Node) -> None:
    waiting = [asyncio.ensure_future(node.append({"n": n})) for n in range(5)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(outcome, list) for outcome in results) == 4
    numbers = [data["n"] for data in await node.datas()]
    assert [n for n in numbers if n != 2] == [0, 1, 3, 4]
    assert numbers == sorted(numbers)


# Reading.


async def filled(node: Node, count: int) -> None:
    """Elements a few to a segment, each dated its number."""
    for n in range(count):
        await node.append(at(10 * n, n))


async def test_a_tail_is_what_its_bounds_say(node: Node) -> None:
    await filled(node, 120)
    log = twin.Log(tuple(at(10 * n, n) for n in range(120)))
    for since in (None, 0, 5, 595, 1180, 1190, 10**15):
        for count in (None, 0, 1, 7, 119, 120, 121):
            assert await node.elements(since, count) == log.within(since, count)
            assert await node.elements(since, None, count) == log.within(since, None, count)


@pytest.mark.slow
async def test_a_tail_is_read_from_the_segments_that_hold_it(node: Node, make_node: MakeNode) -> None:
    await filled(node, 1500)
    segments = [key for key in await keys_below(node, "_pysync/logs") if "index" not in key]
    spans = sorted(tuple(map(int, key.rsplit("/")[-1].split("-"))) for key in segments)

    async def cost(*bounds: int | None) -> tuple[int, int]:
        """Objects read beside the head and blocks of the index, and segments that hold the answer."""
        reader = make_node()
        found = {each["data"]["n"] for each in await reader.elements(*bounds)}
        blocks = sum("index" in key for key in reader.got)
        holding = sum(not found.isdisjoint(range(start, end)) for start, end in spans)
        assert blocks <= 3 + holding // 8
        return len(reader.got) - 1 - blocks, holding

    for count in (0, 1, 2, 20, 100):
        read, holding = await cost(None, count)
        assert read == holding
    for since in (14_990, 14_985, 14_000, 12_345, 7777):
        read, holding = await cost(since)
        assert read <= holding + 1
        for count in (1, 20, 100):
            read, holding = await cost(since, count)
            assert read <= holding + 1
            read, holding = await cost(since, None, count)
            # Nobody knows before how many of the first segment's elements are among them.
            assert read <= holding + max(end - start for start, end in spans)


async def test_a_read_of_an_unchanged_log_costs_one_get(node: Node) -> None:
    await node.append({"n": 0})
    node.calls.clear()
    await node.elements(None, 5)
    await node.elements(None, 5)
    assert (node.calls["get"], node.calls["put"]) == (2, 0)


@pytest.mark.slow
async def test_long_tail_in_chunks_makes_the_same_text(node: Node) -> None:
    await filled(node, 1000)
    for bounds in (LogRange(), LogRange(since=95), LogRange(newest=900), LogRange(9990), LogRange(newest=0)):
        tail = await node.logs.read(KEY, bounds, RULES)
        is_long = await tail.is_long()
        chunks = [chunk async for chunk in tail.chunks()]
        assert is_long == (len(chunks) > 1)
        whole = await (await node.logs.read(KEY, bounds, RULES)).text()
        assert parsed(b"".join(chunks)) == parsed(whole)


@pytest.mark.slow
async def test_chunk_stays_small_though_elements_become_long(make_node: MakeNode) -> None:
    node = make_node(None)
    await node.append(*({"n": n, "text": "s" * 1000} for n in range(300)))
    await node.append(*({"n": n, "text": "l" * 200_000} for n in range(60)))
    for bounds in (LogRange(), LogRange(since=0, oldest=350)):
        tail = await node.logs.read(KEY, bounds, RULES)
        assert max([len(chunk) async for chunk in tail.chunks()]) < 2_500_000


async def test_a_segment_that_is_empty_is_corrupt(node: Node, store: Store) -> None:
    await filled(node, 100)
    for key in await keys_below(store, "_pysync/logs"):
        await store.put(key, b"")
    with pytest.raises(DocumentCorrupt):
        await node.elements(None, 30)


async def test_a_tail_is_of_one_moment(node: Node) -> None:
    await node.append(*numbered(50))
    tail = await node.logs.read(KEY, LogRange(), RULES)
    await node.append(*numbered(50, 50))
    assert [each["data"] for each in parsed(await tail.text())] == numbered(50)
    assert tail.hash == twin.log_hash(50, {"n": 49})


async def test_append_of_another_node_is_read_at_once(make_node: MakeNode) -> None:
    one, other = make_node(), make_node()
    for n in range(60):
        await (one, other)[n % 3 == 0].append({"n": n})
        assert await other.datas() == await one.datas() == numbered(n + 1)


async def test_nothing_stored_is_an_empty_log(node: Node) -> None:
    tail = await node.logs.read(KEY, LogRange(), RULES)
    assert (await tail.text(), tail.hash, await tail.is_long()) == (b"", "", False)
    assert b"[]".join(tail.envelope('f"')).replace(b"[[]]", b"[]") == b'{"f\\"":[]}'
    assert [chunk async for chunk in tail.chunks()] == []


# Failures.


async def test_after_a_failed_put_the_next_append_works(node: Node) -> None:
    await node.append(*numbered(20))
    for verb in ("fail", "lose_reply"):
        for after in range(3):
            before = await node.datas()
            getattr(node, verb)("put", after=after)
            results = await node.append_at_once([{"verb": verb, "after": after}])
            node.reset()
            [done] = await node.append({"next": after})
            found = await node.datas()
            assert found[: len(before)] == before
            assert found[-1] == {"next": after}
            assert done.hash == twin.log_hash(len(found), found[-1])
            lost = {"verb": verb, "after": after}
            assert found.count(lost) == 1 if isinstance(results[0], WriteResult) else found.count(lost) <= 1


async def test_nodes_that_collide_lose_nothing(make_node: MakeNode) -> None:
    nodes = [make_node(), make_node(), make_node()]
    results = await asyncio.gather(
        *(node.append({"node": at, "n": n}) for n in range(60) for at, node in enumerate(nodes))
    )
    elements = await nodes[0].elements()
    assert sorted(written.timestamp_ms for [written] in results) == [each["ts"] for each in elements]
    for at_ in range(3):
        own = [each["data"]["n"] for each in elements if each["data"]["node"] == at_]
        assert own == list(range(60))


@pytest.mark.parametrize("stored", [b"", b"{}", b"x", b'{"v":1,"data":{"items":1}}'])
async def test_malformed_log_is_corrupt_and_left_alone(node: Node, store: Store, stored: bytes) -> None:
    await store.put(KEY, stored)
    with pytest.raises(DocumentCorrupt):
        await node.elements()
    with pytest.raises(DocumentCorrupt):
        await node.append({})
    assert await body(store, KEY) == stored


async def test_lost_segment_is_reported_to_its_readers_alone(node: Node, store: Store) -> None:
    await filled(node, 100)
    lost = next(key for key in await keys_below(store, "_pysync/logs") if "/0-" in key)
    await store.delete(lost)
    with pytest.raises(DocumentCorrupt):
        await node.elements()
    assert [data["n"] for data in await node.datas(None, 50)] == list(range(50, 100))
    await node.append({})


async def test_a_store_that_fails_is_not_an_empty_log(node: Node, make_node: MakeNode) -> None:
    await filled(node, 100)
    other = make_node()
    for after in range(4):
        other.fail("get", after=after)
        with pytest.raises(StoreUnavailable):
            await other.elements()
        other.reset()


async def test_the_text_of_an_element_is_what_was_hashed(node: Node) -> None:
    await node.logs.append(KEY, element({"b": 1.0, "a": "é"}), RULES)
    tail = await node.logs.read(KEY, LogRange(), RULES)
    assert b'"data":{"a":"\xc3\xa9","b":1}' in await tail.text()
    assert json.loads(await tail.text())["data"] == {"a": "é", "b": 1}


@pytest.mark.parametrize("written", ["here", "starfish", "starfish in chunks"])
async def test_a_read_knows_whether_newer_elements_were_left_out(
    node: Node, store: Store, written: str
) -> None:
    log = log_of(numbered(50), 1000)
    if written == "here":
        await node.append(*(twin.Element(1000 + n, {"n": n}) for n in range(50)))
    else:
        is_chunked = written == "starfish in chunks"
        document = {KEY: twin.starfish_document(log)}
        await store_values(store, twin.starfish_chunks(log, KEY, 8) if is_chunked else document)
    for since, oldest, newest, has_more in (
        (None, 49, None, True),
        (None, 50, None, False),
        (1008, 40, None, True),
        (1009, 40, None, False),
        (2000, 1, None, False),
        (1000, None, None, False),
        (1000, None, 3, False),
    ):
        for in_chunks in (False, True):
            tail = await node.logs.read(KEY, LogRange(since, newest, oldest), LogSettings())
            text = b"".join([chunk async for chunk in tail.chunks()]) if in_chunks else await tail.text()
            assert tail.has_more is has_more, (since, oldest, text)
