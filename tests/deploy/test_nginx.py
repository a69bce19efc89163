"""Behind a real nginx with the configuration of deploy/nginx: what a client sees is what pysync says."""

import asyncio
import gzip
import json
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from components import free_port
from components.fixtures import StartNginx
from support.clients import Browser, Reply, Signed, Start
from support.collections import PUBLIC
from support.nginx_fixture import DEPLOYED, certify, front, open_request, site
from support.nginx_site import ME, SERVICE, signer
from support.uploads import upload

ONE: dict[str, Any] = {"storagePath": "metrics", **PUBLIC}


@pytest_asyncio.fixture
async def me(start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession) -> Signed:
    """A caller who signs for nginx, and reaches one node through it."""
    return signer(front(start_nginx, await start(SERVICE)), session)


async def test_signed_requests_pass_as_they_were_signed(me: Signed) -> None:
    pushed = await me.push(f"u/{ME}/a", {"n": 1})
    assert pushed.status == 200
    pulled = await me.pull(f"u/{ME}/a")
    assert pulled.json["data"] == {"n": 1}
    assert (await me.request("POST", f"/push/log/{ME}/l", {"data": {"n": 1}})).status == 200
    assert [e["data"] for e in (await me.pull(f"log/{ME}/l?last=5")).json["data"]["items"]] == [{"n": 1}]
    assert (await me.request("GET", f"/list/u/{ME}?limit=5")).json["items"] == ["a"]
    params = quote(json.dumps({"mine": [{"id": "a"}]}), safe="")
    batch = await me.request("GET", f"/batch/pull?collections=mine&params={params}")
    assert batch.json["collections"]["mine"][0]["data"] == {"n": 1}


async def test_batch_with_a_hundred_known_versions_passes(me: Signed) -> None:
    names = [f"{n:036}" for n in range(100)]
    for name in names[:3]:
        assert (await me.push(f"u/{ME}/{name}", {"n": name})).status == 200
    params = quote(
        json.dumps({"mine": [{"identity": ME, "id": name} for name in names]}, separators=(",", ":")),
        safe=",:",
    )
    digits = (await me.pull(f"u/{ME}/{names[1]}")).json["hash"][:16]
    known = quote(json.dumps({"mine": [digits] * 100}, separators=(",", ":")), safe=",:")
    target = f"/batch/pull?collections=mine&params={params}&known={known}"
    assert 12 * 1024 < len(target) < 16 * 1024
    batch = await me.request("GET", target, headers={"Accept-Encoding": "identity"})
    assert [entry.get("unchanged") for entry in batch.json["collections"]["mine"][:4]] == [
        None,
        True,
        None,
        None,
    ]


@pytest.mark.parametrize("name", ["a%2Db", "%61-b", "a-%62"])
async def test_a_target_that_could_be_written_otherwise_arrives_as_it_was_written(
    me: Signed, name: str
) -> None:
    assert (await me.push(f"u/{ME}/{name}", {"n": 1})).status == 200
    assert (await me.pull(f"u/{ME}/a-b")).json["data"] == {"n": 1}


@pytest.mark.parametrize("key", ["notes/%2e%2e", "notes//a", "notes/a%2Fb", "notes/x/../a", "notes/a%0Ab"])
async def test_path_that_pysync_rejects_is_not_normalised_by_nginx(me: Signed, key: str) -> None:
    assert (await me.pull(key)).status in (400, 404)
    assert "X-Request-Id" in (await me.pull(key)).headers


async def test_a_replay_is_a_replay(me: Signed) -> None:
    me.nonce, me.ts_ms = bytes(16), None
    headers = me.headers("GET", f"/pull/u/{ME}/a", b"")
    anyone = Browser(me.base, me.session)
    assert (await anyone.pull(f"u/{ME}/a", headers)).status == 200
    assert (await anyone.pull(f"u/{ME}/a", headers)).status == 401


async def test_a_repeated_push_is_recognised_by_its_key(me: Signed) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await me.push(f"u/{ME}/a", {"n": 1}, headers=key)
    again = await me.push(f"u/{ME}/a", {"n": 1}, headers=key)
    assert (again.status, again.body) == (200, first.body)
    assert (await me.push(f"u/{ME}/a", {"n": 1})).status == 409


async def test_a_certificate_as_long_as_pysync_takes_it_passes(me: Signed) -> None:
    longest = "Cap " + "A" * (8192 - len("Cap "))
    answer = await Browser(me.base, me.session).pull(f"u/{ME}/a", {"Authorization": longest})
    assert answer.error == (401, "Unauthorized"), "refused by pysync, which could read it"


