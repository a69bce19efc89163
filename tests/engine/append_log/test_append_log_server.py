"""Logs in the service: time, spaces, limits, failures, long answers, and what Starfish left behind."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
import pytest
from support.append_log_browser import append, elements, hash_of, proof, tail, ten
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import NOTES, collection, limit_of
from support.faulty_store import FaultyStore
from yarl import URL

from pysync.errors import StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

PLAIN = {"requireAuthorSignature": False}
LOG: dict[str, Any] = collection("log", appendOnly=PLAIN)
TEXT = "x" * 70_000
"""Large enough for a segment of its own."""


def clocked() -> FakeClock:
    return FakeClock(minted_at()["now_s"] * 1000)


async def long_log(browser: Browser, key: str, count: int = 100) -> Any:
    """Appends more than one answer should hold, and returns the elements."""
    found = []
    for n in range(count):
        data = {"n": n, "text": TEXT}
        answer = await append(browser, key, data)
        assert answer.status == 200
        found.append({"ts": answer.json["timestamp"], "data": data})
    return found


# Time


async def test_time_is_the_servers_and_never_stands_still(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = clocked()
    browser = Browser(await start({"collections": [LOG]}, now_ms=clock), session)
    first = clock.now_ms
    times = []
    for moved in (0, 0, 10, -500, 0):
        clock.now_ms += moved
        times.append((await append(browser, "log/a", {})).json["timestamp"])
    assert times == [first, first + 1, first + 10, first + 11, first + 12]
    limit = clock.now_ms + 300_000
    assert (await append(browser, "log/a", {}, ts=limit + 1)).error == (400, "ts is too far in the future")
    assert (await append(browser, "log/a", {}, ts=limit)).json["timestamp"] == limit
    assert (await tail(browser, "log/a")).json["timestamp"] == clock.now_ms


async def test_a_log_expires_as_a_whole_and_an_append_starts_it_anew(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = clocked()
    browser = Browser(await start({"collections": [{**LOG, "ttlMs": 1000}]}, now_ms=clock), session)
    await append(browser, "log/a", {"n": 1}, ts=1)
    clock.now_ms += 900
    last = (await append(browser, "log/a", {"n": 2}, ts=2)).json["hash"]
    clock.now_ms += 1000
    assert (await tail(browser, "log/a")).json["hash"] == last, "its last append counts, not its elements"
    clock.now_ms += 1
    for query in ("full=true", "last=1", "checkpoint=0"):
        expired = await tail(browser, "log/a", query, {"If-None-Match": f'"{last}"'})
        assert (expired.status, expired.json["data"], expired.json["hash"]) == (200, {"items": []}, "")
        assert "ETag" not in expired.headers
    anew = await append(browser, "log/a", {"n": 3}, ts=1)
    assert anew.json == {"hash": hash_of(1, {"n": 3}), "timestamp": 1}
    assert await elements(browser, "log/a") == [{"ts": 1, "data": {"n": 3}}]


async def test_the_sweep_deletes_expired_logs_with_all_they_consist_of(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = clocked()
    store = MemoryStore(clock)
    short = {**LOG, "ttlMs": 1000}
    sealed = {**short, "name": "sealed", "storagePath": "sealed/{id}", "pushOnly": True}
    kept = {**LOG, "name": "kept", "storagePath": "log/kept"}
    browser = Browser(await start({"collections": [short, sealed, kept]}, store=store, now_ms=clock), session)
    for key in ("log/old", "sealed/old"):
        for _ in range(3):
            await append(browser, key, {"text": TEXT})
    await append(browser, "log/kept", {})
    clock.now_ms += 1001
    await append(browser, "log/new", {})
    assert len([each async for each in store.walk("_pysync/logs")]) > 1
    (app,) = start.apps  # type: ignore[attr-defined]
    assert await app.jobs.ttl_sweeper.sweep() == 2
    assert {each.key async for each in store.walk("")} == {"log/kept", "log/new"}


async def test_a_checkpoint_may_be_too_old(start: Start, session: aiohttp.ClientSession) -> None:
    clock = clocked()
    log = {**LOG, "appendOnly": {**PLAIN, "maxCheckpointAgeMs": 1000, "maxPullLimit": 5}}
    browser = Browser(await start({"collections": [log]}, now_ms=clock), session)
    await ten(browser, "log/a")
    for since in (clock.now_ms - 1000, clock.now_ms, clock.now_ms + 10**6):
        assert (await tail(browser, "log/a", f"checkpoint={since}")).status == 200
    for query in (f"checkpoint={clock.now_ms - 1001}", f"since={clock.now_ms - 1001}", "checkpoint=0&last=1"):
        assert (await tail(browser, "log/a", query)).error == (400, "checkpoint_too_old")
    assert (await tail(browser, "log/a", "checkpoint=0&full=1")).error == (400, "full_with_bounds")
    assert len(await elements(browser, "log/a", "last=9")) == 5
    assert len(await elements(browser, "log/a", "full=1")) == 10, "the whole log is asked for by name"


async def test_a_truncated_checkpoint_read_says_so(start: Start, session: aiohttp.ClientSession) -> None:
    log = {**LOG, "appendOnly": {**PLAIN, "maxPullLimit": 5}}
    browser = Browser(await start({"collections": [log]}), session)
    for n in range(1, 11):
        await append(browser, "log/a", {"n": n}, ts=n)
    truncated = dict.fromkeys(("checkpoint=0", "since=4"), True)
    whole = ("checkpoint=5", "checkpoint=9", "checkpoint=10", "last=5", "checkpoint=0&last=5", "full=1")
    for query, has_more in {**truncated, **dict.fromkeys(whole, False)}.items():
        answer = await tail(browser, "log/a", query)
        wanted = {"data", "hash", "timestamp"} | ({"hasMore"} if has_more else set())
        assert answer.json.keys() == wanted, query
        assert answer.json.get("hasMore", False) is has_more
        assert answer.headers["ETag"] == f'"{answer.json["hash"]}"'
        head = await browser.request("HEAD", f"/pull/log/a?{query}")
        assert (head.status, head.body, head.headers["ETag"]) == (200, b"", answer.headers["ETag"])
    assert "hasMore" not in (await tail(browser, "log/none", "checkpoint=0")).json


async def test_a_long_truncated_answer_says_so_at_its_end(
    start: Start, session: aiohttp.ClientSession
) -> None:
    permissions = {"secret": {"readRoles": ["admin"]}}
    log = {**LOG, "appendOnly": {**PLAIN, "maxPullLimit": 90}}
    hiding = {**log, "name": "hiding", "storagePath": "hiding/{id}", "fieldPermissions": permissions}
    browser = Browser(await start({"collections": [log, hiding]}), session)
    for key in ("log/a", "hiding/a"):
        found = await long_log(browser, key, 100)
        answer = await tail(browser, key, "checkpoint=0")
        assert answer.headers["Transfer-Encoding"] == "chunked"
        assert answer.json["data"]["items"] == found[:90]
        assert answer.json["hasMore"] is True
        rest = await tail(browser, key, f"checkpoint={found[89]['ts']}")
        assert rest.json["data"]["items"] == found[90:]
        assert "hasMore" not in rest.json


async def test_a_checkpoint_is_ignored_where_a_log_is_always_sent_whole(
    start: Start, session: aiohttp.ClientSession
) -> None:
    rules = {**PLAIN, "allowFull": False, "maxPullLimit": 5, "maxCheckpointAgeMs": 1000}
    whole = {**LOG, "appendOnly": rules, "forceFullFetch": True}
    browser = Browser(await start({"collections": [whole]}), session)
    for n in range(1, 5):
        await append(browser, "log/a", {"n": n}, ts=n)

    async def pulled(query: str) -> tuple[list[int], bool]:
        answer = (await tail(browser, "log/a", query)).json
        return [element["ts"] for element in answer["data"]["items"]], "hasMore" in answer

    for query in ("checkpoint=0", "checkpoint=3", "since=99"):
        assert await pulled(query) == ([1, 2, 3, 4], False)
    await append(browser, "log/a", {"n": 5}, ts=5)
    assert await pulled("checkpoint=3") == ([1, 2, 3, 4, 5], False)
    await append(browser, "log/a", {"n": 6}, ts=6)
    assert await pulled("checkpoint=3") == ([1, 2, 3, 4, 5], True)
    assert await pulled("last=2") == ([5, 6], False)
    params = {"collections": "log", "params": '{"log":[{"id":"a"},{"id":"a"}]}'}
    params["appendParams"] = '{"log":[{"since":3},{"last":2}]}'
    batch = (await browser.request("GET", f"/batch/pull?{urlencode(params)}")).json["collections"]["log"]
    assert [element["ts"] for element in batch[0]["data"]["items"]] == [1, 2, 3, 4, 5]
    assert batch[0]["hasMore"] is True
    assert [element["ts"] for element in batch[1]["data"]["items"]] == [5, 6]
    assert "hasMore" not in batch[1]


# Who may do what


async def test_rejections_come_in_the_order_of_documents(
    start: Start, session: aiohttp.ClientSession
) -> None:
    log = {
        "name": "log", "storagePath": "u/{identity}/{id}", "readRoles": ["self"], "writeRoles": ["self"],
        "appendOnly": True, "maxBodyBytes": 2000,
        "fieldPermissions": {"pay": {"writeRoles": ["admin"]}},
        "objectSchema": {"properties": {"n": {"type": "integer"}}},
    }  # fmt: skip
    base = await start({"collections": [log]})
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT))
    mine, key = f"/push/u/{SUBJECT.user_id}/a", f"u/{SUBJECT.user_id}/a"
    text = {"Content-Type": "text/plain"}

    async def rejected(*sent: Any, by: Browser = caller, to: str = mine) -> tuple[int, str]:
        return (await by.request("POST", to, *sent)).error

    def body(data: Any, **changed: str) -> bytes:
        return orjson.dumps({"data": data, **proof(SUBJECT, key, data), **changed})

    assert await rejected(b"x" * 3000, text, by=Browser(base, session)) == (401, "Unauthorized")
    assert await rejected(b"x" * 3000, text) == (415, "Content-Type must be application/json")
    assert await rejected(b"x" * 3000) == (413, "Payload too large")
    others_target = f"/push/u/{STRANGER.user_id}/a"
    assert await rejected(b"{", to=others_target) == (403, "Forbidden")
    assert await rejected(b'{"data":{"pay":1},"ts":-1') == (400, "Invalid JSON body")
    assert await rejected(b'{"data":{"pay":1},"ts":-1}') == (400, "ts must be a non-negative integer")
    bad = {"pay": 1, "n": "x"}
    missing = (400, "append requires authorPubkey and authorSignature")
    assert await rejected({"data": bad}) == missing
    presenter = (403, "append author must be the request presenter")
    assert await rejected(body(bad, authorPubkey=ISSUER.ed_pub)) == presenter
    assert await rejected(body(bad, authorSignature="x")) == (403, "invalid append author signature")
    assert await rejected(body(bad)) == (403, 'Forbidden: field "pay" requires roles: admin')
    status, error = await rejected(body({"n": "x"}), {"Idempotency-Key": ""})
    assert (status, error.startswith("Schema validation failed: ")) == (400, True)
    status, error = await rejected(body({"n": 1}), {"Idempotency-Key": ""})
    assert error.startswith("Idempotency-Key must be")
    assert (await caller.request("POST", mine, body({"n": 1}))).status == 200


async def test_the_logs_of_a_space_are_its_members(start: Start, session: aiohttp.ClientSession) -> None:
    access = {
        "name": "access", "storagePath": "spaces/{spaceId}/_access",
        "readRoles": ["space:member"], "writeRoles": ["space:owner"],
    }  # fmt: skip
    chat = {
        "name": "chat", "storagePath": "spaces/{spaceId}/chat",
        "readRoles": ["space:member"], "writeRoles": ["space:member"], "appendOnly": True,
    }  # fmt: skip
    base = await start({"collections": [access, chat], "auth": {"spaces": {}}})
    owner, member, stranger = (
        Signed(base, session, keys, root_device(keys)) for keys in (ISSUER, SUBJECT, STRANGER)
    )
    who = {"owner": ISSUER.user_id, "members": [SUBJECT.user_id]}
    founded = await append(owner, "spaces/s1/chat", who, **proof(ISSUER, "spaces/s1/chat", who))
    assert founded.status == 403, "an append founds no space"
    assert (await owner.push("spaces/s1/_access", who)).status == 200
    key = "spaces/s1/chat"
    for caller, keys in ((owner, ISSUER), (member, SUBJECT)):
        assert (await append(caller, key, {}, **proof(keys, key, {}))).status == 200
        assert len(await elements(caller, key)) > 0
    assert (await append(stranger, key, {}, **proof(STRANGER, key, {}))).error == (403, "Forbidden")
    assert (await tail(stranger, key)).error == (403, "Forbidden")
    assert (await tail(member, "spaces/s2/chat")).error == (403, "Forbidden")


async def test_appends_and_pulls_count_against_their_limits(
    start: Start, session: aiohttp.ClientSession
) -> None:
    window = limit_of(2)
    for action, (pushes, pulls) in (
        ("push", ([200, 200, 429], [200, 200, 200])),
        ("pull", ([200, 200, 200], [200, 200, 429])),
    ):
        log = {**LOG, "rateLimit": {action: window}}
        browser = Browser(await start({"collections": [log]}), session)
        assert [(await append(browser, "log/a", {})).status for _ in range(3)] == pushes
        assert [(await tail(browser, "log/a")).status for _ in range(3)] == pulls


async def test_a_log_is_no_keyring_and_no_document(start: Start, session: aiohttp.ClientSession) -> None:
    """A fold of what a log's collection owns is left out, whatever the log holds."""
    ring = {**LOG, "name": "ring", "storagePath": "notes/{id}/_keyring"}
    browser = Browser(await start({"collections": [NOTES, ring]}), session)
    await browser.push("notes/a", {"n": 1})
    await append(browser, "notes/a/_keyring", {"k": 1})
    answer = await browser.request("GET", "/pull/notes/a?withKeyring=1")
    assert (answer.status, answer.json["data"], "keyring" in answer.json) == (200, {"n": 1}, False)


