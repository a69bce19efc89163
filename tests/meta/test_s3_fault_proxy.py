"""The fault proxy: what passes is unchanged, what fails fails as it was asked to."""

import asyncio
import io
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from multidict import CIMultiDict
from support.http_relay import RequestHead
from support.injected_faults import s3_error
from support.s3_fault_proxy import FaultProxy
from yarl import URL

Answered = tuple[int, CIMultiDict[str], bytes]

LARGE = bytes(range(256)) * 12 * 1024
"""More than the proxy takes whole."""


class Upstream:
    """Holds bodies under their paths, and keeps the requests that came."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.requests: list[web.BaseRequest] = []
        self.connections: set[Any] = set()
        self.broken = asyncio.Event()

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        self.connections.add(request.transport)
        try:
            body = await request.content.read()
        except ConnectionResetError:
            self.broken.set()
            return web.Response(status=400)
        if request.raw_path == "/bye":
            response = web.Response()
            response.force_close()
            return response
        if request.method == "PUT":
            if "If-None-Match" in request.headers and request.raw_path in self.held:
                return web.Response(status=412)
            self.held[request.raw_path] = body
            return web.Response(headers={"ETag": '"1"'})
        found = self.held.get(request.raw_path)
        if found is None:
            return web.Response(status=404, text="nothing")
        headers = {"ETag": '"1"', "Content-Encoding": "gzip"}
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers=headers)
        if "chunked" in request.query:
            return await self._in_chunks(request, found)
        return web.Response(body=found, headers=headers)

    async def _in_chunks(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for start in range(0, len(body), 100_000):
            await response.write(body[start : start + 100_000])
        return response


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest_asyncio.fixture
async def upstream_url(upstream: Upstream) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(upstream.respond, auto_decompress=False))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture
async def proxy(upstream_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(upstream_url) as opened:
        yield opened


class Requester:
    """Sends requests as they are given, each once."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **options: Any
    ) -> Answered:
        url = URL(self._url + path, encoded=True)
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self._session.request(method, url, data=data, headers=headers, **options) as answer:
            return answer.status, CIMultiDict(answer.headers), await answer.read()


@pytest_asyncio.fixture
async def requester(proxy: FaultProxy) -> AsyncIterator[Requester]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        session._retry_connection = False  # by itself it sends again what finds its connection closed
        yield Requester(session, proxy.url)


async def test_a_request_and_its_answer_pass_unchanged(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    path = "/b/a%2Fb%20%C3%A9+c//d?x=%2f&y"
    await requester("PUT", path, b"\x1f\x8bbytes", {"X-Odd-Case": "v  w", "Content-Encoding": "gzip"})
    status, headers, body = await requester("GET", path)
    assert (status, body) == (200, b"\x1f\x8bbytes")
    assert (headers["ETag"], headers["Content-Encoding"]) == ('"1"', "gzip")
    request = upstream.requests[0]
    assert (request.method, request.raw_path) == ("PUT", path)
    assert (b"X-Odd-Case", b"v  w") in request.raw_headers
    assert request.host == proxy.url.removeprefix("http://")
    assert (await requester("GET", "/none"))[::2] == (404, b"nothing")


async def test_answers_without_a_body_leave_the_connection_in_step(
    upstream: Upstream, requester: Requester
) -> None:
    await requester("PUT", "/b/a", b"one")
    status, headers, body = await requester("HEAD", "/b/a")
    assert (status, headers["Content-Length"], body) == (200, "3", b"")
    assert (await requester("GET", "/b/a", headers={"If-None-Match": '"1"'}))[::2] == (304, b"")
    assert (await requester("GET", "/b/a"))[2] == b"one"
    assert len(upstream.connections) == 1


async def test_large_and_chunked_bodies_pass_both_ways(upstream: Upstream, requester: Requester) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 70_000):
            yield LARGE[start : start + 70_000]

    await requester("PUT", "/b/a", LARGE)
    await requester("PUT", "/b/b?chunked", chunks())
    assert upstream.held == {"/b/a": LARGE, "/b/b?chunked": LARGE}
    assert upstream.requests[1].headers["Transfer-Encoding"] == "chunked"
    assert (await requester("GET", "/b/a"))[2] == LARGE
    _, headers, body = await requester("GET", "/b/b?chunked")
    assert (headers["Transfer-Encoding"], body) == ("chunked", LARGE)
    assert len(upstream.connections) == 1


async def test_client_that_expects_a_continue_receives_it(upstream: Upstream, requester: Requester) -> None:
    assert (await requester("PUT", "/b/a", b"one", expect100=True))[0] == 200
    assert upstream.held == {"/b/a": b"one"}


