"""The service around the protocol: time, failures, mounts, proxies, slow clients, stopping."""

import asyncio
import hashlib
import json
import socket
from typing import Any

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import MINE, NOTES, collection, limit_of
from support.faulty_store import FaultyStore
from support.loop_time import loop_time
from yarl import URL

from pysync import config
from pysync._core import decode_push
from pysync.auth import issuing
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from pysync.store.memory import MemoryStore

ADMIN_TOKEN = "token-of-the-tests"


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
    assert await app.jobs.ttl_sweeper.sweep() == 1
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
    hash_ = hashlib.sha256(b'{"a":[1],"b":1}').hexdigest()
    stored = {"data": {"b": 1, "a": [1.0]}, "v": 1, "hash": hash_, "ts": 5}
    await store.put("notes/a", json.dumps(stored, indent=1).encode())
    pulled = (await browser.pull("notes/a")).json
    assert (pulled["data"], pulled["hash"]) == (stored["data"], stored["hash"])
    assert (await browser.push("notes/a", {"n": 1}, hash_)).status == 200


async def test_a_failing_store_is_said_to_fail(start: Start, session: aiohttp.ClientSession) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [NOTES]}, store=store), session)
    store.fail("get", "put", "probe", "probe")
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


async def test_unforeseen_error_reports_only_its_request_id(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenStore(MemoryStore):
        async def get(self, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("/secret/place")

    browser = Browser(await start({"collections": [NOTES]}, store=BrokenStore()), session)
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


async def test_public_host_of_this_machine_matches_with_any_port(
    start: Start, session: aiohttp.ClientSession
) -> None:
    hosts = ["127.0.0.1", "[::1]", "sync.example"]
    browser = Browser(await start({"server": {"publicHosts": hosts}, "collections": [NOTES]}), session)
    assert (await browser.pull("notes/a")).status == 200
    tried = {"127.0.0.1": 200, "[::1]:9000": 200, "localhost:80": 421, "sync.example:9000": 421}
    assert {host: (await browser.pull("notes/a", {"Host": host})).status for host in tried} == tried


async def test_forwarding_headers_count_only_behind_known_proxies(
    start: Start, session: aiohttp.ClientSession
) -> None:
    metered = {**NOTES, "rateLimit": {"pull": limit_of(1, bucket="ip")}}
    forwarded = [{"X-Forwarded-For": f"6.6.6.6, 10.0.0.{n}"} for n in range(3)]
    direct = Browser(await start({"collections": [metered]}), session)
    assert [(await direct.pull("notes/a", via)).status for via in forwarded] == [200, 429, 429]
    proxied = Browser(await start({"server": {"trustedProxyHops": 1}, "collections": [metered]}), session)
    assert [(await proxied.pull("notes/a", via)).status for via in forwarded] == [200, 200, 200]
    assert (await proxied.pull("notes/a", forwarded[0])).status == 429


async def test_a_rejected_rate_does_not_take_the_nonce(start: Start, session: aiohttp.ClientSession) -> None:
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
    requested = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    preflight = await browser.request("OPTIONS", "/push/notes/a", headers=requested)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "X-Starfish-Sig" in preflight.headers["Access-Control-Allow-Headers"]
    assert preflight.headers["Access-Control-Allow-Methods"] == "POST"
    for answer in (await browser.pull("notes/a", requested), await browser.pull("nope", requested)):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"ETag", "Date", "WWW-Authenticate"} <= set(exposed)
    other = await browser.pull("notes/a", {"Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    closed = Browser(await start({"collections": [NOTES]}), session)
    assert (await closed.request("OPTIONS", "/push/notes/a", headers=requested)).status == 405


async def test_a_body_that_stalls_gets_408(start: Start) -> None:
    url = URL(await start({"collections": [NOTES]}))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000\r\n\r\n" + b"x" * 500_000
    )
    with loop_time() as time:
        began_s = time.now_s
        received = await time.pass_until(asyncio.ensure_future(reader.read()), 1.0)
        assert time.now_s - began_s < 200, "its mean rate would do for longer"
    head, _, answered = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in head
    assert json.loads(answered)["code"] == "request_timeout"
    writer.close()


async def test_stopping_finishes_what_is_under_way_and_accepts_no_more() -> None:
    store = FaultyStore(MemoryStore())
    release = asyncio.Event()
    settings = config.parse({"version": 1, "store": "memory:", "collections": [NOTES]})
    async with await create_app(settings, store) as app, aiohttp.ClientSession() as session:
        service = serve_on(app)
        browser = Browser(f"http://127.0.0.1:{await service.__aenter__()}", session)
        assert (await browser.request("GET", "/health/ready")).status == 200
        arrived = store.delay("put", release)
        push = asyncio.create_task(browser.push("notes/a", {"n": 1}))
        await arrived.wait()
        stopping = asyncio.create_task(service.__aexit__(None, None, None))
        while not app.readiness.draining:
            await asyncio.sleep(0)
        release.set()
        assert (await push).status == 200
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await browser.pull("notes/a")


async def test_a_push_whose_body_is_still_coming_is_finished_on_stopping() -> None:
    settings = config.parse({"version": 1, "store": "memory:", "collections": [NOTES]})
    body = b'{"data":{"n":1}}'
    head = (
        "POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    async with await create_app(settings) as app:
        service = serve_on(app)
        reader, writer = await asyncio.open_connection("127.0.0.1", await service.__aenter__())
        writer.write(head.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(body[:5])
        stopping = asyncio.create_task(service.__aexit__(None, None, None))
        while not app.readiness.draining:
            await asyncio.sleep(0)
        writer.write(body[5:])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Connection: close" in answer
        await stopping
        writer.close()


async def test_a_slow_body_does_not_outlive_its_signature(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = Clock()
    base = await start({"collections": [MINE]}, now_ms=clock)
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT), ts_ms=clock.now_ms)
    body = b'{"data":{"n":1}}'
    target = f"/push/u/{SUBJECT.user_id}/a"
    lines = "".join(f"{name}: {value}\r\n" for name, value in caller.headers("POST", target, body).items())
    url = URL(base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"POST {target} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n{lines}"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    clock.now_ms += 300_001
    writer.write(body)
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_an_answer_waits_for_a_client_that_does_not_read(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    base = await start({"collections": [NOTES]}, store=store)
    await Browser(base, session).push("notes/a", {"text": "x" * 50_000})
    url = URL(base)
    requests = 2000
    with socket.create_connection((str(url.host), url.port or 80)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /pull/notes/a HTTP/1.1\r\nHost: h\r\n\r\n" * requests)
        gets = -1
        while gets != store.calls["get"]:
            gets = store.calls["get"]
            await Browser(base, session).request("GET", "/health")
        assert gets < requests / 4


@pytest.mark.parametrize("stored", [b"garbage", b"\xff", b"{}"])
async def test_unreadable_revocation_list_blocks_its_issuer_until_it_is_replaced(
    start: Start, session: aiohttp.ClientSession, stored: bytes
) -> None:
    store = MemoryStore()
    base = await start({"collections": [MINE]}, store=store)
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT))
    key = f"u/{SUBJECT.user_id}/a"
    await store.put(f"_pysync/revocations/{SUBJECT.user_id}", stored)
    assert (await caller.pull(key)).error == (503, "store_unavailable")
    readable = issuing.issue_revocation_list(SUBJECT, 1, subjects=[("0" * 64, 9_999_999_999)])
    browser = Browser(base, session)
    assert (await browser.request("POST", "/revocations", readable.text)).status == 200
    assert (await caller.pull(key)).status == 200


async def test_lists_are_published_at_a_bounded_rate_and_size(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({}, now_ms=Clock()), session)
    answers = [await browser.request("POST", "/revocations", b"{}") for _ in range(61)]
    assert [answer.status for answer in answers] == [400] * 60 + [429]
    other = Browser(await start({}), session)
    assert (await other.request("POST", "/revocations", b" " * 262_145)).status == 413


async def test_an_appended_forwarding_header_counts_and_nonsense_does_not(
    start: Start, session: aiohttp.ClientSession
) -> None:
    metered = {**NOTES, "rateLimit": {"pull": limit_of(1, bucket="ip")}}
    url = URL(await start({"server": {"trustedProxyHops": 1}, "collections": [metered]}))

    async def pull(*forwarded: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        lines = b"".join(b"X-Forwarded-For: " + value + b"\r\n" for value in forwarded)
        writer.write(b"GET /pull/notes/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + lines + b"\r\n")
        status = (await reader.read())[9:12]
        writer.close()
        return status

    assert await pull(b"6.6.6.1", b"7.7.7.7") == b"200"
    assert await pull(b"6.6.6.2", b"7.7.7.7") == b"429", "the proxy's own line is the last"
    assert await pull(b"\xff") == b"200"
    assert await pull(b"nonsense") == b"429", "what is no address is the connection's"


KEYRING = collection("ring", "notes/{id}/_keyring")


@pytest.mark.parametrize(
    ("owner", "folded"),
    [
        ({}, {"open": 1, "secret": 2}),
        ({"fieldPermissions": {"secret": {"readRoles": ["admin"]}}}, {"open": 1}),
        ({"pushOnly": True}, None),
        ({"requireAuth": True}, None),
        ({"readRoles": ["admin"]}, None),
    ],
)
async def test_a_folded_keyring_is_what_a_pull_of_it_gives(
    start: Start, session: aiohttp.ClientSession, owner: dict[str, Any], folded: object
) -> None:
    store = MemoryStore()
    stored = decode_push(b'{"data":{"open":1,"secret":2}}').stored(1)
    await store.put("notes/a/_keyring", stored)
    browser = Browser(await start({"collections": [NOTES, {**KEYRING, **owner}]}, store=store), session)
    answer = (await browser.request("GET", "/pull/notes/a?withKeyring=1")).json
    assert answer.get("keyring", {"data": None})["data"] == folded


async def test_a_rejected_schema_quotes_nothing_and_stops_at_the_first_fault(
    start: Start, session: aiohttp.ClientSession
) -> None:
    schema = {"properties": {"many": {"items": {"type": "string"}}}, "maxProperties": 2}
    typed = {
        **NOTES,
        "objectSchema": schema,
        "fieldPermissions": {"pay": {"readRoles": ["admin"], "writeRoles": ["admin"]}},
    }
    base = await start({"auth": {"adminToken": ADMIN_TOKEN}, "collections": [typed]})
    browser = Browser(base, session)
    first = await browser.push(
        "notes/a", {"a": 1, "pay": 4242}, None, {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    )
    assert first.status == 200
    base_hash = (await browser.pull("notes/a")).json["hash"]
    rejected = await browser.push("notes/a", {"a": 1, "b": 2}, base_hash)
    assert rejected.json["validator"] == "maxProperties"
    assert "4242" not in rejected.json["error"]
    many = await browser.push("notes/b", {"many": [1] * 100_000})
    assert (many.json["path"], many.json["validator"]) == ("/many/0", "type")


async def test_a_locked_value_that_is_hidden_cannot_be_guessed(
    start: Start, session: aiohttp.ClientSession
) -> None:
    secret = {"pin": {"readRoles": ["admin"], "writeRoles": ["admin"]}}
    base = await start(
        {"auth": {"adminToken": ADMIN_TOKEN}, "collections": [{**NOTES, "fieldPermissions": secret}]}
    )
    browser = Browser(base, session)
    first = await browser.push("notes/a", {"pin": 7}, None, {"Authorization": f"Bearer {ADMIN_TOKEN}"})
    version = (await browser.pull("notes/a")).json["hash"]
    assert version != first.json["hash"]
    for guess in (6, 7):
        assert (await browser.push("notes/a", {"pin": guess}, version)).status == 403
    for base in ("0" * 64, first.json["hash"]):
        assert (await browser.push("notes/a", {"pin": 7}, base)).json["currentHash"] == version


async def test_answer_that_depends_on_the_caller_is_not_cached_for_all(
    start: Start, session: aiohttp.ClientSession
) -> None:
    cached = {**NOTES, "cacheDurationMs": 60_000}
    for more in ({"fieldPermissions": {"x": {"readRoles": ["admin"]}}}, {"requireAuth": True}):
        base = await start({"auth": {"adminToken": ADMIN_TOKEN}, "collections": [{**cached, **more}]})
        answer = await Browser(base, session).pull("notes/a", {"Authorization": f"Bearer {ADMIN_TOKEN}"})
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "private, max-age=60")


async def test_namespace_is_served_at_the_path_of_published_clients(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"namespaces": {"acme": {"collections": [NOTES]}}}), session)
    for target in ("/acme/pull/notes/a", "/v1/acme/pull/notes/a"):
        assert (await browser.request("GET", target)).status == 200


async def test_a_repetition_of_a_push_that_has_expired_is_answered_as_the_first(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = Clock()
    browser = Browser(await start({"collections": [{**NOTES, "ttlMs": 60_000}]}, now_ms=clock), session)
    once = {"Idempotency-Key": "k"}
    first = await browser.push("notes/a", {"n": 1}, None, once)
    clock.now_ms += 61_000
    again = await browser.push("notes/a", {"n": 1}, None, once)
    assert (again.status, again.json) == (200, first.json)
    assert (await browser.pull("notes/a")).json["data"] == {}


async def test_a_client_that_leaves_in_mid_body_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    url = URL(await start({"collections": [NOTES]}))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"{")
    writer.transport.abort()
    (app,) = start.apps  # type: ignore[attr-defined]
    while b'status="400"' not in app.render_metrics():
        await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
