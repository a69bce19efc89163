"""Connections that run out, and requests that wait for their turn."""

import asyncio
import socket
from collections.abc import Sequence

import pytest
from aiohttp import web
from support.listening import connect, listening, receive
from support.loop_time import loop_time

from pysync.errors import BadRequest, Overloaded
from pysync.server.http import connection as http_server
from pysync.server.http.connection import HEAD_TIMEOUT_S, Connection
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.load import REQUESTS_PER_TURN, Load
from pysync.server.http.request_body import read_body
from pysync.server.http.responses import DRAIN_ABOVE, Response

GET = b"GET /0 HTTP/1.1\r\nHost: h\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def client(address: tuple[str, int], ip: str = "127.0.0.1") -> Streams:
    return await asyncio.open_connection(*address, local_addr=(ip, 0))


async def request(streams: Streams, number: int = 0) -> int:
    """Send a request, and return the status of its response; 0 if the connection is closed."""
    reader, writer = streams
    try:
        writer.write(GET.replace(b"0", b"%d" % number, 1))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    return int(head.split()[1])


def loop_timed_load(max_connections: int = 100) -> Load:
    """A load whose clock is that of the event loop."""
    loop = asyncio.get_running_loop()
    return Load(now=lambda: loop.time(), max_connections=max_connections)


async def hang_up(clients: Sequence[Streams]) -> None:
    for _, writer in clients:
        writer.transport.abort()


async def test_the_connection_that_was_idle_for_longest_gives_way() -> None:
    async with listening(load=Load(max_connections=3)) as address:
        clients = [await client(address) for _ in range(3)]
        assert [await request(each) for each in (clients[1], clients[0], clients[2])] == [200, 200, 200]
        newcomer = await client(address)
        assert await request(newcomer) == 200
        assert await clients[1][0].read() == b""
        assert [await request(each) for each in (clients[0], clients[2])] == [200, 200]
        await hang_up([*clients, newcomer])


async def test_the_address_that_has_most_connections_gives_way() -> None:
    async with listening(load=Load(max_connections=4)) as address:
        first = await client(address, "127.0.1.1")
        many = [await client(address, "127.0.1.2") for _ in range(3)]
        assert [await request(each) for each in (first, *many)] == [200] * 4
        newcomers = [await client(address, f"127.0.1.{n}") for n in (3, 4)]
        assert [await request(each) for each in newcomers] == [200, 200]
        assert [await request(each) for each in (first, *many)] == [200, 0, 0, 200]
        await hang_up([first, *many, *newcomers])


async def test_eleven_addresses_that_send_nothing_lock_nobody_out() -> None:
    async with listening(load=Load(max_connections=100)) as address:
        silent = []
        for n in range(220):
            silent.append(await client(address, f"127.0.2.{n % 11 + 1}"))
            if n % 20 == 19:
                newcomer = await client(address, f"127.0.3.{n // 20 + 1}")
                assert await request(newcomer) == 200
                await hang_up([newcomer])
        await hang_up(silent)


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    load = loop_timed_load()
    async with listening(load=load) as address:
        with loop_time() as time:
            reader, writer = await client(address)
            while not load.connections:
                await asyncio.sleep(0)
            time.now_s += HEAD_TIMEOUT_S + 1.0
            assert await reader.read() == b""
            writer.close()


async def test_a_head_that_does_not_end_gets_408() -> None:
    load = loop_timed_load()
    async with listening(load=load) as address:
        with loop_time() as time:
            reader, writer = await client(address)
            assert await request((reader, writer)) == 200
            writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
            while not load.heads:
                await asyncio.sleep(0)
            time.now_s += HEAD_TIMEOUT_S + 1.0
            received = await reader.read()
            assert received.startswith(b"HTTP/1.1 408 ")
            assert received.endswith(b'{"error":"Request timeout","code":"request_timeout"}')
            writer.close()


