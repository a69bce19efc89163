"""Attacks and overload: short forms of the rows of `benches/overload.py`, without timing.

Whatever is asked of a server, good clients are answered meanwhile (200, or 503 `overloaded`), every bound
holds, and afterwards nothing is left of it.
"""

import asyncio
import base64
import itertools
import json
import os
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import pytest_asyncio
from support.clients import SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import MINE, NOTES, collection
from yarl import URL

from pysync.server.app import App
from pysync.server.http import in_flight

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MB = 1_000_000
BUDGET = 4 * MB
MAX_CONNECTIONS, MAX_STREAMS = 200, 20
COLLECTIONS = [NOTES, MINE, collection("big", maxBodyBytes=2 * MB)]
OWN = f"u/{SUBJECT.user_id}/a"
GOOD = "127.0.1.1"
CROWD = tuple(f"127.0.2.{n}" for n in range(1, 9))
BAD = tuple(f"127.0.0.{n}" for n in range(2, 6))
"""Addresses: of the good client, of many others, and of attackers."""
BOUNDS = {
    "pysync_connections": MAX_CONNECTIONS,
    "pysync_bytes_in_flight": BUDGET * in_flight.RESERVE,
    "pysync_streams": MAX_STREAMS,
    "pysync_stream_unread_bytes": 32 * 1024 * 1024,
}
"""The most that a gauge may show."""


class Site:
    """A service with low bounds, a good client, whose certificate is known, and attackers."""

    def __init__(self, app: App, good: Signed, forwarded_for: str = "") -> None:
        self.app, self.good = app, good
        self._headers = {"X-Forwarded-For": forwarded_for} if forwarded_for else {}
        self._writers: list[asyncio.StreamWriter] = []

    async def send(self) -> Reply:
        """A good request, which is answered whatever else is asked."""
        async with asyncio.timeout(30):
            reply = await self.good.pull(OWN, self._headers)
        assert reply.status == 200 or is_overloaded(reply), (reply.status, reply.body)
        return reply

    async def during(self, attack: Coroutine[Any, Any, T]) -> T:
        """The outcome of an attack. Meanwhile the good client asks, and the bounds hold."""
        attacking = asyncio.create_task(attack)
        try:
            await self.until(attacking.done)
            return attacking.result()
        finally:
            attacking.cancel()

    def gauge(self, name: str) -> float:
        """A gauge, as operators see it."""
        found = re.search(rf"^{name} (\S+)$", self.app.render_metrics().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def check_bounds(self) -> None:
        """Every gauge is within its bound."""
        for name, most in BOUNDS.items():
            assert self.gauge(name) <= most, name

    async def connect(self, text: bytes, sources: Sequence[str] = BAD, *, reads: bool = True) -> Streams:
        """A connection on which `text` was sent. The client takes next to nothing of the answer if it does
        not read. Raises ConnectionError if the server refuses it."""
        url, sock = URL(self.good.base), socket.socket()
        sock.setblocking(False)
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.bind((sources[len(self._writers) % len(sources)], 0))
        try:
            await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
        except BaseException:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock, limit=65_536 if reads else 1)
        self._writers.append(writer)
        writer.write(text)
        return reader, writer

    async def hold(self, texts: Iterable[bytes]) -> None:
        """Connections on which these were sent, and which the clients keep without reading."""
        for text in texts:
            with suppress(ConnectionError):
                await self.connect(text, reads=False)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Go on asking until this holds."""
        async with asyncio.timeout(30):
            while not holds():
                await self.send()
                self.check_bounds()

    async def recover(self) -> None:
        """Let the attackers hang up, and wait until nothing is left of them."""
        for writer in self._writers:
            writer.transport.abort()
        calm = {**dict.fromkeys(BOUNDS, 0.0), "pysync_connections": 1.0}
        await self.until(lambda: {name: self.gauge(name) for name in BOUNDS} == calm)
        assert (await self.send()).status == 200


MakeSite = Callable[..., Awaitable[Site]]


@pytest_asyncio.fixture
async def make_site(start: Start) -> AsyncIterator[MakeSite]:
    """Starts a service with these members of `server`. It is calm again at the end of the test."""
    async with AsyncExitStack() as stack:

        async def make(*, forwarded_for: str = "", **server: Any) -> Site:
            bounds = {
                "maxBytesInFlight": BUDGET,
                "maxConnections": MAX_CONNECTIONS,
                "maxStreams": MAX_STREAMS,
            }
            members = {
                "collections": COLLECTIONS,
                "server": {**bounds, **server},
            }
            base = await start(members)
            connector = aiohttp.TCPConnector(limit=1, local_addr=(GOOD, 0))
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            good = Signed(base, session, SUBJECT, root_device(SUBJECT))
            site = Site(start.apps[-1], good, forwarded_for)  # type: ignore[attr-defined]
            assert (await good.push(OWN, {"n": 1})).status == 200
            stack.push_async_callback(site.recover)
            return site

        yield make


def is_overloaded(reply: Reply) -> bool:
    return reply.status == 503 and reply.json["code"] == "overloaded" and "Retry-After" in reply.headers


def get(target: str, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"GET {target} HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode()


def push(target: str, length: int, body: bytes = b"") -> bytes:
    lines = f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"POST {target} HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode() + body


async def statuses_of(reader: asyncio.StreamReader) -> AsyncIterator[int]:
    """The status of each answer, until the server hangs up or the caller stops."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None, head
            status, body = int(head.split()[1]), await reader.readexactly(int(length[1]))
            if status == 503:
                assert b"Retry-After: " in head
                assert json.loads(body)["code"] == "overloaded"
            yield status
            if b"Connection: close" in head:
                return


