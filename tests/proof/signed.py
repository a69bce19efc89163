"""Signed requests as bytes, and the connections that carry them: what is sent again is the same to the byte.

A library would send a request again by itself where its connection broke, and be refused as a replay.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from random import Random
from typing import Any, Final

import orjson
from pyarrow import parquet

from proof.service import FILE_TYPE
from pysync import protocol
from pysync.auth import issuing, signing
from pysync.auth.identity_keys import IdentityKeys
from pysync.clock import wall_clock_ms
from pysync.protocol import JSON_TYPE, PARQUET_TYPE

MESSAGE_ID: Final = "message_id"
HOST: Final = "proof.example"
"""Signed by everybody, whichever node it is for, so that one node's request may be sent to another."""
ANSWER_LIMIT_S: Final = 15.0
CHUNK_BYTES: Final = 64 * 1024


class NoReply(Exception):
    """The connection broke, or nothing came in time: whether it was done is unknown."""


@dataclass(frozen=True, slots=True)
class Request:
    text: bytes
    nonce: str
    signed_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: Any


class Device:
    """Somebody who signs: the root device of keys of its own, who may read and write these collections."""

    def __init__(self, random: Random, collections: tuple[str, ...]) -> None:
        keys = IdentityKeys.from_private(random.randbytes(32), random.randbytes(32))
        self._keys = keys
        self._authorization = issuing.issue_device_certificate(
            keys,
            keys.ed_pub,
            keys.kem_pub,
            now_s=wall_clock_ms() // 1000,
            nonce=os.urandom(16),
            collections=collections,
        ).authorization

    def request(
        self, target: str, body: object = None, headers: Iterable[tuple[str, str]] = (), method: str = ""
    ) -> Request:
        """A GET, or with a body a POST, unless it has another `method`, signed now: of a file where the body
        is bytes, else of JSON."""
        is_file = isinstance(body, bytes)
        sent = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        method, now_ms = method or ("GET" if body is None else "POST"), wall_clock_ms()
        covered = b"" if is_file else sent
        signed = signing.sign_request(self._keys, method, target, covered, HOST, now_ms, os.urandom(16))
        lines = {"Host": HOST, "Authorization": self._authorization, **signed, **dict(headers)}
        if body is not None:
            content_type = FILE_TYPE if is_file else JSON_TYPE
            lines |= {"Content-Type": content_type, "Content-Length": str(len(sent))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        text = f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + sent
        return Request(text, signed[protocol.HEADER_NONCE], now_ms)


class Connection:
    """A connection to one node, kept for one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, address: tuple[str, int]) -> "Connection":
        """Raises NoReply where nobody listens."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return cls(*await asyncio.open_connection(*address))
        except OSError as error:
            raise NoReply(repr(error)) from error

    async def send(self, request: Request, limit_s: float = ANSWER_LIMIT_S) -> Reply:
        """The answer to `request`. Raises NoReply where none came within `limit_s`; the connection is then
        good for nothing more."""
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(request.text)
                return await self._reply()
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise NoReply(repr(error)) from error

    async def stream(self, request: Request) -> Reply | AsyncGenerator[bytes, None]:
        """The pieces of the answer's body as they come, or the answer where it is an error. Raises NoReply,
        and the pieces do, where the connection breaks or nothing comes for `ANSWER_LIMIT_S`."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                self._writer.write(request.text)
                status, headers = await self._head()
                if status != 200:
                    return Reply(status, await self._body(headers))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise NoReply(repr(error)) from error
        return self._stream_chunks(headers)

    def close(self) -> None:
        self._writer.transport.abort()

    async def _reply(self) -> Reply:
        status, headers = await self._head()
        return Reply(status, None if status == 304 else await self._body(headers))

    async def _head(self) -> tuple[int, dict[str, str]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        return int(head[0].split(" ")[1]), dict(line.lower().split(": ", 1) for line in head[1:] if line)

    async def _body(self, headers: Mapping[str, str]) -> Any:
        """What was sent as JSON; of a file its hashes, as it is told and as it is, and the ids of its events
        where it has some."""
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self._chunks()])
        else:
            body = await self._reader.readexactly(int(headers["content-length"]))
        content_type = headers.get("content-type")
        if content_type not in (FILE_TYPE, PARQUET_TYPE):
            return orjson.loads(body)
        hashes = {"hash": headers["etag"].strip('"'), "sha256": hashlib.sha256(body).hexdigest()}
        if content_type == PARQUET_TYPE:
            hashes["ids"] = parquet.read_table(BytesIO(body), columns=[MESSAGE_ID])[MESSAGE_ID].to_pylist()
        return hashes

    async def _stream_chunks(self, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        chunks = self._chunks() if headers.get("transfer-encoding") == "chunked" else self._to_the_end()
        try:
            while True:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    chunk = await anext(chunks, b"")
                if not chunk:
                    return
                yield chunk
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NoReply(repr(error)) from error
        finally:
            self.close()

    async def _to_the_end(self) -> AsyncGenerator[bytes, None]:
        while chunk := await self._reader.read(CHUNK_BYTES):
            yield chunk

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
