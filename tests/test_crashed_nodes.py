"""Nodes on one bucket and one Redis, killed between a write and its announcement: followers hear of it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from buckets import new_prefix
from components import RedisServer, S3Server
from conftest import Browser
from test_processes import serving

from pysync.changes import read_change
from pysync.coordinator.redis import RedisCoordinator
from pysync.testing import FaultProxy

pytestmark = pytest.mark.timeout(180)

LOGS = {
    "name": "logs",
    "storagePath": "logs/{id}",
    "readRoles": ["public"],
    "writeRoles": ["public"],
    "appendOnly": {"type": "by_timestamp", "requireAuthorSignature": False},
}
NOTES = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}


@pytest.fixture
async def follower(redis: RedisServer) -> AsyncIterator[RedisCoordinator]:
    coordinator = await RedisCoordinator.at(redis.url)
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
    return {"store": store, "coordinator": redis.url, "collections": [NOTES, LOGS]}


async def hashes(follower: RedisCoordinator, count: int) -> list[str]:
    """Of the first changes that are told, once there are so many."""
    while len(found := await follower.changes("", 100) or []) < count:
        await follower.wait(await follower.newest())
    return [read_change(told).hash for _, told in found]


async def killed_before_it_announces(
    folder: Path, s3: S3Server, prefix: str, redis: RedisServer, key: str, session: aiohttp.ClientSession
) -> None:
    """Push to `key` by a node that is killed when S3 has done it and nobody has heard of that."""
    async with (
        FaultProxy(s3.endpoint) as proxy,
        serving(folder, **members(s3, prefix, redis, proxy.url)) as node,
    ):
        proxy.lose_reply("PUT", when=lambda sent: sent.path.endswith(key))
        looks_again = proxy.delay(until=asyncio.Event(), when=lambda _: proxy.met["lose_reply"] > 0)
        pushing = asyncio.create_task(Browser(node.base, session).push(key, {"n": 1}))
        await looks_again.wait()
        node.signal(signal.SIGKILL)
        await node.ended()
        with pytest.raises(aiohttp.ClientError):
            await pushing


async def test_the_next_start_of_a_node_announces_what_a_killed_one_wrote(
    tmp_path: Path,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
) -> None:
    prefix = new_prefix()
    await killed_before_it_announces(tmp_path, moto, prefix, redis, "notes/a", session)
    assert await follower.changes("", 10) == []
    assert len(await follower.intents(10)) == 1
    async with serving(tmp_path, **members(moto, prefix, redis)) as node:
        written = (await Browser(node.base, session).pull("notes/a")).json
        assert written["data"] == {"n": 1}
        assert await hashes(follower, 1) == [written["hash"]]


@pytest.mark.parametrize("kind", ["notes", "logs"])
async def test_the_next_write_is_announced_after_what_a_killed_node_wrote(
    tmp_path: Path,
    moto: S3Server,
    redis: RedisServer,
    follower: RedisCoordinator,
    session: aiohttp.ClientSession,
    kind: str,
) -> None:
    prefix, key = new_prefix(), f"{kind}/a"
    async with serving(tmp_path, **members(moto, prefix, redis)) as other:
        browser = Browser(other.base, session)
        await killed_before_it_announces(tmp_path, moto, prefix, redis, key, session)
        read = f"{key}?full=true" if kind == "logs" else key
        first = (await browser.pull(read)).json["hash"]
        assert first
        assert await follower.changes("", 10) == []
        second = await browser.push(key, {"n": 2}, first if kind == "notes" else None)
        assert second.status == 200
        assert await hashes(follower, 2) == [first, second.json["hash"]]
        assert await follower.intents(10) == []
