"""Files as the client sends and gets them: against a small server of the test's own, which may cut."""

import asyncio
import hashlib
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.fake_server import DEVICE, KEYS, PULLED, PUSHED, client, is_signed, serving

from pysync import protocol
from pysync.client import Client, FileChanged, FileTooLarge, RetryPolicy, Unreachable
from pysync.client.files import UploadBody
from pysync.errors import Forbidden, NotFound, PayloadTooLarge, UnsupportedMediaType

PARQUET = "application/vnd.apache.parquet"
NOTHING = {"data": {}, "hash": "", "timestamp": 5}
LARGE = bytes(range(256)) * 4096
SIGNED: dict[str, Any] = {"keys": KEYS, "certificate": DEVICE}


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


def stored(content: bytes, content_type: str = "image/png") -> tuple[int, bytes, dict[str, str]]:
    """The answer of a server that has the file."""
    return 200, content, {"Content-Type": content_type, "ETag": etag(content)}


class Depot:
    """A server of one file, whose answers are cut after so many bytes, as long as there are `cuts`. Each cut
    may come with other content from then on (None: the same), and `ranges` may not be understood."""

    def __init__(self, content: bytes, *cuts: int, then: bytes | None = None, ranges: bool = True) -> None:
        self.content = content
        self.ranges: list[str | None] = []
        self.etag: str | None = None
        self._cuts = list(cuts)
        self._then = then
        self._ranges = ranges

    async def respond(self, request: web.Request) -> web.StreamResponse:
        range_ = request.headers.get("Range")
        self.ranges.append(range_)
        tag = self.etag or etag(self.content)
        start, headers = 0, {"ETag": tag, "Content-Type": "image/png"}
        if range_ and self._ranges and request.headers["If-Range"] == tag:
            start = int(range_.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
        body = self.content[start:]
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        if not self._cuts:
            await response.write(body)
            return response
        await response.write(body[: self._cuts.pop(0)])
        assert request.transport is not None
        request.transport.close()
        self.content = self.content if self._then is None else self._then
        return response


@asynccontextmanager
async def pulling(depot: Depot, **options: Any) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_get("/pull/files/a", depot.respond)
    async with TestServer(app) as server, client(str(server.make_url("/")), **options) as anonymous:
        yield anonymous


async def chunks_once(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_file_is_pushed_as_it_is_and_signed_over_nothing() -> None:
    async with serving((200, PUSHED)) as server, client(server.url, **SIGNED) as signed:
        pushed = await signed.push_blob("files/a", LARGE, "image/png")
    request, body = server.requests[0]
    assert (pushed.hash, pushed.timestamp_ms) == ("h2", 6)
    assert (request.method, request.raw_path, body) == ("POST", "/push/files/a", LARGE)
    assert request.headers["Content-Type"] == "image/png"
    assert request.headers["Content-Length"] == str(len(LARGE))
    assert is_signed(request, b"", "/push/files/a")


@pytest.mark.parametrize("content", [b"", b"x", LARGE])
async def test_each_kind_of_source_arrives_whole(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    sources = (content, tmp_path / "f", chunks_once(content[:1], content[1:]))
    async with serving(*[(200, PUSHED)] * 3) as server, client(server.url) as anonymous:
        for source in sources:
            await anonymous.push_blob("files/a", source, "image/png")
    assert [body for _, body in server.requests] == [content] * 3
    assert server.headers("Content-Length") == [str(len(content))] * 2 + [None]


async def test_a_namespace_is_in_the_path_of_a_file() -> None:
    answers = ((200, PUSHED), stored(b"x"))
    async with serving(*answers) as server, client(server.url, namespace="acme") as anonymous:
        await anonymous.push_blob("/push/files/a", b"x", "image/png")
        await anonymous.pull_blob("/pull/files/a")
    paths = [request.raw_path for request, _ in server.requests]
    assert paths == ["/v1/acme/push/files/a", "/v1/acme/pull/files/a"]


async def test_a_file_of_json_is_signed_as_json_is() -> None:
    async with serving((200, PUSHED)) as server, client(server.url, **SIGNED) as signed:
        await signed.push_blob("files/a", b"[1]", "Application/JSON; charset=utf-8")
        with pytest.raises(ValueError, match="pass its bytes"):
            await signed.push_blob("files/a", chunks_once(b"[1]"), "application/json")
    assert is_signed(*server.requests[0], "/push/files/a")
    assert server.requests[0][1] == b"[1]"


async def test_push_answer_without_a_time_is_understood() -> None:
    async with serving((200, {"hash": "h"})) as server, client(server.url) as anonymous:
        pushed = await anonymous.push_blob("files/a", b"x", "image/png")
    assert (pushed.hash, pushed.timestamp_ms) == ("h", 0)


async def test_a_push_of_what_can_be_had_again_is_repeated_under_one_idempotency_key(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"file")
    answers = ((503, {"code": "store_unavailable"}), (200, PUSHED), None, (200, PUSHED))
    async with serving(*answers) as server, client(server.url, **SIGNED) as signed:
        await signed.push_blob("files/a", b"bytes", "image/png")
        await signed.push_blob("files/a", tmp_path / "f", "image/png", idempotency_key="mine")
    assert [body for _, body in server.requests] == [b"bytes", b"bytes", b"file", b"file"]
    first, second, *others = server.headers(protocol.HEADER_IDEMPOTENCY_KEY)
    assert first == second != others[0]
    assert others == ["mine", "mine"]
    assert len(set(server.headers(protocol.HEADER_NONCE))) == 4


async def test_a_push_of_what_can_be_had_once_is_not_repeated() -> None:
    async with serving(None) as server, client(server.url) as anonymous:
        with pytest.raises(Unreachable):
            await anonymous.push_blob("files/a", chunks_once(b"a", b"b"), "image/png")
    assert len(server.requests) == 1


class Unreadable(Exception):
    pass


async def test_error_of_a_source_is_raised(tmp_path: Path) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"a"
        raise Unreadable

    async with serving() as server, client(server.url) as anonymous:
        with pytest.raises(Unreadable):
            await anonymous.push_blob("files/a", failing(), "image/png")
        with pytest.raises(FileNotFoundError):
            await anonymous.push_blob("files/a", tmp_path / "none", "image/png")


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2)


def truncate(path: Path) -> None:
    os.truncate(path, 1)


def edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, (1, 1))  # another time in any case


@asynccontextmanager
async def changing(change: Callable[[], None]) -> AsyncIterator[tuple[Client, list[bytes]]]:
    """A client, and what came of its pushes to a server that has begun to take each when `change` is made."""
    received: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        await request.content.readany()
        change()
        received.append(await request.content.read())
        return web.json_response(PUSHED)

    app = web.Application()
    app.router.add_post("/push/files/a", take)
    async with TestServer(app) as server, client(str(server.make_url("/"))) as anonymous:
        yield anonymous, received


async def test_a_file_that_grows_while_it_is_sent_is_sent_as_it_was(tmp_path: Path) -> None:
    path, content = tmp_path / "f", LARGE * 16
    path.write_bytes(content)
    async with changing(lambda: grow(path)) as (anonymous, received):
        await anonymous.push_blob("files/a", path, "image/png")
    assert content.endswith(received[0])


@pytest.mark.parametrize("change", [truncate, edit])
async def test_a_file_that_changes_while_it_is_sent_is_not_sent(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(LARGE * 16)
    async with changing(lambda: change(path)) as (anonymous, received):
        with pytest.raises(ValueError, match="changed while it was sent"):
            await anonymous.push_blob("files/a", path, "image/png")
    assert received == []


async def test_a_file_that_is_replaced_before_it_is_opened_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    upload = UploadBody(path, None)
    path.rename(tmp_path / "g")
    path.write_bytes(b"afters")
    async with upload.stall_timeout:
        with pytest.raises(ValueError, match="changed while it was sent"):
            await anext(aiter(upload))


async def test_a_pipe_is_not_taken_for_an_empty_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with serving() as server, client(server.url) as anonymous:
        with pytest.raises(ValueError, match="no regular file"):
            await anonymous.push_blob("files/a", tmp_path / "pipe", "image/png")


async def test_a_rejection_is_raised_though_the_file_was_not_read_to_its_end() -> None:
    gate = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)
            await asyncio.sleep(0)

    async def reject(request: web.Request) -> web.Response:
        gate.set()
        return web.json_response({"error": "x", "code": "payload_too_large"}, status=413)

    app = web.Application()
    app.router.add_post("/push/files/a", reject)
    async with TestServer(app) as server, client(str(server.make_url("/"))) as anonymous:
        with pytest.raises(PayloadTooLarge):
            await anonymous.push_blob("files/a", endless(), "image/png")
    assert gate.is_set()


async def test_a_server_that_takes_nothing_is_out_of_reach() -> None:
    done = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0, limit=1024)
    port = server.sockets[0].getsockname()[1]
    options = {"timeout_s": 0.2, "backoff": RetryPolicy(attempts=1)}
    async with server, client(f"http://127.0.0.1:{port}", **options) as anonymous:
        with pytest.raises(Unreachable, match="not taken"):
            await anonymous.push_blob("files/a", bytes(64 << 20), "image/png")
        done.set()


