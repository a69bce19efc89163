"""A watch against streams that are cut, closed, silent, refused or nonsense: it goes on where it was."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import aiohttp
import pytest
from support.fake_server import DEVICE, KEYS, NOW_MS, Waits, client
from support.fake_sse_server import End, Script, event, rejected, streamed, streaming

from pysync._core import PublicKey, verify_request
from pysync.client import ChangeEvent, Client, Reset, RetryPolicy, Unreachable, Watch
from pysync.client.watch import ReconnectingStream
from pysync.errors import (
    BadRequest,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    PysyncError,
    RateLimited,
    Unauthorized,
)

OPENING = ": hello\n\nid: 0\n\n"


def change(id_: str, hash_: str = "h", namespace: str | None = None) -> ChangeEvent:
    return ChangeEvent("notes", {"id": "a"}, hash_, 7, namespace, id_)


def never(error: Exception) -> None:
    raise AssertionError from error


async def first(watch: Watch, count: int) -> list[ChangeEvent | Reset]:
    """The next so many that a watch tells; it is closed then."""
    async with watch:
        return [await anext(watch) for _ in range(count)]


async def test_changes_arrive_as_they_are_sent() -> None:
    said = OPENING + event("1") + ": beat\n\n" + event("2", "g", namespace="acme", more=1)
    async with streaming(streamed(said, End.HOLD)) as server, client(server.url) as anyone:
        assert await first(anyone.watch(), 2) == [change("1"), change("2", "g", "acme")]


async def test_collections_and_parameters_are_requested() -> None:
    scripts = [streamed(OPENING, End.HOLD) for _ in range(4)]
    async with streaming(*scripts) as server, client(server.url) as anyone:
        await first(anyone.watch(), 0)
        await first(anyone.watch(["notes", "é/"]), 0)
        await first(anyone.watch(["notes"], {"notes": {"id": "a b", "n": 1}}), 0)
        async with client(server.url + "/base", namespace="acme") as inside:
            await first(inside.watch(["notes"]), 0)
    assert [head.split()[:2] for head in server.heads] == [
        ["GET", "/events"],
        ["GET", "/events?collections=notes,%C3%A9%2F"],
        [
            "GET",
            "/events?collections=notes&params=%7B%22notes%22:%7B%22id%22:%22a%20b%22,%22n%22:1%7D%7D",
        ],
        ["GET", "/base/v1/acme/events?collections=notes"],
    ]
    assert server.headers("Accept") == ["text/event-stream"] * 4
    assert server.headers("Accept-Encoding") == ["identity"] * 4


@pytest.mark.parametrize("end", [End.CLOSE, End.ABORT])
async def test_a_watch_goes_on_where_its_connection_ended(end: End) -> None:
    waits = Waits()
    aborted = streamed(OPENING + event("1") + event("2"), end)
    last = streamed(": hello\n\n" + event("3"), End.HOLD)
    async with streaming(aborted, last) as server, client(server.url, sleep=waits) as anyone:
        found = []
        async with anyone.watch() as changes:
            found += [await anext(changes), await anext(changes)]
            aborted.go.set()
            found.append(await anext(changes))
            assert changes.last_event_id == "3"
    assert found == [change("1"), change("2"), change("3")]
    assert server.headers("Last-Event-ID") == [None, "2"]
    assert waits.seconds == [0.25]


async def test_incomplete_event_is_requested_again_after_a_reconnect() -> None:
    half = streamed(OPENING + event("1") + event("2").removesuffix("\n"))
    rest = streamed(event("2") + event("3"), End.HOLD)
    async with streaming(half, rest) as server, client(server.url) as anyone:
        assert await first(anyone.watch(), 3) == [change("1"), change("2"), change("3")]
    assert server.headers("Last-Event-ID") == [None, "1"]


async def test_id_alone_moves_the_cursor_and_an_empty_one_forgets_it() -> None:
    scripts = [
        streamed("id: 5\n\n"),
        streamed("id: 6\n\n:\n\n"),
        streamed("id\n\n"),
        streamed(event("7"), End.HOLD),
    ]
    async with streaming(*scripts) as server, client(server.url) as anyone:
        assert await first(anyone.watch(after="4"), 1) == [change("7")]
    assert server.headers("Last-Event-ID") == ["4", "5", "6", None]


async def test_watch_continues_after_the_cursor_of_an_earlier_one() -> None:
    scripts = [streamed(OPENING + event("1"), End.HOLD), streamed(event("2"), End.HOLD)]
    async with streaming(*scripts) as server, client(server.url) as anyone:
        earlier = anyone.watch()
        assert earlier.last_event_id is None
        await first(earlier, 1)
        assert await first(anyone.watch(after=earlier.last_event_id), 1) == [change("2")]
    assert server.headers("Last-Event-ID") == [None, "1"]


async def test_lost_history_is_reported_and_the_cursor_is_after_it() -> None:
    said = 'id: 9\nevent: reset\ndata: {"reset":true}\n\n' + event("10")
    async with (
        streaming(streamed(said), streamed(event("11"), End.HOLD)) as server,
        client(server.url) as anyone,
    ):
        assert await first(anyone.watch(after="1"), 3) == [Reset("9"), change("10"), change("11")]
    assert server.headers("Last-Event-ID") == ["1", "10"]


async def test_events_of_other_kinds_are_passed_by_and_their_ids_kept() -> None:
    said = OPENING + "id: 1\nevent: later\ndata: ?\n\nevent: message\n" + event("2")
    async with streaming(streamed(said, End.HOLD)) as server, client(server.url) as anyone:
        assert await first(anyone.watch(), 1) == [change("2")]


async def test_change_of_a_collection_without_parameters_may_have_none() -> None:
    said = OPENING + 'data: {"collection":"one","hash":"h","timestamp":7}\n\n'
    async with streaming(streamed(said, End.HOLD)) as server, client(server.url) as anyone:
        assert await first(anyone.watch(), 1) == [ChangeEvent("one", {}, "h", 7, None, "0")]


@pytest.mark.parametrize(
    "nonsense",
    [
        streamed(OPENING + "data: no JSON\n\n"),
        streamed(OPENING + "data: []\n\n"),
        streamed(OPENING + 'data: {"collection":"notes"}\n\n'),
        Script(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n" + event("1").encode()
        ),
        Script(b"no HTTP\r\n\r\n"),
    ],
)
async def test_malformed_stream_is_a_lost_stream(nonsense: Script) -> None:
    lost: list[Exception] = []
    scripts = [streamed(OPENING), nonsense, streamed(event("1"), End.HOLD)]
    async with streaming(*scripts) as server, client(server.url) as anyone:
        assert await first(anyone.watch(on_disconnect=lost.append), 1) == [change("1")]
    assert {type(error) for error in lost} == {Unreachable}


async def test_malformed_event_is_not_skipped() -> None:
    scripts = [streamed(OPENING), streamed("id: 7\ndata: no JSON\n\n"), streamed(event("7"), End.HOLD)]
    async with streaming(*scripts) as server, client(server.url) as anyone:
        assert await first(anyone.watch(), 1) == [change("7")]
    assert server.headers("Last-Event-ID") == [None, "0", "0"]


async def test_every_connection_is_signed_afresh() -> None:
    scripts = [streamed(OPENING), streamed(event("1"), End.HOLD)]
    async with (
        streaming(*scripts) as server,
        client(server.url, keys=KEYS, certificate=DEVICE) as signer,
    ):
        await first(signer.watch(["notes"]), 1)
    hosts, signatures = server.headers("Host"), server.headers("X-Starfish-Sig")
    nonces = server.headers("X-Starfish-Nonce")
    assert nonces[0] != nonces[1]
    assert server.headers("Authorization") == [DEVICE.authorization] * 2
    for host, signature, nonce in zip(hosts, signatures, nonces, strict=True):
        assert host is not None
        assert signature is not None
        assert nonce is not None
        key, target = PublicKey(KEYS.ed_pub), "/events?collections=notes"
        assert verify_request(key, signature, "GET", [target], b"", host, NOW_MS, nonce)


async def test_a_stream_that_says_nothing_is_taken_for_dead() -> None:
    scripts = [streamed(OPENING, End.HOLD), Script(b"", End.HOLD), streamed(event("1"), End.HOLD)]
    lost: list[Exception] = []
    async with streaming(*scripts) as server, client(server.url) as anyone:
        watch = anyone.watch(idle_s=0.3, on_disconnect=lost.append)
        assert await first(watch, 1) == [change("1")]
        assert scripts[0].closed.is_set()
    assert [str(error) for error in lost] == [f"{server.url}: no answer in time"]


@pytest.mark.slow
async def test_a_comment_now_and_then_keeps_a_stream_alive() -> None:
    async def heartbeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(streamed(OPENING).said)
        for _ in range(7):
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 0.5)  # the client hangs up
            writer.write(b": beat\n\n")
        writer.write(event("1").encode())
        await reader.read()
        writer.close()

    async with await asyncio.start_server(heartbeat, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client(f"http://127.0.0.1:{port}") as anyone:
            assert await first(anyone.watch(idle_s=3.0, on_disconnect=never), 1) == [change("1")]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_params", BadRequest),
        (401, "unauthorized", Unauthorized),
        (403, "forbidden", Forbidden),
        (404, "not_found", NotFound),
        (405, "method_not_allowed", MethodNotAllowed),
    ],
)
async def test_a_rejection_ends_a_watch_at_first_and_later(
    status: int, code: str, kind: type[PysyncError]
) -> None:
    rejection = rejected(status, code)
    async with streaming(rejection, streamed(OPENING), rejection) as server, client(server.url) as anyone:
        with pytest.raises(kind):
            await anext(anyone.watch())
        with pytest.raises(kind):
            await first(anyone.watch(), 1)


BUSY = [rejected(503, "store_unavailable"), rejected(429, "rate_limited"), rejected(502, "?")]


async def test_unreachable_server_is_retried_at_first_as_often_as_for_a_request() -> None:
    waits = Waits()
    async with streaming(*BUSY) as server, client(server.url, sleep=waits, backoff=RetryPolicy(3)) as anyone:
        with pytest.raises(PysyncError, match=r"\?"):
            await anext(anyone.watch(on_disconnect=never))
        assert waits.seconds == [0.25, 0.5]
    async with client(server.url, sleep=waits, backoff=RetryPolicy(2)) as anyone:
        with pytest.raises(Unreachable):
            async with anyone.watch():
                pass
    long = rejected(429, "rate_limited", "Retry-After: 60\r\n")
    async with streaming(long) as server, client(server.url) as anyone:
        with pytest.raises(RateLimited):
            await anext(anyone.watch())


async def test_lost_server_is_retried_without_end_and_ever_more_seldom() -> None:
    waits = Waits()
    lost: list[Exception] = []
    lives: list[int] = []
    failing = [script for _ in range(3) for script in (*BUSY, Script(b"")) if script.said]
    scripts = [streamed(OPENING), *failing, streamed(event("1")), streamed(event("2"), End.HOLD)]
    async with streaming(*scripts) as server, client(server.url, sleep=waits) as anyone:
        watch = anyone.watch(on_disconnect=lost.append, on_connect=lambda: lives.append(len(waits.seconds)))
        assert await first(watch, 2) == [change("1"), change("2")]
    assert waits.seconds[:9] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert [str(error) for error in lost] == ["the stream of changes ended"] * 2
    assert lives == [0, 10, 11]


async def test_jitter_shortens_waits_that_grow_while_no_stream_lasts() -> None:
    waits = Waits()
    lasting = [streamed(OPENING, End.ABORT) for _ in range(3)]
    scripts = [*lasting, streamed(event("1"), End.HOLD)]
    async with (
        streaming(*scripts) as server,
        client(server.url, sleep=waits, jitter=lambda: 0.5) as anyone,
    ):
        for script in lasting:
            script.go.set()
        assert await first(anyone.watch(), 1) == [change("1")]
    assert waits.seconds == [0.1875, 0.375, 0.75]  # none of them lasted


async def test_waits_begin_anew_after_a_stream_that_lasted() -> None:
    class Lasting:
        async def iter_any(self) -> AsyncIterator[bytes]:
            yield OPENING.encode()
            yield b":\n\n"

    @asynccontextmanager
    async def connect(headers: Mapping[str, str], idle_s: float) -> AsyncIterator[aiohttp.StreamReader]:
        yield cast(aiohttp.StreamReader, Lasting())

    waits = Waits()
    stream = ReconnectingStream(
        connect=connect,
        last_event_id="",
        idle_s=1.0,
        on_disconnect=lambda _: None,
        on_connect=lambda: None,
        backoff=RetryPolicy(),
        jitter=lambda: 0.5,
        sleep=waits,
    )
    following = stream.follow()
    while len(waits.seconds) < 3:
        assert await anext(following) is None
    assert waits.seconds == [0.1875] * 3


@pytest.mark.parametrize(
    ("scripts", "waited"),
    [
        ([streamed(OPENING + "retry: 2500\n\n")], [2.5]),
        ([streamed(OPENING + "retry: 2500\n\n"), BUSY[0], BUSY[0]], [2.5, 2.5, 2.5]),
        ([streamed(OPENING + "retry: 2500\n\n"), streamed(event("1"))], [2.5, 0.5]),
        ([streamed(OPENING), rejected(503, "unavailable", "Retry-After: 60\r\n")], [0.25, 60.0]),
        ([streamed(OPENING), rejected(429, "rate_limited", "Retry-After: soon\r\n")], [0.25, 0.5]),
    ],
)
async def test_a_server_says_how_long_to_wait(scripts: list[Script], waited: list[float]) -> None:
    waits = Waits()
    async with (
        streaming(*scripts, streamed(event("2"), End.HOLD)) as server,
        client(server.url, sleep=waits) as anyone,
        anyone.watch() as changes,
    ):
        while await anext(changes) != change("2"):
            pass
    assert waits.seconds == waited


async def test_a_watch_is_entered_when_the_stream_is_live() -> None:
    script = streamed("", End.ABORT)
    script.said = script.said.removesuffix(b"\r\n")
    live: list[bool] = []

    async def enter(anyone: Client) -> str | None:
        async with anyone.watch(on_connect=lambda: live.append(True)) as changes:
            return changes.last_event_id

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for said in (script.said, b"\r\n", b": hello\n\n"):
            writer.write(said)
            await writer.drain()
            assert not live
        said_all.set()
        await go.wait()
        writer.write(b"id: 4\n\n")
        await reader.read()
        writer.close()

    said_all, go = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client(f"http://127.0.0.1:{port}") as anyone:
            entering = asyncio.ensure_future(enter(anyone))
            await said_all.wait()
            assert not entering.done()
            go.set()
            assert await entering == "4"
            assert live == [True]


async def test_a_watch_that_is_entered_late_has_lost_nothing() -> None:
    said = OPENING + event("1") + event("2")
    async with streaming(streamed(said, End.HOLD)) as server, client(server.url) as anyone:
        watch = anyone.watch()
        assert await anext(watch) == change("1")
        assert await first(watch, 1) == [change("2")]


@pytest.mark.parametrize("way", ["close", "leave", "cancel", "break", "client"])
async def test_an_end_closes_the_connection_at_once(way: str) -> None:
    script = streamed(OPENING + event("1"), End.HOLD)
    async with streaming(script) as server, client(server.url) as anyone:
        watch = anyone.watch()
        assert await anext(watch) == change("1")
        match way:
            case "close":
                await watch.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(watch)
            case "leave":
                await watch.__aexit__()
            case "cancel":
                waiting = asyncio.ensure_future(anext(watch))
                await asyncio.sleep(0)
                waiting.cancel()
            case "break":
                del watch
            case "client":
                await anyone.close()
                with pytest.raises(RuntimeError, match="not open"):
                    await anext(watch)
        await script.closed.wait()


async def test_streams_do_not_keep_requests_waiting() -> None:
    scripts = [streamed(OPENING, End.HOLD) for _ in range(101)]
    answer = Script(
        b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n" + b'{"status":"ok"}'
    )
    async with streaming(*scripts, answer) as server, client(server.url) as anyone:
        watches = [anyone.watch() for _ in scripts]
        await asyncio.gather(*(watch.__aenter__() for watch in watches))
        assert await anyone.health() == {"status": "ok"}
        await asyncio.gather(*(watch.aclose() for watch in watches))


async def test_a_client_that_is_not_open_watches_nothing() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        await anext(client("http://127.0.0.1:9").watch())


@pytest.mark.slow
async def test_a_reader_that_takes_its_time_misses_nothing() -> None:
    many: list[Any] = [str(n) for n in range(1, 20_000)]
    script = streamed(OPENING + "".join(map(event, many)), End.HOLD)
    async with streaming(script) as server, client(server.url) as anyone:
        found = []
        async with anyone.watch() as changes:
            for _ in many:
                found.append(await anext(changes))
                await asyncio.sleep(0)
    assert [change.id for change in found] == many
