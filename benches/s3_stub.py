"""A server that speaks as much S3 as the figures of `s3_cost.py` need: it checks no signature, and all of it
is in memory.

    python -m benches.s3_stub PORT

Conditions hold. Below `given/` of any bucket every key is that of a document of 1 KB, so that no two reads
need meet the same object.
"""

import asyncio
import itertools
import sys
from email.utils import formatdate
from typing import Final, NamedTuple, cast

import uvloop

from benches.workloads import note

GIVEN: Final = "given/"
_EMPTY_LIST: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class Stored(NamedTuple):
    """An object: its etag in quotes, and the lines that describe it."""

    body: bytes
    etag: str
    lines: str


class Objects:
    """What is stored, by path."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._etags = itertools.count(1)
        self._given = Stored(note("given"), f'"{"f" * 32}"', "Content-Type: application/json\r\n")

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        path = target.partition("?")[0]
        key = path.lstrip("/").partition("/")[2]
        if not key:
            return _answer(200, _EMPTY_LIST, "Content-Type: application/xml\r\n")
        found = self._given if key.startswith(GIVEN) else self._stored.get(path)
        if method == "PUT":
            return self._put(path, found, headers, body)
        if method == "DELETE":
            if found is not None and headers.get("if-match", found.etag) not in (found.etag, "*"):
                return _error(412, "PreconditionFailed")
            self._stored.pop(path, None)
            return _answer(204)
        if found is None:
            return _error(404, "NoSuchKey")
        if headers.get("if-none-match") == found.etag:
            return _answer(304, b"", f"ETag: {found.etag}\r\n")
        return _answer(200, found.body, f"ETag: {found.etag}\r\n{found.lines}", is_head=method == "HEAD")

    def _put(self, path: str, found: Stored | None, headers: dict[str, str], body: bytes) -> bytes:
        if "if-none-match" in headers and found is not None:
            return _error(412, "PreconditionFailed")
        if "if-match" in headers and (found is None or headers["if-match"] != found.etag):
            return _error(412, "PreconditionFailed")
        etag = f'"{next(self._etags):032x}"'
        kept = [
            f"{name}: {headers[name]}\r\n"
            for name in headers
            if name == "content-type" or name.startswith("x-amz-meta-")
        ]
        self._stored[path] = Stored(body, etag, "".join(kept))
        return _answer(200, b"", f"ETag: {etag}\r\n")


class Connection(asyncio.Protocol):
    """One client connection, a request at a time."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        line, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        ends = end + 4 + int(headers.get("content-length", 0))
        if len(self._received) < ends:
            if headers.get("expect") == "100-continue" and len(self._received) == end + 4:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        body, self._received = self._received[end + 4 : ends], self._received[ends:]
        method, target, _ = line.split(" ")
        self._transport.write(self._objects.answer(method, target, headers, body))


def _answer(status: int, body: bytes = b"", lines: str = "", *, is_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status} -\r\nServer: stub\r\nDate: {formatdate(usegmt=True)}\r\nx-amz-request-id: 0\r\n"
        f"Last-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n{lines}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)


def _error(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
    return _answer(status, body, "Content-Type: application/xml\r\n")


async def serve(port: int) -> None:
    objects = Objects()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(objects), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
