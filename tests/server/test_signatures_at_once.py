"""Signed requests that a service receives at the same time, over real connections."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import orjson
import pytest
import pytest_asyncio
from support.clients import ISSUER, SUBJECT, Signed, Start, root_device
from support.collections import MINE
from support.core_calls import core_calls
from yarl import URL

from pysync.auth import issuing, revocation
from pysync.auth.signing import DOCUMENT_AUTHOR, Signer, sign_author
from pysync.clock import wall_clock_ms
from pysync.store import ABSENT, Store
from pysync.testing import FakeClock

CONNECTIONS = 6


class Client:
    """Keeps connections to a service, and sends a request on each before the service reads any."""

    def __init__(self, caller: Signed, sockets: list[socket.socket]) -> None:
        self.caller = caller
        self._sockets = sockets

    async def statuses(self, count: int, forged: int = -1) -> list[int]:
        """The statuses of signed pulls, of which one is forged."""
        return await self.send([self.pull(n, b"" if n != forged else b"other") for n in range(count)])

    def pull(self, n: int, signed_body: bytes = b"") -> bytes:
        """A signed pull, which is forged if it signs a body."""
        target = f"/pull/u/{SUBJECT.user_id}/n{n}"
        return self._head(target, self.caller.headers("GET", target, signed_body))

    def push(self, n: int, text: bytes, signed_body: bytes | None = None) -> bytes:
        """A signed push of this body, which is forged if it signs another."""
        target = f"/push/u/{SUBJECT.user_id}/p{n}"
        headers = self.caller.headers("POST", target, text if signed_body is None else signed_body)
        headers |= {"Content-Type": "application/json", "Content-Length": f"{len(text)}"}
        return self._head(target, headers, "POST") + text

    async def send(self, requests: list[bytes]) -> list[int]:
        """The statuses of requests that arrive at once."""
        for request, sock in zip(requests, self._sockets, strict=False):
            sock.sendall(request)
        return [await self._status(sock) for sock in self._sockets[: len(requests)]]

    async def get_ready(self) -> None:
        """Use each connection once, and let the service keep the certificate."""
        assert (await self.caller.pull(f"u/{SUBJECT.user_id}/n0")).status == 200
        for sock in self._sockets:
            sock.sendall(self._head("/health", {}))
            assert await self._status(sock) == 200

    def _head(self, target: str, headers: dict[str, str], method: str = "GET") -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {URL(self.caller.base).authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _status(self, sock: socket.socket) -> int:
        received = b""
        while b"}" not in received:
            received += await asyncio.get_running_loop().sock_recv(sock, 65536)
        return int(received.split()[1])


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the service."""
    return FakeClock(wall_clock_ms())


@pytest_asyncio.fixture
async def client(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[Client]:
    base = await start({"store": f"file:{tmp_path / 'data'}", "collections": [MINE]}, now_ms=clock)
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
def calls() -> Iterator[Counter[str]]:
    """The calls of the core that verify signatures."""
    with core_calls() as calls:
        yield calls


async def test_signatures_that_arrive_at_once_are_verified_together(
    client: Client, calls: Counter[str]
) -> None:
    calls.clear()
    assert await client.statuses(CONNECTIONS) == [200] * CONNECTIONS
    assert (calls["verify_requests"], calls["verify_request"]) == (1, 0)
    assert await client.statuses(1) == [200]
    assert (calls["verify_requests"], calls["verify_request"]) == (1, 1), "a lone one is verified alone"


async def test_a_forged_signature_rejects_only_its_request(client: Client) -> None:
    assert await client.statuses(CONNECTIONS, forged=2) == [200, 200, 401, 200, 200, 200]


async def test_wrong_signature_of_a_stranger_leaves_the_batch_of_others(
    client: Client, calls: Counter[str]
) -> None:
    known = client.caller
    stranger = Signed(known.base, known.session, ISSUER, root_device(ISSUER))
    client.caller = stranger
    forged = client.pull(0, b"other")
    client.caller = known
    requests = [forged, *(client.pull(n) for n in range(CONNECTIONS - 1))]
    calls.clear()
    assert await client.send(requests) == [401] + [200] * (CONNECTIONS - 1)
    assert (calls["verify_requests"], calls["verify_request"]) == (1, 1)


async def test_a_request_that_arrives_twice_at_once_is_accepted_once(client: Client) -> None:
    requests = [client.pull(n) for n in range(CONNECTIONS - 1)]
    assert sorted(await client.send([*requests, requests[0]])) == [200] * (CONNECTIONS - 1) + [401]
    assert await client.send(requests) == [401] * (CONNECTIONS - 1)


async def test_a_certificate_that_another_node_revoked_is_rejected_within_5_seconds(
    client: Client, clock: FakeClock, start: Start
) -> None:
    assert await client.statuses(CONNECTIONS) == [200] * CONNECTIONS
    listed = issuing.issue_revocation_list(SUBJECT, 1, certificates=[client.caller.certificate])
    store: Store = start.apps[0].store  # type: ignore[attr-defined]
    await store.put(f"{revocation.PREFIX}/{SUBJECT.user_id}", listed.text, expect=ABSENT)
    clock.now_ms += 5000
    assert await client.statuses(CONNECTIONS) == [401] * CONNECTIONS


def authored(n: int, *, is_proven: bool = True, author: Signer = SUBJECT) -> bytes:
    """The body of a push with an author proof."""
    data = b'{"n":%d}' % n
    proof = sign_author(author, DOCUMENT_AUTHOR, f"u/{SUBJECT.user_id}/p{n}", data if is_proven else b"{}")
    return orjson.dumps({"data": orjson.Fragment(data), "baseHash": None, **proof})


async def test_author_proofs_are_verified_with_the_signatures_of_their_requests(
    client: Client, calls: Counter[str]
) -> None:
    calls.clear()
    pushes = [client.push(n, authored(n)) for n in range(CONNECTIONS)]
    assert await client.send(pushes) == [200] * CONNECTIONS
    assert await client.send([client.push(CONNECTIONS, authored(CONNECTIONS))]) == [200]
    assert (calls["verify_request"], calls["verify_author"]) == (0, 0), "also a lone one"


async def test_a_wrong_author_proof_rejects_only_its_push(client: Client) -> None:
    pushes = [client.push(n, authored(n, is_proven=n != 2)) for n in range(CONNECTIONS - 1)]
    pushes.append(client.push(CONNECTIONS, authored(CONNECTIONS, author=ISSUER)))
    assert await client.send(pushes) == [200, 200, 403, 200, 200, 403]
    assert await client.send(pushes) == [401] * CONNECTIONS, "the nonces of all are recorded"


async def test_only_the_signer_of_a_push_learns_the_fault_of_its_body(client: Client) -> None:
    for text in (b'{"authorSignature"', b'{"data":1,"authorSignature":"x"}'):
        assert await client.send([client.push(1, text)]) == [400]
        assert await client.send([client.push(1, text, b"other")]) == [401]
