"""Change streams are bounded: how many are open, and what waits in those that nobody reads."""

import asyncio
import json
import resource
from typing import Any, cast

import aiohttp
import pytest
from support.change_feed import NOTES as TOPIC
from support.change_feed import Log, following
from support.clients import SUBJECT, Signed, Start, root_device
from support.collections import MINE, NOTES
from support.sse_client import EventStream, Listen, Serve

from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.subscriptions import Event, StartPosition
from pysync.model import ANONYMOUS
from pysync.server import sse
from pysync.server.http.load import RESERVED_DESCRIPTORS
from pysync.server.http.responses import STALL_S
from pysync.server.process.metrics import Counters
from pysync.server.sse import SSEConnection, SSEHub, StreamLimits, StreamSource
from pysync.server.stream_authorization import StreamGrant


def said(stream: EventStream) -> tuple[int, str, str]:
    return stream.status, json.loads(stream.body)["code"], stream.headers["Retry-After"]


FULL = 503, "overloaded", str(sse.RETRY_AFTER_S)


async def test_beyond_the_streams_that_may_be_open_another_is_rejected_until_one_ends(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(NOTES, server={"maxStreams": 2})
    first, second = await subscribe(browser), await subscribe(browser)
    assert (first.status, second.status) == (200, 200)
    assert said(await subscribe(browser)) == FULL
    page = (await browser.request("GET", "/metrics")).body
    assert b'\npysync_rejected_streams_total{limit="maxStreams"} 1.0\n' in page
    assert (await browser.push("notes/a", {})).status == 200
    assert (await second.event()).data["params"] == {"id": "a"}
    await first.close()
    while (again := await subscribe(browser)).status != 200:
        assert said(again) == FULL
    await browser.push("notes/b", {})
    assert (await again.event()).data["params"] == {"id": "b"}


async def test_one_caller_leaves_streams_to_others(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    browser = await serve(NOTES, MINE, server={"maxStreamsPerCaller": 1})
    me = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    assert [(await subscribe(who)).status for who in (browser, browser, me, me)] == [200, 503, 200, 503]
    page = (await browser.request("GET", "/metrics")).body
    assert b'\npysync_rejected_streams_total{limit="maxStreamsPerCaller"} 2.0\n' in page


class HeldLog(MemoryCoordinator):
    """A coordinator that says where its changes end once it is `free`; `asked` counts who wants to know."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()
        self.queries = 0

    async def last_id(self) -> str:
        self.queries += 1
        await self.free.wait()
        return await super().last_id()


async def test_of_streams_that_begin_together_no_more_stay_than_there_is_room_for(
    serve: Serve, subscribe: Listen
) -> None:
    log = HeldLog()
    browser = await serve(NOTES, server={"maxStreams": 2}, coordinator=log)
    log.free.clear()
    before = log.queries
    beginning = [asyncio.ensure_future(subscribe(browser)) for _ in range(5)]
    while log.queries < before + 5:
        await asyncio.sleep(0)
    log.free.set()
    streams = await asyncio.gather(*beginning)
    assert [stream.status for stream in streams] == [200] * 5
    await browser.push("notes/a", {})

    async def is_reset(stream: EventStream) -> bool:
        """True for an event, False for a stream that ends with the time after which to try again."""
        while (block := await stream.block()).data is None:
            if block.retry is not None:
                assert await stream.rest() == []
                return False
        return True

    assert sorted([await is_reset(stream) for stream in streams]) == [False] * 3 + [True] * 2


async def test_addresses_of_one_ipv6_network_are_one_caller(serve: Serve, subscribe: Listen) -> None:
    browser = await serve(NOTES, server={"maxStreamsPerCaller": 1, "trustedProxyHops": 1})

    async def opened_from(address: str) -> int:
        return (await subscribe(browser, headers={"X-Forwarded-For": address})).status

    addresses = "2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "192.0.2.7", "::ffff:192.0.2.7"
    assert [await opened_from(address) for address in addresses] == [200, 503, 200, 200, 503]


class Pipe(asyncio.Transport):
    """A transport whose other end reads nothing, unless it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def detach(self, protocol: asyncio.Protocol) -> "Pipe":
        """As of the `Connection` that it stands for."""
        return self


def opened(hub: SSEHub) -> tuple[SSEConnection, Pipe]:
    pipe, grant = Pipe(), StreamGrant({TOPIC: {}}, frozenset())
    source = StreamSource(following(Log()), cast(Any, None), cast(Any, None), cast(Any, None), 100)
    stream = SSEConnection(hub, source, grant, ANONYMOUS, None, StartPosition("0"))
    stream.begin(cast(Any, pipe), b"")
    pipe.waiting = 0
    return stream, pipe


def hub() -> SSEHub:
    return SSEHub(Counters(), StreamLimits(100, 100))


def event(size: int) -> Event:
    return Event("1", TOPIC, {}, "key", b"x" * size)


async def test_streams_with_the_most_unread_bytes_end_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_UNREAD", 1_000_000)
    streams = hub()
    held = [opened(streams) for _ in range(9)]
    for number, (stream, pipe) in enumerate(held):
        stream.deliver([event(100_000)])
        if number % 3 == 0:
            pipe.waiting = 0  # its client has read
    assert streams.unread.total == 900_000
    held[0][0].deliver([event(150_000)])
    held[1][0].deliver([event(100_000)])
    assert streams.unread.total == 850_000, "counted again: nobody has to go"
    assert not any(pipe.is_aborted for _, pipe in held)
    held[4][0].deliver([event(150_000)])
    held[5][0].deliver([event(50_000)])
    assert [number for number, (_, pipe) in enumerate(held) if pipe.is_aborted] == [4]
    assert streams.unread.total == sum(pipe.waiting for _, pipe in held if not pipe.is_aborted)
    assert streams.counters.counts["pysync_aborted_streams", "total"] == 1
    for stream, _ in held:
        stream.connection_lost(None)
    assert (streams.unread.total, streams.counters.gauges["pysync_streams"]) == (0, 0)
    streams.close()


async def test_stream_with_too_many_unread_bytes_ends() -> None:
    streams = hub()
    (stream, pipe), (_, other) = opened(streams), opened(streams)
    stream.deliver([event(sse.MAX_WRITE_BUFFER)])
    assert not pipe.is_aborted
    stream.deliver([event(1)])
    assert (pipe.is_aborted, other.is_aborted) == (True, False)
    assert streams.counters.counts["pysync_aborted_streams", "stream"] == 1
    streams.close()


async def test_a_stream_ends_whose_client_has_read_nothing_for_thirty_seconds() -> None:
    streams = hub()
    (stuck, pipe), (slow, slowly), (idle, nothing) = opened(streams), opened(streams), opened(streams)
    for stream in (stuck, slow):
        stream.deliver([event(1_000)])
    heartbeats = int(STALL_S / sse.HEARTBEAT_S) + 2
    for heartbeat in range(heartbeats):
        assert not pipe.is_aborted, f"too early, at heartbeat {heartbeat}"
        slowly.waiting -= 10
        nothing.waiting = 0
        for stream in (stuck, slow, idle):
            stream.heartbeat("")
    assert (pipe.is_aborted, slowly.is_aborted, nothing.is_aborted) == (True, False, False)
    assert streams.counters.counts["pysync_aborted_streams", "stalled"] == 1
    streams.close()


async def test_connections_and_streams_share_the_files_that_may_be_open(start: Start) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, allowed[1]))
    try:
        await start({"collections": [NOTES], "server": {"maxConnections": 1_000, "maxStreams": 2_000}})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    (app,) = start.apps  # type: ignore[attr-defined]
    assert app.load.max_connections == (600 - RESERVED_DESCRIPTORS) // 3
    assert app.subscribers.limits.streams == 600 - RESERVED_DESCRIPTORS - app.load.max_connections
