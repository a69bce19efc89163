"""Old elements leave a log a segment at a time, and nothing else is lost: not by reads, crashes or damage."""

import asyncio
import json
from contextlib import suppress
from random import Random
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from support import reference_append_log as twin
from support.append_log_browser import append, tail
from support.append_log_nodes import KEY, MakeNode, Node, keys_below, numbered, parsed
from support.clients import Browser, Start
from support.collections import collection
from support.faulty_store import FaultyStore

from pysync import _core
from pysync.client import Client, LogCursor
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import LogRange, LogSettings
from pysync.engine.append_log.log import AppendLogs
from pysync.errors import CheckpointTooOld, PysyncError, StoreUnavailable
from pysync.migrate.copier import Copier
from pysync.migrate.verify import Damage, Verifier
from pysync.server.process.background import MAX_READ
from pysync.store import Store, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

KEEP = 50
NEWEST = LogSettings(keep_elements=KEEP)
RECENT = LogSettings(keep_ms=60_000)


async def head_of(store: Store, key: str = KEY) -> _core.LogHead:
    found = await store.get(key)
    assert isinstance(found, StoredObject)
    return _core.LogHead.read(found.body, "items")


async def reachable(store: Store) -> set[str]:
    """The names of the objects that the head leads to."""
    head = await head_of(store)
    names, waiting = set(), list(head.nodes())
    while waiting:
        node = waiting.pop()
        names.add(node.name)
        if node.level:
            block = await store.get(f"_pysync/logs/{head.id}/{node.name}")
            assert isinstance(block, StoredObject)
            waiting += head.expand(block.body, node)
    return names


async def stored_names(store: Store) -> set[str]:
    return {key.rpartition("/")[2] for key in await keys_below(store, "_pysync/logs")}


async def swept(node: Node) -> None:
    await node.logs.close()


async def test_the_newest_elements_stay_and_the_store_does_not_grow(node: Node, store: Store) -> None:
    wanted = []
    for n in range(2_000):
        [written] = await node.append({"n": n}, rules=NEWEST)
        wanted.append({"ts": written.timestamp_ms, "data": {"n": n}})
        assert written.hash == twin.log_hash(n + 1, {"n": n}), "the hash counts all that were appended"
    await swept(node)
    found = await node.elements()
    assert KEEP <= len(found) <= KEEP + 60
    assert found == wanted[-len(found) :]
    assert await stored_names(store) == await reachable(store)
    assert len(await stored_names(store)) <= 20
    assert (await head_of(store)).count == 2_000


async def test_a_checkpoint_before_what_stays_is_too_old(node: Node, store: Store) -> None:
    wanted = [written.timestamp_ms for written in await node.append(*numbered(500), rules=NEWEST)]
    kept = [element["ts"] for element in await node.elements()]
    dropped = wanted[: -len(kept)]
    for since in (0, dropped[0], dropped[-1] - 1):
        for bounds in (LogRange(since), LogRange(since, 3), LogRange(since, None, 3)):
            with pytest.raises(CheckpointTooOld) as caught:
                await node.logs.read(KEY, bounds, NEWEST)
            assert caught.value.earliest_ms == dropped[-1]
    for at, since in enumerate([dropped[-1], *kept]):
        assert [element["ts"] for element in await node.elements(since)] == kept[at:]
    assert [element["ts"] for element in await node.elements(None, 10**6)] == kept


@pytest.mark.parametrize("seed", range(6))
async def test_retained_elements_are_the_end_of_the_log_however_it_grows(
    make_node: MakeNode, store: Store, clock: FakeClock, seed: int
) -> None:
    random = Random(seed)
    nodes = [make_node(random.choice([300, 700, 3000])) for _ in range(2)]
    wanted: list[Any] = []
    for _ in range(60):
        rules = random.choice([LogSettings(), NEWEST, RECENT, LogSettings(keep_elements=1, keep_ms=100)])
        clock.now_ms += random.choice([0, 1, 30_000])
        datas = [
            {"n": len(wanted) + n, "x": "x" * random.choice([0, 0, 300])} for n in range(random.randrange(40))
        ]
        for data, written in zip(datas, await random.choice(nodes).append_at_once(datas, rules), strict=True):
            wanted.append({"ts": written.timestamp_ms, "data": data})
        if random.random() < 0.2:
            await random.choice(nodes).logs.drop_oldest(KEY, rules)
        node = random.choice(nodes)
        wanted.sort(key=lambda element: element["ts"])
        found = await node.elements()
        assert found == wanted[len(wanted) - len(found) :]
        if found:
            newest = random.randrange(len(found) + 1)
            assert await node.elements(None, newest) == found[len(found) - newest :]
            at = random.randrange(len(found))
            assert await node.elements(found[at]["ts"]) == found[at + 1 :]
    for node in nodes:
        await swept(node)
    assert await reachable(store) <= await stored_names(store)
    damages: list[Damage] = []
    await Verifier(store, damages.append).run()
    assert damages == []


