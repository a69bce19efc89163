"""A service whose Redis goes: what is public goes on, what is signed or metered waits, no replay passes."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from components import RedisServer
from components.fixtures import StartRedis
from support.clients import ISSUER, Browser, Reply, Signed, Start, root_device
from support.collections import PUBLIC, collection, limit_of
from support.faulty_store import FaultyStore
from support.redis_losses import WITH_AOF, client

from pysync.clock import wall_clock_ms
from pysync.coordinator.redis.coordinator import INTENTS, LEEWAY_MS, RedisCoordinator
from pysync.engine.changes import DocumentRef, WriteContext, parse_change
from pysync.engine.idempotency import SETTLED_MS
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

LIMIT = limit_of(1_000)
SERVED: dict[str, Any] = {
    "auth": {"trustedIssuers": [ISSUER.ed_pub]},
    "collections": [
        collection("open"),
        collection("metered", rateLimit={"push": LIMIT, "pull": LIMIT}),
        collection("notes", readRoles=["cap:read:notes"], writeRoles=["cap:write:notes"]),
    ],
}


def end_and_forget(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return server.start


def end_and_remember(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return lambda: server.start(*WITH_AOF)


def hang(server: RedisServer) -> Callable[[], None]:
    server.pause()
    return server.resume


@pytest.fixture
def redis(start_redis: StartRedis) -> RedisServer:
    server = start_redis()
    server.kill()
    server.start(*WITH_AOF)
    return server


@pytest.mark.slow
@pytest.mark.parametrize("go_down", [end_and_forget, end_and_remember, hang])
async def test_without_redis_only_safe_requests_are_served(
    redis: RedisServer,
    start: Start,
    session: aiohttp.ClientSession,
    go_down: Callable[[RedisServer], Callable[[], None]],
) -> None:
    store = MemoryStore()
    nodes = [await start({**SERVED, "coordinator": redis.url}, store=store) for _ in range(2)]
    anyone = [Browser(base, session) for base in nodes]
    signed = [
        Signed(base, session, ISSUER, root_device(ISSUER, collections=("notes",)), ts_ms=wall_clock_ms())
        for base in nodes
    ]
    for caller in signed:
        caller.nonce = os.urandom(16)
    first = (await anyone[0].push("open/a", {"n": 1})).json["hash"]
    for caller in signed:
        assert (await caller.pull("notes/a")).status == 200
        assert (await caller.pull("notes/a")).status == 401, "a replay"
    await reported(anyone[0], (True, None, "pysync_coordinator_up 1.0"))

    come_up = go_down(redis)
    for browser in anyone:
        assert (await browser.pull("open/a")).json["data"] == {"n": 1}
        assert_unavailable(await browser.pull("metered/a"))
        assert_unavailable(await browser.push("metered/a", {"n": 1}))
        assert_unavailable(await browser.push("open/a", {"n": 2}, first))  # nobody could be told of it
        assert_unavailable(await browser.push("open/b", {"n": 2}))
        await reported(browser, (True, "unreachable", "pysync_coordinator_up 0.0"))
    for caller in signed:
        assert_unavailable(await caller.pull("notes/a"))
        assert_unavailable(await fresh(caller).pull("notes/b"))
        assert_unavailable(await fresh(caller).push("notes/b", {"n": 1}))

    come_up()
    for browser, caller in zip(anyone, signed, strict=True):
        while (answer := await fresh(caller, LEEWAY_MS).push("notes/c", {"n": 1})).status == 503:
            assert (await caller.pull("notes/a")).status in (401, 503), "a replay"
        assert answer.status in (200, 409)
        assert (await browser.pull("metered/a")).status == 200
        assert (await caller.pull("notes/a")).status in (401, 503), "a replay"
        await reported(browser, (True, None, "pysync_coordinator_up 1.0"))
    assert (await anyone[0].push("open/a", {"n": 3}, first)).status == 200
    assert (await store.get("open/b"), await store.get("notes/b")) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("go_down", [end_and_forget, hang])
async def test_push_is_stored_and_announced_once_redis_is_back(
    redis: RedisServer,
    start: Start,
    session: aiohttp.ClientSession,
    go_down: Callable[[RedisServer], Callable[[], None]],
) -> None:
    store, release = FaultyStore(MemoryStore()), asyncio.Event()
    anyone = Browser(await start({**SERVED, "coordinator": redis.url}, store=store), session)
    arrived = store.delay("put", release)
    pushing = asyncio.create_task(anyone.push("open/a", {"n": 1}))
    await arrived.wait()
    come_up = go_down(redis)
    release.set()
    answer = await pushing
    assert answer.status == 200
    come_up()
    follower = await RedisCoordinator.connect(redis.url)
    while not (found := await follower.read("", 10)):
        await follower.wait_for_change(await follower.last_id())
    assert parse_change(found[0][1]).hash == answer.json["hash"]
    await follower.close()


async def test_node_announces_pending_writes_of_another(
    redis: RedisServer, start: Start, session: aiohttp.ClientSession
) -> None:
    follower = await RedisCoordinator.connect(redis.url)
    left = WriteContext(DocumentRef("open", {"id": "a"}, None), "somebody").change("ab" * 32, 1)
    long_ago_ms = wall_clock_ms() - SETTLED_MS
    async with client(redis) as own:
        await own.xadd(INTENTS, {"at": long_ago_ms, left.text: left.identity})
    await start({**SERVED, "coordinator": redis.url}, store=MemoryStore())
    while not (found := await follower.read("", 10)):
        await follower.wait_for_change(await follower.last_id())
    assert [change[:2] for _, change in found] == [left[:2]]
    assert await follower.prepared(10) == []
    await follower.close()


async def test_a_replay_is_rejected_by_the_other_node(
    redis: RedisServer, start: Start, session: aiohttp.ClientSession
) -> None:
    nodes = [await start({**SERVED, "coordinator": redis.url}, store=MemoryStore()) for _ in range(2)]
    first = Signed(nodes[0], session, ISSUER, root_device(ISSUER, collections=("notes",)))
    headers = first.headers("GET", "/pull/notes/a", b"")
    headers["Host"] = nodes[0].removeprefix("http://")
    statuses = await asyncio.gather(*(Browser(base, session).pull("notes/a", headers) for base in nodes * 10))
    assert sorted(answer.status for answer in statuses) == [200] + [401] * 19


async def test_limit_that_one_node_has_reached_holds_over_all_nodes_a_second_later(
    redis: RedisServer, start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock(wall_clock_ms())
    limited = {"name": "l", "storagePath": "l/{id}", **PUBLIC}
    members = {"collections": [{**limited, "rateLimit": {"pull": limit_of(10)}}], "coordinator": redis.url}
    nodes = [await start(members, store=MemoryStore(), now_ms=clock) for _ in range(3)]
    first, second, third = (Browser(base, session) for base in nodes)
    assert [(await first.pull("l/a")).status for _ in range(10)] == [200] * 10
    clock.now_ms += 1_000
    assert [(await each.pull("l/a")).status for each in (first, second, third)] == [429] * 3


@pytest.mark.process
async def test_a_server_starts_with_its_redis_or_says_why_not(tmp_path: Path, redis: RedisServer) -> None:
    url = redis.url.replace("//", "//:hush@")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "serve", "--port", "0", "--store", "memory:", "--coordinator", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    out, error = await process.communicate()
    assert process.returncode == 5
    assert out == b""
    assert f"pysync: redis at 127.0.0.1:{redis.port}, database 0: " in error.decode()
    assert b"hush" not in error


async def reported(browser: Browser, wanted: tuple[bool, str | None, str]) -> None:
    """Return once a service, which is ready, says so of itself, of its coordinator and in its metrics."""
    while True:
        ready = await browser.request("GET", "/health/ready")
        assert ready.status == 200
        metrics = (await browser.request("GET", "/metrics")).body.decode()
        gauge = [line for line in metrics.splitlines() if line.startswith("pysync_coordinator_up ")]
        if (ready.json["ok"], ready.json.get("coordinator"), "".join(gauge)) == wanted:
            return
        await asyncio.sleep(0.02)


def fresh(caller: Signed, ahead_ms: int = 0) -> Signed:
    """The same caller, signing now."""
    return replace(caller, nonce=None, ts_ms=wall_clock_ms() + ahead_ms)


def assert_unavailable(answer: Reply) -> None:
    assert (answer.status, answer.json["code"]) == (503, "coordinator_unavailable")
    assert int(answer.headers["Retry-After"]) >= 1
