"""Nodes on one bucket and one Redis, killed between a write and its announcement: followers hear of it."""

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from components import RedisServer, S3Server
from support.clients import Browser, Start
from support.collections import NOTES, UNSIGNED, collection
from support.redis_losses import client
from support.s3_fault_proxy import FaultProxy
from support.s3_stores import new_prefix
from support.server_process import serving

from pysync.coordinator.redis.coordinator import INTENTS, RedisCoordinator
from pysync.engine.changes import parse_change
from pysync.engine.outbox import EARLY_RECOVERY_MS

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

LOGS = collection("logs", appendOnly=UNSIGNED)


@pytest.fixture
async def follower(redis: RedisServer) -> AsyncIterator[RedisCoordinator]:
    coordinator = await RedisCoordinator.connect(redis.url)
    yield coordinator
    await coordinator.close()


def members(s3: S3Server, prefix: str, redis: RedisServer, endpoint: str | None = None) -> dict[str, Any]:
    """What a node is configured with, which asks S3 at `endpoint`, else directly."""
    store = {
        "url": f"s3://{s3.bucket}/{prefix}",
        "endpoint": endpoint or s3.endpoint,
        "region": s3.region,
        "forcePathStyle": True,
        "accessKeyId": s3.access_key_id,
        "secretAccessKey": s3.secret_access_key,
    }
    return {
        "store": store,
        "coordinator": redis.url,
        "collections": [NOTES, LOGS, FILES, EVENTS],
        "events": [{"collection": "events", "storagePath": "events/{id}/{batchId}"}],
    }


FILES = collection("files", allowedMimeTypes=["application/octet-stream"], maxBodyBytes=10_000_000)
EVENTS = collection("events", "events/{id}/{batchId}", listable=True)


async def hashes(follower: RedisCoordinator, count: int) -> list[str]:
    """Of the first changes that are told, once there are so many."""
    while len(found := await follower.read("", 100) or []) < count:
        await follower.wait_for_change(await follower.last_id())
    return [parse_change(change).hash for _, change in found]


async def killed_before_it_announces(
    folder: Path, s3: S3Server, prefix: str, redis: RedisServer, key: str, session: aiohttp.ClientSession
) -> None:
    """Push to `key` by a node that is killed when S3 has done it and nobody has heard of that."""
    async with (
        FaultProxy(s3.endpoint) as proxy,
        serving(folder, **members(s3, prefix, redis, proxy.url)) as node,
    ):
        proxy.lose_reply("PUT", when=lambda sent: sent.path.endswith(key))
        second_lookup = proxy.delay(until=asyncio.Event(), when=lambda _: proxy.met["lose_reply"] > 0)
        pushing = asyncio.create_task(Browser(node.base, session).push(key, {"n": 1}))
        await second_lookup.wait()
        node.signal(signal.SIGKILL)
        await node.ended()
        with pytest.raises(aiohttp.ClientError):
            await pushing


async def test_starting_node_announces_writes_of_a_killed_node(
    tmp_path: Path,
    start: Start,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
) -> None:
    prefix = new_prefix()
    await killed_before_it_announces(tmp_path, moto, prefix, redis, "notes/a", session)
    assert await follower.read("", 10) == []
    assert len(await follower.prepared(10)) == 1
    async with client(redis) as own:  # some seconds pass
        ((name, fields),) = cast(list[tuple[bytes, dict[Any, Any]]], await own.xrange(INTENTS))
        await own.xadd(INTENTS, {**fields, b"at": int(fields[b"at"]) - EARLY_RECOVERY_MS})
        await own.xdel(INTENTS, name)
    written = (await Browser(await start(members(moto, prefix, redis)), session).pull("notes/a")).json
    assert written["data"] == {"n": 1}
    assert await hashes(follower, 1) == [written["hash"]]


@pytest.mark.parametrize("kind", ["notes", "logs"])
async def test_the_next_write_is_announced_after_what_a_killed_node_wrote(
    tmp_path: Path,
    start: Start,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
    kind: str,
) -> None:
    prefix, key = new_prefix(), f"{kind}/a"
    browser = Browser(await start(members(moto, prefix, redis)), session)
    await killed_before_it_announces(tmp_path, moto, prefix, redis, key, session)
    read = f"{key}?full=true" if kind == "logs" else key
    first = (await browser.pull(read)).json["hash"]
    assert first
    assert await follower.read("", 10) == []
    second = await browser.push(key, {"n": 2}, first if kind == "notes" else None)
    assert second.status == 200
    assert await hashes(follower, 2) == [first, second.json["hash"]]
    assert await follower.prepared(10) == []


