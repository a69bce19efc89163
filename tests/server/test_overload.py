"""What the server leaves undone when requests arrive faster than it can answer them."""

import asyncio

import aiohttp
import pytest
from support.clients import Start

from pysync.server.overload import (
    CALM_TICKS,
    MANY_REQUESTS,
    MOST_PER_TICK,
    TICK_S,
    Address,
    LoadShedder,
    spread,
)

MAX_WAIT_S = 0.25
LATE_S = 0.2
HERE, THERE = "192.0.2.1", "192.0.2.2"


class Client:
    """A connection to a `LoadShedder`, without a socket."""

    def __init__(self, load: LoadShedder, ip: str = HERE) -> None:
        self.reads = True
        self.is_receiving = self.has_closed = False
        self.was_served = False
        self.address: Address | None = load.opened(ip)
        self._load = load
        assert self.address is not None

    def is_refused(self, waited_s: float = 0.0) -> bool:
        """Send a request that waits for so long, and return True if it is refused."""
        ((at, read_at),) = spread(self._load.arrivals(self), 1)
        assert self.address is not None
        return self._load.refuses(self, self.address, (at - waited_s, read_at - waited_s))

    def go_on(self) -> None: ...

    def give_up(self) -> None: ...

    def stop_reading(self) -> bool:
        if not self.is_receiving:
            self.reads = False
        return not self.reads

    def read_on(self, since: float) -> None:
        self.reads = True
        self._load.read_again(self, since)

    def kernel_wait_s(self) -> float | None:
        return None if self.has_closed else 0.0

    def abort(self) -> None:
        self._load.closed(self)