async def statuses(site: Site, texts: Iterable[bytes], sources: Sequence[str] = BAD) -> Counter[int]:
    """The statuses with which requests are answered, each on a connection of its own."""

    async def one(text: bytes) -> int:
        reader, writer = await site.connect(text, sources)
        async for status in statuses_of(reader):
            writer.close()
            return status
        return 0

    return Counter(await asyncio.gather(*map(one, texts)))


async def test_valid_requests_beyond_capacity_are_answered_or_rejected(make_site: MakeSite) -> None:
    site = await make_site(maxQueueMs=1)

    async def pipeline(number: int) -> Counter[int]:
        reader, _ = await site.connect(get("/pull/notes/a") * 8, CROWD)
        found = Counter[int]()
        async for status in statuses_of(reader):
            found[status] += 1
            if found.total() == 8:
                break
        return found

    async def crowd() -> Counter[int]:
        found = Counter[int]()
        for each in await asyncio.gather(*map(pipeline, range(64))):
            assert each.total() == 8
            found += each
        return found

    found = await site.during(crowd())
    assert set(found) <= {200, 503}
    health = await site.good.request("GET", "/health")
    assert health.status == 200


def junk(count: int, **headers: str) -> list[bytes]:
    """What scanners send: for nothing that there is, without credentials or with nonsense, or no HTTP."""
    made = []
    for number in range(count):
        nonsense = base64.b64encode(os.urandom(450)).decode()
        made.append(
            (
                get(f"/{number}/wp-login.php", **headers),
                get(f"/pull/{OWN}", **headers),
                get(f"/pull/{OWN}", Authorization=f"Cap {nonsense}", **headers),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(16) + b"\r\n\r\n",
            )[number % 4]
        )
    return made


async def test_junk_is_rejected_and_leaves_known_clients_alone(make_site: MakeSite) -> None:
    site = await make_site()
    found = await site.during(statuses(site, junk(80)))
    assert set(found) <= {400, 401, 404, 503}
    assert found.total() == 80
    assert (await site.send()).status == 200


async def test_forged_certificates_are_rejected_and_leave_known_clients_alone(make_site: MakeSite) -> None:
    site = await make_site()
    text = site.good.certificate.text
    expiry = json.loads(text)["exp"]

    def forged(number: int) -> bytes:
        changed = text.replace(b"%d" % expiry, b"%d" % (expiry + 1 + number))
        headers = site.good.headers("GET", f"/pull/{OWN}", b"")
        headers["Authorization"] = "Cap " + base64.b64encode(changed).decode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"GET /pull/{OWN} HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode()

    found = await site.during(statuses(site, map(forged, range(80))))
    assert set(found) <= {401, 503}
    assert found[401]
    assert (await site.send()).status == 200


async def store_large(site: Site) -> None:
    """Store a document of 1 MB."""
    anyone = Browser(site.good.base, site.good.session)
    assert (await anyone.push("big/megabyte", {"text": "x" * MB})).status == 200


