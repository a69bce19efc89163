"""Files in a real server process: killed in the middle of them, and in little memory."""

import asyncio
import hashlib
import io
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from support.clients import Browser
from support.collections import PUBLIC
from support.server_process import Process, serving
from yarl import URL

pytestmark = pytest.mark.process

MB = 1_048_576
FILES = {
    "name": "files",
    "storagePath": "files/{id}",
    "allowedMimeTypes": ["*/*"],
    "maxBodyBytes": 512 * MB,
    "listable": True,
    **PUBLIC,
}
PLAIN = {"Content-Type": "text/plain"}


def file_of(size: int, fill: bytes) -> bytes:
    return fill * (size // len(fill))


async def push(browser: Browser, key: str, body: bytes) -> str:
    """Push a file, and return its hash."""
    url = f"{browser.base}/push/files/{key}"
    async with browser.session.post(url, data=io.BytesIO(body), headers=PLAIN) as answer:
        assert answer.status == 200
        written = await answer.json()
        return str(written["hash"])


async def test_a_server_killed_during_uploads_leaves_the_old_files_or_nothing(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """Each is killed in the middle of one upload over a file and of one to a key where nothing is."""
    old = file_of(3 * MB, b"old content ")
    for attempt in range(2):
        async with serving(tmp_path, collections=[FILES]) as process:
            browser = Browser(process.base, session)
            await push(browser, "old", old)
            sent = [asyncio.Event(), asyncio.Event()]
            uploads = [
                asyncio.create_task(upload(process, key, (attempt + 1) * MB, sent[at]))
                for at, key in enumerate(("old", "new"))
            ]
            await asyncio.gather(*(each.wait() for each in sent))
            process.signal(signal.SIGKILL)
            await process.ended()
            await asyncio.gather(*uploads)
        async with serving(tmp_path, collections=[FILES]) as process:
            browser = Browser(process.base, session)
            listed = await browser.request("GET", "/list/files")
            assert listed.json == {"items": ["old"], "hasMore": False}
            pulled = await browser.pull("files/old")
            assert pulled.body == old
            assert pulled.headers["ETag"] == f'"{hashlib.sha256(old).hexdigest()}"'
            assert (await browser.pull("files/new")).json["hash"] == ""
            assert [path.name for path in (tmp_path / "data/files/files").iterdir()] == ["old"]


async def upload(process: Process, key: str, size: int, sent: asyncio.Event) -> None:
    """Send `size` bytes of a file that would have more, and wait for the end of the connection."""
    url = URL(process.base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /push/files/{key} HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain\r\n"
    writer.write(f"{head}Content-Length: {size * 2}\r\n\r\n".encode())
    writer.write(file_of(size, b"new"))
    await writer.drain()
    sent.set()
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_a_server_killed_while_files_are_replaced_leaves_each_whole(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    versions = [file_of(2 * MB, bytes([65 + n])) for n in range(8)]
    known = {hashlib.sha256(body).hexdigest(): body for body in versions}
    acknowledged = 0
    enough = asyncio.Event()

    async def replace(browser: Browser, key: str) -> str:
        """Push one version after the other; the hash of the last that was acknowledged."""
        nonlocal acknowledged
        last = ""
        for attempt in range(10_000):
            try:
                last = await push(browser, key, versions[attempt % 8])
            except aiohttp.ClientError:
                return last
            acknowledged += 1
            if acknowledged >= 25:
                enough.set()
        return last

    async with serving(tmp_path, collections=[FILES]) as process:
        browser = Browser(process.base, session)
        writers = {key: asyncio.create_task(replace(browser, key)) for key in ("a", "b", "c")}
        await enough.wait()
        process.signal(signal.SIGKILL)
        await process.ended()
        last = {key: await writer for key, writer in writers.items()}
    hashes = list(known)
    async with serving(tmp_path, collections=[FILES]) as process:
        browser = Browser(process.base, session)
        for key, acknowledged_hash in last.items():
            pulled = await browser.pull(f"files/{key}")
            found = pulled.headers["ETag"].strip('"')
            assert pulled.body == known[found]
            next_ = hashes[(hashes.index(acknowledged_hash) + 1) % 8]
            assert found in (acknowledged_hash, next_)


@pytest.mark.timeout(180)
async def test_256_mib_go_up_and_down_in_little_memory(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    size, block = 256 * MB, os.urandom(MB)

    async def chunks_of_body() -> AsyncIterator[bytes]:
        for _ in range(size // MB):
            yield block

    async with serving(tmp_path, collections=[FILES]) as process:
        await push(Browser(process.base, session), "small", block)
        before = peak_bytes(process)
        async with session.post(
            f"{process.base}/push/files/big", data=chunks_of_body(), headers=PLAIN
        ) as answer:
            hash_ = (await answer.json())["hash"]
        digest, received = hashlib.sha256(), 0
        async with session.get(f"{process.base}/pull/files/big") as answer:
            async for chunk in answer.content.iter_any():
                digest.update(chunk)
                received += len(chunk)
        assert (received, digest.hexdigest()) == (size, hash_)
        assert peak_bytes(process) - before < 32 * MB


async def test_clients_that_do_not_read_cost_no_memory(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, collections=[FILES]) as process:
        body = os.urandom(24 * MB)
        browser = Browser(process.base, session)
        await push(browser, "a", body)
        assert (await browser.pull("files/a")).body == body
        before = peak_bytes(process)
        url = URL(process.base)
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(6)]
        for reader, writer in idle:
            writer.write(b"GET /pull/files/a HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await browser.pull("files/a")).body == body, "others are served meanwhile"
        assert peak_bytes(process) - before < 16 * MB
        for at, (reader, writer) in enumerate(idle):
            if at % 2:
                writer.transport.abort()
            else:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"Content-Length: %d\r\n" % len(body) in head
                assert await reader.readexactly(len(body)) == body
                writer.close()
        assert (await browser.pull("files/a")).body == body
        while open_files(process, "files/a"):
            await asyncio.sleep(0)


async def test_answers_to_requests_that_came_together_come_in_their_order(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, collections=[FILES]) as process:
        bodies = {"big": os.urandom(3 * MB), "small": b"x" * 1000, "middle": os.urandom(100_000)}
        browser = Browser(process.base, session)
        for key, body in bodies.items():
            await push(browser, key, body)
        order = ["small", "big", "middle", "small", "small", "big", "big", "middle"]
        url = URL(process.base)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"".join(b"GET /pull/files/%b HTTP/1.1\r\nHost: h\r\n\r\n" % key.encode() for key in order)
        )
        for key in order:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: %d\r\n" % len(bodies[key]) in head
            assert await reader.readexactly(len(bodies[key])) == bodies[key]
        writer.close()


async def unread(process: Process, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A pull of a file of which only the head has been read."""
    url = URL(process.base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET /pull/files/{key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    return reader, writer


async def test_a_file_that_is_being_read_stays_what_it_was(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, collections=[FILES]) as process:
        body = os.urandom(24 * MB)
        browser = Browser(process.base, session)
        await push(browser, "a", body)
        reader, writer = await unread(process, "a")
        await push(browser, "a", b"another")
        assert (await browser.pull("files/a")).body == b"another"
        assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_a_file_that_is_truncated_on_the_disk_aborts_the_answer(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, collections=[FILES]) as process:
        browser = Browser(process.base, session)
        await push(browser, "a", os.urandom(24 * MB))
        reader, writer = await unread(process, "a")
        os.truncate(tmp_path / "data/files/files/a", 20 * MB)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(24 * MB)
        writer.close()


async def test_a_client_that_does_not_read_does_not_keep_the_server_from_ending(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path, collections=[FILES], server={"drainTimeoutMs": 200}) as process:
        await push(Browser(process.base, session), "a", os.urandom(24 * MB))
        _, writer = await unread(process, "a")
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert b"Traceback" not in process.log.read_bytes()
        writer.close()


def peak_bytes(process: Process) -> int:
    """The most memory that the server has had."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def open_files(process: Process, ending: str) -> list[str]:
    """The files that the server has open whose path ends so."""
    folder = Path(f"/proc/{process.process.pid}/fd")
    found = []
    for link in folder.iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return [path for path in found if path.endswith(ending)]