async def test_bundle_contains_a_log_that_is_not_persisted_as_empty(
    start: Start, session: aiohttp.ClientSession
) -> None:
    page = {**NOTES, "storagePath": "pages/{page}", "bundle": "page"}
    typing = {**page, "name": "typing", "appendOnly": {**PLAIN, "persist": False}}
    browser = Browser(await start({"collections": [{**page, "name": "title"}, typing]}), session)
    assert (await append(browser, "pages/p/typing", {"who": "me"})).status == 200
    assert (await browser.push("pages/p/title", {"n": 1})).status == 200
    members = (await browser.pull("pages/p")).json["collections"]
    assert members["typing"] == {"data": {}, "hash": ""}
    assert members["title"]["data"] == {"n": 1}


# Failures


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"{",
        b"null",
        b'"log"',
        b'{"v":1,"data":{"items":[{]}}',
        b'{"v":1,"data":{"items":{}}}',
        b'{"v":1,"data":{"items":[{"ts":1}]}}',
        b'{"v":1,"data":{"items":[{"ts":2,"data":{}},{"ts":1,"data":{}}]}}',
        b"[]",
        b'{"v":1}',
    ],
)
async def test_a_corrupt_log_is_neither_missing_nor_empty(
    start: Start, session: aiohttp.ClientSession, stored: bytes
) -> None:
    store = MemoryStore()
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    await store.put("log/a", stored)
    for query in ("full=true", "last=1", "checkpoint=0"):
        assert (await tail(browser, "log/a", query)).error == (500, "document_corrupt")
    assert (await append(browser, "log/a", {})).error == (500, "document_corrupt")
    found = await store.get("log/a")
    assert getattr(found, "body", None) == stored


