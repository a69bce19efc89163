"""Long answers are written piece by piece, on either event loop."""

import asyncio
import contextlib
import io
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import uvloop
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from support.clients import Start
from support.loop_time import loop_time
from yarl import URL

from pysync.errors import StoreUnavailable
from pysync.protocol import CHUNK_BYTES
from pysync.server.http import responses
from pysync.server.http.connection import CANCEL_S, HEAD_TIMEOUT_S, HttpServer
from pysync.server.http.load import Load
from pysync.server.http.responses import Response
from pysync.server.http.streaming import StreamingResponse
from pysync.store.local.store import LocalStore

Run = Callable[[Coroutine[Any, Any, None]], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

PIECES = [b"a" * 10, b"", b"b" * (CHUNK_BYTES + 1), b"c"]
WHOLE = b"first" + b"".join(PIECES)
HEADERS = 'ETag: "x"\r\n'


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test on one kind of event loop."""
    chosen: Run = request.param
    return chosen


class Source:
    """Pieces, and what became of them."""

    def __init__(self, pieces: list[bytes], error: BaseException | None = None) -> None:
        self._pieces = pieces
        self._error = error
        self.made = 0
        self.closed = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.transport: asyncio.Transport | None = None

    async def handle(self, request: web.BaseRequest) -> StreamingResponse:
        self.transport = request.transport
        response = StreamingResponse(b"first", self._generate(), HEADERS)
        response.request_id = "find-me"
        return response

    async def _generate(self) -> AsyncGenerator[bytes, None]:
        try:
            for piece in self._pieces:
                await self.release.wait()
                self.made += 1
                yield piece
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()


@contextlib.asynccontextmanager
async def connected(source: Source, load: Load | None = None) -> AsyncIterator[Streams]:
    """A connection to a service that answers everything from `source`."""
    server = HttpServer(source.handle, load)
    await server.start()
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.close()


async def head(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode()


async def unchunked(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks. Raises IncompleteReadError where it ends before its last chunk."""
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


def test_chunks_are_grouped_and_the_connection_serves_on(run: Run) -> None:
    async def scenario() -> None:
        async with connected(Source(PIECES)) as (reader, writer):
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
                received = await head(reader)
                assert received.startswith("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                assert "\r\nTransfer-Encoding: chunked\r\n" in received
                assert HEADERS in received
                assert "Content-Length" not in received
                assert "Connection" not in received
                assert await unchunked(reader) == WHOLE

    run(scenario())


@pytest.mark.parametrize("wish", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_the_body_until_the_end_of_the_connection(run: Run, wish: bytes) -> None:
    async def scenario() -> None:
        async with connected(Source(PIECES)) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n" + wish + b"\r\n")
            received = await head(reader)
            assert "Transfer-Encoding" not in received
            assert "Content-Length" not in received
            assert "\r\nConnection: close\r\n" in received
            assert await reader.read() == WHOLE

    run(scenario())


def test_head_is_answered_without_making_a_chunk(run: Run) -> None:
    async def scenario() -> None:
        source = Source(PIECES)
        async with connected(source) as (reader, writer):
            for _ in range(2):
                writer.write(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
                assert "\r\nTransfer-Encoding: chunked\r\n" in await head(reader)
            assert source.made == 0

    run(scenario())


@pytest.mark.parametrize("error", [StoreUnavailable(), RuntimeError("unforeseen")])
def test_failing_chunk_leaves_the_body_incomplete(
    run: Run, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        source = Source(PIECES, error)
        async with connected(source) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await head(reader)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await unchunked(reader)
            assert source.closed.is_set()

    run(scenario())
    (record,) = [each for each in caplog.records if each.name == "pysync.server"]
    assert record.levelno == (logging.WARNING if isinstance(error, StoreUnavailable) else logging.ERROR)
    assert record.__dict__["request_id"] == "find-me"
    assert "store_unavailable" in record.getMessage() or "unforeseen" in str(record.exc_info)


def test_failing_chunk_resets_the_connection_rather_than_completing_the_body(run: Run) -> None:
    async def scenario() -> None:
        async with connected(Source([b"x"], StoreUnavailable())) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                await reader.read()

    run(scenario())


def test_a_client_that_does_not_read_is_waited_for_within_bounded_memory(run: Run) -> None:
    async def scenario() -> None:
        piece = b"x" * 300_000
        source = Source([piece] * 1000)
        server = HttpServer(source.handle)
        await server.start()
        with socket.create_connection(server.address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            made, turns = -1, 0
            while turns < 200 or source.made == 0:
                turns = turns + 1 if made == source.made else 0
                made = source.made
                await asyncio.sleep(0)
            assert made < 200, "the rest waits for the client"
            assert source.transport is not None
            assert source.transport.get_write_buffer_size() <= 64 * 1024 + CHUNK_BYTES
            assert not source.closed.is_set()
        await asyncio.wait_for(source.closed.wait(), 10)
        await server.close()

    run(scenario())


def test_an_answer_under_way_is_finished_when_the_service_stops(run: Run) -> None:
    async def scenario() -> None:
        source = Source(PIECES)
        source.release.clear()
        server = HttpServer(source.handle)
        await server.start()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await head(reader)
        stopping = asyncio.create_task(server.close(30))
        await asyncio.wait([stopping], timeout=2 * CANCEL_S)
        assert not stopping.done()
        source.release.set()
        assert await unchunked(reader) == WHOLE
        await stopping
        assert await reader.read() == b""
        writer.close()

    run(scenario())


def test_half_a_head_that_follows_does_not_break_into_an_answer(run: Run) -> None:
    async def scenario() -> None:
        source, now_s = Source(PIECES), 0.0
        source.release.clear()
        load = Load(now=lambda: now_s)
        async with connected(source, load) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await head(reader)
            writer.write(b"GET / HTT")
            assert source.transport is not None
            silent, hang_up = await asyncio.open_connection(*source.transport.get_extra_info("sockname"))
            while load.connections < 2:
                await asyncio.sleep(0)
            now_s += HEAD_TIMEOUT_S + 1
            assert await silent.read() == b"", "slow heads are looked for"
            source.release.set()
            assert await unchunked(reader) == WHOLE
            hang_up.close()

    run(scenario())


def test_others_run_between_chunks(run: Run) -> None:
    async def scenario() -> None:
        source, turns = Source([b"x"] * 200), 0
        async with connected(source) as (reader, writer):

            async def take_turns() -> None:
                nonlocal turns
                while not source.closed.is_set():
                    turns += source.made > 0
                    await asyncio.sleep(0)

            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await asyncio.gather(take_turns(), head(reader))
            await unchunked(reader)
            assert turns >= 200

    run(scenario())


def test_leaving_client_ends_the_chunks(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        source = Source([b"x" * 300_000] * 1000)
        async with connected(source) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await head(reader)
            writer.transport.abort()
            await asyncio.wait_for(source.closed.wait(), 10)
            assert source.made < 1000

    run(scenario())
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_takes_nothing_is_aborted(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(responses, "STALL_S", 0.01)

    async def scenario() -> None:
        source = Source([b"x" * 300_000] * 1000)
        ended = asyncio.Event()

        async def handle(request: web.BaseRequest) -> Response:
            source.transport = request.transport
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda _: ended.set())
            return await source.handle(request) if is_streamed else Response(200, b"x" * 64_000_000)

        server = HttpServer(handle)
        await server.start()
        with socket.create_connection(server.address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await ended.wait()
            assert source.transport is not None
            assert source.transport.is_closing()
        await server.close()

    run(scenario())


def test_a_client_that_takes_little_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "STALL_S", 0.001)

    class Slow(asyncio.Transport):
        """Holds back less each time that somebody looks."""

        def __init__(self, protocol: BaseProtocol) -> None:
            super().__init__()
            self.protocol = protocol
            self.held = 300_000

        def get_write_buffer_size(self) -> int:
            self.held -= 50_000
            if self.held <= 0:
                self.protocol.resume_writing()
            return max(self.held, 0)

        def is_closing(self) -> bool:
            return False

    async def scenario() -> None:
        protocol = BaseProtocol(asyncio.get_running_loop())
        protocol.transport = slow = Slow(protocol)
        protocol.pause_writing()
        writer = StreamWriter(protocol, asyncio.get_running_loop())
        await responses.flush(cast(web.BaseRequest, SimpleNamespace(writer=writer)), slow)
        assert slow.held <= 0

    run(scenario())


def test_long_answer_is_given_to_the_connection_chunk_by_chunk(run: Run) -> None:
    async def scenario() -> None:
        body, most = bytes(range(256)) * 20_000, 0
        source = Source([])

        async def handle(request: web.BaseRequest) -> Response:
            source.transport = request.transport
            return Response(200, body)

        source.handle = handle  # type: ignore[method-assign, assignment]
        async with connected(source) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await head(reader)
            received = b""
            while len(received) < len(body):
                assert source.transport is not None
                most = max(most, source.transport.get_write_buffer_size())
                received += await reader.read(100_000)
            assert received == body
            assert most <= 64 * 1024 + CHUNK_BYTES

    run(scenario())


async def test_a_client_that_takes_nothing_of_a_file_is_aborted(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    photos = {
        "name": "photos",
        "storagePath": "photos/{id}",
        "readRoles": ["public"],
        "writeRoles": ["public"],
        "allowedMimeTypes": ["image/*"],
        "maxBodyBytes": 64_000_000,
    }
    store = await LocalStore.open_folder(tmp_path / "data")
    try:
        url = URL(await start({"collections": [photos]}, store))
        body = io.BytesIO(bytes(48_000_000))
        headers = {"Content-Type": "image/png", "Connection": "close"}
        async with session.post(url / "push/photos/a", data=body, headers=headers) as pushed:
            assert pushed.status == 200
        load: Load = start.apps[-1].load  # type: ignore[attr-defined]
        while load.connections:
            await asyncio.sleep(0)
        with socket.create_connection((url.host, url.port)) as client, loop_time() as time:
            client.sendall(b"GET /pull/photos/a HTTP/1.1\r\nHost: h\r\n\r\n")
            while not load.connections:
                await asyncio.sleep(0)
            while load.connections:
                time.now_s += 1.0
                await asyncio.sleep(0)
    finally:
        await store.close()