class Overload:
    """A `LoadShedder` with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.load = LoadShedder(MAX_WAIT_S, 1_000, now=lambda: self.now)

    def clients(self, count: int, ip: str = HERE) -> list[Client]:
        """Open connections that were served before."""
        clients = [Client(self.load, ip) for _ in range(count)]
        assert not any(client.is_refused() for client in clients)
        return clients

    def tick(self, late_s: float = 0.0) -> None:
        self.now += TICK_S + late_s
        self.load.tick(late_s)

    def begin(self) -> None:
        """Be late for so long, with so many requests, that it is an overload."""
        (client,) = self.clients(1)
        self.tick()
        for _ in range(2):
            for _ in range(MANY_REQUESTS + 1):
                client.is_refused(waited_s=MAX_WAIT_S - 0.01)
            self.now += LATE_S
        assert self.load.is_overloaded
        self.load.closed(client)
        self.now += 1.0

    def ask(self, clients: list[Client], waited_s: float = 0.0) -> None:
        for client in clients:
            client.is_refused(waited_s)

    def pause(self, clients: list[Client]) -> None:
        """Stop reading from clients, as after a refusal while others wait."""
        waiting = Client(self.load, THERE)
        self.load.queue._preferred[waiting] = (self.now, waiting)
        for client in clients:
            self.load.pause_if_busy(client)
        self.load.closed(waiting)

    def calm_down(self) -> None:
        for _ in range(200):
            self.tick()


def reading(clients: list[Client]) -> list[Client]:
    return [client for client in clients if client.reads]


def test_one_late_request_is_answered() -> None:
    overload = Overload()
    (client,) = overload.clients(1)
    overload.tick(late_s=2.0)
    assert not client.is_refused(waited_s=2.0)
    assert not overload.load.is_overloaded


def test_a_few_late_requests_are_no_overload() -> None:
    overload = Overload()
    (client,) = overload.clients(1)
    for _ in range(10):
        for _ in range(MANY_REQUESTS - 1):
            assert not client.is_refused(waited_s=2.0)
        overload.tick(LATE_S)
        overload.now += 1.0


def test_requests_that_waited_too_long_are_rejected_while_overloaded() -> None:
    overload = Overload()
    (client,) = overload.clients(1)
    overload.begin()
    assert client.is_refused(waited_s=MAX_WAIT_S + 0.01)
    assert not client.is_refused(waited_s=MAX_WAIT_S - 0.01)


def test_a_connection_is_paused_only_while_others_wait() -> None:
    overload = Overload()
    first, second = overload.clients(2)
    overload.begin()
    overload.load.pause_if_busy(first)
    assert first.reads
    overload.pause([first, second])
    assert not first.reads
    assert not second.reads
    assert overload.load.paused == 2


def test_connections_that_were_served_are_read_before_new_ones() -> None:
    overload = Overload()
    old = overload.clients(2)
    new = [Client(overload.load, THERE) for _ in range(4)]
    overload.begin()
    overload.pause([*old, *new])
    overload.tick()
    assert reading([*old, *new]) == old


def test_an_address_that_uses_more_than_its_share_is_read_last() -> None:
    overload = Overload()
    few, many = overload.clients(2), overload.clients(90, THERE)
    overload.begin()
    for _ in range(10):
        overload.ask([*many, *few])
    overload.pause([*few, *many])
    overload.tick()
    assert reading(few) == few
    assert not reading(many)


def test_more_connections_are_read_again_with_each_tick_that_leaves_no_request_waiting() -> None:
    overload = Overload()
    clients = overload.clients(200)
    overload.begin()
    overload.pause(clients)
    counts = [len(reading(clients))]
    for _ in range(4):
        overload.tick()
        counts.append(len(reading(clients)))
    assert counts == sorted(set(counts))
    assert counts[-1] < MOST_PER_TICK


def test_no_connection_is_read_again_while_requests_wait() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.begin()
    overload.pause(clients)
    overload.load.queue._preferred[clients[0]] = (overload.now, clients[0])
    overload.tick()
    assert not reading(clients)


def test_a_request_that_arrives_in_part_is_read_to_its_end() -> None:
    overload = Overload()
    clients = overload.clients(10)
    clients[7].is_receiving = True
    overload.begin()
    overload.pause(clients)
    assert reading(clients) == [clients[7]]


def test_all_connections_are_read_again_after_the_overload() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.begin()
    overload.pause(clients)
    overload.calm_down()
    assert len(reading(clients)) == 100
    assert not overload.load.is_overloaded
    assert not clients[0].is_refused(waited_s=MAX_WAIT_S + 1)


def test_an_overload_is_not_over_while_requests_wait() -> None:
    overload = Overload()
    (client,) = overload.clients(1)
    overload.begin()
    overload.load.queue._preferred[client] = (overload.now, client)
    for _ in range(2 * CALM_TICKS):
        overload.tick()
        assert overload.load.is_overloaded
    overload.load.queue.remove(client)
    overload.calm_down()
    assert not overload.load.is_overloaded


def test_closed_connections_and_idle_addresses_are_forgotten() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.begin()
    overload.pause(clients)
    for client in clients:
        overload.load.closed(client)
    assert overload.load.paused == 0
    overload.calm_down()
    assert overload.load.address(HERE) is not clients[0].address


def test_connections_that_their_clients_have_closed_are_ended_unread() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.begin()
    overload.pause(clients)
    deferred = [client for client in clients if not client.reads]
    for client in deferred:
        client.has_closed = True
    overload.calm_down()
    assert reading(deferred) == []
    assert overload.load.connections == 100 - len(deferred)


def test_close_reads_from_all_connections() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.begin()
    overload.pause(clients)
    overload.load.close()
    assert len(reading(clients)) == 100


def test_one_address_leaves_connections_to_others() -> None:
    load = LoadShedder(MAX_WAIT_S, 100)
    for _ in range(50):
        Client(load)
    with pytest.raises(AssertionError):
        Client(load)
    for _ in range(25):
        Client(load, THERE)


def test_no_connection_is_opened_beyond_the_limit() -> None:
    load = LoadShedder(MAX_WAIT_S, 20)
    for n in range(20):
        Client(load, f"192.0.2.{n}")
    with pytest.raises(AssertionError):
        Client(load, THERE)


def test_the_addresses_of_an_ipv6_network_are_counted_as_one() -> None:
    load = LoadShedder(MAX_WAIT_S, 1_000)
    assert load.address("2001:db8::1") is load.address("2001:db8::ffff:2")
    assert load.address("2001:db8::1") is not load.address("2001:db8:0:1::1")


def test_a_server_that_stops_rejects_nothing_more() -> None:
    overload = Overload()
    clients = overload.clients(100)
    overload.load.close()
    overload.tick()
    for _ in range(2):
        assert not any(client.is_refused(waited_s=2 * MAX_WAIT_S) for client in clients)
        overload.tick(LATE_S)
    assert len(reading(clients)) == 100


async def test_the_server_goes_on_watching_after_a_failure() -> None:
    failures = 0
    ticked = asyncio.Event()

    class Failing(LoadShedder):
        def tick(self, late_s: float) -> None:
            nonlocal failures
            failures += 1
            if failures == 1:
                raise MemoryError
            ticked.set()

    errors = list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    load = Failing(MAX_WAIT_S, 1_000)
    load.start()
    async with asyncio.timeout(10):
        await ticked.wait()
    load.close()
    assert [type(error) for error in errors] == [MemoryError]


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/healthy", 503), ("/pull/a", 503)])
async def test_of_all_requests_only_health_probes_are_never_rejected(
    start: Start, session: aiohttp.ClientSession, path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = await start({"collections": []})
    monkeypatch.setattr(LoadShedder, "refuses", lambda *arguments: True)
    assert (await session.get(base + path)).status == status


async def test_behind_a_trusted_proxy_requests_count_for_the_address_that_it_forwards(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"server": {"trustedProxyHops": 1}, "collections": []})
    await session.get(f"{base}/nowhere", headers={"X-Forwarded-For": "198.51.100.7"})
    (app,) = start.apps  # type: ignore[attr-defined]
    assert app.load.address("198.51.100.7").use > 0
    assert app.load.address("127.0.0.1").use == 0
