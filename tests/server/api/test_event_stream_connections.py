"""Streams over time: certificates that end, readers that are slow, services that stop and come back."""

import asyncio
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Signed, minted_at, root_device
from support.collections import MINE, NOTES, collection
from support.faulty_store import FaultyStore
from support.loop_time import loop_time
from support.server_process import serving
from support.sse_client import EventStream, Listen, Serve
from yarl import URL

from pysync.auth import issuing
from pysync.changelog import Change
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef
from pysync.engine.subscriptions import Event, StartPosition
from pysync.model import ANONYMOUS
from pysync.server.sse import (
    HEARTBEAT_BUCKETS,
    HEARTBEAT_S,
    RenderedPage,
    SSEConnection,
    SSEHub,
    StreamSource,
)
from pysync.server.stream_authorization import CHECK_MS, StreamGrant
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

TEAM = collection("team", "s/{spaceId}/{id}", readRoles=["space:member"], writeRoles=["public"])


def clock_of_now() -> FakeClock:
    return FakeClock(minted_at()["now_s"] * 1000)


async def test_a_stream_ends_when_its_certificate_does(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    clock = clock_of_now()
    browser = await serve(NOTES, MINE, now_ms=clock)
    expires_at_s = clock() // 1000 + 3600
    brief = Signed(browser.base, session, SUBJECT, root_device(SUBJECT, expires_at_s=expires_at_s))
    lasting = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    stream, other = await subscribe(brief), await subscribe(lasting)
    await stream.block()
    with loop_time() as time:
        clock.now_ms = expires_at_s * 1000
        time.now_s += HEARTBEAT_S
        assert (await stream.block()).comments == 1
        clock.now_ms += 1_000
        await time.pass_until(asyncio.ensure_future(stream.rest()), HEARTBEAT_S)
    await browser.push("notes/a", {})
    assert (await other.event()).data["params"] == {"id": "a"}


async def test_no_stream_begins_in_the_minutes_by_which_clocks_may_differ(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    clock = clock_of_now()
    browser = await serve(NOTES, MINE, now_ms=clock)
    expires_at_s = clock() // 1000 + 60
    me = Signed(browser.base, session, SUBJECT, root_device(SUBJECT, expires_at_s=expires_at_s))
    clock.now_ms = expires_at_s * 1000 + 1
    assert (await me.pull(f"u/{SUBJECT.user_id}/a")).status == 200
    assert (await subscribe(me, collections="mine")).status == 401
    assert (await subscribe(me, collections="notes")).status == 200, "open: nobody looks at credentials"


def test_an_expired_certificate_is_noticed_within_five_seconds() -> None:
    """At the next beat, unless it was looked at just before."""
    assert HEARTBEAT_S * 1000 + CHECK_MS <= 5_000


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_stream_ends_when_its_certificate_is_taken_back(
    is_idle: bool, serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    clock = clock_of_now()
    browser = await serve(NOTES, MINE, now_ms=clock)
    me = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    stream, open_to_all = await subscribe(me), await subscribe(me, collections="notes")
    await browser.push("notes/a", {})
    assert (await stream.event()).data["params"] == {"id": "a"}
    taken_back = issuing.issue_revocation_list(SUBJECT, 1, certificates=[me.certificate])
    assert (await browser.request("POST", "/revocations", taken_back.text)).status == 200
    with loop_time() as time:
        clock.now_ms += 4_000
        if not is_idle:
            await browser.push("notes/b", {})
        ending = asyncio.ensure_future(stream.rest())
        rest = await time.pass_until(ending, HEARTBEAT_S if is_idle else 0.0)
    assert [found for found in rest if found.data] == []
    assert (await open_to_all.event()).data["params"] == {"id": "a"}


async def test_membership_is_decided_when_the_event_is_sent(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    access = {**NOTES, "name": "access", "storagePath": "spaces/{spaceId}/_access"}
    browser = await serve(NOTES, TEAM, access, auth={"spaces": {}})
    me = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    stream = await subscribe(me, collections="notes,team")
    hash_ = None
    for number, members in enumerate([[], [SUBJECT.user_id], []]):
        data = {"owner": "somebody", "members": members}
        hash_ = (await browser.push("spaces/s1/_access", data, hash_)).json["hash"]
        await browser.push(f"s/s1/{number}", {})
        await browser.push(f"notes/{number}", {})
        found = [] if number != 1 else ["1"]
        assert [data["params"]["id"] for data in await stream.events(1 + len(found))] == [*found, str(number)]


def noted(collection: str, *numbers: object, **params: str) -> list[Change]:
    """Changes of as many documents."""
    return [DocumentRef(collection, {**params, "id": str(n)}).change("", 1) for n in numbers]


def ids(found: list[Any]) -> list[str]:
    return [data["params"]["id"] for data in found]


async def test_stream_is_aborted_if_the_membership_of_a_space_is_unknown(
    serve: Serve, subscribe: Listen, session: aiohttp.ClientSession
) -> None:
    store, log = FaultyStore(MemoryStore()), MemoryCoordinator()
    access = {**NOTES, "name": "access", "storagePath": "spaces/{spaceId}/_access"}
    browser = await serve(NOTES, TEAM, access, auth={"spaces": {}}, store=store, coordinator=log)
    me = Signed(browser.base, session, SUBJECT, root_device(SUBJECT))
    await browser.push("spaces/s1/_access", {"owner": SUBJECT.user_id})
    stream, other = (
        await subscribe(me, collections="team,notes"),
        await subscribe(browser, collections="notes"),
    )
    await log.append(noted("notes", "a"))
    assert ids(await stream.events(1)) == ["a"]
    store.fail("get", times=100)
    await log.append([*noted("team", "b", spaceId="s1"), *noted("notes", "c")])
    assert [found for found in await stream.rest() if found.data] == []
    store.reset()
    again = await subscribe(me, collections="team,notes", lastEventId=stream.last_id)
    assert ids(await again.events(2)) == ["b", "c"]
    assert ids(await other.events(2)) == ["a", "c"]


@pytest.mark.slow
async def test_slow_reader_is_aborted_and_resumes_at_its_cursor(serve: Serve, subscribe: Listen) -> None:
    log, count = MemoryCoordinator(), 0
    browser = await serve({**NOTES, "storagePath": "notes/{room}/{id}"}, coordinator=log)
    slow = await slow_reader(browser)
    other = await subscribe(browser)
    while b"\npysync_streams 1.0\n" not in (await browser.request("GET", "/metrics")).body:
        await log.append(noted("notes", *range(count, count + 100), room="x" * 250))
        await other.events(100)
        count += 100
        assert count < 100_000
    stream = await slow()
    await stream.rest()
    await stream.close()
    found = ids([block.data for block in stream.blocks if block.data])
    again = await subscribe(browser, lastEventId=stream.last_id)
    found += ids(await again.events(count - len(found)))
    assert found == [str(number) for number in range(count)]


@pytest.mark.slow
async def test_slow_catch_up_is_given_time(serve: Serve, subscribe: Listen) -> None:
    log, count = MemoryCoordinator(), 20_000
    browser = await serve({**NOTES, "storagePath": "notes/{room}/{id}"}, coordinator=log)
    cursor = (await (await subscribe(browser)).block()).id
    await log.append(noted("notes", *range(count), room="x" * 250))
    slow = await slow_reader(browser, f"?lastEventId={cursor}")
    stream = await slow()
    found = ids(await stream.events(count))
    assert found == [str(number) for number in range(count)]
    await log.append(noted("notes", "last", room="x"))
    assert ids(await stream.events(1)) == ["last"]
    await stream.close()


def test_heartbeat_names_no_later_cursor_during_a_catch_up() -> None:
    """Who resumed from there would miss what lies in between."""
    start = StartPosition("1", is_resumed=True)
    hub, source = cast(SSEHub, None), cast(StreamSource, None)
    subscriber = SSEConnection(hub, source, StreamGrant({}, frozenset()), ANONYMOUS, None, start)
    subscriber.heartbeat("2")
    assert subscriber.cursor == "1"


def test_the_text_of_events_is_made_once_for_streams_that_receive_the_same() -> None:
    page = RenderedPage()
    events = [Event(str(n), (None, "notes"), {}, "", b"id: %d\n\n" % n) for n in range(3)]
    text, numbers = page.render(events)
    assert (text, numbers) == (b"id: 0\n\nid: 1\n\nid: 2\n\n", {"notes": 3})
    assert page.render(list(events))[0] is text
    of_team = events[1]._replace(topic=("n", "team"))
    assert page.render([events[0], of_team]) == (text[:14], {"notes": 1, "n/team": 1})
    hidden = events[0]._replace(sse_bytes=b"id: 0\ndata: {}\n\n")
    assert page.render([hidden, of_team])[0] == hidden.sse_bytes + of_team.sse_bytes


async def slow_reader(browser: Browser, query: str = "") -> Callable[[], Awaitable[EventStream]]:
    """Open a stream and read nothing of it, until what is returned is called."""
    url = URL(browser.base)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (url.host, url.port))
    await loop.sock_sendall(connection, f"GET /events{query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    first = await loop.sock_recv(connection, 1)

    async def read() -> EventStream:
        reader, writer = await asyncio.open_connection(sock=connection)
        head = first + await reader.readuntil(b"\r\n\r\n")
        return EventStream(int(head.split()[1]), {}, reader, writer)

    return read


@pytest.mark.process
async def test_streams_of_a_process_end_in_good_order(tmp_path: Path, subscribe: Listen) -> None:
    async with (
        serving(tmp_path, server={"drainTimeoutMs": 3_600_000}) as process,
        aiohttp.ClientSession() as session,
    ):
        browser = Browser(process.base, session)
        streams = [await subscribe(browser) for _ in range(20)]
        process.signal(signal.SIGTERM)
        retries = {(await stream.rest())[-1].retry for stream in streams}
        assert await process.ended() == 0
    assert all(retry is not None and 1000 <= retry <= 3000 for retry in retries)
    assert len(retries) > 1


@pytest.mark.process
async def test_write_on_one_worker_is_delivered_by_the_others(tmp_path: Path, subscribe: Listen) -> None:
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        serving(tmp_path, server={"workers": 2}) as process,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        browser = Browser(process.base, session)
        streams = [await subscribe(browser, collections="notes") for _ in range(16)]
        for number in range(16):
            assert (await browser.push(f"notes/{number}", {})).status == 200
        found = [ids(await stream.events(16)) for stream in streams]
        assert all(sorted(each, key=int) == [str(number) for number in range(16)] for each in found)
        assert len({tuple(each) for each in found}) == 1
        while b"\npysync_streams 16.0\n" not in (await browser.request("GET", "/metrics")).body:
            pass  # the other worker tells every second


@pytest.mark.process
async def test_a_process_may_have_as_many_connections_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        async with serving(tmp_path) as process:
            assert resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_process_that_stood_still_does_not_make_up_for_every_heartbeat(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(NOTES)
    stream = await subscribe(browser)
    await stream.block()
    with loop_time() as time:
        time.now_s += 3600
        for _ in range(100 * HEARTBEAT_BUCKETS):
            await asyncio.sleep(0)
        await browser.push("notes/a", {})
        await stream.event()
    assert len(stream.blocks) <= 4, "the beginning, two heartbeats at most, and the event"
