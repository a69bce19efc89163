"""Signed requests that a service receives at the same time, over real connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import aiohttp
import pytest
import pytest_asyncio
from support.clients import SUBJECT, Signed, Start, root_device
from support.collections import MINE
from yarl import URL

from pysync import _core
from pysync.auth.signature_batch import RequestParts

CONNECTIONS = 6


class Client:
    """Keeps connections to a service, and sends a request on each before the service reads any."""

    def __init__(self, caller: Signed, sockets: list[socket.socket]) -> None:
        self._caller = caller
        self._sockets = sockets

    async def statuses(self, count: int, forged: int = -1) -> list[int]:
        """The statuses of signed pulls, of which one is forged."""
        for n, sock in enumerate(self._sockets[:count]):
            target = f"/pull/u/{SUBJECT.user_id}/n{n}"
            headers = self._caller.headers("GET", target, b"" if n != forged else b"other")
            sock.sendall(self._head(target, headers))
        return [await self._status(sock) for sock in self._sockets[:count]]

    async def get_ready(self) -> None:
        """Use each connection once, and let the service keep the certificate."""
        assert (await self._caller.pull(f"u/{SUBJECT.user_id}/n0")).status == 200
        for sock in self._sockets:
            sock.sendall(self._head("/health", {}))
            assert await self._status(sock) == 200

    def _head(self, target: str, headers: dict[str, str]) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"Host: {URL(self._caller.base).authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _status(self, sock: socket.socket) -> int:
        received = b""
        while b"}" not in received:
            received += await asyncio.get_running_loop().sock_recv(sock, 65536)
        return int(received.split()[1])


@pytest_asyncio.fixture
async def client(start: Start, session: aiohttp.ClientSession) -> AsyncIterator[Client]:
    base = await start({"collections": [MINE]})
    url = URL(base)
    with ExitStack() as stack:
        sockets = []
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.create_connection((url.host, url.port)))
            sock.setblocking(False)
            sockets.append(sock)
        client = Client(Signed(base, session, SUBJECT, root_device(SUBJECT)), sockets)
        await client.get_ready()
        yield client


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches whose signatures are verified together."""
    sizes: list[int] = []
    verify_requests = _core.verify_requests

    def verify(requests: list[RequestParts]) -> bool:
        sizes.append(len(requests))
        return verify_requests(requests)

    monkeypatch.setattr(_core, "verify_requests", verify)
    return sizes


async def test_signatures_that_arrive_at_once_are_verified_together(
    client: Client, batches: list[int]
) -> None:
    assert await client.statuses(CONNECTIONS) == [200] * CONNECTIONS
    assert batches == [CONNECTIONS]
    assert await client.statuses(1) == [200]
    assert batches == [CONNECTIONS], "a lone one is verified alone"


async def test_a_forged_signature_refuses_only_its_request(client: Client, batches: list[int]) -> None:
    assert await client.statuses(CONNECTIONS, forged=2) == [200, 200, 401, 200, 200, 200]
    assert batches == [CONNECTIONS]
