"""The fault proxy: what passes is unchanged, what fails fails as it was asked to."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from pysync.testing import FaultProxy


class Upstream:
    """Holds bodies under their paths, and keeps the requests that came."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.came: list[tuple[str, str, list[tuple[bytes, bytes]]]] = []
        self.connections: set[object] = set()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.came.append((request.method, request.raw_path, list(request.raw_headers)))
        self.connections.add(request.transport)
        if request.method == "PUT":
            self.held[request.raw_path] = body
            return web.Response(headers={"ETag": '"1"'})
        found = self.held.get(request.raw_path)
        if found is None:
            return web.Response(status=404, text="nothing")
        return web.Response(body=found, headers={"ETag": '"1"', "Content-Encoding": "gzip"})


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest_asyncio.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[FaultProxy]:
    runner = web.ServerRunner(web.Server(upstream.answer, auto_decompress=False))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with FaultProxy(f"http://127.0.0.1:{port}") as opened:
        yield opened
    await runner.cleanup()


class Asking:
    """Sends requests as they are given; `broken` counts those that found their connection closed."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, CIMultiDict[str], bytes]:
        url = URL(self._url + path, encoded=True)
        async with self._session.request(method, url, data=body, headers=headers) as answer:
            return answer.status, CIMultiDict(answer.headers), await answer.read()


@pytest_asyncio.fixture
async def ask(proxy: FaultProxy) -> AsyncIterator[Asking]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        session._retry_connection = False  # what a proxy loses is to be seen, not asked for again
        yield Asking(session, proxy.url)


async def test_a_request_and_its_answer_pass_unchanged(
    proxy: FaultProxy, upstream: Upstream, ask: Asking
) -> None:
    path = "/b/a%2Fb%20%C3%A9+c//d?x=%2f&y"
    await ask("PUT", path, b"\x1f\x8bbytes", **{"X-Odd-Case": "v  w", "Content-Encoding": "gzip"})
    status, headers, body = await ask("GET", path)
    assert (status, body, headers["ETag"], headers["Content-Encoding"]) == (
        200,
        b"\x1f\x8bbytes",
        '"1"',
        "gzip",
    )
    method, raw_path, raw_headers = upstream.came[0]
    assert (method, raw_path) == ("PUT", path)
    assert (b"X-Odd-Case", b"v  w") in raw_headers
    assert (b"Host", proxy.url.removeprefix("http://").encode()) in raw_headers
    assert (await ask("GET", "/none"))[0] == 404


async def test_a_lost_reply_was_applied(proxy: FaultProxy, upstream: Upstream, ask: Asking) -> None:
    proxy.lose_reply("PUT")
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await ask("PUT", "/b/a", b"one")
    assert upstream.held == {"/b/a": b"one"}
    assert (await ask("GET", "/b/a"))[2] == b"one"
    assert proxy.met == {"lose_reply": 1}


async def test_a_cut_request_never_comes(proxy: FaultProxy, upstream: Upstream, ask: Asking) -> None:
    proxy.cut("PUT", after=1, times=2)
    await ask("PUT", "/b/a", b"one")
    for _ in range(2):
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask("PUT", "/b/a", b"two")
    assert upstream.held == {"/b/a": b"one"}
    await ask("PUT", "/b/a", b"three")
    assert proxy.calls == {"PUT": 4}
    assert proxy.statuses == {200: 2}
