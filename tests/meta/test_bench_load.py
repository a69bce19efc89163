"""The load generator: what it sends is what it says, and no answer goes uncounted."""

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from aiohttp.test_utils import TestServer
from support.bench_requests import BASE, parts

from benches import bare, servers
from benches.load import measure
from benches.workloads import (
    BATCH,
    BIG_BYTES,
    COLLECTIONS,
    DOCUMENT_BYTES,
    LISTED,
    PAGE,
    WORKLOADS,
    Author,
    Workload,
    big_document,
    note,
)
from pysync import config
from pysync._core import PublicKey, canonicalize, content_hash, decode_push, verify_request
from pysync.auth import certificates, signing
from pysync.cli.load_generator import drive, read_head


@pytest.fixture
async def bare_url() -> AsyncIterator[str]:
    async with TestServer(bare.application()) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_every_answer_is_counted(bare_url: str) -> None:
    for name in ("bare-get", "bare-post"):
        run = await measure(bare_url, WORKLOADS[name], count=500, seconds=30)
        assert run.answers == 500
        assert run.errors == {}


async def test_another_status_is_an_error_and_shown(bare_url: str) -> None:
    lost = Workload("lost", lambda author, count: [author.request("/nowhere")] * count)
    run = await measure(bare_url, lost, count=50, seconds=30)
    assert (run.answers, run.errors) == (0, {"404": 50})


async def test_an_answer_that_is_too_short_is_an_error(bare_url: str) -> None:
    for at_least, errors in ((1_024, {}), (1_025, {"too short": 50})):
        row = Workload("row", lambda author, count: [author.request("/")] * count, at_least=at_least)
        assert (await measure(bare_url, row, count=50, seconds=30)).errors == errors


async def test_a_broken_connection_is_an_error() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        run, _ = await drive(url, [Author(url).request("/")] * 3, 200, connections=2, seconds=30)
    assert run.errors == {"connection lost": 2}
    assert len(run.latencies) == 0


async def test_an_answer_in_pieces_is_one_answer() -> None:
    pieces = [b"HTTP/1.1 200 O", b"K\r\nContent-Length: 6\r\n", b"\r\nabc", b"def"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        run, _ = await drive(url, [Author(url).request("/")] * 2, 200, connections=1, seconds=30)
    assert len(run.latencies) == 2
    assert run.errors == {}


async def test_a_workload_whose_documents_cannot_be_made_is_not_measured(bare_url: str) -> None:
    with pytest.raises(RuntimeError, match=r"pull cannot be prepared: .*404"):
        await measure(bare_url, WORKLOADS["pull"], count=1, seconds=30)


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length:12\r\n", (200, 12)),
        (b"HTTP/1.1 409 Conflict\r\nX: 1\r\nContent-Length: 0\r\n", (409, 0)),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n", (304, 0)),
    ],
)
def test_the_head_tells_how_long_the_answer_is(head: bytes, found: tuple[int, int]) -> None:
    assert read_head(head) == found


def test_an_answer_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="without Content-Length"):
        read_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n")


@pytest.mark.parametrize("name", ["signed-pull", "signed-push", "batch-100-signed", "signed-append"])
def test_signed_requests_hold_and_no_nonce_is_used_twice(name: str) -> None:
    author = Author(BASE)
    workload = WORKLOADS[name]
    requests = [*workload.prepare(author), *workload.requests(author, 200)]
    nonces = set()
    for request in requests:
        method, path, headers, body = parts(request)
        certificate = certificates.from_authorization(headers["Authorization"])
        certificates.verify(certificate, time.time())
        ts_ms, nonce = int(headers["X-Starfish-Ts"]), headers["X-Starfish-Nonce"]
        key = PublicKey(certificate.sub)
        host = signing.canonical_host(BASE)
        assert verify_request(key, headers["X-Starfish-Sig"], method, [path], body, host, ts_ms, nonce)
        nonces.add(nonce)
    assert len(nonces) == len(requests)


def test_an_update_names_the_hash_of_the_create_before_it() -> None:
    stored: dict[str, str] = {}
    updates = 0
    for request in WORKLOADS["signed-push"].requests(Author(BASE), 2_000):
        _, path, _, body = parts(request)
        pushed = decode_push(body)
        assert pushed.base_hash == stored.get(path)
        updates += pushed.base_hash is not None
        stored[path] = pushed.hash
    assert (len(stored), updates) == (1_000, 1_000)


def test_an_unchanged_pull_names_the_hash_of_what_was_pushed() -> None:
    author = Author(BASE)
    workload = WORKLOADS["pull-304"]
    stored = {}
    for request in workload.prepare(author):
        _, path, _, body = parts(request)
        stored[path.replace("/push/", "/pull/")] = f'"{decode_push(body).hash}"'
    asked = {
        path: headers["If-None-Match"] for _, path, headers, _ in map(parts, workload.requests(author, 1_000))
    }
    assert asked == stored


@pytest.mark.parametrize("name", ["push", "push-512k"])
def test_every_push_creates_a_document_of_its_own(name: str) -> None:
    paths = [parts(request)[1] for request in WORKLOADS[name].requests(Author(BASE), 20)]
    assert len(set(paths)) == 20


@pytest.mark.parametrize("name", ["batch-100", "batch-100-signed"])
def test_batches_read_every_document_once(name: str) -> None:
    author = Author(BASE)
    workload = WORKLOADS[name]
    pushed = {parts(request)[1].rpartition("/")[2] for request in workload.prepare(author)}
    read = []
    for request in workload.requests(author, len(pushed) // BATCH):
        query = parse_qs(urlsplit(parts(request)[1]).query)
        sets = orjson.loads(query["params"][0])[query["collections"][0]]
        assert len(sets) == BATCH
        read += [each["id"] for each in sets]
    assert sorted(read) == sorted(pushed)


def test_the_last_page_holds_the_last_names_of_the_list() -> None:
    author = Author(BASE)
    names = [
        parts(request)[1].rpartition("/")[2] for request in WORKLOADS["fill-list"].requests(author, LISTED)
    ]
    assert names == sorted(set(names))
    (request,) = WORKLOADS["list-last"].requests(author, 1)
    query = parse_qs(urlsplit(parts(request)[1]).query)
    assert int(query["limit"][0]) == PAGE
    assert names.index(query["after"][0]) == LISTED - PAGE - 1


def test_the_service_that_is_measured_has_the_collections_that_the_figures_name() -> None:
    assert len(config.load(servers.SERVICE, {}).collections) == COLLECTIONS


@pytest.mark.process
@pytest.mark.parametrize("name", ["batch-100", "batch-100-signed", "batch-100-304", "fill-list", "config"])
def test_bulk_workloads_are_answered_in_full(name: str) -> None:
    with servers.pysync() as server:
        run = asyncio.run(measure(server.url, WORKLOADS[name], count=20, seconds=30))
    assert (run.answers, run.errors) == (20, {})


def test_documents_have_the_size_that_the_figures_name() -> None:
    assert len(note("/push/notes/abc-12")) == DOCUMENT_BYTES
    assert canonicalize(note("x")) == note("x")
    bodies = [big_document(seed) for seed in range(2)]
    assert all(BIG_BYTES - 2_048 < len(body) <= BIG_BYTES for body in bodies)
    assert content_hash(bodies[0]) != content_hash(bodies[1])
    assert isinstance(orjson.loads(bodies[0])["records"], list)


def test_a_mounted_server_is_asked_below_its_mount() -> None:
    request = Author(BASE + "/v1").request("/pull/notes/a")
    assert urlsplit(parts(request)[1]).path == "/v1/pull/notes/a"
