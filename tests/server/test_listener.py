"""How connections are accepted, read late, or refused."""

import asyncio
import socket
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import pytest
from support.listening import connect, listening, receive

from pysync.server import listener
from pysync.server.connection import Request
from pysync.server.http_server import HttpServer
from pysync.server.listener import UnreadConnection
from pysync.server.metrics import Counters
from pysync.server.overload import LoadShedder
from pysync.server.responses import Response

MANY = 60


class Overloaded(LoadShedder):
    """Is overloaded until `close`, and has no room for new connections."""

    def __init__(self, max_connections: int = 1_000) -> None:
        self.counters = Counters()
        super().__init__(0.25, max_connections, counters=self.counters)
        self._begin()

    @property
    def defers_new(self) -> bool:
        return self.is_overloaded


async def turns_until(load: LoadShedder, connections: int) -> int:
    """Return the turns of the event loop until so many connections are open."""
    async with asyncio.timeout(10):
        turns = 0
        while load.connections != connections:
            await asyncio.sleep(0)
            turns += 1
        return turns


async def test_connections_that_come_together_are_accepted_together() -> None:
    load = LoadShedder(0.25)
    async with listening(load) as address:
        with ExitStack() as clients:
            for _ in range(MANY):
                clients.enter_context(connect(address))
            assert await turns_until(load, MANY) < MANY / 2


async def test_a_new_connection_is_not_read_during_an_overload() -> None:
    load = Overloaded()
    async with listening(load) as address:
        with connect(address, b"GET /pull HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            await turns_until(load, 1)
            assert load.paused == 1
            load.close()
            assert (await receive(client)).endswith(b"answered")
            assert load.paused == 0


async def test_requests_of_a_connection_that_was_not_read_have_waited_since_then() -> None:
    load, arrivals = Overloaded(), list[float]()

    async def note(request: Request) -> Response:
        at, _ = request.arrival
        arrivals.append(at)
        return Response(200, b"answered")

    async with listening(load, note) as address:
        with connect(address, 3 * b"GET /pull HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            await turns_until(load, 1)
            (unread,) = load._paused
            since = load._paused[unread] = load._now() - 10.0
            load.resume(unread)
            while len(arrivals) < 3:
                await receive(client)
    assert arrivals[0] == pytest.approx(since)
    assert arrivals == sorted(arrivals)


async def test_a_health_probe_is_answered_during_an_overload() -> None:
    load = Overloaded()
    async with listening(load) as address:
        with connect(address, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            assert (await receive(client)).endswith(b"answered")


async def test_a_health_probe_that_comes_late_is_answered_during_an_overload() -> None:
    load = Overloaded()
    async with listening(load) as address:
        with connect(address) as client:
            await turns_until(load, 1)
            client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await receive(client)).endswith(b"answered")


async def test_health_probe_in_chunks_is_answered_during_an_overload() -> None:
    load = Overloaded()
    async with listening(load) as address:
        with connect(address, b"GET /he") as client:
            await turns_until(load, 1)
            for piece in (b"alt", b"h HTTP/1.1\r\nHost: h\r\n\r\n"):
                for _ in range(10):  # turns in which the server could look at the first pieces
                    await asyncio.sleep(0)
                assert load.paused == 1
                client.send(piece)
            assert (await receive(client)).endswith(b"answered")
            client.send(b"GET /\r\n\r\n")  # fewer bytes than a probe has are read too
            assert await receive(client)


async def test_connection_that_ends_within_a_health_probe_is_not_read_again() -> None:
    load = Overloaded()
    async with listening(load) as address:
        with connect(address, b"GET /he") as client:
            await turns_until(load, 1)
            (unread,) = load._paused
            assert isinstance(unread, UnreadConnection)
            client.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                while unread._is_watched:
                    await asyncio.sleep(0)
            assert load.paused == 1


async def test_a_connection_that_is_not_read_is_forgotten_when_its_client_has_gone() -> None:
    load = Overloaded()
    async with listening(load) as address:
        connect(address, b"GET /pull HTTP/1.1\r\nHost: h\r\n\r\n").close()
        await turns_until(load, 1)
        load.tick(0.0)
        assert (load.connections, load.paused) == (0, 0)


async def test_a_connection_beyond_the_limit_is_ended_at_once() -> None:
    load = LoadShedder(0.25, max_connections=1)
    async with listening(load) as address:
        with connect(address), connect(address) as second:
            with pytest.raises(ConnectionResetError):
                await receive(second)
            assert load.connections == 1


async def test_the_oldest_connection_that_was_never_read_gives_way() -> None:
    load = Overloaded(max_connections=2)
    async with listening(load) as address:
        with connect(address) as first, connect(address) as second:
            await turns_until(load, 2)
            with connect(address, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") as probe:
                assert (await receive(probe)).endswith(b"answered")
                assert await receive(first) == b""
            assert load.counters.counts["pysync_rejected_connections",] == 1
            load.close()
            second.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await receive(second)).endswith(b"answered")


async def test_closed_connections_make_room_for_others() -> None:
    load = LoadShedder(0.25, max_connections=1)
    async with listening(load) as address:
        for _ in range(3):
            with connect(address, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n") as client:
                assert (await receive(client)).endswith(b"answered")
            await turns_until(load, 0)


@pytest.mark.parametrize(
    ("load", "owner", "name"),
    [
        (Overloaded(), listener, "UnreadConnection"),
        (Overloaded(), UnreadConnection, "look_for_probe"),
        (Overloaded(), listener.Listener, "_serve"),
        (LoadShedder(0.25), listener.Listener, "_serve"),
        (LoadShedder(0.25), HttpServer, "make_connection"),
    ],
)
async def test_a_connection_without_memory_for_its_objects_is_ended_and_not_counted(
    load: LoadShedder, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> NoReturn:
        raise MemoryError

    request = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    async with listening(load) as address:
        with monkeypatch.context() as patched, connect(address, request) as client:
            patched.setattr(owner, name, fail)
            with suppress(ConnectionResetError):
                assert await receive(client) == b""
            assert (load.connections, load.paused) == (0, 0)
        with connect(address, request) as client:
            assert (await receive(client)).endswith(b"answered")


async def test_a_connection_that_finds_no_memory_is_ended_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*arguments: object) -> None:
        raise MemoryError

    load = LoadShedder(0.25)
    async with listening(load) as address:
        with monkeypatch.context() as patched, connect(address) as client:
            patched.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fail)
            assert await receive(client) == b""
            assert load.connections == 0
        with connect(address, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            assert (await receive(client)).endswith(b"answered")
    assert "cannot serve a connection" in caplog.text