async def test_a_client_that_never_reads_a_short_response_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "STALL_S", 0.1)

    async def handle(request: web.BaseRequest) -> Response:
        return Response(200, b"x" * (DRAIN_ABOVE // 2))

    load = Load()
    async with listening(handle, load) as address:
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        silent.connect(address)
        silent.sendall(GET)
        other = await client(address)
        async with asyncio.timeout(30):
            while await request(other) == 200 and load.connections == 2:
                pass
        assert load.connections == 1
        silent.close()
        await hang_up([other])


async def test_connections_are_served_without_a_time_limit_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")  # only Linux has it

    async def handle(request: web.BaseRequest) -> Response:
        return Response(200)

    async with listening(handle) as address:
        one = await client(address)
        assert await request(one) == 200
        await hang_up([one])


class Held:
    """Requests that are held until `release` is set, and how many have begun."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.release = asyncio.Event()
        self.begun = 0

    async def handle(self, request: web.BaseRequest) -> Response:
        self.begun += 1
        await self.release.wait()
        return Response(200, b"answered")


async def test_a_request_in_progress_is_answered_while_its_address_makes_room() -> None:
    load = Load(max_connections=2)
    held = Held(load)
    async with listening(held.handle, load) as address:
        busy = await client(address)
        pending = asyncio.create_task(request(busy))
        while not held.begun:
            await asyncio.sleep(0)
        idle = await client(address)
        newcomer = await client(address)
        assert await idle[0].read() == b""
        idle[1].close()
        held.release.set()
        assert await pending == 200
        assert await request(newcomer) == 200
        await hang_up([busy, newcomer])


async def test_a_connection_is_rejected_where_its_own_address_has_only_busy_ones() -> None:
    load = Load(max_connections=1)
    held = Held(load)
    async with listening(held.handle, load) as address:
        busy = await client(address)
        pending = asyncio.create_task(request(busy))
        while not held.begun:
            await asyncio.sleep(0)
        reader, writer = await client(address)
        assert await reader.read() == b""
        held.release.set()
        assert await pending == 200
        writer.close()
        await hang_up([busy])


async def test_a_connection_that_gives_way_with_half_a_body_is_an_incomplete_request() -> None:
    raised: list[Exception] = []

    async def handle(request: web.BaseRequest) -> Response:
        try:
            return Response(200, await read_body(request, 100, BytesInFlight(100, lambda request: "")))
        except Exception as error:
            raised.append(error)
            raise ConnectionResetError from None

    async with listening(handle, Load(max_connections=1)) as address:
        first = connect(address, GET)
        await receive(first)
        # Both arrive in one turn, so the first gives way when its request is about to begin.
        newcomer = socket.create_connection(address, source_address=("127.0.0.2", 0))
        newcomer.setblocking(False)
        first.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nx")
        newcomer.sendall(GET)
        assert (await receive(newcomer)).startswith(b"HTTP/1.1 200 ")
        first.close()
        newcomer.close()
    assert [error for error in raised if not isinstance(error, BadRequest)] == []


async def test_of_connections_that_arrive_together_no_more_are_served_than_the_limit() -> None:
    async with listening(load=Load(max_connections=1)) as address:
        clients = [connect(address, GET) for _ in range(8)]
        answers = await asyncio.gather(*map(receive, clients), return_exceptions=True)
        for each in clients:
            each.close()
    assert len([each for each in answers if isinstance(each, bytes) and each]) == 1


class Unread:
    """Responses of which none is read. `transport` has those that the system does not take."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.responses = 0

    @property
    def is_full(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    async def handle(self, request: web.BaseRequest) -> Response:
        self.transport = request.transport
        self.responses += 1
        return Response(200, bytes(32 * 1024))


async def test_a_closing_connection_that_nobody_reads_gives_way() -> None:
    unread = Unread()
    loop = asyncio.get_running_loop()
    load = loop_timed_load(max_connections=1)
    async with listening(unread.handle, load) as address:
        with loop_time() as time, socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            await loop.sock_connect(silent, address)
            requested = 0
            while not unread.is_full:
                await loop.sock_sendall(silent, GET)
                requested += 1
                while unread.responses < requested:
                    await asyncio.sleep(0)
            await loop.sock_sendall(silent, b"GET")
            while not load.heads:
                await asyncio.sleep(0)
            time.now_s += HEAD_TIMEOUT_S + 1.0
            assert unread.transport is not None
            while not unread.transport.is_closing():
                await asyncio.sleep(0)
            newcomer = await client(address)
            assert await request(newcomer) == 200
            received = b""
            while some := await loop.sock_recv(silent, 1024 * 1024):
                received = received[-100:] + some
            assert b"request_timeout" not in received
            await hang_up([newcomer])


async def test_requests_in_progress_are_answered_while_the_server_stops() -> None:
    held = Held(Load())
    async with listening(held.handle, held.load) as address:
        clients = [await client(address) for _ in range(3)]
        pending = asyncio.gather(*map(request, clients))
        while held.begun < 3:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0, held.release.set)
    assert await pending == [200, 200, 200]
    await hang_up(clients)


class Turns:
    """A server of whose requests those go on first whose turn it is. Each takes `took_s`."""

    def __init__(self, took_s: float) -> None:
        self.now, self.took_s = 0.0, took_s
        self.load = Load(max_wait_s=1.0, now=lambda: self.now)
        self.order: list[int] = []

    async def handle(self, request: web.BaseRequest) -> Response:
        assert isinstance(request.protocol, Connection)
        if (turn := self.load.turn(request.protocol)) is not None:
            try:
                await turn
            except Overloaded:
                return Response(503, b"")
        self.order.append(int(request.raw_path[1:]))
        self.now += self.took_s
        return Response(200, b"")

    async def request_at_once(self, count: int) -> list[int]:
        """Return the statuses of requests that arrive together, in their order."""
        async with listening(self.handle, self.load) as address:
            clients = [await client(address) for _ in range(count)]
            for number, each in enumerate(clients):
                assert await request(each, number) == 200
            self.order.clear()
            self.now = 0.0
            statuses = await asyncio.gather(*(request(each, n) for n, each in enumerate(clients)))
            await hang_up(clients)
        return statuses


async def test_requests_that_arrive_together_are_answered_in_their_order() -> None:
    turns = Turns(took_s=0.001)
    assert await turns.request_at_once(3 * REQUESTS_PER_TURN) == [200] * 3 * REQUESTS_PER_TURN
    assert turns.order == list(range(3 * REQUESTS_PER_TURN))


async def test_a_request_that_has_waited_too_long_is_rejected_and_the_newest_are_answered() -> None:
    turns = Turns(took_s=0.1)
    statuses = await turns.request_at_once(3 * REQUESTS_PER_TURN)
    assert statuses == [200] * REQUESTS_PER_TURN + [503] * REQUESTS_PER_TURN + [200] * REQUESTS_PER_TURN


async def test_a_first_request_has_not_waited_since_its_connection_was_opened() -> None:
    turns = Turns(took_s=0.0)
    turns.now = 1.0
    async with listening(turns.handle, turns.load) as address:
        clients = [await client(address) for _ in range(2 * REQUESTS_PER_TURN)]
        while turns.load.connections < len(clients):
            await asyncio.sleep(0)
        turns.now = 5.0
        statuses = await asyncio.gather(*(request(each, n) for n, each in enumerate(clients)))
        await hang_up(clients)
    assert statuses == [200] * len(clients)


async def test_a_client_that_hangs_up_while_it_waits_gives_up_its_turn() -> None:
    turns = Turns(took_s=0.0)
    async with listening(turns.handle, turns.load) as address:
        clients = [await client(address) for _ in range(2 * REQUESTS_PER_TURN)]
        assert [await request(each) for each in clients] == [200] * len(clients)
        turns.order.clear()
        for _, writer in clients:
            writer.write(GET)
            writer.transport.abort()
        while turns.load.connections:
            await asyncio.sleep(0)
        another = await client(address)
        assert await request(another) == 200
        await hang_up([another])
