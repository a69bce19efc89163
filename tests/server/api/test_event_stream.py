"""`GET {ns}/events`: a client is told of every write that it could pull, and of no other.

See docs/reference/protocol.md#change-stream.
"""

import json
from typing import Any

import aiohttp
from support.clients import ISSUER, STRANGER, Browser, Signed, root_device
from support.collections import MINE, NOTES, collection, limit_of
from support.loop_time import loop_time
from support.sse_client import Listen, Serve

from pysync.auth.issuing import Grant
from pysync.server.sse import HEARTBEAT_S

ROOMS = collection("rooms", "rooms/{room}/{id}", readRoles=["cap:read:rooms"], writeRoles=["public"])


async def test_write_is_delivered_with_its_hash_and_time(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(NOTES)
    stream = await subscribe(browser, collections="notes")
    assert (stream.status, stream.headers["Content-Type"]) == (200, "text/event-stream")
    written = (await browser.push("notes/a", {"n": 1})).json
    assert await stream.events(1) == [{"collection": "notes", "params": {"id": "a"}, **written}]


async def test_stream_begins_with_a_comment_and_a_cursor_to_resume_from(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(NOTES)
    stream = await subscribe(browser)
    first = await stream.block()
    assert first.comments == 1
    assert first.id
    await stream.close()
    written = (await browser.push("notes/a", {"n": 1})).json
    again = await subscribe(browser, headers={"Last-Event-ID": first.id})
    assert (await again.event()).data["hash"] == written["hash"]


async def test_stream_resumes_after_the_last_received_event(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(NOTES)
    stream = await subscribe(browser)
    for name in "abc":
        await browser.push(f"notes/{name}", {})
    for name in "abc":
        found = await stream.event()
        again = await subscribe(browser, lastEventId=found.id)
        left = await again.events(2 - "abc".index(name))
        assert [data["params"]["id"] for data in left] == list("abc")["abc".index(name) + 1 :]
        await browser.push("notes/later", {"name": name})


async def test_resumed_stream_delivers_only_readable_documents(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    browser = await serve(ROOMS)
    device = root_device(STRANGER, collections=("rooms",), grant=Grant(("read",), ("rooms/mine/*",)))
    caller = Signed(browser.base, session, STRANGER, device)
    cursor = (await (await subscribe(caller)).block()).id
    for key in ("mine/1", "other/1", "mine/2", "other/2", "mine/3"):
        await browser.push(f"rooms/{key}", {})
    stream = await subscribe(caller, headers={"Last-Event-ID": cursor})
    found = [(each["params"]["room"], each["params"]["id"]) for each in await stream.events(3)]
    assert found == [("mine", "1"), ("mine", "2"), ("mine", "3")]


async def test_last_event_id_header_wins_over_the_parameter(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(NOTES)
    began = (await (await subscribe(browser)).block()).id
    for key in "ab":
        await browser.push(f"notes/{key}", {})
    stopped = (await (await subscribe(browser, lastEventId=began)).event()).id
    again = await subscribe(browser, headers={"Last-Event-ID": stopped}, lastEventId=began)
    assert (await again.event()).data["params"] == {"id": "b"}


async def test_idle_stream_keeps_a_young_cursor(serve: Serve, subscribe: Listen) -> None:
    other = {**NOTES, "name": "other", "storagePath": "other/{id}"}
    browser = await serve(NOTES, other, changes={"maxCount": 3})
    stream = await subscribe(browser, collections="other")
    first = await stream.block()
    for number in range(10):
        await browser.push(f"notes/{number}", {})
    newest = (await (await subscribe(browser)).block()).id
    found = first
    with loop_time() as time:
        while found.id != newest:
            time.now_s += HEARTBEAT_S
            found = await stream.block()
            assert found.data is None
    assert (
        await (await subscribe(browser, collections="other", lastEventId=first.id)).event()
    ).event == "reset"
    again = await subscribe(browser, collections="other", lastEventId=newest)
    await browser.push("other/a", {})
    assert (await again.event()).data["params"] == {"id": "a"}


async def test_a_stream_whose_history_is_gone_is_reset_and_goes_on(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(NOTES, changes={"maxCount": 3})
    cursor = (await (await subscribe(browser)).block()).id
    for number in range(5):
        await browser.push(f"notes/{number}", {})
    for lost in (cursor, "nonsense", "0", "9" * 99, "9" * 101, "\u00e9"):
        stream = await subscribe(browser, lastEventId=lost)
        found = await stream.event()
        assert (found.event, found.data) == ("reset", {"reset": True})
        await browser.push("notes/more", {"after": lost}, await _hash(browser, "notes/more"))
        assert (await stream.event()).data["params"] == {"id": "more"}
        again = await subscribe(browser, lastEventId=found.id)
        assert (await again.event()).data["params"] == {"id": "more"}


async def _hash(browser: Browser, key: str) -> str | None:
    return (await browser.pull(key)).json["hash"] or None


async def test_a_namespace_has_a_stream_of_its_own(serve: Serve, subscribe: Listen) -> None:
    own = {**NOTES, "storagePath": "acme/{id}"}
    browser = await serve(NOTES, namespaces={"acme": {"collections": [own]}})
    root, inner = await subscribe(browser), await subscribe(browser, "/acme/events")
    alias = await subscribe(browser, "/v1/acme/events")
    await browser.request("POST", "/acme/push/acme/a", {"data": {"n": 1}})
    await browser.push("notes/b", {"n": 2})
    for stream in (inner, alias):
        found = (await stream.event()).data
        assert (found["namespace"], found["params"]) == ("acme", {"id": "a"})
    found = (await root.event()).data
    assert ("namespace" in found, found["params"]) == (False, {"id": "b"})


async def test_stream_delivers_requested_collections_and_parameters(serve: Serve, subscribe: Listen) -> None:
    lists = {**NOTES, "name": "lists", "storagePath": "lists/{owner}/{id}"}
    browser = await serve(NOTES, lists)
    everything = await subscribe(browser)
    notes = await subscribe(browser, collections="notes,,notes")
    some = await subscribe(browser, collections="lists,notes", params={"lists": {"owner": "bo", "id": 1}})
    for key in ("notes/1", "lists/al/1", "lists/bo/2", "lists/bo/1", "notes/2"):
        await browser.push(key, {})

    def keys(found: list[Any]) -> list[list[str]]:
        return [[each["collection"], *each["params"].values()] for each in found]

    assert keys(await notes.events(2)) == [["notes", "1"], ["notes", "2"]]
    assert keys(await some.events(3)) == [["notes", "1"], ["lists", "bo", "1"], ["notes", "2"]]
    assert len(await everything.events(5)) == 5


async def test_unreadable_subscription_is_rejected_before_the_stream_begins(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    sealed = {**NOTES, "name": "sealed", "storagePath": "s/{id}", "pushOnly": True}
    browser = await serve(NOTES, MINE, ROOMS, sealed, auth={"trustedIssuers": [ISSUER.ed_pub]})
    stranger = Signed(browser.base, session, STRANGER, root_device(STRANGER))
    forged = {"Authorization": "Cap eyJ9"}

    async def rejected(who: Browser, headers: dict[str, str] | None = None, **query: Any) -> tuple[int, str]:
        stream = await subscribe(who, headers=headers, **query)
        assert stream.headers["Content-Type"] == "application/json"
        return stream.status, json.loads(stream.body)["error"]

    malformed: list[Any] = [
        "[]",
        "{",
        "1",
        {"notes": []},
        {"notes": {"other": "1"}},
        {"notes": {"id": "a/b"}},
    ]
    for sets in malformed:
        assert await rejected(browser, params=sets) == (400, "Invalid params parameter")
    for value in (True, None, ["a"], "", "x" * 256):
        assert await rejected(browser, params={"notes": {"id": value}}) == (400, "Invalid params parameter")
    assert await rejected(browser, collections="notes,other") == (400, "Collection not found")
    assert await rejected(browser, params={"other": {}}) == (400, "Collection not found")
    assert await rejected(browser, collections="notes", params={"rooms": {}}) == (400, "Collection not found")
    assert await rejected(browser, collections=",") == (
        400,
        "Missing required query parameter: collections",
    )
    assert await rejected(browser, collections="rooms,mine") == (401, "Unauthorized")
    assert await rejected(browser, collections="sealed") == (401, "Unauthorized")
    assert await rejected(browser, forged, collections="rooms") == (401, "Unauthorized")
    assert await rejected(browser, forged) == (401, "Unauthorized")
    assert await rejected(stranger, collections="rooms,sealed") == (403, "Forbidden")
    assert await rejected(stranger, params={"mine": {"identity": ISSUER.user_id}}, collections="mine") == (
        403,
        "Forbidden",
    )
    assert (await subscribe(browser, headers=forged, collections="notes")).status == 200
    assert (await subscribe(browser)).status == 200


async def test_head_answers_the_head_alone(serve: Serve, session: aiohttp.ClientSession) -> None:
    browser = await serve(NOTES)
    for _ in range(2):
        reply = await browser.request("HEAD", "/events")
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["Content-Type"] == "text/event-stream"
    assert (await browser.request("POST", "/events", {})).status == 405


async def test_nothing_on_the_way_may_keep_a_stream(serve: Serve, subscribe: Listen) -> None:
    stream = await subscribe(await serve(NOTES))
    assert stream.headers["Cache-Control"] == "no-store"
    assert stream.headers["X-Accel-Buffering"] == "no"
    assert stream.headers["Connection"] == "close"
    assert not stream.headers.keys() & {"Content-Length", "Transfer-Encoding"}


async def test_pages_elsewhere_may_listen_and_resume(serve: Serve, subscribe: Listen) -> None:
    origin = {"Origin": "https://app.example"}
    browser = await serve(NOTES, server={"cors": {"origins": ["https://app.example"]}})
    stream = await subscribe(browser, headers=origin)
    assert stream.headers["Access-Control-Allow-Origin"] == "https://app.example"
    requested = {**origin, "Access-Control-Request-Method": "GET"}
    preflight = await browser.request("OPTIONS", "/events", headers=requested)
    assert preflight.status == 204
    assert "Last-Event-ID" in preflight.headers["Access-Control-Allow-Headers"]


async def test_a_subscription_counts_as_a_pull_of_each_collection_that_it_names(
    serve: Serve, subscribe: Listen
) -> None:
    limit = limit_of(2)
    limited = {**NOTES, "name": "limited", "storagePath": "limited/{id}", "rateLimit": {"pull": limit}}
    browser = await serve(NOTES, limited)
    assert (await subscribe(browser, collections="limited,notes")).status == 200
    assert (await browser.pull("limited/a")).status == 200
    rejected = await subscribe(browser, collections="limited,notes")
    assert (rejected.status, json.loads(rejected.body)["error"]) == (429, "Rate limit exceeded")
    assert "Retry-After" in rejected.headers
    assert (await subscribe(browser, collections="notes")).status == 200


async def test_subscription_counts_once_and_only_for_its_collections(serve: Serve, subscribe: Listen) -> None:
    twice = {"pull": limit_of(2)}
    closed = {**ROOMS, "rateLimit": {"pull": limit_of(1)}}
    browser = await serve({**NOTES, "rateLimit": twice}, closed)
    statuses = [(await subscribe(browser, collections="notes,rooms")).status for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_append_is_delivered_with_the_hash_of_its_answer(serve: Serve, subscribe: Listen) -> None:
    log = {**NOTES, "appendOnly": {"requireAuthorSignature": False}}
    passing = {
        **log,
        "name": "passing",
        "storagePath": "p/{id}",
        "appendOnly": {**log["appendOnly"], "persist": False},
    }
    browser = await serve(log, passing)
    stream = await subscribe(browser)
    for key in ("notes/a", "p/a"):
        answer = await browser.request("POST", f"/push/{key}", {"data": {"n": 1}})
        found = (await stream.event()).data
        assert {name: found[name] for name in ("hash", "timestamp")} == answer.json


async def test_a_members_event_has_the_parameters_of_its_bundle(serve: Serve, subscribe: Listen) -> None:
    title = {**NOTES, "name": "title", "bundle": "page"}
    body = {**NOTES, "name": "body", "bundle": "page", "readRoles": ["admin"]}
    browser = await serve(title, body)
    stream = await subscribe(browser)
    for name in ("body", "title"):
        await browser.push(f"notes/a/{name}", {})
    found = (await stream.event()).data
    assert (found["collection"], found["params"]) == ("title", {"id": "a"})


async def test_metrics_count_open_streams_and_sent_events(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(namespaces={"acme": {"collections": [NOTES]}})
    stream, other = await subscribe(browser, "/acme/events"), await subscribe(browser, "/acme/events")
    await browser.request("POST", "/acme/push/notes/a", {"data": {}})
    await stream.event()
    await other.event()
    page = (await browser.request("GET", "/metrics")).body.decode()
    assert "\npysync_streams 2.0\n" in page
    assert '\npysync_events_total{collection="acme/notes"} 2.0\n' in page
    await stream.close()
    while "\npysync_streams 1.0\n" not in page:
        page = (await browser.request("GET", "/metrics")).body.decode()