async def test_a_failing_store_is_said_to_fail(start: Start, session: aiohttp.ClientSession) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    store.fail("get")
    assert (await tail(browser, "log/a")).error == (503, "store_unavailable")
    store.fail("put")
    failed = await append(browser, "log/a", {})
    assert failed.error == (503, "store_unavailable")
    assert int(failed.headers["Retry-After"]) >= 1
    assert (await append(browser, "log/a", {})).status == 200


async def test_an_append_whose_reply_was_lost_is_made_once(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    once = {"Idempotency-Key": "k1"}
    store.lose_reply("put")
    assert (await append(browser, "log/a", {"n": 1}, once)).status == 503
    again = await append(browser, "log/a", {"n": 1}, once)
    assert (again.status, again.json["hash"]) == (200, hash_of(1, {"n": 1}))
    assert (await append(browser, "log/a", {"n": 1}, once)).json == again.json
    assert len(await elements(browser, "log/a")) == 1


async def test_an_append_is_never_answered_for_other_data_under_its_key(
    start: Start, session: aiohttp.ClientSession
) -> None:
    kept = {**LOG, "name": "kept", "storagePath": "kept/{id}"}
    passing = {**kept, "name": "passing", "storagePath": "passing/{id}"}
    passing["appendOnly"] = {**passing["appendOnly"], "persist": False}
    browser = Browser(await start({"collections": [kept, passing]}), session)
    once = {"Idempotency-Key": "order-0001"}
    for key in ("kept/a", "passing/a"):
        first = await append(browser, key, {"who": "a stranger"}, once)
        reused = await append(browser, key, {"who": "me"}, once)
        assert (reused.status, reused.json["code"]) == (422, "idempotency_key_reused")
        assert (await append(browser, key, {"who": "a stranger"}, once)).json == first.json
        assert (await append(browser, key, {"who": "me"}, {"Idempotency-Key": "mine"})).status == 200
    assert [found["data"]["who"] for found in await elements(browser, "kept/a")] == ["a stranger", "me"]


async def test_an_append_under_way_is_finished_when_the_service_stops(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store, release = FaultyStore(MemoryStore()), asyncio.Event()
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    arrived = store.delay("put", release)
    sent = asyncio.create_task(append(browser, "log/a", {}))
    await arrived.wait()
    (app,) = start.apps  # type: ignore[attr-defined]
    app.drain()
    release.set()
    answer = await sent
    assert (answer.status, answer.headers["Connection"]) == (200, "close")


# Long answers


async def test_a_long_answer_is_chunked_and_has_the_headers_of_any(
    start: Start, session: aiohttp.ClientSession
) -> None:
    members = {"collections": [{**LOG, "cacheDurationMs": 5000}], "server": {"cors": {"origins": ["*"]}}}
    browser = Browser(await start(members), session)
    written = await long_log(browser, "log/a")
    pulled = await tail(browser, "log/a", "full=true", {"X-Request-Id": "me", "Origin": "http://a.example"})
    assert pulled.headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in pulled.headers
    assert pulled.headers["X-Request-Id"] == "me"
    assert pulled.headers["Access-Control-Allow-Origin"] == "*"
    assert pulled.headers["Cache-Control"] == "public, max-age=5"
    assert pulled.headers["Content-Type"] == "application/json"
    assert pulled.json["data"] == {"items": written}
    assert (await tail(browser, "log/a", "last=95")).json["data"]["items"] == written[-95:]
    after = f"checkpoint={written[9]['ts']}"
    assert (await tail(browser, "log/a", after)).json["data"]["items"] == written[10:]
    head = await browser.request("HEAD", "/pull/log/a?full=true")
    assert (head.status, head.body, head.headers["ETag"]) == (200, b"", pulled.headers["ETag"])
    (app,) = start.apps  # type: ignore[attr-defined]
    app.drain()
    last = await tail(browser, "log/a")
    assert (last.headers["Connection"], last.json["data"]) == ("close", {"items": written})


async def test_head_of_a_long_log_reads_no_element(start: Start, session: aiohttp.ClientSession) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    await long_log(browser, "log/a", 20)
    gets = store.calls["get"]
    assert (await browser.request("HEAD", "/pull/log/a?full=true")).status == 200
    assert store.calls["get"] - gets <= 2, "the head, and a block of its index"
    assert (await tail(browser, "log/a")).headers["Transfer-Encoding"] == "chunked"


async def test_a_long_answer_to_http_1_0_ends_with_the_connection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    url = URL(await start({"collections": [LOG]}))
    written = await long_log(Browser(str(url), session), "log/a")
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /pull/log/a?full=1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"Transfer-Encoding" not in head
    assert json.loads(body)["data"] == {"items": written}


class Ailing(MemoryStore):
    """A store that fails to read segments, once so many have been read."""

    segments_left = 10**9

    async def get(self, key: str, *arguments: Any) -> Any:
        if key.startswith("_pysync/logs/"):
            self.segments_left -= 1
            if self.segments_left < 0:
                raise StoreUnavailable
        return await super().get(key, *arguments)


async def test_a_long_answer_that_fails_at_once_is_rejected_and_later_is_incomplete(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    store = Ailing()
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    await long_log(browser, "log/a", 200)
    store.segments_left = 5
    assert (await tail(browser, "log/a")).error == (503, "store_unavailable")
    store.segments_left = 100
    with pytest.raises(aiohttp.ClientPayloadError):
        await tail(browser, "log/a", "full=true", {"X-Request-Id": "find-me"})
    assert "find-me" in [record.__dict__.get("request_id") for record in caplog.records]
    store.segments_left = 10**9
    assert len(await elements(browser, "log/a")) == 200


# What Starfish left behind


@pytest.mark.parametrize("dump", [json.dumps, lambda value: json.dumps(value, indent=1)])
async def test_a_log_that_starfish_wrote_is_read_and_taken_over(
    start: Start, session: aiohttp.ClientSession, dump: Callable[[Any], str]
) -> None:
    store = MemoryStore()
    browser = Browser(await start({"collections": [LOG]}, store=store), session)
    items = [{"ts": 5, "data": {"b": 1, "a": [1.0]}}, {"data": {}, "ts": 9, "authorPubkey": "p",
              "authorSignature": "s"}]  # fmt: skip
    hash_ = hash_of(2, {})
    stored = dump({"v": 1, "data": {"items": items}, "ts": 9, "hash": hash_}).encode()
    await store.put("log/a", stored)
    pulled = await tail(browser, "log/a")
    assert (pulled.json["data"], pulled.json["hash"]) == ({"items": items}, hash_)
    assert (await elements(browser, "log/a", "checkpoint=5")) == items[1:]
    assert getattr(await store.get("log/a"), "body", None) == stored, "reading rewrites nothing"
    assert (await append(browser, "log/a", {}, ts=9)).status == 409
    assert (await append(browser, "log/a", {"n": 3}, ts=10)).json["hash"] == hash_of(3, {"n": 3})
    assert await elements(browser, "log/a") == [*items, {"ts": 10, "data": {"n": 3}}]