async def push_file(base: str, key: str, content: bytes, session: aiohttp.ClientSession) -> str:
    headers = {"Content-Type": "application/octet-stream"}
    async with session.post(f"{base}/push/{key}", data=BytesIO(content), headers=headers) as answer:
        assert answer.status == 200
        return str((await answer.json())["hash"])


async def pulled(base: str, key: str, session: aiohttp.ClientSession) -> bytes:
    async with session.get(f"{base}/pull/{key}") as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize(("size", "makes_visible"), [(9, "PUT"), (3_000_000, "POST uploadId")])
async def test_file_of_a_killed_node_is_announced_before_the_next_write(
    tmp_path: Path,
    start: Start,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
    size: int,
    makes_visible: str,
) -> None:
    prefix = new_prefix()
    other = await start(members(moto, prefix, redis))
    async with (
        FaultProxy(moto.endpoint) as proxy,
        serving(tmp_path, **members(moto, prefix, redis, proxy.url)) as node,
    ):
        proxy.lose_reply(makes_visible, when=lambda sent: "files/a" in sent.path)
        second_lookup = proxy.delay(until=asyncio.Event(), when=lambda _: proxy.met["lose_reply"] > 0)
        pushing = asyncio.create_task(push_file(node.base, "files/a", bytes(size), session))
        await second_lookup.wait()
        node.signal(signal.SIGKILL)
        await node.ended()
        with pytest.raises(aiohttp.ClientError):
            await pushing
    assert await pulled(other, "files/a", session) == bytes(size)
    assert await follower.read("", 10) == []
    second = await push_file(other, "files/a", b"two", session)
    assert await hashes(follower, 2) == [hashlib.sha256(bytes(size)).hexdigest(), second]


async def test_unfinished_file_of_a_killed_node_is_not_there(
    tmp_path: Path,
    start: Start,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
) -> None:
    prefix = new_prefix()
    other = await start(members(moto, prefix, redis))
    first = await push_file(other, "files/a", b"one", session)
    async with (
        FaultProxy(moto.endpoint) as proxy,
        serving(tmp_path, **members(moto, prefix, redis, proxy.url)) as node,
    ):
        sends = proxy.delay("PUT partNumber", until=asyncio.Event())
        pushing = asyncio.create_task(push_file(node.base, "files/a", bytes(3_000_000), session))
        await sends.wait()
        node.signal(signal.SIGKILL)
        await node.ended()
        with pytest.raises(aiohttp.ClientError):
            await pushing
    assert await pulled(other, "files/a", session) == b"one"
    assert await follower.prepared(10) == []
    assert await hashes(follower, 1) == [first]


async def test_event_batch_is_idempotent_across_nodes_after_a_crash(
    tmp_path: Path,
    start: Start,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
) -> None:
    prefix = new_prefix()
    body = {"data": {"events": [{"event": "seen"}]}, "baseHash": None}
    once = {"Idempotency-Key": "a key of this push"}

    async def push(base: str) -> Any:
        async with session.post(f"{base}/push/events/web/any", json=body, headers=once) as answer:
            assert answer.status == 200
            return await answer.json()

    other = await start(members(moto, prefix, redis))
    async with (
        FaultProxy(moto.endpoint) as proxy,
        serving(tmp_path, **members(moto, prefix, redis, proxy.url)) as node,
    ):
        proxy.lose_reply("PUT", when=lambda sent: sent.path.endswith(".parquet"))
        second_lookup = proxy.delay(until=asyncio.Event(), when=lambda _: proxy.met["lose_reply"] > 0)
        pushing = asyncio.create_task(push(node.base))
        await second_lookup.wait()
        node.signal(signal.SIGKILL)
        await node.ended()
        with pytest.raises(aiohttp.ClientError):
            await pushing
    pushed = await push(other)
    async with session.get(f"{other}/list/events/web") as answer:
        assert (await answer.json())["items"] == [pushed["batchId"]]
    content = await pulled(other, f"events/web/{pushed['batchId']}", session)
    assert hashlib.sha256(content).hexdigest() == pushed["hash"]
    assert set(await hashes(follower, 1)) == {pushed["hash"]}
