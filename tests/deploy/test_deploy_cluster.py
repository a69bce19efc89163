"""deploy/cluster.json as it is deployed: three processes on one bucket and one Redis, behind nginx."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio
from components import S3Server, free_port
from components.fixtures import StartNginx, StartRedis
from support.clients import SUBJECT, Browser, Signed, root_device
from support.deployment import DEPLOY
from support.nginx_fixture import site

pytestmark = pytest.mark.process

PASSWORD = "0123456789abcdef"
ME = SUBJECT.user_id


@pytest_asyncio.fixture
async def nodes(radosgw: S3Server, start_redis: StartRedis) -> AsyncIterator[list[str]]:
    """The base URLs of three nodes."""
    redis = start_redis("--requirepass", PASSWORD)
    environment = {
        "S3_ENDPOINT": radosgw.endpoint,
        "S3_ACCESS_KEY_ID": radosgw.access_key_id,
        "S3_SECRET_ACCESS_KEY": radosgw.secret_access_key,
        "REDIS_ADDRESS": f"127.0.0.1:{redis.port}",
        "REDIS_PASSWORD": PASSWORD,
        "PYSYNC_SERVER_HOST": "127.0.0.1",
        "PYSYNC_SERVER_PORT": "0",
        "PYSYNC_SERVER_ADMIN_PORT": "0",
    }
    async with AsyncExitStack() as stack:
        started = [stack.enter_async_context(node(environment)) for _ in range(3)]
        yield [await each for each in started]


@asynccontextmanager
async def node(environment: dict[str, str]) -> AsyncIterator[str]:
    """A server process with deploy/cluster.json; its base URL. It drains at the end, and ends well."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "serve", "--config", str(DEPLOY / "cluster.json"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        first = (await process.stdout.readline()).decode()
        assert " at http://" in first, first
        yield first.split(" at ")[1].strip()
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def signer(base: str, session: aiohttp.ClientSession) -> Signed:
    return Signed(base, session, SUBJECT, root_device(SUBJECT))


@pytest.mark.timeout(180)  # with the start of Ceph
async def test_three_nodes_behind_nginx_are_one_service(
    nodes: list[str], start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    port = free_port()
    me = signer(start_nginx(site("cluster.conf", port, *nodes), port).url, session)
    key = f"users/{ME}/notes/{os.urandom(6).hex()}"
    hash_: str | None = None
    for n in range(6):
        pushed = await me.push(key, {"n": n}, hash_)
        assert pushed.status == 200, "each node in turn, upon what the one before it stored"
        hash_ = pushed.json["hash"]
    for base in nodes:
        assert (await signer(base, session).pull(key)).json["data"] == {"n": 5}

    headers = me.headers("GET", f"/pull/{key}", b"")
    anyone = Browser(me.base, session)
    statuses = [(await anyone.pull(key, headers)).status for _ in range(4)]
    assert statuses == [200, 401, 401, 401], "a replay is one on every node"