async def test_old_elements_of_a_log_leave_though_nobody_appends(
    node: Node, store: Store, clock: FakeClock
) -> None:
    first = await node.append(*numbered(300), rules=RECENT)
    clock.now_ms = first[-1].timestamp_ms + 30_000
    second = await node.append(*numbered(20), rules=RECENT)
    clock.now_ms = first[-1].timestamp_ms + 60_001
    await node.logs.drop_oldest(KEY, RECENT)
    kept = await node.elements()
    assert [element["ts"] for element in kept][-20:] == [written.timestamp_ms for written in second]
    assert len(kept) < 80
    clock.now_ms = second[-1].timestamp_ms + 60_000
    await node.logs.drop_oldest(KEY, RECENT)
    assert len(await node.elements()) >= 1
    clock.now_ms += 1
    await node.logs.drop_oldest(KEY, RECENT)
    assert await node.elements() == []
    assert await stored_names(store) == set()
    assert (await node.hash(), (await head_of(store)).verify()) == (second[-1].hash, True)
    with pytest.raises(CheckpointTooOld):
        await node.logs.read(KEY, LogRange(second[-1].timestamp_ms - 1), RECENT)
    [written] = await node.append({"n": 0}, rules=RECENT)
    assert written.timestamp_ms > second[-1].timestamp_ms
    assert written.hash == twin.log_hash(321, {"n": 0})
    assert await node.datas(second[-1].timestamp_ms) == [{"n": 0}]


async def test_a_full_log_accepts_elements_again_when_old_ones_have_left(
    node: Node, clock: FakeClock
) -> None:
    full = LogSettings(max_items=5, keep_ms=1000)
    await node.append(*numbered(5), rules=full)
    with pytest.raises(PysyncError, match="append_limit_exceeded"):
        await node.append({}, rules=full)
    clock.now_ms += 1006
    await node.logs.drop_oldest(KEY, full)
    await node.append(*numbered(5), rules=full)
    assert await node.datas() == numbered(5)


@pytest.mark.slow
async def test_a_log_with_a_long_past_loses_it_in_steps(node: Node, store: Store) -> None:
    await node.append(*numbered(3_000))
    deleted = []
    for n in range(30):
        node.calls.clear()
        await node.append({"n": n}, rules=NEWEST)
        await swept(node)
        deleted.append(node.calls["delete"])
    blocks = 64 // 16 + 1
    assert 64 <= max(deleted) <= 64 + blocks, "one append deletes no more than a bounded number"
    await node.logs.drop_oldest(KEY, NEWEST)
    assert await stored_names(store) == await reachable(store)
    assert len(await stored_names(store)) < 20


# Reads under way


