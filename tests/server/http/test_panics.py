"""A panic of the core, which is no Exception to Python, ends one request: nobody waits for it for ever."""

import asyncio
from typing import Any, NoReturn

import aiohttp
import pytest
from support.append_log_nodes import Node, nothing
from support.clients import Browser, Start
from support.collections import NOTES

from pysync import _core
from pysync.store.memory import MemoryStore


def panics(*args: object, **options: object) -> NoReturn:
    raise _core.PanicException("index out of bounds")


async def test_a_panic_is_a_500_that_names_the_request_and_what_it_was_about(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    class Panicking(MemoryStore):
        is_panicking = True

        async def put(self, *args: Any, **options: Any) -> str:
            return panics() if self.is_panicking else await super().put(*args, **options)

    store = Panicking()
    browser = Browser(await start({"collections": [NOTES]}, store), session)
    answer = await browser.push("notes/a", {}, None, {"X-Request-Id": "find-me"})
    store.is_panicking = False
    assert answer.error == (500, "Internal error")
    assert answer.json["requestId"] == "find-me"
    assert "unhandled error: push notes 'notes/a'" in caplog.text
    assert (await browser.push("notes/a", {})).status == 200


async def test_a_panic_among_reads_that_are_made_together_is_a_500(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Panicking(MemoryStore):
        async def get(self, *_: object) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(panics))

    base = await start({"collections": [NOTES]}, Panicking())
    assert (await Browser(base, session).pull("notes/a")).error == (500, "Internal error")


async def test_after_a_panic_in_a_group_of_appends_the_log_goes_on(node: Node) -> None:
    async def panic(_: str) -> None:
        node.before_put = nothing
        panics()

    node.before_put = panic
    outcomes = await node.append_at_once([{"n": n} for n in range(3)])
    assert [type(outcome) for outcome in outcomes] == [_core.PanicException] * 3
    await node.append({"n": 3})
    await node.logs.close()
