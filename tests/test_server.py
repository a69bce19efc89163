"""The service around the protocol: time, failures, mounts, proxies, slow clients, stopping."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from conftest import SUBJECT, Browser, Signed, Start, minted_at, root_device
from yarl import URL

from pysync import config
from pysync.server import body as body_module
from pysync.server import connection
from pysync.server.app import create_app
from pysync.server.run import listening
from pysync.store.memory import MemoryStore
from pysync.testing import FaultyStore

NOTES = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
MINE = {"name": "mine", "storagePath": "u/{identity}/{id}", "readRoles": ["self"], "writeRoles": ["self"]}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ms: int = minted_at()["now_s"] * 1000

    def __call__(self) -> int:
        return self.now_ms


async def test_a_document_expires_on_every_path(start: Start, session: aiohttp.ClientSession) -> None:
    clock, store = Clock(), MemoryStore()
    notes = {**NOTES, "ttlMs": 1000}
    browser = Browser(await start({"collections": [notes]}, store=store, now_ms=clock), session)
    first = (await browser.push("notes/a", {"n": 1})).json["hash"]
    clock.now_ms += 1000
    assert (await browser.pull("notes/a")).json["hash"] == first
    clock.now_ms += 1
    expired = (await browser.pull("notes/a")).json
    assert (expired["data"], expired["hash"]) == ({}, "")
    assert (await browser.push("notes/a", {"n": 2}, first)).json["currentHash"] == ""
    assert (await browser.push("notes/a", {"n": 2})).status == 200


async def test_the_sweep_deletes_what_expired_and_nothing_else(start: Start) -> None:
    clock = Clock()
    store = MemoryStore(clock)
    notes = {**NOTES, "ttlMs": 1000}
    kept = {**NOTES, "name": "kept", "storagePath": "notes/kept"}
    await start({"collections": [notes, kept]}, store=store, now_ms=clock)
    for key in ("notes/old", "notes/kept", "notes/deeper/old"):
        await store.put(key, b"{}")
    clock.now_ms += 1001
    await store.put("notes/new", b"{}")
    (app,) = start.apps  # type: ignore[attr-defined]
    assert await app.expiry.sweep() == 1
    assert await store.list("notes", None, 10) == ["kept", "new"]
    assert await store.get("notes/deeper/old") is not None


@pytest.mark.parametrize(
    "stored",
    [b"", b"{", b"null", b"[]", b'{"v":1}', b'{"v":1,"ts":1,"hash":"","data":{}}',
     b'{"v":1,"ts":1,"hash":"' + b"0" * 64 + b'","data":{"a":'],
)  # fmt: skip
async def test_a_corrupt_document_is_neither_missing_nor_empty(
    start: Start, session: aiohttp.ClientSession, stored: bytes
) -> None:
    store = MemoryStore()
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    await store.put("notes/a", stored)
    assert (await browser.pull("notes/a")).error == (500, "document_corrupt")
    conflict = {"error": "hash_mismatch", "code": "hash_mismatch", "currentHash": ""}
    assert (await browser.push("notes/a", {"n": 1}, None)).json == conflict
    assert (await browser.push("notes/a", {"n": 1}, "0" * 64)).json == conflict
    assert (await browser.push("notes/a", {"n": 1}, "")).status == 200
    assert (await browser.pull("notes/a")).json["data"] == {"n": 1}


async def test_documents_that_starfish_wrote_are_read(start: Start, session: aiohttp.ClientSession) -> None:
    store = MemoryStore()
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    stored = {"data": {"b": 1, "a": [1.0]}, "v": 1, "hash": "ab" * 32, "ts": 5}
    await store.put("notes/a", json.dumps(stored, indent=1).encode())
    pulled = (await browser.pull("notes/a")).json
    assert (pulled["data"], pulled["hash"]) == (stored["data"], stored["hash"])
    assert (await browser.push("notes/a", {"n": 1}, "ab" * 32)).status == 200


async def test_a_failing_store_is_said_to_fail(start: Start, session: aiohttp.ClientSession) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    store.fail("get", "put", "probe")
    for answer in (
        await browser.pull("notes/a"),
        await browser.push("notes/a", {}),
        await browser.request("GET", "/health/ready"),
    ):
        assert answer.error == (503, "store_unavailable")
        assert int(answer.headers["Retry-After"]) >= 1
    assert (await browser.request("GET", "/health")).status == 200


async def test_a_push_whose_reply_was_lost_may_be_repeated(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    once = {"Idempotency-Key": "k1"}
    store.lose_reply("put")
    assert (await browser.push("notes/a", {"n": 1}, None, once)).status == 503
    assert (await browser.push("notes/a", {"n": 1}, None, once)).status == 200


async def test_an_unforeseen_error_tells_only_its_request_id(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(MemoryStore):
        async def get(self, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("/secret/place")

    browser = Browser(await start({"collections": [NOTES]}, store=Broken()), session)
    answer = await browser.pull("notes/a", {"X-Request-Id": "find-me"})
    assert answer.status == 500
    assert answer.json == {"error": "Internal error", "code": "internal_error", "requestId": "find-me"}
    assert "/secret/place" in caplog.text


async def test_a_mount_prefixes_every_route_and_both_signed_forms_hold(
    start: Start, session: aiohttp.ClientSession
) -> None:
    spaces = {"acme": {"collections": [MINE]}}
    origin = await start({"server": {"mountPath": "/v1"}, "collections": [NOTES, MINE], "namespaces": spaces})
    certificate = root_device(SUBJECT)
    key = f"u/{SUBJECT.user_id}/a"
    assert (await Browser(origin, session).pull("notes/a")).status == 404
    assert (await Browser(f"{origin}/v1", session).pull("notes/a")).status == 200
    assert (await Browser(origin, session).request("GET", "/health")).status == 200
    assert (await Browser(origin, session).request("GET", "/v1/health")).status == 200
    mounted = Signed(f"{origin}/v1", session, SUBJECT, certificate)
    assert (await mounted.pull(key)).status == 200, "a base URL with the mount signs the path without it"
    whole = Signed(origin, session, SUBJECT, certificate)
    assert (await whole.request("GET", f"/v1/acme/pull/{key}")).status == 200
    assert (await whole.request("GET", f"/v1/pull/{key}")).status == 200


async def test_only_public_hosts_are_answered(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start({"server": {"publicHosts": ["sync.example"]}, "collections": [NOTES]})
    browser = Browser(base, session)
    assert (await browser.pull("notes/a")).status == 421
    assert (await browser.pull("notes/a", {"Host": "Sync.Example:80"})).status == 200


async def test_forwarding_headers_count_only_behind_known_proxies(
    start: Start, session: aiohttp.ClientSession
) -> None:
    metered = {**NOTES, "rateLimit": {"pull": {"windowMs": 3_600_000, "maxRequests": 1, "bucket": "ip"}}}
    forwarded = [{"X-Forwarded-For": f"6.6.6.6, 10.0.0.{n}"} for n in range(3)]
    direct = Browser(await start({"collections": [metered]}), session)
    assert [(await direct.pull("notes/a", via)).status for via in forwarded] == [200, 429, 429]
    proxied = Browser(await start({"server": {"trustedProxyHops": 1}, "collections": [metered]}), session)
    assert [(await proxied.pull("notes/a", via)).status for via in forwarded] == [200, 200, 200]
    assert (await proxied.pull("notes/a", forwarded[0])).status == 429


async def test_a_refused_rate_does_not_take_the_nonce(start: Start, session: aiohttp.ClientSession) -> None:
    clock = Clock()
    metered = {**MINE, "rateLimit": {"pull": {"windowMs": 10_000, "maxRequests": 1}}}
    base = await start({"collections": [metered]}, now_ms=clock)
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT), ts_ms=clock.now_ms)
    clock.now_ms = clock.now_ms // 10_000 * 10_000 + 1
    key = f"u/{SUBJECT.user_id}/a"
    assert (await caller.pull(key)).status == 200
    caller.nonce = b"n" * 16
    assert (await caller.pull(key)).status == 429
    clock.now_ms += 10_000
    assert (await caller.pull(key)).status == 200, "the very same signed request, repeated as it was told"


async def test_pages_of_known_origins_may_call(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start({"server": {"cors": {"origins": ["https://app.example"]}}, "collections": [NOTES]})
    browser = Browser(base, session)
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    preflight = await browser.request("OPTIONS", "/push/notes/a", headers=asked)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "X-Starfish-Sig" in preflight.headers["Access-Control-Allow-Headers"]
    assert preflight.headers["Access-Control-Allow-Methods"] == "POST"
    for answer in (await browser.pull("notes/a", asked), await browser.pull("nope", asked)):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert "ETag" in answer.headers["Access-Control-Expose-Headers"]
    other = await browser.pull("notes/a", {"Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    closed = Browser(await start({"collections": [NOTES]}), session)
    assert (await closed.request("OPTIONS", "/push/notes/a", headers=asked)).status == 405


async def test_a_head_that_does_not_end_gets_408(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.0)
    monkeypatch.setattr(connection, "CHECK_EVERY_S", 0.01)
    url = URL(await start({"collections": [NOTES]}))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
    heard = await reader.read()
    assert heard.startswith(b"HTTP/1.1 408 ")
    assert heard.endswith(b'{"error":"Request timeout","code":"request_timeout"}')
    writer.close()


async def test_a_body_that_stalls_gets_408(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "STALL_S", 0.05)
    url = URL(await start({"collections": [NOTES]}))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    head, _, answered = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in head
    assert json.loads(answered)["code"] == "request_timeout"
    writer.close()


async def test_stopping_finishes_what_is_under_way_and_accepts_no_more() -> None:
    store = FaultyStore(MemoryStore())
    release = asyncio.Event()
    settings = config.parse({"version": 1, "store": "memory:", "collections": [NOTES]})
    async with await create_app(settings, store) as app, aiohttp.ClientSession() as session:
        service = listening(app)
        browser = Browser(f"http://127.0.0.1:{await service.__aenter__()}", session)
        assert (await browser.request("GET", "/health/ready")).status == 200
        arrived = store.delay("put", release)
        push = asyncio.create_task(browser.push("notes/a", {"n": 1}))
        await arrived.wait()
        stopping = asyncio.create_task(service.__aexit__(None, None, None))
        while not app.ops.draining:
            await asyncio.sleep(0)
        release.set()
        assert (await push).status == 200
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await browser.pull("notes/a")
