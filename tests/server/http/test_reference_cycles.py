"""Requests that fail leave no reference cycle that holds their body: nobody would free it before the next
collection of garbage, which is rare."""

import asyncio
import gc
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.clients import Start
from support.collections import LOG, MINE, NOTES, UNSIGNED, collection
from support.listening import connect
from yarl import URL

from pysync import _core
from pysync.store.local.store import LocalStore

CONFIG: dict[str, Any] = {
    "collections": [
        NOTES,
        MINE,
        LOG,
        collection("full", appendOnly={**UNSIGNED, "maxItems": 1}),
        collection("small", maxBodyBytes=100),
        collection("checked", objectSchema={"type": "object", "required": ["name"]}),
    ]
}
TEXT = "x" * 20_000
JSON = json.dumps({"data": {"text": TEXT}, "baseHash": None})
ELEMENT = json.dumps({"data": {"text": TEXT}})
STALE = json.dumps({"data": {"text": TEXT}, "baseHash": "0" * 64})
ONCE = "Idempotency-Key: {}\r\n"


def post(path: str, body: str, lines: str = "", length: int | None = None) -> bytes:
    declared = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{lines}"
    return f"{head}Content-Length: {declared}\r\n\r\n{body}".encode()


REQUESTS: dict[str, tuple[int, bytes]] = {
    "success": (200, post("/push/notes/{}", JSON)),
    "conflict in the store": (409, post("/push/notes/stored", JSON)),
    "conflict with what was read": (409, post("/push/notes/stored", STALE)),
    "conflict with an idempotency key": (409, post("/push/notes/stored", STALE, ONCE)),
    "full log": (409, post("/push/full/stored", ELEMENT)),
    "full log with an idempotency key": (409, post("/push/full/stored", ELEMENT, ONCE)),
    "time in the future": (400, post("/push/log/stored", ELEMENT[:-1] + ',"ts":99999999999999}')),
    "not JSON": (400, post("/push/notes/a", "[" * 20_000)),
    "against the schema": (400, post("/push/checked/a", JSON)),
    "unknown path": (404, post("/push/nowhere/a", JSON)),
    "unknown method": (405, post("/push/notes/a", JSON).replace(b"POST", b"PUT")),
    "unknown type": (415, post("/push/notes/a", JSON).replace(b"application/json", b"text/plain")),
    "unknown encoding": (415, post("/push/notes/a", JSON, "Content-Encoding: br\r\n")),
    "not gzip": (400, post("/push/notes/a", JSON, "Content-Encoding: gzip\r\n")),
    "too long": (413, post("/push/small/a", JSON)),
    "too long in chunks": (
        413,
        b"POST /push/small/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n4e20\r\n" + TEXT.encode() + b"\r\n0\r\n\r\n",
    ),
    "malformed chunk": (
        400,
        b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n4e20\r\n" + TEXT.encode() + b"\r\nzz\r\n\r\n",
    ),
    "malformed head": (400, b"\0" + TEXT.encode() + b"\r\n\r\n"),
    "not signed": (401, post("/push/u/a/b", JSON)),
    "malformed certificate": (401, post("/push/u/a/b", JSON, "Authorization: Cap abcd\r\n")),
    "client that leaves within the body": (0, post("/push/notes/a", JSON, length=50_000)),
}


def address_of(base: str) -> tuple[str, int]:
    url = URL(base)
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


@pytest.fixture
async def address(start: Start, tmp_path: Path) -> tuple[str, int]:
    address = address_of(await start({**CONFIG, "store": f"file:{tmp_path}/data"}))
    for path, body in (("notes", JSON), ("log", ELEMENT), ("full", ELEMENT)):
        assert await status_of(address, post(f"/push/{path}/stored", body)) == 200
    return address


async def status_of(address: tuple[str, int], request: bytes, number: int = 0) -> int:
    """Send a request on a connection of its own, with `number` for its braces, and close it after the
    response. Returns its status; 0 if the client does not wait for it, because it declared a longer body."""
    client = connect(address, request.replace(b"{}", b"%d" % number, 1))
    loop = asyncio.get_running_loop()
    waits = b"Content-Length: 50000" not in request
    reply = await loop.sock_recv(client, 65_536) if waits else b""
    for _ in range(0 if waits else 10):
        await asyncio.sleep(0)  # let the handler wait for the rest
    client.close()
    return int(reply[9:12] or b"0")


@contextmanager
def without_held_bodies() -> Iterator[None]:
    """Fail if cycles that become garbage meanwhile hold a long body, or what the core made of one."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = [
            (type(garbage), type(each)) for garbage in gc.garbage for each in gc.get_referents(garbage)
            if (isinstance(each, bytes | bytearray) and len(each) >= len(TEXT))
            or isinstance(each, _core.PushBody | _core.Append | _core.LogHead)
        ]  # fmt: skip
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert held == []


async def all_done() -> None:
    """Wait until the server has forgotten the connections that were closed."""
    while any(not task.done() and "Connection.start" in repr(task) for task in asyncio.all_tasks()):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_no_cycle_holds_the_body_of_a_request(address: tuple[str, int], kind: str) -> None:
    status, request = REQUESTS[kind]
    assert await status_of(address, request, 1) == status
    await all_done()
    with without_held_bodies():
        assert await status_of(address, request, 2) == status
        await all_done()


@pytest.mark.parametrize("path", ["/push/notes/{}", "/push/log/stored"])
async def test_no_cycle_holds_the_bodies_of_a_group_that_the_database_rejects(
    address: tuple[str, int], path: str, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "data" / "pysync.db")) as database:
        for event in ("INSERT", "UPDATE"):
            database.execute(
                f"CREATE TRIGGER no_{event} BEFORE {event} ON object BEGIN DELETE FROM nowhere; END"
            )
    with without_held_bodies():
        sent = [status_of(address, post(path, JSON), number) for number in range(3)]
        assert await asyncio.gather(*sent) == [503] * 3
        await all_done()


def plain() -> Exception:
    return KeyError()


def circular() -> Exception:
    """An error that is its own cause: `raise error from error`, by way of another."""
    error, cause = LookupError(), ValueError()
    error.__cause__, cause.__context__ = cause, error
    return error


@pytest.mark.parametrize("error", [plain, circular])
async def test_no_cycle_holds_the_body_of_a_request_that_fails_unexpectedly(
    start: Start, tmp_path: Path, error: Callable[[], Exception]
) -> None:
    class Broken(LocalStore):
        async def commit(self, *args: object, **options: object) -> NoReturn:
            raise error()

    address = address_of(await start(CONFIG, await Broken.open_folder(tmp_path)))
    with without_held_bodies():
        assert await status_of(address, post("/push/notes/{}", JSON)) == 500
        await all_done()
