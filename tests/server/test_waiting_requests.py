"""Requests that wait on their connections as bytes that nobody has parsed."""

import asyncio
import random
from collections.abc import Callable

import pytest
from support.listening import answer, connect, listening, receive

from pysync.server import connection as connection_module
from pysync.server.connection import Connection, Kept, Request
from pysync.server.early_rejection import EarlyRejections
from pysync.server.metrics import Counters
from pysync.server.overload import LoadShedder
from pysync.server.request_queue import RequestQueue
from pysync.server.responses import Response

MAX_WAIT_S = 0.25
PULL = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


class Waiting:
    """A handler that waits until it may answer, and the connections of its requests."""

    def __init__(self) -> None:
        self.connections = list[Connection]()
        self.may_answer = asyncio.Event()

    async def handle(self, request: Request) -> Response:
        self.connections.append(request.connection)
        await self.may_answer.wait()
        return Response(200, await request.content.read() + b"answered")

    async def connection(self) -> Connection:
        """Wait for the first request, and return its connection."""
        while not self.connections:
            await asyncio.sleep(0)
        return self.connections[0]


async def echo(request: Request) -> Response:
    body = await request.content.read()
    return Response(200, request.raw_path.encode() + b" " + body + b"\n")


def full(load: LoadShedder, monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    """Let the queue be full when this function says so."""
    monkeypatch.setattr(RequestQueue, "is_full", property(lambda self: is_full() or not self.is_empty))


@pytest.mark.parametrize("seed", range(30))
async def test_requests_that_wait_are_answered_in_their_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    sent, expected = b"", list[bytes]()
    for number in range(100):
        body = random_.randbytes(random_.choice([0, 0, 1, 300])).hex().encode()
        method = b"POST" if body else b"GET"
        length = b"Content-Length: %d\r\n" % len(body) if body else b""
        sent += b"%b /%d HTTP/1.1\r\nHost: h\r\n%b\r\n%b" % (method, number, length, body)
        expected.append(b"/%d %b\n" % (number, body))
    load = LoadShedder(random_.choice([0.0, 1e9]))
    full(load, monkeypatch, lambda: random_.random() < 0.7)
    if seed % 3 == 0:
        load._begin()
    early = EarlyRejections(load, Counters()) if seed % 2 else None
    async with listening(load, echo, early) as address:
        reader, writer = await asyncio.open_connection(*address)
        while sent:
            size = random_.choice([1, 20, 100, 400, 3_000, 10_000])
            writer.write(sent[:size])
            sent = sent[size:]
            await writer.drain()
            for _ in range(random_.randrange(4)):
                await asyncio.sleep(0)
        async with asyncio.timeout(20):
            for body in expected:
                head = await reader.readuntil(b"\r\n\r\n")
                length_of = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                received = await reader.readexactly(length_of)
                is_refused = early is not None and head.startswith(b"HTTP/1.1 503 ")
                assert is_refused or received == body
        writer.close()
    assert load.queue.kept_bytes == 0


async def test_requests_that_have_waited_too_long_are_rejected_unparsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    load = LoadShedder(MAX_WAIT_S, now=lambda: now)
    paths = list[str]()

    async def note(request: Request) -> Response:
        paths.append(request.raw_path)
        return Response(200, b"answered")

    is_full = True
    monkeypatch.setattr(Connection, "kernel_wait_s", lambda self: 0.0)
    full(load, monkeypatch, lambda: is_full)
    load._begin()
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load, note, EarlyRejections(load, Counters())) as address:
        with connect(address, 2 * b"GET /old HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            while load.queue.is_empty:
                await asyncio.sleep(0)
            now += 2 * MAX_WAIT_S
            client.send(b"GET /new HTTP/1.1\r\nHost: h\r\n\r\n")
            waiting = load.queue._next()
            assert isinstance(waiting, Connection)
            while len(waiting._kept) == 1:
                await asyncio.sleep(0)
            data, (_, last, read_at) = waiting._kept[0]
            waiting._kept[0] = Kept(data, (now - 2 * MAX_WAIT_S, last, read_at))
            waiting.go_on()
            received = b""
            while b"answered" not in received:
                received += await receive(client)
    assert received.count(b"HTTP/1.1 503 ") >= 1
    assert paths[-1] == "/new"


async def test_a_client_that_sends_on_is_read_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadShedder(1e9)
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(connection_module, "KEPT_BYTES", 100)
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, 4 * PULL) as client:
            while load.queue.is_empty:
                await asyncio.sleep(0)
            waiting = load.queue._next()
            assert isinstance(waiting, Connection)
            assert waiting.transport is not None
            assert not waiting.transport.is_reading()
            waiting.go_on()
            assert waiting.transport.is_reading()
            assert (await receive(client)).endswith(b"answered")


