"""`GET {ns}/events`: a client is told of every write that it could pull, and of no other (wire section 9)."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from conftest import ISSUER, STRANGER, Browser, Signed, Start, root_device
from streams import Heard, listen

NOTES = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
MINE = {"name": "mine", "storagePath": "u/{identity}/{id}", "readRoles": ["self"], "writeRoles": ["self"]}
ROOMS = {
    "name": "rooms",
    "storagePath": "rooms/{room}/{id}",
    "readRoles": ["cap:read:rooms"],
    "writeRoles": ["public"],
}


@pytest.fixture
def serve(start: Start, session: aiohttp.ClientSession) -> Callable[..., Awaitable[Browser]]:
    """Starts a service with these collections."""

    async def serve_one(*collections: dict[str, Any], **members: Any) -> Browser:
        return Browser(await start({"collections": list(collections), **members}), session)

    return serve_one


Serve = Callable[..., Awaitable[Browser]]
Listen = Callable[..., Awaitable[Heard]]


@pytest_asyncio.fixture
async def hear() -> AsyncIterator[Listen]:
    """`listen`, which hangs up when the test ends."""
    async with AsyncExitStack() as stack:

        async def hear_one(*args: Any, **options: Any) -> Heard:
            heard = await listen(*args, **options)
            stack.push_async_callback(heard.close)
            return heard

        yield hear_one


async def test_a_write_is_told_with_its_hash_and_time(serve: Serve, hear: Listen) -> None:
    browser = await serve(NOTES)
    heard = await hear(browser, collections="notes")
    assert (heard.status, heard.headers["Content-Type"]) == (200, "text/event-stream")
    written = (await browser.push("notes/a", {"n": 1})).json
    assert await heard.events(1) == [{"collection": "notes", "params": {"id": "a"}, **written}]


async def test_a_stream_begins_with_a_comment_and_a_place_to_resume_from(serve: Serve, hear: Listen) -> None:
    browser = await serve(NOTES)
    heard = await hear(browser)
    first = await heard.block()
    assert first.comments == 1
    assert first.id
    await heard.close()
    written = (await browser.push("notes/a", {"n": 1})).json
    again = await hear(browser, headers={"Last-Event-ID": first.id})
    assert (await again.event()).data["hash"] == written["hash"]


async def test_a_stream_resumes_after_the_last_event_that_came(serve: Serve, hear: Listen) -> None:
    browser = await serve(NOTES)
    heard = await hear(browser)
    for name in "abc":
        await browser.push(f"notes/{name}", {})
    for name in "abc":
        told = await heard.event()
        again = await hear(browser, lastEventId=told.id)
        left = await again.events(2 - "abc".index(name))
        assert [data["params"]["id"] for data in left] == list("abc")["abc".index(name) + 1 :]
        await browser.push("notes/later", {"name": name})


async def test_a_stream_that_hears_of_nothing_keeps_a_young_place(
    serve: Serve, hear: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.server.subscribers.BEAT_S", 0.02)
    other = {**NOTES, "name": "other", "storagePath": "other/{id}"}
    browser = await serve(NOTES, other, changes={"maxCount": 3})
    heard = await hear(browser, collections="other")
    first = await heard.block()
    for number in range(10):
        await browser.push(f"notes/{number}", {})
    newest = (await (await hear(browser)).block()).id
    while (told := await heard.block()).id != newest:
        assert told.data is None
    assert (await (await hear(browser, collections="other", lastEventId=first.id)).event()).event == "reset"
    again = await hear(browser, collections="other", lastEventId=newest)
    await browser.push("other/a", {})
    assert (await again.event()).data["params"] == {"id": "a"}


async def test_a_stream_whose_history_is_gone_is_reset_and_goes_on(serve: Serve, hear: Listen) -> None:
    browser = await serve(NOTES, changes={"maxCount": 3})
    place = (await (await hear(browser)).block()).id
    for number in range(5):
        await browser.push(f"notes/{number}", {})
    for lost in (place, "nonsense", "0", "9" * 99, "9" * 101, "\u00e9"):
        heard = await hear(browser, lastEventId=lost)
        told = await heard.event()
        assert (told.event, told.data) == ("reset", {"reset": True})
        await browser.push("notes/more", {"after": lost}, await _hash(browser, "notes/more"))
        assert (await heard.event()).data["params"] == {"id": "more"}
        again = await hear(browser, lastEventId=told.id)
        assert (await again.event()).data["params"] == {"id": "more"}


async def _hash(browser: Browser, key: str) -> str | None:
    return (await browser.pull(key)).json["hash"] or None


async def test_a_namespace_has_a_stream_of_its_own(serve: Serve, hear: Listen) -> None:
    browser = await serve(NOTES, namespaces={"acme": {"collections": [NOTES]}})
    root, inner = await hear(browser), await hear(browser, "/acme/events")
    alias = await hear(browser, "/v1/acme/events")
    await browser.request("POST", "/acme/push/notes/a", {"data": {"n": 1}})
    await browser.push("notes/b", {"n": 2})
    for heard in (inner, alias):
        told = (await heard.event()).data
        assert (told["namespace"], told["params"]) == ("acme", {"id": "a"})
    told = (await root.event()).data
    assert ("namespace" in told, told["params"]) == (False, {"id": "b"})


async def test_a_stream_tells_of_the_collections_and_parameters_that_it_is_asked_for(
    serve: Serve, hear: Listen
) -> None:
    lists = {**NOTES, "name": "lists", "storagePath": "lists/{owner}/{id}"}
    browser = await serve(NOTES, lists)
    everything = await hear(browser)
    notes = await hear(browser, collections="notes,,notes")
    some = await hear(browser, collections="lists,notes", params={"lists": {"owner": "bo", "id": 1}})
    for key in ("notes/1", "lists/al/1", "lists/bo/2", "lists/bo/1", "notes/2"):
        await browser.push(key, {})

    def keys(told: list[Any]) -> list[list[str]]:
        return [[each["collection"], *each["params"].values()] for each in told]

    assert keys(await notes.events(2)) == [["notes", "1"], ["notes", "2"]]
    assert keys(await some.events(3)) == [["notes", "1"], ["lists", "bo", "1"], ["notes", "2"]]
    assert len(await everything.events(5)) == 5


async def test_what_nobody_could_listen_for_is_refused_before_the_stream_begins(
    serve: Serve, hear: Listen, session: aiohttp.ClientSession
) -> None:
    sealed = {**NOTES, "name": "sealed", "storagePath": "s/{id}", "pushOnly": True}
    browser = await serve(NOTES, MINE, ROOMS, sealed, auth={"trustedIssuers": [ISSUER.ed_pub]})
    stranger = Signed(browser.base, session, STRANGER, root_device(STRANGER))
    forged = {"Authorization": "Cap eyJ9"}

    async def refused(who: Browser, headers: dict[str, str] | None = None, **query: Any) -> tuple[int, str]:
        heard = await hear(who, headers=headers, **query)
        assert heard.headers["Content-Type"] == "application/json"
        return heard.status, json.loads(heard.body)["error"]

    malformed: list[Any] = [
        "[]",
        "{",
        "1",
        {"notes": []},
        {"notes": {"other": "1"}},
        {"notes": {"id": "a/b"}},
    ]
    for sets in malformed:
        assert await refused(browser, params=sets) == (400, "Invalid params parameter")
    for value in (True, None, ["a"], "", "x" * 256):
        assert await refused(browser, params={"notes": {"id": value}}) == (400, "Invalid params parameter")
    assert await refused(browser, collections="notes,other") == (400, "Collection not found")
    assert await refused(browser, params={"other": {}}) == (400, "Collection not found")
    assert await refused(browser, collections="notes", params={"rooms": {}}) == (400, "Collection not found")
    assert await refused(browser, collections=",") == (
        400,
        "Missing required query parameter: collections",
    )
    assert await refused(browser, collections="rooms,mine") == (401, "Unauthorized")
    assert await refused(browser, collections="sealed") == (401, "Unauthorized")
    assert await refused(browser, forged, collections="rooms") == (401, "Unauthorized")
    assert await refused(browser, forged) == (401, "Unauthorized")
    assert await refused(stranger, collections="rooms,sealed") == (403, "Forbidden")
    assert await refused(stranger, params={"mine": {"identity": ISSUER.user_id}}, collections="mine") == (
        403,
        "Forbidden",
    )
    assert (await hear(browser, headers=forged, collections="notes")).status == 200
    assert (await hear(browser)).status == 200
