"""Requests that wait until the event loop begins to handle them."""

import asyncio
import random
from collections.abc import Callable
from math import inf

import pytest
from support.listening import connect, listening, receive

from pysync.server import connection as connection_module
from pysync.server.connection import Connection, Request
from pysync.server.early_rejection import EarlyRejections
from pysync.server.metrics import Counters
from pysync.server.overload import LoadShedder
from pysync.server.request_queue import OTHERS_EVERY, OTHERS_WAITING, REQUESTS_PER_TICK, RequestQueue
from pysync.server.responses import Response

MAX_WAIT_S = 0.25


class Client:
    """A connection whose request begins when its turn comes."""

    def __init__(self, queue: RequestQueue, name: int, events: list[tuple[str, int]]) -> None:
        self.name = name
        self._queue = queue
        self._events = events

    def go_on(self) -> None:
        self._queue.will_start(self)
        self._events.append(("begin", self.name))

    def give_up(self) -> None:
        self._events.append(("give up", self.name))


class Queue:
    """A queue with a clock that stands still, and what happened to its connections."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue = RequestQueue(MAX_WAIT_S, lambda: self.now)
        self.events: list[tuple[str, int]] = []

    def add(self, *names: int, is_preferred: bool = True, waited_s: float = 0.0) -> list[Client]:
        clients = [Client(self.queue, name, self.events) for name in names]
        for client in clients:
            self.queue.add(client, self.now - waited_s, is_preferred=is_preferred)
        return clients

    async def tick(self) -> list[int]:
        """Let a tick pass, and return which requests it begins."""
        self.events.clear()
        await asyncio.sleep(0)
        self.queue._starting.clear()
        return [name for event, name in self.events if event == "begin"]


async def test_requests_begin_in_the_order_in_which_they_came_those_preferred_first() -> None:
    queue = Queue()
    queue.add(1, is_preferred=False)
    queue.add(2, 3)
    queue.add(4, is_preferred=False)
    assert await queue.tick() == [2, 3, 1, 4]


def test_the_oldest_of_all_that_wait_is_known() -> None:
    queue = Queue()
    assert queue.queue.oldest() == inf
    for name, (since, is_preferred) in enumerate([(3.0, True), (1.0, False), (2.0, True)]):
        client = Client(queue.queue, name, queue.events)
        waiting = queue.queue._preferred if is_preferred else queue.queue._others
        waiting[client] = (since, client)
    assert queue.queue.oldest() == 1.0


async def test_a_tick_begins_only_so_many_requests() -> None:
    queue = Queue()
    queue.add(*range(2 * REQUESTS_PER_TICK))
    assert queue.queue.is_full
    assert await queue.tick() == list(range(REQUESTS_PER_TICK))
    assert await queue.tick() == list(range(REQUESTS_PER_TICK, 2 * REQUESTS_PER_TICK))
    assert not queue.queue.is_full


async def test_during_an_overload_the_last_that_are_preferred_come_first() -> None:
    queue = Queue()
    queue.queue.is_newest_first = True
    queue.add(1, 2, is_preferred=False)
    queue.add(3, 4)
    assert await queue.tick() == [4, 3, 2, 1]


async def test_others_have_their_part_during_an_overload() -> None:
    queue = Queue()
    queue.queue.is_newest_first = True
    queue.add(*range(REQUESTS_PER_TICK))
    queue.add(-1, -2, is_preferred=False)
    begun = await queue.tick()
    assert sum(name < 0 for name in begun) == min(2, REQUESTS_PER_TICK // OTHERS_EVERY)


async def test_what_has_waited_too_long_is_given_up_during_an_overload() -> None:
    queue = Queue()
    queue.add(1, waited_s=2 * MAX_WAIT_S)
    assert await queue.tick() == [1]
    queue.queue.is_newest_first = True
    queue.add(1, waited_s=2 * MAX_WAIT_S)
    queue.add(2, waited_s=MAX_WAIT_S / 2)
    assert await queue.tick() == [2]
    assert ("give up", 1) in queue.events


async def test_few_others_wait_during_an_overload() -> None:
    queue = Queue()
    queue.add(*range(OTHERS_WAITING), is_preferred=False)
    assert queue.queue.has_room_for_others
    await queue.tick()
    queue.queue.is_newest_first = True
    queue.add(*range(OTHERS_WAITING), is_preferred=False)
    assert not queue.queue.has_room_for_others


async def test_a_connection_that_is_closed_does_not_begin() -> None:
    queue = Queue()
    first, second = queue.add(1, 2)
    queue.queue.remove(first)
    assert await queue.tick() == [2]
    assert queue.queue.is_empty
    queue.queue.will_start(second)
    assert queue.queue.has_unstarted()
    queue.queue.remove(second)
    assert not queue.queue.has_unstarted()


async def test_others_begin_after_one_that_fails() -> None:
    queue = Queue()
    errors = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failing, _ = queue.add(1, 2)

    def fail() -> None:
        raise MemoryError

    failing.go_on = fail  # type: ignore[method-assign]
    assert await queue.tick() == []
    assert await queue.tick() == [2]
    assert [type(error) for error in errors] == [MemoryError]


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
    sent, expected = b"", b""
    for number in range(40):
        body = random_.randbytes(random_.choice([0, 0, 1, 300])).hex().encode()
        method = b"POST" if body else b"GET"
        length = b"Content-Length: %d\r\n" % len(body) if body else b""
        sent += b"%b /%d HTTP/1.1\r\nHost: h\r\n%b\r\n%b" % (method, number, length, body)
        expected += b"/%d %b\n" % (number, body)
    load = LoadShedder(1e9)
    full(load, monkeypatch, lambda: random_.random() < 0.7)
    if seed % 3 == 0:
        load._begin()
    early = EarlyRejections(load, Counters()) if seed % 2 else None
    async with listening(load, echo, early) as address:
        reader, writer = await asyncio.open_connection(*address)
        while sent:
            size = random_.choice([1, 20, 100, 400, 3_000])
            writer.write(sent[:size])
            sent = sent[size:]
            await writer.drain()
            for _ in range(random_.randrange(4)):
                await asyncio.sleep(0)
        received = b""
        async with asyncio.timeout(20):
            for _ in range(40):
                head = await reader.readuntil(b"\r\n\r\n")
                length_of = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                received += await reader.readexactly(length_of)
        writer.close()
    assert received == expected


async def test_requests_that_have_waited_too_long_are_refused_unparsed(
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
            waiting._kept[0] = waiting._kept[0]._replace(
                arrivals=waiting._kept[0].arrivals._replace(first=now - 2 * MAX_WAIT_S)
            )
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
        with connect(address, 4 * b"GET / HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            while load.queue.is_empty:
                await asyncio.sleep(0)
            waiting = load.queue._next()
            assert isinstance(waiting, Connection)
            assert waiting.transport is not None
            assert not waiting.transport.is_reading()
            waiting.go_on()
            assert waiting.transport.is_reading()
            assert (await receive(client)).endswith(b"answered")


async def test_a_connection_is_ended_that_sends_more_than_may_wait_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, request = LoadShedder(1e9), b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(connection_module, "MAX_KEPT_BYTES", len(request))
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, request) as waiting, connect(address) as ended:
            while load.queue.kept_bytes < len(request):
                await asyncio.sleep(0)
            ended.send(request)
            assert await receive(ended) == b""
            assert load.queue.kept_bytes == len(request)
            first = load.queue._next()
            first.go_on()
            assert load.queue.kept_bytes == 0
            assert (await receive(waiting)).endswith(b"answered")


async def test_a_health_probe_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadShedder(1e9)
    full(load, monkeypatch, lambda: True)
    monkeypatch.setattr(RequestQueue, "_begin_some", lambda self: None)
    async with listening(load) as address:
        with connect(address, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") as client:
            assert (await receive(client)).endswith(b"answered")
