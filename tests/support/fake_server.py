"""A server with scripted responses, and a client of it whose clock, jitter and waits the test controls."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from pysync import protocol
from pysync._core import PublicKey, verify_request
from pysync.auth import issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client

KEYS = IdentityKeys.from_private(bytes([1]) * 32, bytes([2]) * 32)
NOW_MS = 1_700_000_000_000
DEVICE = issuing.issue_device_certificate(
    KEYS, KEYS.ed_pub, KEYS.kem_pub, now_s=NOW_MS // 1000, nonce=bytes(16)
)
PULLED = {"data": {"a": 1}, "hash": "h1", "timestamp": 5}
PUSHED = {"hash": "h2", "timestamp": 6}

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None


class Server:
    """Answers each request with its next answer and keeps the requests. None drops the connection, upon which
    aiohttp by itself sends a GET once more. It has no change stream."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[web.BaseRequest, bytes]] = []
        self.url = ""

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/events"):
            return web.Response(status=404)
        self.requests.append((request, await request.read()))
        answer = self.answers.pop(0)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        body = answer[1] if isinstance(answer[1], bytes) else orjson.dumps(answer[1])
        return web.Response(status=answer[0], body=body, headers=answer[2] if len(answer) > 2 else None)

    def headers(self, name: str) -> list[str | None]:
        return [request.headers.get(name) for request, _ in self.requests]


@asynccontextmanager
async def silent_until(noticed: asyncio.Event) -> AsyncIterator[str]:
    """The URL of a server that answers no pull before `noticed` is set."""

    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        await noticed.wait()
        return web.json_response(PULLED)

    application = web.Application()
    application.router.add_get("/pull/{path:.*}", respond)
    async with TestServer(application) as server:
        yield str(server.make_url("/"))


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[Server]:
    server = Server(*answers)
    test_server = TestServer(web.Application())
    test_server.app.router.add_route("*", "/{path:.*}", server.respond)
    async with test_server:
        server.url = str(test_server.make_url("/"))
        yield server
    assert not server.answers, "answers that no request took"


class Waits:
    """A sleep that takes no time and remembers how long it was asked for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def client(url: str, **options: Any) -> Client:
    fresh = itertools.count()
    defaults: dict[str, Any] = {
        "now_ms": lambda: NOW_MS,
        "random": lambda size: next(fresh).to_bytes(size, "big"),
        "jitter": lambda: 0.0,
        "sleep": Waits(),
    }
    return Client(url, **{**defaults, **options})


def is_signed(request: web.BaseRequest, body: bytes, target: str) -> bool:
    host = request.headers["Host"]
    headers = request.headers
    return verify_request(
        PublicKey(KEYS.ed_pub),
        headers[protocol.HEADER_SIGNATURE],
        request.method,
        [target],
        body,
        host,
        int(headers[protocol.HEADER_TIMESTAMP]),
        headers[protocol.HEADER_NONCE],
    )