async def test_a_file_is_pulled_with_its_type_and_hash() -> None:
    async with serving(stored(b"\x89PNG")) as server, client(server.url, **SIGNED) as signed:
        file = await signed.pull_blob("files/a")
    assert file == (b"\x89PNG", "image/png", hashlib.sha256(b"\x89PNG").hexdigest())
    request, body = server.requests[0]
    assert is_signed(request, body, "/pull/files/a")
    assert request.headers["Accept"] == "*/*"


@pytest.mark.parametrize("answer", [(200, NOTHING, {"Content-Type": "application/json"}), (404, b"")])
async def test_a_missing_file_is_none_whichever_way_a_server_says_so(answer: Any, tmp_path: Path) -> None:
    async with serving(*[answer] * 3) as server, client(server.url) as anonymous:
        assert await anonymous.pull_blob("files/a") is None
        assert await anonymous.pull_parquet("files/a") is None
        assert await anonymous.pull_blob_to("files/a", tmp_path / "f") is None
    assert list(tmp_path.iterdir()) == []


async def test_a_missing_route_is_no_missing_file() -> None:
    answer = (404, {"error": "Not found", "code": "not_found"})
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(NotFound):
            await anonymous.pull_blob("files/a")


async def test_a_rejected_pull_is_raised(tmp_path: Path) -> None:
    answer = (403, {"error": "Forbidden", "code": "forbidden"})
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(Forbidden):
            await anonymous.pull_blob_to("files/a", tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_reads_like_the_empty_document_is_a_file() -> None:
    content = b'{"data":{},"hash":"","timestamp":5}'
    async with serving(stored(content, "application/json")) as server, client(server.url) as anonymous:
        file = await anonymous.pull_blob("files/a")
    assert file is not None
    assert file.data == content


async def test_a_document_is_not_taken_for_a_file() -> None:
    headers = {"Content-Type": "application/json", "ETag": f'"{"a" * 64}"'}
    async with serving((200, PULLED, headers)) as server, client(server.url) as anonymous:
        with pytest.raises(ValueError, match="a document"):
            await anonymous.pull_blob("files/a")


@pytest.mark.parametrize(
    ("headers", "content_type", "hash_"),
    [
        ({"ETag": '"v1"'}, "application/octet-stream", "v1"),
        ({"ETag": 'W/"v1"', "Content-Type": "text/plain; charset=x"}, "text/plain; charset=x", "v1"),
        ({"Content-Type": "application/json"}, "application/json", None),
    ],
)
async def test_file_metadata_of_other_servers_is_returned(
    headers: dict[str, str], content_type: str, hash_: str | None
) -> None:
    content = b'{"data":{"a":1},"hash":"x"}' + b" " * 600
    async with serving((200, content, headers)) as server, client(server.url) as anonymous:
        assert await anonymous.pull_blob("files/a") == (content, content_type, hash_)


async def test_a_file_that_was_damaged_on_its_way_is_not_given() -> None:
    answer = (200, b"other", {"Content-Type": "image/png", "ETag": etag(b"mine")})
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(Unreachable, match="damaged"):
            await anonymous.pull_blob("files/a")


@pytest.mark.parametrize("ranges", [True, False])
async def test_aborted_pull_continues_at_its_offset(tmp_path: Path, ranges: bool) -> None:
    cuts = (100_000, 300_000, 0, 1) if ranges else (100_000, 300_000)
    depot = Depot(LARGE, *cuts, ranges=ranges)
    async with pulling(depot) as anonymous:
        head = await anonymous.pull_blob_to("files/a", tmp_path / "f")
    assert head is not None
    assert (head.size, head.content_type) == (len(LARGE), "image/png")
    assert (tmp_path / "f").read_bytes() == LARGE
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    offsets = [int((range_ or "bytes=0-")[6:-1]) for range_ in depot.ranges]
    assert len(offsets) == len(cuts) + 1
    assert offsets == sorted(offsets)
    assert 0 < offsets[-1] < len(LARGE)


async def test_cuts_without_any_progress_are_given_up() -> None:
    depot = Depot(LARGE, *[0] * 10)
    async with pulling(depot, backoff=RetryPolicy(attempts=3)) as anonymous:
        with pytest.raises(Unreachable):
            await anonymous.pull_blob("files/a")
    assert len(depot.ranges) == 3


async def test_a_file_that_changed_after_an_abort_is_pulled_anew(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"before")
    other = LARGE[::-1]
    async with pulling(Depot(LARGE, 100_000, then=other)) as anonymous:
        await anonymous.pull_blob_to("files/a", tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == other
    async with pulling(Depot(LARGE, 100_000, then=other)) as anonymous:
        file = await anonymous.pull_blob("files/a")
        assert file is not None
        assert file.data == other


async def test_change_of_a_file_during_a_stream_is_raised() -> None:
    depot = Depot(LARGE, 100_000, then=LARGE[::-1])
    async with pulling(depot) as anonymous, anonymous.open_blob("files/a") as stream:
        assert stream is not None
        with pytest.raises(FileChanged):
            async for _ in stream.chunks:
                pass


async def test_a_file_without_a_strong_version_is_not_put_together_of_parts() -> None:
    depot = Depot(LARGE, 100_000)
    depot.etag = 'W/"v1"'
    async with pulling(depot) as anonymous:
        with pytest.raises(Unreachable):
            await anonymous.pull_blob("files/a")
    assert depot.ranges == [None]


async def test_a_failed_pull_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"before")
    async with pulling(Depot(LARGE, 1000, *[0] * 9), backoff=RetryPolicy(attempts=2)) as anonymous:
        with pytest.raises(Unreachable):
            await anonymous.pull_blob_to("files/a", tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"before"


@pytest.mark.parametrize("verb", ["open", "write", "replace"])
async def test_a_cancelled_pull_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Whatever is done in a thread when it is cancelled is done after it, as a slow disk would."""
    begun = asyncio.Event()

    async def late(do: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(do, "__name__", "") != verb:
            return do(*arguments)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(do, *arguments)

    async with pulling(Depot(LARGE)) as anonymous:
        monkeypatch.setattr(asyncio, "to_thread", late)
        task = asyncio.create_task(anonymous.pull_blob_to("files/a", tmp_path / "f"))
        waits = {task, asyncio.create_task(begun.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        await asyncio.wait(waits)
        await asyncio.sleep(0)
    assert [path.name for path in tmp_path.iterdir() if path.name != "f"] == []


async def test_a_file_on_its_way_is_not_held_in_memory(tmp_path: Path) -> None:
    size = 48 << 20

    async def take(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.json_response(PUSHED)

    async def give(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        response.content_length = size
        await response.prepare(request)
        for _ in range(size >> 16):
            await response.write(bytes(1 << 16))
        return response

    app = web.Application()
    app.router.add_post("/push/files/a", take)
    app.router.add_get("/pull/files/a", give)
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", size)
    async with TestServer(app) as server, client(str(server.make_url("/"))) as anonymous:
        tracemalloc.start()
        try:
            await anonymous.push_blob("files/a", tmp_path / "f", "image/png")
            await anonymous.pull_blob_to("files/a", tmp_path / "g")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (tmp_path / "g").stat().st_size == size
    assert peak < 8 << 20


async def test_a_file_larger_than_allowed_is_not_taken() -> None:
    async with pulling(Depot(LARGE)) as anonymous:
        with pytest.raises(FileTooLarge):
            await anonymous.pull_blob("files/a", max_bytes=len(LARGE) - 1)
        file = await anonymous.pull_blob("files/a", max_bytes=len(LARGE))
    assert file is not None
    assert file.data == LARGE


async def test_a_parquet_file_is_pushed_as_one() -> None:
    async with serving((200, PUSHED)) as server, client(server.url) as anonymous:
        await anonymous.push_parquet("files/a", b"PAR1")
    assert server.headers("Content-Type") == [PARQUET]


@pytest.mark.parametrize("content_type", [PARQUET, "application/x-parquet", "application/octet-stream"])
async def test_a_parquet_file_is_pulled_under_each_of_its_types(content_type: str) -> None:
    async with serving(stored(b"PAR1", content_type)) as server, client(server.url) as anonymous:
        assert (await anonymous.pull_parquet("files/a") or (b"",))[0] == b"PAR1"


@pytest.mark.parametrize("content_type", [PARQUET + "; v=1", "text/html", PARQUET.upper()])
async def test_a_file_of_another_type_is_no_parquet_file(content_type: str) -> None:
    async with serving(stored(b"PAR1", content_type)) as server, client(server.url) as anonymous:
        with pytest.raises(UnsupportedMediaType) as caught:
            await anonymous.pull_parquet("files/a")
    assert caught.value.status == 415
