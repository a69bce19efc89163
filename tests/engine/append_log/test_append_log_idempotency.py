"""An append that is sent again under its Idempotency-Key is made once, whatever was lost on the way."""

import asyncio
import hashlib

import pytest
from support import reference_append_log as twin
from support.append_log_nodes import KEY, RULES, MakeNode, Node, keys_below, log_of, numbered, store_values

from pysync.coordinator import IDEMPOTENCY_TTL_MS
from pysync.engine.append_log import LogSettings, read
from pysync.engine.append_log.head import FRESH_MS
from pysync.errors import (
    AppendLimitExceeded,
    DocumentCorrupt,
    IdempotencyKeyReused,
    NonMonotonicTimestamp,
    PysyncError,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.store import Store
from pysync.testing import FakeClock


async def test_a_repetition_is_answered_as_the_first_was(make_node: MakeNode, clock: FakeClock) -> None:
    node, other = make_node(), make_node()
    await node.append(*numbered(3))
    result = await node.once({"n": 3}, "k")
    assert result.hash == twin.log_hash(4, {"n": 3})
    for after in range(100):
        # It lies in the tail at first, then in a segment, then below a block of the index.
        assert await node.once({"n": 3}, "k") == await other.once({"n": 3}, "k") == result
        await node.append({"after": after})
    clock.now_ms += IDEMPOTENCY_TTL_MS - 1
    assert await make_node().once({"n": 3}, "k") == result
    assert (await node.datas()).count({"n": 3}) == 1


async def test_repetition_that_cannot_be_looked_up_fails_alone(node: Node, store: Store) -> None:
    node.fail("put")
    with pytest.raises(StoreUnavailable):
        await node.once({"n": 0}, "k")
    node.reset()
    await node.append(*numbered(60))
    for key in await keys_below(store, "_pysync/logs"):
        await store.delete(key)
    others = asyncio.gather(*(node.append({"n": n}) for n in (60, 61)))
    with pytest.raises(DocumentCorrupt):
        await node.once({"n": 0}, "k")
    assert [result.hash for [result] in await others] == [twin.log_hash(n + 1, {"n": n}) for n in (60, 61)]


async def test_keys_are_apart(node: Node) -> None:
    result = [await node.once({"same": 1}, key) for key in ("k", "l", "kl")]
    assert len({written.timestamp_ms for written in result}) == 3
    assert [await node.once({"same": 1}, key) for key in ("k", "l", "kl")] == result


async def test_a_key_used_again_after_ten_minutes_appends_again(node: Node, clock: FakeClock) -> None:
    first = await node.once({"n": 1}, "k")
    clock.now_ms += IDEMPOTENCY_TTL_MS + 1
    node.fail("put")
    with pytest.raises(StoreUnavailable):
        await node.once({"n": 2}, "k")
    second = await node.once({"n": 2}, "k")
    assert second != first
    assert second == await node.once({"n": 2}, "k")
    assert await node.datas() == numbered(2, 1)


@pytest.mark.parametrize("others", [0, 30])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_an_append_whose_answer_was_lost_is_made_once(
    make_node: MakeNode, clock: FakeClock, others: int, after: int
) -> None:
    for kind in ("fail", "lose_reply"):
        node, other = make_node(), make_node()
        await node.append(*numbered(6))
        getattr(node, kind)("put", after=after)
        try:
            result = await node.once({"kind": kind}, kind)
        except StoreUnavailable:
            result = None
        node.reset()
        await other.append(*numbered(others))
        answers = [await again.once({"kind": kind}, kind) for again in (other, node, other)]
        assert answers == answers[:1] * 3
        assert result in (None, answers[0])
        assert (await node.datas()).count({"kind": kind}) == 1


async def test_a_node_that_died_is_repeated_by_another(make_node: MakeNode) -> None:
    for after in range(4):
        for done in (False, True):
            dying, other = make_node(), make_node()
            await dying.append(*numbered(20))
            dying.crash(after, done=done)
            data, key = {"after": after, "done": done}, f"{after}{done}"
            result = await asyncio.gather(dying.once(data, key), return_exceptions=True)
            again = await other.once(data, key)
            assert result[0] == again or isinstance(result[0], StoreUnavailable)
            assert (await other.datas()).count(data) == 1


async def test_a_crash_between_claim_and_write_does_not_keep_the_key_from_appending(
    make_node: MakeNode,
) -> None:
    dying, other = make_node(), make_node()
    dying.crash(0, done=False)
    with pytest.raises(StoreUnavailable):
        await dying.once({"n": 0}, "k")
    result = await other.once({"n": 0}, "k")
    assert result == await other.once({"n": 0}, "k")
    assert await other.datas() == numbered(1)


async def test_attempts_at_once_make_one_element(make_node: MakeNode) -> None:
    for round_ in range(10):
        nodes = [make_node(), make_node(ahead_ms=60_000), make_node(ahead_ms=-60_000)] * 3
        result = await asyncio.gather(*(node.once({"turn": round_}, f"{round_}") for node in nodes))
        assert result == result[:1] * len(nodes)
        assert await nodes[0].datas() == [{"turn": n} for n in range(round_ + 1)]


@pytest.mark.parametrize("ahead_ms", [0, 10_000, -10_000])
async def test_slow_write_is_not_made_in_addition_to_its_repetition(
    make_node: MakeNode, ahead_ms: int
) -> None:
    slow, other = make_node(), make_node(ahead_ms=ahead_ms)
    await slow.append(*numbered(5))
    release = asyncio.Event()
    arrived = slow.delay("put", release)
    first = asyncio.ensure_future(slow.once({"n": 5}, "k"))
    await arrived.wait()
    again = await other.once({"n": 5}, "k")
    await other.append({"n": 6})
    release.set()
    assert await first == again
    assert await other.datas() == numbered(7)


async def test_a_slow_append_whose_repetition_was_deleted_with_the_log_is_not_made_again(
    make_node: MakeNode,
) -> None:
    slow, other = make_node(), make_node()
    await slow.append(*numbered(5))
    release = asyncio.Event()
    arrived = slow.delay("put", release)
    first = asyncio.ensure_future(slow.once({"n": 5}, "k"))
    await arrived.wait()
    again = await other.once({"n": 5}, "k")
    await other.logs.delete(KEY, again.hash, RULES)
    release.set()
    assert await first == again
    assert await other.datas() == []


async def test_a_slow_append_to_a_log_that_is_deleted_meanwhile_begins_a_new_one(make_node: MakeNode) -> None:
    slow, other = make_node(), make_node()
    await slow.append(*numbered(5))
    release = asyncio.Event()
    arrived = slow.delay("put", release)
    first = asyncio.ensure_future(slow.once({"n": 5}, "k"))
    await arrived.wait()
    await other.logs.delete(KEY, await other.hash(), RULES)
    release.set()
    assert await first == await other.once({"n": 5}, "k")
    assert await other.datas() == numbered(1, 5)


async def test_a_repetition_joins_others_in_one_put(node: Node) -> None:
    result = await node.once({"n": 0}, "k")
    node.calls.clear()
    appends = [node.append({"n": 1}), node.append({"n": 2})]
    again, *_ = await asyncio.gather(node.once({"n": 0}, "k"), *appends)
    assert again == result
    assert node.calls["put"] <= 2
    assert await node.datas() == numbered(3)


async def test_key_queries_the_store_for_nothing_of_a_fresh_log(make_node: MakeNode) -> None:
    node = make_node(head_bytes=None)
    await node.append({})
    node.calls.clear()
    await asyncio.gather(*(node.once({"n": n}, f"{n}") for n in range(20)))
    assert (node.calls["get"], node.calls["put"]) == (0, 1)


async def test_a_rejected_append_is_rejected_again_and_made_once_it_may_be(node: Node) -> None:
    await node.append(twin.Element(100, {}))
    for _ in range(2):
        with pytest.raises(NonMonotonicTimestamp):
            await node.once(twin.Element(100, {"n": 1}), "k")
    assert (await node.once(twin.Element(101, {"n": 1}), "k")).timestamp_ms == 101


@pytest.mark.slow
@pytest.mark.parametrize(
    ("element", "rejected", "rules"),
    [
        (twin.Element(50, {"n": -1}), NonMonotonicTimestamp, LogSettings()),
        (twin.Element(2**50, {"n": -1}), TsTooFarAhead, LogSettings()),
        (twin.Element(None, {"n": -1}), AppendLimitExceeded, LogSettings(max_items=1)),
    ],
)
async def test_rejected_append_is_not_looked_up_when_it_is_repeated(
    node: Node, element: twin.Element, rejected: type[PysyncError], rules: LogSettings
) -> None:
    await node.append(twin.Element(100, {}))
    with pytest.raises(rejected):
        await node.once(element, "k", rules)
    await node.append(*numbered(400))
    node.got.clear()
    for _ in range(3):
        with pytest.raises(rejected):
            await node.once(element, "k", rules)
    assert len(node.got) <= 3
    await node.once({"other": 1}, "k")  # the key is free
    with pytest.raises(IdempotencyKeyReused):
        await node.once({"n": -1}, "k")


async def test_other_data_under_a_key_is_rejected_by_every_node(make_node: MakeNode) -> None:
    node, other = make_node(), make_node()
    result = await node.once({"n": 0}, "k")
    await node.append(*numbered(40, 1))
    for again in (node, other):
        with pytest.raises(IdempotencyKeyReused):
            await again.once({"n": 99}, "k")
    assert await other.once({"n": 0}, "k") == result
    assert await node.datas() == numbered(41)


async def test_idempotency_key_with_other_data_is_rejected_even_if_the_first_answer_was_lost(
    make_node: MakeNode,
) -> None:
    dying, other = make_node(), make_node()
    dying.fail("put")
    with pytest.raises(StoreUnavailable):
        await dying.once({"n": 0}, "k")
    with pytest.raises(IdempotencyKeyReused):
        await other.once({"n": 1}, "k")
    await other.once({"n": 0}, "k")
    assert await other.datas() == numbered(1)


async def test_a_rejected_repetition_does_not_free_the_key_of_an_append_that_was_stored(
    make_node: MakeNode,
) -> None:
    """The second attempt cannot know whether the first one, which got no answer, will still be written."""
    slow, other = make_node(), make_node()
    await slow.append(twin.Element(100, {}))
    release = asyncio.Event()
    arrived = slow.delay("put", release)
    first = asyncio.ensure_future(slow.once({"n": 1}, "k"))
    await arrived.wait()
    with pytest.raises(NonMonotonicTimestamp):
        await other.once(twin.Element(50, {"n": 1}), "k")
    release.set()
    result = await first
    assert await other.once({"n": 1}, "k") == result
    assert await other.datas() == [{}, {"n": 1}]


async def test_segments_searched_by_one_attempt_are_not_searched_by_another(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 1)
    dying, other = make_node(), make_node()
    dying.fail("put")
    with pytest.raises(StoreUnavailable):
        await dying.once({"n": -1}, "k")
    await other.append(*numbered(400))
    other.got.clear()
    result = await other.once({"n": -1}, "k")
    assert len(other.got) > 40
    await other.append(*numbered(40))
    other.got.clear()
    assert await other.once({"n": -1}, "k") == result
    assert len(other.got) < 30


async def test_search_continues_behind_the_searched_segments_if_another_append_comes_first(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 1)
    dying, late, other = make_node(), make_node(), make_node()
    dying.fail("put")
    with pytest.raises(StoreUnavailable):
        await dying.once({"n": -1}, "k")
    await other.append(*numbered(400))
    searched: list[int] = []

    async def append_first(key: str) -> None:
        if key == KEY and not searched:
            searched.append(len(late.got))
            await other.append({"n": 400})

    late.before_put = append_first
    await late.once({"n": -1}, "k")
    assert searched[0] > 40
    assert len(late.got) < searched[0] + 10
    assert await late.datas() == [*numbered(401), {"n": -1}]


async def test_a_claim_of_an_earlier_version_is_honoured(node: Node) -> None:
    name = hashlib.sha256(b"append k").hexdigest()
    await node.coordinator.put_if_absent(name, b'["0011223344556677","",0]', IDEMPOTENCY_TTL_MS)
    result = await node.once({"n": 0}, "k")
    assert await node.once({"n": 0}, "k") == result
    assert await node.datas() == numbered(1)


async def test_node_that_slept_searches_only_elements_after_the_key(
    make_node: MakeNode, clock: FakeClock
) -> None:
    sleepy, busy = make_node(), make_node()
    await sleepy.append({})
    await busy.append(*numbered(400))
    clock.now_ms += FRESH_MS
    release = asyncio.Event()
    arrived = sleepy.delay("put", release)
    first = asyncio.ensure_future(sleepy.once({"n": -1}, "k"))
    await arrived.wait()
    await busy.append(*numbered(10))
    sleepy.got.clear()
    release.set()
    await first
    assert len(sleepy.got) < 15


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_log_of_starfish_is_taken_over_once_by_a_repeated_append(
    make_node: MakeNode, store: Store, clock: FakeClock, chunked: bool
) -> None:
    log = log_of(numbered(50), clock.now_ms - 1000)
    await store_values(
        store, twin.starfish_chunks(log, KEY, 8) if chunked else {KEY: twin.starfish_document(log)}
    )
    for after in range(4):
        node, other = make_node(), make_node()
        node.lose_reply("put", after=after)
        data, key = {"n": 50 + after}, f"{after}"
        result = await asyncio.gather(node.once(data, key), return_exceptions=True)
        node.reset()
        again = await other.once(data, key)
        assert result[0] == again or isinstance(result[0], StoreUnavailable)
        assert await other.datas() == numbered(51 + after)


async def test_append_that_is_not_persisted_is_answered_again_too(node: Node, clock: FakeClock) -> None:
    rules = LogSettings(persist=False)
    result = await node.once({"n": 1}, "k", rules)
    clock.now_ms += 1000
    assert await node.once({"n": 1}, "k", rules) == result


async def test_an_append_that_began_a_log_anew_is_found_in_that_log(node: Node, clock: FakeClock) -> None:
    """What had expired was longer than what came after it."""
    rules = LogSettings(ttl_ms=60_000)
    await node.append(*numbered(50), rules=rules)
    clock.now_ms += 60_001
    result = await node.once({"first": 1}, "k", rules)
    await node.append(*numbered(40), rules=rules)
    assert await node.once({"first": 1}, "k", rules) == result
    assert await node.datas(rules=rules) == [{"first": 1}, *numbered(40)]
