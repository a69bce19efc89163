"""Change streams as published clients read them, and sign for them.

See docs/reference/protocol.md#compatibility.
"""

import asyncio
import json
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from support.clients import SUBJECT, Signed, root_device
from support.collections import NOTES, collection
from support.loop_time import loop_time
from support.sse_client import Listen, Serve
from yarl import URL

from pysync.server.sse import HEARTBEAT_BUCKETS

MINE = collection("mine", "u/{identity}/{id}", readRoles=["self"], writeRoles=["public"])


def messages(text: str) -> list[Any]:
    """What the Python client makes of a stream: of each frame the lines of data, and of those objects."""
    frames = text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n")[:-1]
    found = []
    for frame in frames:
        data = [line[5:].removeprefix(" ") for line in frame.split("\n") if line.startswith("data:")]
        if data:
            message = json.loads("\n".join(data))
            assert isinstance(message, dict)
            found.append(message)
    return found


async def test_the_python_client_reads_changes_with_headers_that_stay_the_same(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    browser = await serve(NOTES, MINE)
    signed = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    headers = {**signed.headers("GET", "/events", b""), "Accept": "text/event-stream"}
    async with session.get(f"{browser.base}/events", headers=headers) as answer:
        assert answer.status == 200
        await browser.push("notes/a", {"n": 1})
        text = ""
        async with asyncio.timeout(30):
            while not messages(text):
                text += (await answer.content.readany()).decode()
        assert [message["params"] for message in messages(text)] == [{"id": "a"}]
    async with session.get(f"{browser.base}/events", headers=headers) as answer:
        assert answer.status == 401  # as they are told; what is open to everybody they hear again
    async with session.get(f"{browser.base}/events?collections=notes", headers=headers) as answer:
        assert answer.status == 200


async def test_no_stream_says_nothing_for_as_long_as_the_python_client_waits(
    serve: Serve, subscribe: Listen
) -> None:
    """It waits for 5 s, and a busy server may be late."""
    browser = await serve(NOTES)
    streams = [await subscribe(browser) for _ in range(HEARTBEAT_BUCKETS + 4)]
    with loop_time() as time:
        for stream in streams:
            await stream.block()
        for _ in range(4):
            time.now_s += 4.1
            for stream in streams:
                assert (await stream.block()).comments == 1


@pytest.mark.parametrize("mount", ["", "/sync", "/v1"])
@pytest.mark.parametrize("namespace", ["", "/acme"])
async def test_the_typescript_client_signs_a_query_that_is_encoded_as_a_form(
    mount: str, namespace: str, serve: Serve, session: aiohttp.ClientSession
) -> None:
    spaces = {"acme": {"collections": [{**NOTES, "storagePath": "acme/{id}"}]}}
    browser = await serve(NOTES, MINE, namespaces=spaces, server={"mountPath": mount})
    names = "notes" if namespace else "notes,mine"
    query = urlencode({"collections": names, "params": json.dumps({"notes": {"id": "a"}}), "more": "x y"})
    caller = Signed(browser.base + mount, session, SUBJECT, root_device(SUBJECT))
    target = f"{namespace}/events?{query}"
    url = URL(caller.base + target, encoded=True)
    for path in (target, mount + target):  # the prefix of the base taken off, and where there is none
        async with session.get(url, headers=caller.headers("GET", path, b"")) as answer:
            assert answer.status == 200
            assert (await answer.content.readline()) == b":\n"
    async with session.get(url, headers=caller.headers("GET", target + "&", b"")) as answer:
        assert answer.status == (200 if namespace else 401)