@pytest.mark.parametrize("bounds", [LogRange(), LogRange(newest=400), LogRange(since=0, oldest=400)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_read_with_an_older_head_does_not_fail(
    node: Node, make_node: MakeNode, bounds: LogRange, chunked: bool
) -> None:
    await node.append(*numbered(400))
    before = await node.elements()
    slice_ = await node.logs.read(KEY, bounds, RECENT)
    other = make_node()
    await other.append(*numbered(20), rules=NEWEST)
    await swept(other)
    kept = await node.elements()
    assert before[-1] in kept
    assert before[0] not in kept

    async def read() -> list[Any]:
        text = [chunk async for chunk in slice_.chunks()] if chunked else [await slice_.text()]
        return parsed(b"".join(text))

    if bounds.since is None:
        assert await read() == before[before.index(kept[0]) :]
        return
    with pytest.raises(CheckpointTooOld) as caught:
        await read()
    assert caught.value.earliest_ms == kept[0]["ts"] - 1


@pytest.mark.parametrize("oldest", [None, 5_000])
async def test_a_long_read_that_loses_what_comes_next_misses_nothing_unnoticed(
    node: Node, make_node: MakeNode, oldest: int | None
) -> None:
    datas = [{"n": n, "text": "x" * 20_000} for n in range(300)]
    await node.append(*datas)
    before = await node.elements()
    slice_ = await node.logs.read(KEY, LogRange(before[0]["ts"] - 1, None, oldest), NEWEST)
    chunks = slice_.chunks()
    given = await anext(chunks)
    other = make_node()
    for n in range(80):
        await other.append({"n": n, "text": "x" * 20_000}, rules=NEWEST)
    await swept(other)
    await other.logs.drop_oldest(KEY, NEWEST)
    given += b"".join([chunk async for chunk in chunks])
    found = parsed(given)
    if oldest is None:
        assert found == [element for element in before if element in found], "in order, and each once"
        assert found[-1] == before[-1]
        return
    assert found == before[: len(found)]
    assert len(found) < len(before)
    assert slice_.has_more
    with pytest.raises(CheckpointTooOld):
        await node.logs.read(KEY, LogRange(found[-1]["ts"], None, oldest), NEWEST)


async def test_a_segment_that_should_be_there_is_still_damage(node: Node, store: Store) -> None:
    await node.append(*numbered(300), rules=NEWEST)
    await swept(node)
    slice_ = await node.logs.read(KEY, LogRange(), NEWEST)
    lost = sorted(name for name in await reachable(store) if name[0].isdigit())[0]
    await store.delete(f"_pysync/logs/{(await head_of(store)).id}/{lost}")
    with pytest.raises(PysyncError, match="corrupt"):
        await slice_.text()


async def test_damage_of_old_segments_does_not_keep_them(node: Node, store: Store) -> None:
    await node.append(*numbered(300))
    head = await head_of(store)
    for name in await reachable(store):
        if name[0].isdigit():
            await store.put(f"_pysync/logs/{head.id}/{name}", b"damaged")
    await node.append(*numbered(100), rules=NEWEST)
    await swept(node)
    await node.logs.drop_oldest(KEY, NEWEST)
    found = await node.elements()
    assert KEEP <= len(found) < 110
    dropped_ms = (await head_of(store)).dropped_ms
    assert await node.elements(dropped_ms) == found


# Crashes


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True])
async def test_a_crash_at_any_write_leaves_the_end_of_the_log(clock: FakeClock, done: bool) -> None:
    crashed = set()
    for after in range(200):
        memory = MemoryStore(clock)
        store = FaultyStore(memory)
        coordinator = MemoryCoordinator(clock)
        node = Node(store, coordinator, clock, 400)
        await node.append(*numbered(40))
        store.crash(after, done=done)
        written = []
        with suppress(StoreUnavailable):
            for n in range(40, 100):
                written += await node.append({"n": n}, rules=LogSettings(keep_elements=10))
        await swept(node)
        crashed.add(len(written))
        reader = AppendLogs(memory, coordinator, clock)
        found = parsed(await (await reader.read(KEY, LogRange(), NEWEST)).text())
        numbers = [element["data"]["n"] for element in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[-1] in (39 + len(written), 40 + len(written))
        assert len(numbers) >= 10
        assert await reachable(memory) <= await stored_names(memory)
        await reader.close()
    assert len(crashed) > 30


# Repeated appends


async def test_a_repetition_whose_element_may_have_left_is_not_appended_again(
    node: Node, make_node: MakeNode
) -> None:
    result = await node.once({"n": -2}, "told", NEWEST)
    node.lose_reply("put")
    with pytest.raises(StoreUnavailable):
        await node.once({"n": -1}, "k", NEWEST)
    await node.append(*numbered(400), rules=NEWEST)
    count = (await node.logs.read(KEY, LogRange(newest=0), NEWEST)).hash
    for each in (node, make_node()):
        with pytest.raises(StoreUnavailable):
            await each.once({"n": -1}, "k", NEWEST)
        assert await each.once({"n": -2}, "told", NEWEST) == result
    assert (await node.logs.read(KEY, LogRange(newest=0), NEWEST)).hash == count


async def test_a_first_attempt_with_an_old_head_can_be_repeated(node: Node, make_node: MakeNode) -> None:
    await node.append({"n": 0}, rules=NEWEST)
    other = make_node()
    await other.append(*numbered(400), rules=NEWEST)  # `node` still takes its cached head for the log
    with pytest.raises(StoreUnavailable):
        await node.once({"n": 1}, "k", NEWEST)
    result = await node.once({"n": 1}, "k", NEWEST)
    assert await other.once({"n": 1}, "k", NEWEST) == result
    assert (await node.datas()).count({"n": 1}) <= 2


# The service


def log(**rules: Any) -> dict[str, Any]:
    return collection("log", appendOnly={"requireAuthorSignature": False, **rules})


async def test_the_service_says_from_where_a_log_can_be_read(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"collections": [log(keepElements=3, chunkSize=2)]}), session)
    for ts in range(10, 31):
        assert (await append(browser, "log/a", {"n": ts}, ts=ts)).status == 200
    items = (await tail(browser, "log/a", "full=1")).json["data"]["items"]
    first = items[0]["ts"]
    assert 24 <= first <= 28
    rejected = await tail(browser, "log/a", f"checkpoint={first - 2}")
    assert rejected.error == (400, "checkpoint_too_old")
    assert rejected.json["earliest"] == first - 1
    assert (await tail(browser, "log/a", f"checkpoint={first - 1}")).json["data"]["items"] == items
    query = {"collections": "log", "params": json.dumps({"log": [{"id": "a"}] * 2})}
    query["appendParams"] = json.dumps({"log": [{"since": 0}, {"since": first - 1}]})
    reply = await browser.request("GET", f"/batch/pull?{urlencode(query)}")
    old, new = reply.json["collections"]["log"]
    assert old["error"] == "checkpoint_too_old"
    assert new["data"]["items"] == items


