"""A server of change streams with a script for each connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import orjson


class End(Enum):
    """What becomes of a connection after its last words."""

    CLOSE = auto()
    ABORT = auto()
    HOLD = auto()
    """It stays open until the client closes it."""


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


@dataclass
class Script:
    """One connection: bytes that are sent at once, and how it ends. `closed` is set when it has, `go` lets it
    end."""

    said: bytes
    end: End = End.CLOSE
    go: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


def streamed(said: bytes | str = b"", end: End = End.CLOSE) -> Script:
    """A stream that says `said`."""
    return Script(HEAD + (said.encode() if isinstance(said, str) else said), end)


def rejected(status: int, code: str, headers: str = "") -> Script:
    """An error answer. Each of `headers` ends in a line break of HTTP."""
    body = orjson.dumps({"error": code, "code": code})
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}"
    return Script(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)


def event(id_: str, hash_: str = "h", **members: object) -> str:
    """The text of a change, with its id."""
    change = {"collection": "notes", "params": {"id": "a"}, "hash": hash_, "timestamp": 7, **members}
    return f"id: {id_}\ndata: {orjson.dumps(change).decode()}\n\n"


class Streams:
    """Plays a script for each connection, in their order. `heads` are the requests."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.heads: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        script = self.scripts.pop(0)
        writer.write(script.said)
        match script.end:
            case End.HOLD:
                await reader.read()
            case End.ABORT:
                await writer.drain()
                await script.go.wait()
                writer.transport.abort()
        script.closed.set()
        writer.close()

    def headers(self, name: str) -> list[str | None]:
        """What each request says in that header."""
        found = [dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2]) for head in self.heads]
        return [headers.get(name) for headers in found]


@asynccontextmanager
async def streaming(*scripts: Script) -> AsyncIterator[Streams]:
    streams = Streams(*scripts)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(streams.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    streams.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield streams
    finally:
        server.close()
        await asyncio.gather(*tasks)
        await server.wait_closed()
    assert not streams.scripts, "streams that no request took"
