"""Change streams as published clients read them, and sign for them.

See docs/reference/protocol.md#compatibility.
"""

import asyncio
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from support.clients import SUBJECT, Signed, Start, root_device
from support.collections import NOTES, collection
from support.sse_client import Listen, Serve
from yarl import URL

from pysync.server import sse

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
    serve: Serve, subscribe: Listen, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sse.HEARTBEAT_S == 4.0  # it waits for 5 s, and a busy server may be late
    browser, streams = await serve(NOTES), sse.HEARTBEAT_BUCKETS + 4
    for _ in range(streams):
        await subscribe(browser)
    (app,) = start.apps  # type: ignore[attr-defined]
    hub = app.subscribers
    heartbeats = defaultdict[sse.SSEConnection, list[float]](list)
    monkeypatch.setattr(
        sse.SSEConnection, "heartbeat", lambda stream, _: heartbeats[stream].append(hub._heartbeat_at)
    )
    for _ in range(4 * sse.HEARTBEAT_BUCKETS):  # as timers would, without the time
        timer = hub._heartbeat_timer
        timer._run()
        timer.cancel()
    assert len(heartbeats) == streams
    for times in heartbeats.values():
        assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([4.0] * 3)


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