async def test_requests_are_counted_by_kind(proxy: FaultProxy, requester: Requester) -> None:
    for method, path in (
        ("GET", "/b/a"),
        ("GET", "/b/a?x-id=GetObject"),
        ("GET", "/b?list-type=2&prefix=a%2F"),
        ("HEAD", "/b"),
        ("DELETE", "/b/a"),
        ("POST", "/b/a?uploads="),
        ("PUT", "/b/a?partNumber=1&uploadId=u"),
        ("POST", "/b/a?uploadId=u"),
        ("POST", "/b?delete"),
    ):
        await requester(method, path)
    assert proxy.calls == {
        "GET": 2,
        "LIST": 1,
        "HEAD": 1,
        "DELETE": 1,
        "POST uploads": 1,
        "PUT partNumber": 1,
        "POST uploadId": 1,
        "POST delete": 1,
    }
    assert proxy.statuses == {404: 8, 200: 1}
    proxy.reset_counts()
    assert (proxy.calls, proxy.statuses, proxy.max_concurrent) == ({}, {}, 0)


async def test_a_lost_reply_was_applied(proxy: FaultProxy, upstream: Upstream, requester: Requester) -> None:
    proxy.lose_reply("PUT")
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await requester("PUT", "/b/a", b"one")
    assert upstream.held == {"/b/a": b"one"}
    assert (await requester("GET", "/b/a"))[2] == b"one"
    assert (proxy.met, proxy.statuses) == ({"lose_reply": 1}, {200: 1})


