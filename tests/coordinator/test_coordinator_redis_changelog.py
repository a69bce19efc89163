"""The change log in Redis: many nodes, lost memory, lost replies, and who waits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from components import RedisServer
from support.redis_losses import WITH_AOF, client, drop_connections, end_and_forget, end_and_remember, flush

from pysync.changelog import Change, Retention
from pysync.coordinator import PreparedWrite
from pysync.coordinator.redis.coordinator import CHANGES, INTENTS, RedisCoordinator
from pysync.errors import CoordinatorUnavailable


@pytest.fixture
async def nodes(redis: RedisServer) -> AsyncIterator[list[RedisCoordinator]]:
    nodes = [await RedisCoordinator.connect(redis.url) for _ in range(2)]
    yield nodes
    for node in nodes:
        await node.close()


def change(n: int) -> Change:
    return Change(b'{"n":%d}' % n, f"user {n}" if n % 2 else "")


async def come_back(node: RedisCoordinator) -> None:
    while True:
        try:
            await node.last_id()
            return
        except CoordinatorUnavailable:
            await asyncio.sleep(0)


async def test_one_node_reads_what_another_announces(nodes: list[RedisCoordinator]) -> None:
    one, other = nodes
    start = await other.last_id()
    assert await other.read(start, 10) == []
    changes = [change(n) for n in range(7)]
    last = await one.append(changes)
    assert await other.last_id() == last
    for known in (start, ""):
        found = await other.read(known, 10)
        assert found is not None
        assert [each for _, each in found] == changes
        assert [id_ for id_, _ in found] == sorted({id_ for id_, _ in found})
        assert found[-1][0] == last
        assert await other.read(known, 3) == found[:3]
        assert await other.read(found[2][0], 2) == found[3:5]
    assert await other.read(last, 10) == []


async def test_changes_of_an_earlier_version_are_read_by_everybody(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    start = await nodes[0].last_id()
    async with client(redis) as own:
        await own.xadd(CHANGES, {"c": b'{"n":1}', "i": "somebody"})
    last = await nodes[0].append([change(2)._replace(origin="/notes")])
    page = await nodes[1].read_matching(start, 10, {"/other"}.__contains__)
    assert page is not None
    assert [each for _, each in page.changes] == [Change(b'{"n":1}', "somebody")]
    assert (page.last, page.is_end, page.scanned) == (last, True, 2)


async def test_an_erased_change_leaves_no_byte_in_redis_and_the_stream_its_counts(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    text = b'{"collection":"a","params":{"id":"5ecret"},"hash":"","timestamp":1}'
    ids = [await nodes[0].append([Change(text.replace(b"5", b"%d" % n), "x")]) for n in range(300)]
    async with client(redis) as own:
        await own.config_set("rdbcompression", "no")
        await own.xtrim(CHANGES, maxlen=250, approximate=False)
        facts = await own.xinfo_stream(CHANGES)
        assert b"5ecret" in (await own.dump(CHANGES) or b"")
        await nodes[0].erase({id_: Change(text).erased([]) for id_ in ids})
        assert b"5ecret" not in (await own.dump(CHANGES) or b"5ecret")
        after = await own.xinfo_stream(CHANGES)
    for fact in ("length", "last-generated-id", "entries-added", "max-deleted-entry-id"):
        assert after[fact] == facts[fact]


async def test_a_group_of_changes_costs_one_round_trip(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    async with client(redis) as own:
        before = (await own.info("stats"))["total_reads_processed"]
        await nodes[0].append([change(n) for n in range(50)])
        after = (await own.info("stats"))["total_reads_processed"]
    assert after - before <= 2


async def test_the_cursor_of_an_empty_log_is_unknown_when_something_after_it_is_gone(
    redis: RedisServer,
) -> None:
    node = await RedisCoordinator.connect(redis.url, retention=Retention(count=100))
    start = await node.last_id()
    for n in range(90):
        await node.append([change(n)])
    assert await node.read(start, 1) == await node.read("", 1)
    for n in range(200):
        await node.append([change(n)])
    assert await node.read(start, 1) is None
    await node.close()


async def test_changes_older_than_the_retention_go_and_the_newest_stays(redis: RedisServer) -> None:
    brief = await RedisCoordinator.connect(redis.url, retention=Retention(age_ms=0))
    first = await brief.append([change(n) for n in range(300)])
    async with client(redis) as own:
        while (await own.time())[0] * 1000 <= int(first.split(".")[1].split("-")[0]):
            await asyncio.sleep(0)
    for n in range(300):
        last = await brief.append([change(n)])
    found = await brief.read("", 1000)
    assert found is not None
    assert len(found) < 400
    assert found[-1] == (last, change(299))
    assert await brief.read(first, 1) is None
    assert await brief.last_id() == last
    await brief.close()


@pytest.mark.parametrize("lose", [end_and_forget, end_and_remember, flush])
async def test_follower_receives_a_reset_after_redis_lost_its_memory(
    redis: RedisServer, lose: Callable[[RedisServer], Awaitable[None]]
) -> None:
    redis.kill()
    redis.start(*(WITH_AOF if lose is end_and_remember else ()))
    node = await RedisCoordinator.connect(redis.url)
    start, before = await node.last_id(), await node.append([change(1)])
    await lose(redis)
    await come_back(node)
    assert await node.read(start, 10) is None
    assert await node.read(before, 10) is None
    after = await node.append([change(2)])
    assert before < after
    assert await node.read(before, 10) is None
    found = await node.read("", 10)
    assert found is not None
    assert found[-1] == (after, change(2))
    await node.close()


async def test_an_intent_is_there_until_it_is_announced_or_withdrawn(nodes: list[RedisCoordinator]) -> None:
    one, other = nodes
    kept, withdrawn, announced = [await one.prepare([change(n), change(n + 1)]) for n in (1, 3, 5)]
    found = await other.prepared(10)
    assert [intent.name for intent in found] == [kept, withdrawn, announced]
    assert found[0] == PreparedWrite(kept, found[0].age_ms, [change(1), change(2)])
    assert all(0 <= intent.age_ms < 60_000 for intent in found)
    assert [intent.name for intent in await other.prepared(1)] == [kept]
    await one.abort(withdrawn)
    last = await other.append([change(5), change(6)], announced)
    assert [intent.name for intent in await one.prepared(10)] == [kept]
    found_changes = await one.read("", 10)
    assert found_changes is not None
    assert [each for _, each in found_changes] == [change(5), change(6)]
    assert found_changes[-1][0] == last


async def test_an_intent_survives_its_node_and_a_restart_of_a_redis_that_keeps_a_file(
    redis: RedisServer,
) -> None:
    redis.kill()
    redis.start(*WITH_AOF)
    node = await RedisCoordinator.connect(redis.url)
    name = await node.prepare([change(1)])
    await end_and_remember(redis)
    await node.close()
    later = await RedisCoordinator.connect(redis.url)
    assert [(intent.name, intent.changes) for intent in await later.prepared(10)] == [(name, [change(1)])]
    await later.append([change(1)], name)
    assert await later.prepared(10) == []
    await later.close()


async def test_an_announcement_that_is_rejected_leaves_its_intent(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    name = await nodes[0].prepare([change(1)])
    async with client(redis) as own:
        await own.config_set("maxmemory", 1)
        with pytest.raises(CoordinatorUnavailable):
            await nodes[0].append([change(1)], name)
        await own.config_set("maxmemory", 0)
        assert not await own.exists(CHANGES)
        assert await own.xlen(INTENTS) == 1
    await nodes[0].append([change(1)], name)
    assert await nodes[1].prepared(10) == []


async def test_waiting_reader_receives_an_announcement_of_another_node(nodes: list[RedisCoordinator]) -> None:
    one, other = nodes
    cursor = await other.last_id()
    for n in range(5):
        waits = [asyncio.create_task(other.wait_for_change(cursor)) for _ in range(3)]
        await asyncio.sleep(0)
        last = await one.append([change(n)])
        while not (found := await other.read(cursor, 10)):
            await asyncio.gather(*waits)
            waits = [asyncio.create_task(other.wait_for_change(cursor))]
        await asyncio.gather(*waits)
        assert found == [(last, change(n))]
        cursor = last


async def test_existing_change_ends_the_wait_at_once(nodes: list[RedisCoordinator]) -> None:
    node, other = nodes
    start = await node.last_id()
    last = await node.append([change(1)])
    waiting = asyncio.ensure_future(node.wait_for_change(start))
    await asyncio.sleep(0)
    assert waiting.done()
    under_way = asyncio.ensure_future(node.wait_for_change(last))
    await asyncio.sleep(0)
    await node.append([change(2)])
    await under_way
    await other.wait_for_change(start)


async def test_a_connection_to_wait_on_is_there_only_when_somebody_waits(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    async with client(redis) as own:
        assert len(await own.client_list()) == 3
        await nodes[0].wait_for_change(await nodes[0].last_id())
        assert len(await own.client_list()) == 4


@pytest.mark.slow
async def test_waiting_survives_cuts_and_restarts(redis: RedisServer, nodes: list[RedisCoordinator]) -> None:
    one, other = nodes
    cursor = await other.last_id()
    for n, befall in enumerate((drop_connections, end_and_forget, flush, drop_connections)):
        waiting = asyncio.create_task(other.wait_for_change(cursor))
        await asyncio.sleep(0)
        await befall(redis)
        await waiting
        for node in nodes:
            await come_back(node)
        if await other.read(cursor, 1) is None:
            cursor = await other.last_id()
        last = await one.append([change(n)])
        while not (found := await other.read(cursor, 10)):
            await other.wait_for_change(cursor)
        assert found == [(last, change(n))]
        cursor = last


@pytest.mark.slow
async def test_without_redis_a_wait_returns_and_a_read_raises(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    cursor = await nodes[0].last_id()
    redis.kill()
    await nodes[0].wait_for_change(cursor)
    await nodes[0].wait_for_change("nobody was given this")
    for call in (
        nodes[0].read(cursor, 1),
        nodes[0].last_id(),
        nodes[0].prepared(1),
        nodes[0].acquire_lease("x"),
    ):
        with pytest.raises(CoordinatorUnavailable):
            await call
    for call in (nodes[0].prepare([change(1)]), nodes[0].abort("1-1")):
        with pytest.raises(CoordinatorUnavailable):
            await call


async def test_leader_lease_is_held_until_its_node_closes(nodes: list[RedisCoordinator]) -> None:
    one, other = nodes
    assert [await one.acquire_lease("x"), await other.acquire_lease("x"), await one.acquire_lease("x")] == [
        True,
        False,
        True,
    ]
    assert await other.acquire_lease("y")
    await one.close()
    assert await other.acquire_lease("x")
    assert await other.acquire_lease("y")


async def test_expired_leader_lease_is_acquired_by_another(
    redis: RedisServer, nodes: list[RedisCoordinator]
) -> None:
    one, other = nodes
    assert await one.acquire_lease("x")
    async with client(redis) as own:
        assert 0 < await own.pttl("pysync:l:x") <= 5_000
        await own.pexpire("pysync:l:x", 0)
    assert await other.acquire_lease("x")
    assert not await one.acquire_lease("x")
    await one.close()
    assert await other.acquire_lease("x")
    async with client(redis) as own:
        assert await own.exists("pysync:l:x")