async def test_etags_ranges_and_head_are_answered_as_without_nginx(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    base = await start(SERVICE)
    straight, through = Browser(base, session), Browser(front(start_nginx, base), session)
    await straight.push("notes/a", {"text": "x" * 2000})
    etag = (await straight.pull("notes/a")).headers["ETag"]
    plain = {"Accept-Encoding": "identity"}
    for headers in (plain, plain | {"If-None-Match": etag}, plain | {"Range": "bytes=0-9"}):
        for method in ("GET", "HEAD"):
            here = await straight.request(method, "/pull/notes/a", headers=headers)
            there = await through.request(method, "/pull/notes/a", headers=headers)
            for name in ("ETag", "Content-Type", "Content-Length", "Cache-Control"):
                assert here.headers.get(name) == there.headers.get(name)
            assert set(here.headers.getall("Vary", ())) <= set(there.headers.getall("Vary", ()))
            assert here.status == there.status
            assert len(here.body) == len(there.body)


async def test_documents_are_compressed_and_known_by_their_weak_etags(me: Signed) -> None:
    anybody, packed = Browser(me.base, me.session), {"Accept-Encoding": "gzip"}
    text = "milk " * 500
    await anybody.push("notes/a", {"text": text})
    strong = (await anybody.pull("notes/a", {"Accept-Encoding": "identity"})).headers["ETag"]
    pulled = await anybody.pull("notes/a", packed)
    assert (pulled.headers["Content-Encoding"], pulled.headers["ETag"]) == ("gzip", f"W/{strong}")
    assert set(pulled.headers.getall("Vary")) == {"Accept-Encoding", "Authorization"}
    assert json.loads(gzip.decompress(pulled.body))["data"] == {"text": text}
    for known in (strong, f"W/{strong}", f'"other", W/{strong}'):
        assert (await anybody.pull("notes/a", packed | {"If-None-Match": known})).status == 304
    module = await anybody.request("GET", "/client/pysync.js", headers=packed)
    assert module.headers["Content-Encoding"] == "gzip"


async def test_stream_is_not_compressed(me: Signed) -> None:
    headers = {"Accept-Encoding": "gzip"}
    async with me.session.get(f"{me.base}/events?collections=notes", headers=headers) as stream:
        assert stream.content_type == "text/event-stream"
        assert "Content-Encoding" not in stream.headers
        assert await stream.content.readline() == b":\n"


async def test_a_body_that_is_too_large_for_its_collection_gets_pysyncs_413(me: Signed) -> None:
    anyone = Browser(me.base, me.session)
    assert (await anyone.push("notes/a", {"text": "x" * 4096})).error == (413, "Payload too large")
    assert (await anyone.push("notes/a", {"text": "x"})).status == 200


async def test_an_upload_that_is_rejected_underway_gets_its_413_each_time(me: Signed) -> None:
    """Not the 503 of a node that hung up: pysync leaves nginx the time to read what it says."""

    size = 1024 * 1024
    headers = {"Content-Type": "application/json", "Content-Length": str(size)}
    for _ in range(20):
        reader, writer = await open_request(me.base, "POST", "/push/notes/a", headers)
        assert await upload(writer, size) == size, "nginx takes it all"
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_body_beyond_every_bound_gets_the_same_413_from_nginx(me: Signed) -> None:
    size = 257 * 1024 * 1024
    headers = {"Content-Type": "application/json", "Content-Length": str(size)}
    reader, writer = await open_request(me.base, "POST", "/push/notes/a", headers)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 413 ")
    assert "Content-Type: application/json" in head
    body = await reader.readuntil(b"}")
    assert json.loads(body) == {"error": "Payload too large", "code": "payload_too_large"}
    writer.close()


async def test_addresses_are_counted_apart_and_cannot_be_forged(me: Signed) -> None:
    async def pull_from(address: str, **headers: str) -> int:
        connector = aiohttp.TCPConnector(local_addr=(address, 0), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            return (await Browser(me.base, session).pull("counted/a", headers)).status

    assert [await pull_from("127.0.0.1") for _ in range(4)] == [200, 200, 200, 429]
    assert await pull_from("127.0.0.2") == 200
    for forged in ("9.9.9.9", "127.0.0.3", "9.9.9.9, 127.0.0.3"):
        assert await pull_from("127.0.0.1", **{"X-Forwarded-For": forged}) == 429


def limited(start_nginx: StartNginx, base: str, folder: Path, limits: dict[str, str]) -> str:
    """The base URL of an nginx with other limits than those of the files."""
    for name in ("cluster.conf", "pysync.conf"):
        text = (DEPLOYED / name).read_text()
        for known, other in limits.items():
            text = text.replace(known, other)
        (folder / name).write_text(text)
    port = free_port()
    return start_nginx(site("cluster.conf", port, base, folder=folder), port).url


async def pull_from(base: str, address: str) -> Reply:
    connector = aiohttp.TCPConnector(local_addr=(address, 0), force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await Browser(base, session).pull("notes/a")


def is_overloaded(reply: Reply) -> bool:
    has_headers = reply.headers["Retry-After"] == "1" and bool(reply.headers["X-Request-Id"])
    return reply.error == (503, "overloaded") and reply.json["code"] == "overloaded" and has_headers


async def test_address_above_its_rate_is_rejected_in_the_words_of_pysync(
    start: Start, start_nginx: StartNginx, tmp_path: Path
) -> None:
    limits = {"rate=100r/s": "rate=1r/m", "burst=500": "burst=2"}
    base = limited(start_nginx, await start(SERVICE), tmp_path, limits)
    assert [(await pull_from(base, "127.0.0.1")).status for _ in range(3)] == [200] * 3
    assert is_overloaded(await pull_from(base, "127.0.0.1"))
    assert (await pull_from(base, "127.0.0.2")).status == 200


async def test_an_address_with_too_many_requests_under_way_is_rejected(
    start: Start, start_nginx: StartNginx, tmp_path: Path
) -> None:
    limits = {"pysync_connections 500": "pysync_connections 1"}
    base = limited(start_nginx, await start(SERVICE), tmp_path, limits)
    reader, writer = await open_request(base, "GET", "/events?collections=notes", {})
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert is_overloaded(await pull_from(base, "127.0.0.1"))
    assert (await pull_from(base, "127.0.0.2")).status == 200
    writer.close()


@pytest.mark.parametrize("mount", ["", "/v1", "/a/b"])
async def test_counters_are_not_shown_to_everybody(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession, mount: str
) -> None:
    served = {**SERVICE, "server": {**SERVICE["server"], "mountPath": mount}}
    base = await start({**served, "namespaces": {"acme": {"collections": [{"name": "one", **ONE}]}}})
    straight, through = Browser(base, session), Browser(front(start_nginx, base), session)
    for target in ("/metrics", "/%6detrics", "/metric%73?x=1", "//metrics"):
        assert (await through.request("GET", mount + target)).status == 404
        assert (await through.request("HEAD", mount + target)).status == 404
        assert (await through.request("GET", target)).status == 404
    assert (await straight.request("GET", f"{mount}/metrics")).status == 200
    assert (await through.request("GET", f"{mount}/health")).status == 200


@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_path_that_only_contains_metrics_passes(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession, mount: str
) -> None:
    members = {
        "server": {"mountPath": mount},
        "collections": [{"name": "one", **ONE}, {"name": "deep", **ONE, "storagePath": "deep/{id}"}],
        "namespaces": {"acme": {"collections": [{"name": "one", **ONE}]}},
    }
    through = Browser(front(start_nginx, await start(members)), session)
    for prefix in ("", "/acme"):
        pushed = await through.request("POST", f"{mount}{prefix}/push/metrics", {"data": {"n": 1}})
        assert pushed.status in (200, 409), "both are one document"
        assert (await through.request("GET", f"{mount}{prefix}/pull/metrics")).json["data"] == {"n": 1}
    assert (await through.request("GET", f"{mount}/pull/deep/metrics")).status == 200


def protocol_spoken(port: int, folder: Path, offered: list[str]) -> str | None:
    """Return the protocol that nginx chooses of those that a client offers in the TLS handshake (ALPN)."""
    trusting = ssl.create_default_context(cafile=str(folder / "fullchain.pem"))
    trusting.set_alpn_protocols(offered)
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trusting.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.selected_alpn_protocol()


async def test_a_site_with_tls_speaks_http2(start: Start, start_nginx: StartNginx, tmp_path: Path) -> None:
    """A browser keeps six connections to a host over HTTP/1.1, and an open stream takes one each."""
    certify(tmp_path)
    port = free_port()
    http = site("one.conf", port, await start(SERVICE))
    start_nginx(http.replace("/etc/letsencrypt/live/sync.example.org", str(tmp_path)), port)
    assert await asyncio.to_thread(protocol_spoken, port, tmp_path, ["h2", "http/1.1"]) == "h2"
    assert await asyncio.to_thread(protocol_spoken, port, tmp_path, ["http/1.1"]) == "http/1.1"


async def test_a_node_that_is_down_costs_nobody_an_answer(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        host, port = bound.getsockname()
        base = front(start_nginx, f"{host}:{port}", await start(SERVICE))
        caller = signer(base, session)
        for n in range(4):
            assert (await caller.push(f"u/{ME}/{n}", {"n": n})).status == 200
            assert (await caller.pull(f"u/{ME}/{n}")).json["data"] == {"n": n}


async def test_without_any_node_clients_get_a_retry_after(
    start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        answer = await Browser(front(start_nginx, f"{host}:{port}"), session).pull("notes/a")
    assert answer.error == (503, "Service unavailable")
    assert answer.json["code"] == "unavailable"
    assert answer.headers["Retry-After"] == "1"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("POST", 503)])
async def test_request_aborted_by_a_node_is_retried_only_if_that_changes_nothing(
    start: Start, start_nginx: StartNginx, session: aiohttp.ClientSession, method: str, status: int
) -> None:
    good = await start(SERVICE)
    async with breaking() as (bad, heads):
        through = Browser(front(start_nginx, bad, good), session)
        body = {"data": {"n": 1}, "baseHash": None} if method == "POST" else None
        target = "/push/notes/a" if method == "POST" else "/pull/notes/a"
        assert (await through.request(method, target, body)).status == status
    assert len(heads) == 1, "it came to the node that breaks off first"
    assert (await Browser(good, session).pull("notes/a")).json["hash"] == ""


@asynccontextmanager
async def breaking() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that takes the head of a request and hangs up."""
    heads: list[bytes] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", heads


async def test_connections_to_a_node_are_used_again_by_as_many_requests_at_once(
    start_nginx: StartNginx, session: aiohttp.ClientSession
) -> None:
    together = 64
    async with responding(together) as (node, accepted):
        through = Browser(front(start_nginx, node), session)
        for _ in range(2):
            replies = await asyncio.gather(*(through.pull("notes/a") for _ in range(together)))
            assert [reply.status for reply in replies] == [200] * together
    assert len(accepted) == together


@asynccontextmanager
async def responding(together: int) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A server that responds to requests when `together` of them have come, and the connections to it."""
    accepted: list[asyncio.StreamWriter] = []
    have_come = asyncio.Barrier(together)

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await have_come.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", accepted
        for writer in accepted:
            writer.close()
            await writer.wait_closed()


async def test_a_site_with_tls_takes_what_was_signed_for_it(
    start: Start, start_nginx: StartNginx, tmp_path: Path
) -> None:
    certify(tmp_path)
    port = free_port()
    http = site("one.conf", port, await start(SERVICE))
    start_nginx(http.replace("/etc/letsencrypt/live/sync.example.org", str(tmp_path)), port)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
        me = signer(f"https://localhost:{port}", session)
        assert (await me.push(f"u/{ME}/a", {"n": 1})).status == 200
        assert (await me.pull(f"u/{ME}/a")).json["data"] == {"n": 1}


@pytest.mark.process
async def test_signed_request_passes_over_http2(
    start: Start, start_nginx: StartNginx, tmp_path: Path
) -> None:
    if not await speaks_http2():
        pytest.skip("curl without HTTP/2")
    certify(tmp_path)
    port = free_port()
    http = site("one.conf", port, await start(SERVICE))
    start_nginx(http.replace("/etc/letsencrypt/live/sync.example.org", str(tmp_path)), port)
    base = f"https://localhost:{port}"
    async with aiohttp.ClientSession() as session:
        signed = signer(base, session).headers("GET", f"/pull/u/{ME}/a", b"")
    longest = {"Authorization": "Cap " + "A" * (8192 - len("Cap "))}
    for headers, status in ((signed, 200), (longest, 401)):
        fetched = await curl(
            "--http2", "--silent", "--show-error", "--cacert", str(tmp_path / "fullchain.pem"),
            "--output", str(tmp_path / "answer"), "--write-out", "%{http_version} %{http_code}",
            *(part for name, value in headers.items() for part in ("--header", f"{name}: {value}")),
            f"{base}/pull/u/{ME}/a",
        )  # fmt: skip
        assert fetched == f"2 {status}"


async def speaks_http2() -> bool:
    return shutil.which("curl") is not None and "HTTP2" in await curl("--version")


async def curl(*arguments: str) -> str:
    """Return the output of curl."""
    process = await asyncio.create_subprocess_exec("curl", *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode()
