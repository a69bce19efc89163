"""Requests that an overloaded server refuses by their first bytes."""

import pytest
from support.listening import Handler, answer, connect, listening, receive

from pysync.server.connection import Connection, Request
from pysync.server.early_rejection import REJECTIONS_AT_ONCE, EarlyRejections
from pysync.server.metrics import Counters
from pysync.server.overload import FAIR_USE, Address, LoadShedder
from pysync.server.request_queue import RequestQueue
from pysync.server.responses import Response

HEAVY, LIGHT = "203.0.113.7", "198.51.100.1"
HOST = b"Host: h\r\n"


class Client:
    """A connection that was served before."""

    def __init__(self, address: Address | None) -> None:
        self.address = address
        self.was_served = True

    def stop_reading(self) -> bool:
        return True

    def read_on(self, since: float) -> None: ...

    def abort(self) -> None: ...

    def kernel_wait_s(self) -> float | None:
        return 0.0


class Full(RequestQueue):
    """Has room for preferred requests alone."""

    @property
    def has_room_for_others(self) -> bool:
        return False


class Server:
    """An overloaded server without room for an address that uses more than its share, which HEAVY does."""

    def __init__(self, proxy_hops: int = 0) -> None:
        self.counters = Counters()
        self.load = LoadShedder(0.25, shares_connections=proxy_hops > 0, counters=self.counters)
        self.early_rejections = EarlyRejections(self.load, self.counters, proxy_hops)
        self.load.address(LIGHT).use, self.load.address(HEAVY).use = 2.0, 1000.0
        self.load.tick(0.0)
        self.load._begin()
        self.load.queue = Full(0.25, self.load._now)  # type: ignore[misc]

    def decide(self, data: bytes, ip: str = HEAVY) -> bytes | None:
        return self.early_rejections.decide(Client(self.load.address(ip)), data)

    def is_refused(self, data: bytes, ip: str = HEAVY) -> bool:
        return self.decide(data, ip) is not None


def get(headers: bytes = HOST, target: bytes = b"/pull/a", version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %b %b\r\n%b\r\n" % (target, version, headers)


def from_address(ip: str) -> bytes:
    return b"X-Forwarded-For: %b\r\n" % ip.encode()


def test_an_address_that_uses_more_than_its_share_is_rejected() -> None:
    server = Server()
    assert server.load.address(HEAVY).use > FAIR_USE
    assert server.is_refused(get())
    assert not server.is_refused(get(), LIGHT)


def test_the_rejection_is_the_ordinary_one_and_is_counted() -> None:
    server = Server()
    rejection = server.decide(get())
    assert isinstance(rejection, bytes)
    head, _, body = rejection.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
    assert {b"Retry-After: 1", b"Cache-Control: no-store", b"Content-Length: %d" % len(body)} <= {*lines}
    assert not any(line.startswith(b"Connection:") for line in lines)
    assert body == b'{"error":"overloaded","code":"overloaded"}'
    assert server.counters.statuses == {("none", "", 503): 1}
    assert server.counters.counts == {("pysync_overload_refusals",): 1}


def test_all_requests_that_arrive_together_are_rejected_together() -> None:
    server = Server()
    rejections = server.decide(3 * get())
    assert rejections is not None
    assert rejections.count(b"HTTP/1.1 503 ") == 3
    assert server.load.address(HEAVY).use == pytest.approx(903.0)


def test_only_so_many_requests_are_rejected_together() -> None:
    server = Server()
    data = (REJECTIONS_AT_ONCE + 1) * get()
    assert not server.is_refused(data)
    client = Client(server.load.address(HEAVY))
    rejections, rest = server.early_rejections.reject_until(10.0, client, data, (9.0, 9.0, 9.0))
    assert rejections.count(b"HTTP/1.1 503 ") == REJECTIONS_AT_ONCE
    assert rest == get()
    assert len(rejections) <= 64 * 1024


@pytest.mark.parametrize(("latest", "count"), [(9.0, 0), (10.0, 1), (11.5, 2), (12.0, 3), (13.0, 3)])
def test_requests_that_have_waited_too_long_are_rejected(latest: float, count: int) -> None:
    server = Server()
    data = 3 * get() + get()[:9]
    client = Client(server.load.address(LIGHT))
    arrivals = (10.0, 12.0, 12.0)
    rejections, rest = server.early_rejections.reject_until(latest, client, data, arrivals)
    assert rejections.count(b"HTTP/1.1 503 ") == count
    assert rest == data[count * len(get()) :]


def test_each_rejection_has_a_request_id_of_its_own() -> None:
    server = Server()
    ids = set()
    for _ in range(3):
        rejection = server.decide(get())
        assert isinstance(rejection, bytes)
        ids.add(rejection.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0])
    assert len(ids) == 3