async def test_clients_that_never_read_their_answers_hold_no_more_than_the_budget(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    await store_large(site)
    await site.hold([get("/pull/big/megabyte") * 8] * 20)
    await site.until(lambda: site.gauge("pysync_bytes_in_flight") >= 2 * MB)


async def test_large_bodies_are_stored_or_rejected(make_site: MakeSite) -> None:
    site = await make_site()
    body = json.dumps({"data": {"text": "x" * MB}, "baseHash": None}).encode()
    texts = [push(f"/push/big/{number}", len(body), body) for number in range(20)]
    found = await site.during(statuses(site, texts))
    assert set(found) <= {200, 503}
    assert found[200] >= 3
    assert found.total() == 20


async def test_the_largest_batches_are_answered_or_rejected(make_site: MakeSite) -> None:
    site = await make_site()
    await store_large(site)
    params = json.dumps({"big": [{"id": "megabyte"}] * 3})
    target = "/batch/pull?" + urlencode({"collections": "big", "params": params})
    found = await site.during(statuses(site, [get(target)] * 10))
    assert set(found) <= {200, 503}
    assert found[200] >= 1


async def test_idle_connections_give_way_to_others(make_site: MakeSite) -> None:
    site = await make_site()
    await site.hold([b""] * 2 * MAX_CONNECTIONS)
    await site.until(lambda: site.gauge("pysync_connections") == MAX_CONNECTIONS)
    found = await site.during(statuses(site, [get("/health")] * 4, CROWD))
    assert found == {200: 4}


async def test_slow_bodies_hold_little(make_site: MakeSite) -> None:
    site = await make_site()
    await site.hold(push(f"/push/notes/{number}", 60_000, b"{") for number in range(40))
    await site.until(lambda: site.app.in_flight.held == 40 * in_flight.MIN_BYTES)


async def streams(site: Site, count: int, target: str) -> list[asyncio.StreamReader]:
    """The open change streams of this many that were asked for. The others are refused."""
    opened = []
    for _ in range(count):
        reader, _ = await site.connect(get(target), CROWD)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] in (b"200", b"503")
        if head.split()[1] == b"200":
            opened.append(reader)
    return opened


async def test_streams_beyond_the_limit_are_rejected_and_all_others_get_every_event(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    opened = await site.during(streams(site, 2 * MAX_STREAMS, "/events?collections=notes"))
    assert len(opened) == MAX_STREAMS == site.gauge("pysync_streams")

    async def events() -> None:
        body = b'{"data":{},"baseHash":null}'
        for number in range(20):
            text = push(f"/push/notes/{number}", len(body), body)
            assert await statuses(site, [text], CROWD) == {200: 1}
        for reader, number in itertools.product(opened, range(20)):
            assert await reader.readuntil(b'"params":{"id":"%d"}' % number)

    await site.during(events())


async def test_streams_that_resume_far_back_catch_up_or_are_reset(make_site: MakeSite) -> None:
    site = await make_site()
    (reader,) = await streams(site, 1, "/events?collections=notes")
    cursor = (await reader.readuntil(b"\n\n")).split(b"id: ")[1].strip().decode()
    for number in range(100):
        assert (await site.good.push(f"notes/{number}", {"n": number})).status == 200
    target = f"/events?collections=notes&lastEventId={cursor}"
    opened = await site.during(streams(site, MAX_STREAMS - 1, target))
    assert len(opened) == MAX_STREAMS - 1

    async def catch_up() -> None:
        for reader in opened:
            await reader.readuntil(b'"params":{"id":"99"}')

    await site.during(catch_up())


async def test_behind_a_proxy_good_clients_and_attackers_share_connections(make_site: MakeSite) -> None:
    site = await make_site(trustedProxyHops=1, forwarded_for="198.51.100.1")
    body = json.dumps({"data": {"text": "x" * MB}, "baseHash": None}).encode()
    texts = [
        *junk(80, X_Forwarded_For="203.0.113.7"),
        *(push(f"/push/big/{number}", len(body), body) for number in range(8)),
    ]
    found = await site.during(statuses(site, texts, (GOOD,)))
    assert set(found) <= {200, 400, 401, 404, 503}
    assert found.total() == len(texts)
    assert (await site.send()).status == 200
