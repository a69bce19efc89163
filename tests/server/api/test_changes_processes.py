"""Pages of changes from several processes: a cursor of one is good at each other, also after kills."""

import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from components import RedisServer, S3Server
from support.change_pages import page, pages
from support.clients import Browser, Reply, Start
from support.collections import NOTES
from support.s3_stores import new_prefix
from support.server_process import serving
from support.worker_processes import on_fresh_connection, workers

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


async def test_cursor_is_good_at_every_worker_and_after_any_of_them_was_killed(tmp_path: Path) -> None:
    async with workers(tmp_path, server={"workers": 3}, collections=[NOTES]) as service:

        async def send(method: str, target: str, body: object = None) -> Reply:
            return await on_fresh_connection(
                service.base, lambda browser: browser.request(method, target, body)
            )

        found, cursor = list[str](), ""
        for number in range(24):
            pushed = await send("POST", f"/push/notes/{number}", {"data": {}, "baseHash": None})
            assert pushed.status == 200
            if number % 8 == 7:
                await service.kill(number // 8 + 1)
            reply = (await send("GET", f"/changes?limit=3&since={cursor}" if cursor else "/changes")).json
            assert "reset" not in reply
            found += [change["params"]["id"] for change in reply["changes"]]
            cursor = reply["cursor"]
        assert found == [str(number) for number in range(24)]


async def test_cursor_is_good_after_the_server_was_killed_and_started_again(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    cursor = ""
    for number in range(3):
        async with serving(tmp_path, collections=[NOTES]) as server:
            browser = Browser(server.base, session)
            assert (await browser.push(f"notes/{number}", {})).status == 200
            found = await pages(browser, cursor or None)
            assert found.keys == [f"notes/{number}"]
            assert (await pages(browser)).keys == [f"notes/{each}" for each in range(number + 1)]
            cursor = found.cursor
            server.signal(signal.SIGKILL)
            await server.ended()


async def test_nodes_on_a_bucket_answer_from_the_log_that_they_share(
    start: Start, moto: S3Server, redis: RedisServer, session: aiohttp.ClientSession
) -> None:
    members: dict[str, Any] = {
        "store": {
            "url": f"s3://{moto.bucket}/{new_prefix()}",
            "endpoint": moto.endpoint,
            "region": moto.region,
            "forcePathStyle": True,
            "accessKeyId": moto.access_key_id,
            "secretAccessKey": moto.secret_access_key,
        },
        "coordinator": redis.url,
        "collections": [NOTES],
    }
    one, other = [Browser(await start(members), session) for _ in range(2)]
    await one.push("notes/a", {})
    reply = (await page(one)).json
    assert reply.keys() == {"reset", "cursor"}
    await one.push("notes/b", {})
    await other.push("notes/c", {})
    found = await pages(other, reply["cursor"], limit=1)
    assert found.keys == ["notes/b", "notes/c"]
    assert (await pages(one, found.cursor)).keys == []
    assert (await page(one, "0" * 17)).json == {"reset": True, "cursor": found.cursor}