async def test_an_aborted_request_never_arrives(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    proxy.abort("PUT", after=1, times=2)
    await requester("PUT", "/b/a", b"one")
    for _ in range(2):
        with pytest.raises(aiohttp.ClientConnectionError):
            await requester("PUT", "/b/a", b"two")
    assert upstream.held == {"/b/a": b"one"}
    await requester("PUT", "/b/a", b"three")
    assert (proxy.calls, proxy.statuses) == ({"PUT": 4}, {200: 2})


async def test_a_fault_is_met_by_the_requests_that_it_is_for(proxy: FaultProxy, requester: Requester) -> None:
    def conditional(sent: RequestHead) -> bool:
        return sent.path == "b/é" and "If-Match" in sent.headers

    proxy.throttle("PUT", "DELETE", when=conditional, times=None)
    assert (await requester("PUT", "/b/%C3%A9"))[0] == 200
    assert (await requester("PUT", "/b/e", headers={"If-Match": "1"}))[0] == 200
    assert (await requester("GET", "/b/%C3%A9", headers={"If-Match": "1"}))[0] == 200
    for method in ("PUT", "DELETE", "PUT"):
        assert (await requester(method, "/b/%C3%A9", headers={"If-Match": "1"}))[0] == 503
    proxy.reset()
    assert (await requester("PUT", "/b/%C3%A9", headers={"If-Match": "1"}))[0] == 200


async def test_faults_of_one_kind_are_met_in_the_order_of_requests(
    proxy: FaultProxy, requester: Requester
) -> None:
    proxy.respond("PUT", status=500, after=1)
    proxy.respond("PUT", status=502)
    proxy.respond(status=504)
    assert (await requester("GET", "/b/a"))[0] == 504
    assert [(await requester("PUT", "/b/a"))[0] for _ in range(4)] == [200, 500, 502, 200]


async def test_throttling_is_said_as_s3_says_it(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    proxy.throttle("PUT", "HEAD", times=2)
    status, headers, body = await requester("PUT", "/b/a", LARGE)
    assert (status, headers["Content-Type"]) == (503, "application/xml")
    assert b"<Code>SlowDown</Code>" in body
    assert (await requester("HEAD", "/b/a"))[::2] == (503, b"")
    assert upstream.requests == []
    assert (await requester("PUT", "/b/a", b"one"))[0] == 200


async def test_answer_of_the_proxy_may_hide_an_applied_write(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    proxy.respond("PUT", status=409, body=s3_error("ConditionalRequestConflict"))
    proxy.respond("PUT", status=500, headers={"X-Ours": "1"}, forwarded=True)
    status, _, body = await requester("PUT", "/b/a", b"one")
    assert (status, b"<Code>ConditionalRequestConflict</Code>" in body, upstream.held) == (409, True, {})
    status, headers, _ = await requester("PUT", "/b/a", b"two")
    assert (status, headers["X-Ours"], upstream.held) == (500, "1", {"/b/a": b"two"})
    assert (await requester("PUT", "/b/a", b"three"))[0] == 200


async def test_an_answer_of_ours_may_stand_for_one_status(proxy: FaultProxy, requester: Requester) -> None:
    proxy.respond("PUT", status=500, instead_of=412, after=1)
    absent = {"If-None-Match": "*"}
    statuses = [(await requester("PUT", "/b/a", b"one", absent))[0] for _ in range(4)]
    assert statuses == [200, 412, 500, 412]


async def test_a_torn_answer_promises_all_of_its_body(proxy: FaultProxy, requester: Requester) -> None:
    await requester("PUT", "/b/a", LARGE)
    proxy.truncate("GET", to_bytes=100_000)
    url = URL(proxy.url + "/b/a")
    async with aiohttp.ClientSession(auto_decompress=False) as session, session.get(url) as answer:
        assert answer.content_length == len(LARGE)
        assert await answer.content.readexactly(100_000) == LARGE[:100_000]
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    assert (await requester("GET", "/b/a"))[2] == LARGE


async def test_a_delayed_request_is_applied_though_its_client_has_left(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    release = asyncio.Event()
    arrived = proxy.delay("PUT", until=release)
    put = asyncio.ensure_future(requester("PUT", "/b/a", b"old"))
    await arrived.wait()
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)
    assert (await requester("PUT", "/b/a", b"new"))[0] == 200
    assert upstream.held == {"/b/a": b"new"}
    release.set()
    while upstream.held != {"/b/a": b"old"}:
        await asyncio.sleep(0)


async def test_a_delay_may_be_a_time(proxy: FaultProxy, requester: Requester) -> None:
    arrived = proxy.delay("PUT", until=0.001)
    assert (await requester("PUT", "/b/a"))[0] == 200
    assert arrived.is_set()


async def test_requests_under_way_together_are_counted(proxy: FaultProxy, requester: Requester) -> None:
    release = asyncio.Event()
    arrivals = [proxy.delay("GET", until=release) for _ in range(3)]
    gets = [asyncio.ensure_future(requester("GET", "/b/a")) for _ in range(3)]
    for arrived in arrivals:
        await arrived.wait()
    release.set()
    await asyncio.gather(*gets)
    await requester("GET", "/b/a")
    assert proxy.max_concurrent == 3


async def test_headers_may_be_dropped_or_changed_on_the_way(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    absent = {"If-None-Match": "*"}
    await requester("PUT", "/b/a", b"one", absent)
    proxy.drop_header("if-none-match")
    assert (await requester("PUT", "/b/a", b"two", absent))[0] == 200
    proxy.reset()

    def unquote(headers: CIMultiDict[str]) -> None:
        headers["ETag"] = headers["ETag"].strip('"')

    def quote(headers: CIMultiDict[str]) -> None:
        headers["If-None-Match"] = f'"{headers["If-None-Match"]}"'

    proxy.rewrite(sent=quote, answered=unquote)
    status, headers, _ = await requester("GET", "/b/a", headers={"If-None-Match": "1"})
    assert (status, headers["ETag"]) == (304, "1")


async def outcomes(proxy: FaultProxy, requester: Requester, seed: int) -> list[Any]:
    proxy.chaos(Random(seed), abort=0.2, lose_reply=0.2, throttle=0.2, delay=0.2, delay_s=0.001)
    answered: list[Any] = []
    for _ in range(100):
        try:
            answered.append((await requester("GET", "/b/a"))[0])
        except aiohttp.ClientConnectionError:
            answered.append("broken")
    return answered


async def test_chaos_is_the_same_for_the_same_seed(proxy: FaultProxy, requester: Requester) -> None:
    first = await outcomes(proxy, requester, 1)
    met = dict(proxy.met)
    assert met.keys() == {"abort", "lose_reply", "throttle", "delay"}
    assert all(5 <= times <= 40 for times in met.values())
    assert {404, 503, "broken"} == set(first)
    assert await outcomes(proxy, requester, 1) == first
    assert await outcomes(proxy, requester, 2) != first
    proxy.respond("GET", status=500)
    assert (await requester("GET", "/b/a"))[0] == 500
    proxy.reset()
    assert {(await requester("GET", "/b/a"))[0] for _ in range(20)} == {404}


async def test_a_connection_that_upstream_ends_ends(upstream: Upstream, requester: Requester) -> None:
    assert (await requester("GET", "/b/a"))[0] == 404
    status, headers, _ = await requester("GET", "/bye")
    assert (status, headers["Connection"]) == (200, "close")
    assert (await requester("GET", "/b/a"))[0] == 404
    assert len(upstream.connections) == 2


async def test_half_a_request_is_never_applied(
    proxy: FaultProxy, upstream: Upstream, requester: Requester
) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield LARGE
        while not upstream.requests:
            await asyncio.sleep(0)
        raise ConnectionResetError

    with pytest.raises(aiohttp.ClientConnectionError):
        await requester("PUT", "/b/a", breaking(), {"Content-Length": str(2 * len(LARGE))})
    await upstream.broken.wait()
    assert upstream.held == {}


async def test_an_upstream_that_is_not_there_is_a_broken_connection(unused_tcp_port: int) -> None:
    async with (
        FaultProxy(f"http://127.0.0.1:{unused_tcp_port}") as proxy,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(proxy.url)
    with pytest.raises(ValueError, match="not the URL of a server"):
        FaultProxy("127.0.0.1:80")


async def test_closed_proxy_ends_delayed_requests(upstream: Upstream, upstream_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with FaultProxy(upstream_url) as other:
            arrived = other.delay(until=asyncio.Event())
            get = asyncio.ensure_future(session.get(other.url))
            await arrived.wait()
        with pytest.raises(aiohttp.ClientConnectionError):
            await get
    assert upstream.requests == []