async def test_a_cursor_does_not_skip_what_left_the_log(start: Start) -> None:
    rules = {"keepElements": 3, "chunkSize": 2, "requireAuthorSignature": False}
    service = {"collections": [collection("log", appendOnly=rules)]}
    async with Client(await start(service)) as client:
        await client.append("log/a", {"n": 1}, ts_ms=1)
        cursor = LogCursor(client, "log/a")
        assert len(await cursor.pull()) == 1
        for ts in range(2, 30):
            await client.append("log/a", {"n": ts}, ts_ms=ts)
        with pytest.raises(CheckpointTooOld) as caught:
            await cursor.pull()
        newer = LogCursor(client, "log/a", since=caught.value.earliest_ms)
        assert [element.ts_ms for element in await newer.pull()][-3:] == [27, 28, 29]


async def test_the_sweep_reads_a_bounded_number_of_logs(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_READ >= 100
    monkeypatch.setattr("pysync.server.process.background.MAX_READ", 2)
    store = FaultyStore(MemoryStore(clock))
    service = {"collections": [log(keepMs=1000)]}
    browser = Browser(await start(service, store=store, now_ms=clock), session)
    keys = [f"log/{n}" for n in range(5)]
    for key in keys:
        await append(browser, key, {"n": 1})
    clock.now_ms += 1001
    (app,) = start.apps  # type: ignore[attr-defined]
    for swept in (2, 4, 5, 5):
        store.calls.clear()
        await app.jobs.ttl_sweeper.sweep()
        assert store.calls["get"] <= 4
        counts = [(await head_of(store, key)).tail_count for key in keys]
        assert counts.count(0) == swept


# Copies


async def test_a_log_that_is_shortened_while_it_is_copied_arrives(
    node: Node, store: Store, clock: FakeClock
) -> None:
    await node.append(*numbered(300))
    source, target = FaultyStore(store), MemoryStore(clock)
    release = asyncio.Event()
    arrived = source.delay("get", release, after=2)
    problems: list[tuple[str, str]] = []
    copier = Copier(source, target, lambda *problem: problems.append(problem))
    copying = asyncio.create_task(copier.run())
    await arrived.wait()
    await node.append(*numbered(100), rules=NEWEST)
    await swept(node)
    await node.logs.drop_oldest(KEY, NEWEST)
    release.set()
    await copying
    assert (problems, copier.report.is_complete) == ([], True)
    logs = AppendLogs(target, None, clock)  # type: ignore[arg-type]
    copied = parsed(await (await logs.read(KEY, LogRange(), NEWEST)).text())
    assert copied == await node.elements()