async def test_requests_that_the_parser_holds_back_are_answered_during_an_overload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    load = LoadShedder(MAX_WAIT_S, now=lambda: now)

    async def take_long(request: Request) -> Response:
        nonlocal now
        now += 2 * MAX_WAIT_S
        return Response(200, b"answered")

    monkeypatch.setattr(Connection, "kernel_wait_s", lambda self: 0.0)
    load._begin()
    async with listening(load, take_long, EarlyRejections(load, Counters())) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(100 * PULL)
        async with asyncio.timeout(10):
            for _ in range(100):
                await reader.readuntil(b"answered")
        writer.close()


async def test_waiting_request_is_not_rejected_before_an_earlier_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, waiting = LoadShedder(0.0), Waiting()
    async with listening(load, waiting.handle, EarlyRejections(load, Counters())) as address:
        with connect(address, PULL) as client:
            connection = await waiting.connection()
            full(load, monkeypatch, lambda: True)
            client.send(PULL)
            while not connection._kept:
                await asyncio.sleep(0)
            load._begin()
            connection.go_on()  # as from a place in the queue that it no longer needs
            waiting.may_answer.set()
            received = b""
            while received.count(b"answered") < 2:
                received += await receive(client)
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("way", ["force_close", "close the transport"])
async def test_closed_connection_whose_request_is_due_is_not_written_to(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LoadShedder(0.0)
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load, answer, EarlyRejections(load, Counters())) as address:
        with connect(address, PULL):
            while load.queue.is_empty:
                await asyncio.sleep(0)
            waiting = load.queue._next()
            assert isinstance(waiting, Connection)
            assert waiting.transport is not None
            load._begin()
            if way == "force_close":
                waiting.force_close()
            else:
                waiting.transport.close()
            waiting.go_on()
    assert load.queue.kept_bytes == 0


async def test_a_body_that_is_read_does_not_resume_a_connection_with_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, waiting = LoadShedder(1e9), Waiting()
    monkeypatch.setattr(connection_module, "KEPT_BYTES", 10)
    push = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx"
    async with listening(load, waiting.handle) as address:
        with connect(address, push + PULL) as client:
            connection = await waiting.connection()
            full(load, monkeypatch, lambda: True)
            client.send(PULL)
            while not connection._kept:
                await asyncio.sleep(0)
            assert connection.transport is not None
            waiting.may_answer.set()
            while len(waiting.connections) == 1:
                await asyncio.sleep(0)
                assert not (connection._kept and connection.transport.is_reading())
            received = b""
            while received.count(b"answered") < 3:
                received += await receive(client)


async def test_a_connection_is_not_read_while_its_parser_has_enough() -> None:
    load, waiting = LoadShedder(1e9), Waiting()
    async with listening(load, waiting.handle) as address:
        with connect(address, 40 * PULL):
            connection = await waiting.connection()
            assert connection.transport is not None
            assert not connection.transport.is_reading()
            load.pause(connection)
            load.resume(connection)
            assert not connection.transport.is_reading()
            waiting.may_answer.set()


async def test_a_connection_with_too_much_that_is_detached_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    load, waiting = LoadShedder(1e9), Waiting()
    monkeypatch.setattr(connection_module, "KEPT_BYTES", 10)
    async with listening(load, waiting.handle) as address:
        with connect(address, PULL) as client:
            connection = await waiting.connection()
            full(load, monkeypatch, lambda: True)
            client.send(PULL)
            while not connection._kept:
                await asyncio.sleep(0)
            transport = connection.detach(asyncio.Protocol())
            assert transport.is_reading()
            assert (load.connections, load.queue.kept_bytes) == (0, 0)
            transport.abort()
            waiting.may_answer.set()


async def test_a_client_that_sends_byte_by_byte_is_read_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadShedder(1e9)
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(connection_module, "KEPT_READS", 2)
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, PULL[:1]) as client:
            while load.queue.is_empty:
                await asyncio.sleep(0)
            waiting = load.queue._next()
            assert isinstance(waiting, Connection)
            assert waiting.transport is not None
            for number in (1, 2):
                assert waiting.transport.is_reading()
                client.send(PULL[number : number + 1])
                while len(waiting._kept) == number:
                    await asyncio.sleep(0)
            assert not waiting.transport.is_reading()
            client.send(PULL[3:])
            waiting.go_on()
            assert (await receive(client)).endswith(b"answered")


async def test_large_requests_begin_at_once_while_others_keep_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = LoadShedder(1e9)
    large = b"GET / HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n" % (100 * b"x")
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(connection_module, "SMALL_KEPT_BYTES", len(PULL))
    monkeypatch.setattr(connection_module, "MAX_KEPT_BYTES", len(large))
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, large) as first, connect(address) as second, connect(address) as third:
            while load.queue.kept_bytes < len(large):
                await asyncio.sleep(0)
            second.send(large)
            assert (await receive(second)).endswith(b"answered")
            third.send(PULL)
            while load.queue.kept_bytes < len(large) + len(PULL):
                await asyncio.sleep(0)
            for client in (first, third):
                load.queue._next().go_on()
                assert (await receive(client)).endswith(b"answered")
            assert load.queue.kept_bytes == 0


async def test_a_health_probe_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadShedder(1e9)
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            assert (await receive(client)).endswith(b"answered")