@pytest.mark.parametrize(
    "data",
    [
        get(target=b"/health"),
        get(target=b"/health/ready"),
        get(version=b"HTTP/1.0"),
        get(HOST + b"Origin: https://app.example\r\n"),
        get(HOST + b"connection: close\r\n"),
        get(HOST + b"Proxy-Connection: close\r\n"),
        get(HOST + b"Upgrade: websocket\r\n"),
        get(HOST + b"Content-Length: 2\r\n") + b"{}",
        get(HOST + b"Transfer-Encoding: chunked\r\n"),
        get(HOST + b"Content-Length : 2\r\n"),
        get(b"Host: h\nContent-Length: 2\r\n"),
        get(HOST + b"X: y\r\n Content-Length: 2\r\n"),
        get(HOST + b"X: \0\r\n"),
        get(HOST + b"X\r\n"),
        get(target=b"/ HTTP/1.1 "),
        get() + get()[:-2],
        get()[:-2],
        get().replace(b"GET", b"POST"),
        get().replace(b"GET", b"HEAD"),
        b"GET http://h/pull/a HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ],
)
def test_other_requests_are_not_decided_early(data: bytes) -> None:
    assert Server().decide(data) is None


@pytest.mark.parametrize(
    ("header", "is_refused"),
    [
        (b"X-Forwarded-For: %b\r\n" % HEAVY.encode(), True),
        (b"x-forwarded-for: %b\r\n" % LIGHT.encode(), False),
        (b"X-Forwarded-For: %b, %b\r\n" % (LIGHT.encode(), HEAVY.encode()), True),
        (b"X-Forwarded-For: %b,%b\r\n" % (HEAVY.encode(), LIGHT.encode()), False),
    ],
)
def test_behind_a_proxy_the_address_that_it_forwards_counts(header: bytes, is_refused: bool) -> None:
    server = Server(proxy_hops=1)
    assert server.is_refused(get(HOST + header), "127.0.0.1") is is_refused


@pytest.mark.parametrize(
    "headers", [HOST, HOST + b"X-Forwarded-For: unknown\r\n", HOST + 2 * b"X-Forwarded-For: ::1\r\n"]
)
def test_behind_a_proxy_a_request_without_one_address_is_not_decided_early(headers: bytes) -> None:
    assert Server(proxy_hops=1).decide(get(HOST + headers)) is None


def test_behind_a_proxy_the_head_of_the_first_request_tells_the_address() -> None:
    server = Server(proxy_hops=1)
    client, light = Client(None), get(HOST + from_address(LIGHT))
    early = server.early_rejections
    assert early.address(client, light + get(HOST + from_address(HEAVY))) is server.load.address(LIGHT)
    assert early.address(client, get() + light) is None
    for end in range(len(light)):
        assert early.address(client, light[:end]) is None


async def test_a_connection_goes_on_after_an_early_rejection() -> None:
    server = Server(proxy_hops=1)
    async with listening(server.load, early_rejections=server.early_rejections) as address:
        with connect(address, get(HOST + b"X-Forwarded-For: %b\r\n" % HEAVY.encode())) as client:
            assert (await receive(client)).startswith(b"HTTP/1.1 503 ")
            client.send(get(HOST + b"X-Forwarded-For: %b\r\n" % LIGHT.encode()))
            assert (await receive(client)).endswith(b"answered")


def noting(connections: list[Connection]) -> Handler:
    """A handler that answers, and notes the connections of requests."""

    async def note(request: Request) -> Response:
        connections.append(request.connection)
        return await answer(request)

    return note


async def test_the_rest_of_a_head_is_not_taken_for_a_request() -> None:
    server = Server(proxy_hops=1)
    async with listening(server.load, early_rejections=server.early_rejections) as address:
        begun = get(HOST + from_address(LIGHT)) + b"GET /b HTTP/1.1\r\nX: "
        with connect(address, begun) as client:
            assert (await receive(client)).endswith(b"answered")
            client.send(get(HOST + from_address(HEAVY)))
            assert (await receive(client)).endswith(b"answered")


async def test_a_connection_with_early_rejections_alone_is_not_closed_as_idle() -> None:
    server, connections = Server(proxy_hops=1), list[Connection]()
    async with listening(server.load, noting(connections), server.early_rejections) as address:
        with connect(address, get(HOST + from_address(LIGHT))) as client:
            assert (await receive(client)).endswith(b"answered")
            (connection,) = connections
            connection._next_keepalive_close_time = 0.0
            client.send(get(HOST + from_address(HEAVY)))
            assert (await receive(client)).startswith(b"HTTP/1.1 503 ")
            connection._process_keepalive()
            client.send(get(HOST + from_address(LIGHT)))
            assert (await receive(client)).endswith(b"answered")


async def test_a_client_that_reads_nothing_gets_no_early_rejections() -> None:
    server, connections = Server(proxy_hops=1), list[Connection]()
    async with listening(server.load, noting(connections), server.early_rejections) as address:
        with connect(address, get(HOST + from_address(LIGHT))) as client:
            assert (await receive(client)).endswith(b"answered")
            connections[0].pause_writing()
            client.send(get(HOST + from_address(HEAVY)))
            assert (await receive(client)).endswith(b"answered")
            connections[0].resume_writing()
