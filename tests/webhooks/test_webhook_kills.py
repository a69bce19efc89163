"""Webhooks whose sender and whose receiver are killed again and again: every change arrives, in order."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from components import RedisServer, S3Server
from support.clients import Browser, Start
from support.collections import collection
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix
from support.server_process import Process, serving
from support.webhook_receiver import Inbox, accept, app_of, drop, receiving, sending, webhook
from support.worker_processes import workers

from pysync.store.memory import MemoryStore

NOTES = collection("notes")
KEYS = ("a", "b", "c")


class Writer:
    """Writes documents and remembers their hashes, in order."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.written: list[tuple[str, str]] = []
        self._hashes: dict[str, str] = {}

    async def write(self, key: str) -> None:
        number = len(self.written)
        answer = await self.browser.push(f"notes/{key}", {"n": number}, self._hashes.get(key))
        assert answer.status == 200, answer
        self._hashes[key] = answer.json["hash"]
        self.written.append((key, answer.json["hash"]))


def accepted(inbox: Inbox) -> list[tuple[str, str]]:
    """The changes that a receiver knows if it skips repetitions by id. Each is the same as the first."""
    bodies: dict[str, bytes] = {}
    found = []
    for one in inbox.deliveries:
        if one.id in bodies:
            assert one.raw == bodies[one.id]
            continue
        assert one.id > max(bodies, default="")
        bodies[one.id] = one.raw
        found += [(change["params"]["id"], change["hash"]) for change in one.body["changes"]]
    return found


async def test_every_change_arrives_in_order_over_100_kills(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """The sender is killed before or after it has saved that a request was accepted, or while it waits for
    the response; the receiver before or after it has dealt with one."""
    random, store = Random(30), MemoryStore()
    writer = Writer(Browser(await start({"collections": [NOTES]}, store), session))
    app = app_of(start)
    killed = asyncio.Event()

    async def kill(
        process: FaultyStore, is_done: bool, how: str, request: aiohttp.web.Request
    ) -> aiohttp.web.StreamResponse:
        process.crash(0, done=is_done)
        killed.set()
        if how == "lost request":
            inbox.deliveries.pop()
        return await (accept if how == "sender" else drop)(request)

    async with receiving() as inbox:
        async with sending(app, webhook(inbox.url)):
            pass  # the name is known from here on
        for _ in range(100):
            for key in random.choices(KEYS, k=random.randint(1, 3)):
                await writer.write(key)
            process = FaultyStore(store)
            how = random.choice(["sender", "lost request", "lost response"])
            inbox.answers.append(partial(kill, process, random.random() < 0.5, how))
            killed.clear()
            async with sending(app, webhook(inbox.url), store=process):
                await killed.wait()
            assert process.has_crashed == (how == "sender")
        async with sending(app, webhook(inbox.url)):
            await inbox.until(lambda: accepted(inbox) == writer.written)


@pytest.mark.process
@pytest.mark.slow
async def test_every_change_arrives_in_order_when_the_server_is_killed(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with receiving() as inbox:
        members: dict[str, Any] = {"collections": [NOTES], "webhooks": [webhook(inbox.url)]}
        writer = Writer(Browser("", session))

        async def kill(
            server: Process, is_dealt_with: bool, request: aiohttp.web.Request
        ) -> aiohttp.web.StreamResponse:
            if not is_dealt_with:
                inbox.deliveries.pop()
            server.process.kill()
            return await drop(request)

        for is_dealt_with in (True, False) * 4:
            async with serving(tmp_path, **members) as server:
                writer.browser = Browser(server.base, session)
                await inbox.until(lambda: accepted(inbox) == writer.written)
                for key in KEYS:
                    await writer.write(key)
                await inbox.until(lambda: accepted(inbox) == writer.written)
                inbox.answers.append(partial(kill, server, is_dealt_with))
                await writer.write("a")
                await server.ended()
        async with serving(tmp_path, **members):
            await inbox.until(lambda: accepted(inbox) == writer.written)


@pytest.mark.process
@pytest.mark.slow
async def test_another_worker_continues_when_one_is_killed(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with receiving() as inbox:
        hooks = [webhook(inbox.url)]
        async with workers(tmp_path, collections=[NOTES], webhooks=hooks, server={"workers": 2}) as service:
            writer = Writer(Browser(service.base, session))
            for number in (1, 2, 1, 2):
                async with aiohttp.ClientSession() as fresh:  # a connection ends with its worker
                    writer.browser = Browser(service.base, fresh)
                    for key in KEYS:
                        await writer.write(key)
                    await inbox.until(lambda: accepted(inbox) == writer.written)
                await service.kill(number)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)  # with the start of Ceph; a lease in Redis ends after 5 s
async def test_two_nodes_on_s3_and_redis_send_in_turn_and_one_at_a_time(
    tmp_path: Path, session: aiohttp.ClientSession, radosgw: S3Server, redis: RedisServer
) -> None:
    store = radosgw.store(new_prefix())
    members: dict[str, Any] = {
        "collections": [NOTES],
        "coordinator": redis.url,
        "store": {
            "url": store.url,
            "endpoint": store.endpoint,
            "region": store.region,
            "forcePathStyle": True,
            "accessKeyId": store.access_key_id,
            "secretAccessKey": store.secret_access_key,
        },
    }
    async with receiving() as inbox, AsyncExitStack() as stack:
        members["webhooks"] = [webhook(inbox.url)]

        async def node() -> Process:
            return await stack.enter_async_context(serving(tmp_path, **members))

        async def kill(node: Process, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            node.process.kill()
            return await drop(request)

        leader, writer = await node(), Writer(Browser("", session))
        for _ in range(3):
            follower = await node()
            for at, key in enumerate(KEYS * 4):
                writer.browser = Browser((leader, follower)[at % 2].base, session)
                await writer.write(key)
            await inbox.until(lambda: accepted(inbox) == writer.written)
            assert len({one.id for one in inbox.deliveries}) == len(inbox.deliveries)

            inbox.answers.append(partial(kill, leader))
            await writer.write("a")
            await leader.ended()
            number = len(inbox.deliveries)
            *_, first, again = await inbox.first(number + 1)
            assert first.raw == again.raw
            del inbox.deliveries[-1]
            leader = follower
