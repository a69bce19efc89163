"""HTTP/1.1 messages taken from one connection and written to another as they came, byte for byte."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import parse_qsl, unquote

from multidict import CIMultiDict

CHUNK_BYTES: Final = 64 * 1024
HEAD_BYTES: Final = 256 * 1024

BUFFER_BYTES: Final = 1024 * 1024
"""Bodies of requests up to this size are taken whole before anything happens: the client may then leave."""

Framing = int | Literal["chunked", "to_the_end"]
"""Where a body ends: after so many bytes, with its last chunk, or with the connection."""

SUBRESOURCES: Final = ("uploads", "partNumber", "uploadId", "delete", "location", "versioning", "policy")


@dataclass(slots=True)
class MessageHead:
    """The first line of a message and its headers, in their order and spelling."""

    line: str
    headers: CIMultiDict[str]

    def __bytes__(self) -> bytes:
        lines = [self.line, *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.line.split(" ", 2)[1])

    def closes(self) -> bool:
        """Whether the sender will use the connection no further."""
        options = self.headers.get("Connection", "").lower()
        return "close" in options or ("HTTP/1.0" in self.line and "keep-alive" not in options)

    def framing(self) -> Framing | None:
        """None where the headers do not say."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return "chunked"
        length = self.headers.get("Content-Length")
        return None if length is None else int(length)

    def response_framing(self, method: str) -> Framing:
        """How the body of this answer to a request of `method` ends."""
        if method == "HEAD" or self.status in (204, 304):
            return 0
        found = self.framing()
        return "to_the_end" if found is None else found


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request. `path` and the values of `query` are decoded, `path` is without its first slash: for S3 in
    path style it is `bucket/key`. `headers` as they came."""

    method: str
    path: str
    query: dict[str, str]
    headers: CIMultiDict[str]

    @classmethod
    def of(cls, head: MessageHead) -> Self:
        method, target, _ = head.line.split(" ", 2)
        path, _, query = target.partition("?")
        members = dict(parse_qsl(query, keep_blank_values=True))
        return cls(method, unquote(path).removeprefix("/"), members, head.headers)

    @property
    def kind(self) -> str:
        """The method; `LIST` for S3's ListObjectsV2, and `POST uploads`, `PUT partNumber`, `POST delete`, ...
        for what else a query may name there."""
        if self.method == "GET" and "list-type" in self.query:
            return "LIST"
        named = next((name for name in SUBRESOURCES if name in self.query), None)
        return f"{self.method} {named}" if named else self.method


class HttpConnection:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        return cls(*await asyncio.open_connection(host, port, limit=HEAD_BYTES))

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing() or self.reader.at_eof()

    async def send(self, data: bytes) -> bool:
        """Whether the peer is still there to take it."""
        if self._writer.is_closing():
            return False
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    async def head(self) -> MessageHead | None:
        """The next message's head, None where the connection has ended. Raises IncompleteReadError where it
        ends within."""
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                raise
            return None
        line, *rest = raw[:-4].decode("latin-1").split("\r\n")
        parted = (header.partition(":") for header in rest)
        return MessageHead(line, CIMultiDict((name, value.strip()) for name, _, value in parted))

    async def body(self, framing: Framing) -> AsyncGenerator[bytes, None]:
        """The body of the message whose head was read, in pieces; chunks with their framing, as they came.
        Raises IncompleteReadError where the connection ends before it."""
        if framing == "to_the_end":
            while chunk := await self.reader.read(CHUNK_BYTES):
                yield chunk
        elif framing == "chunked":
            async for chunk in self._chunks():
                yield chunk
        else:
            async for chunk in self._exactly(framing):
                yield chunk

    async def _exactly(self, size: int) -> AsyncGenerator[bytes, None]:
        left = size
        while left:
            chunk = await self.reader.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(chunk)
            yield chunk

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            line = await self.reader.readuntil(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                break
            async for chunk in self._exactly(size + 2):
                yield chunk
        while True:
            trailer = await self.reader.readuntil(b"\r\n")
            yield trailer
            if trailer == b"\r\n":
                return

    def abort(self) -> None:
        """End the connection at once: what was not sent yet is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection after what was sent."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def receive(head: MessageHead, client: HttpConnection) -> AsyncIterator[bytes]:
    """The body of the request, a small one taken whole. A client that waits to be told is told to send it."""
    if head.headers.pop("Expect", None) is not None:
        await client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    framing = head.framing() or 0
    body = client.body(framing)
    if isinstance(framing, int) and framing <= BUFFER_BYTES:
        return _replay([chunk async for chunk in body])
    return body


async def _replay(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def exhaust(body: AsyncIterator[bytes]) -> None:
    async for _ in body:
        pass


async def send(head: MessageHead, body: AsyncIterator[bytes], upstream: HttpConnection) -> None:
    """Forward a request. Where the client leaves within its body, upstream is told by the end of its
    connection; where upstream has had enough, its answer says why."""
    try:
        await upstream.send(bytes(head))
        async for chunk in body:
            await upstream.send(chunk)
    except (OSError, asyncio.IncompleteReadError):
        upstream.abort()


async def response_head(upstream: HttpConnection) -> MessageHead:
    """The head of the answer, without those before it (`100 Continue`). Raises ConnectionError where none
    comes."""
    while (head := await upstream.head()) is not None:
        if head.status >= 200:
            return head
    raise ConnectionResetError("upstream has left")
