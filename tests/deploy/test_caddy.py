"""Behind a real Caddy with the file of deploy/caddy, over HTTPS: what a client sees is what pysync says."""

import asyncio
import gzip
import hashlib
import json
import os
import re
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from components import Caddy, free_port
from components.fixtures import StartCaddy
from support.clients import Browser, Signed, Start
from support.collections import collection
from support.deployment import DEPLOY
from support.nginx_site import ME, SERVICE, signer
from support.server_process import Process, serving

FILE: Final = DEPLOY / "caddy/Caddyfile"
LONG: Final = {"text": "milk " * 1000}
FILE_BYTES: Final = 256 * 1024 * 1024
"""The largest body that passes."""


def front(start_caddy: StartCaddy, node: str) -> Caddy:
    """Caddy before the node at this base URL."""
    port = free_port()
    site = FILE.read_text()
    for variable, value in (
        ("{$DOMAIN:sync.example.org}", f"localhost:{port}"),
        ("{$NODES:127.0.0.1:8080}", node.removeprefix("http://")),
    ):
        assert variable in site
        site = site.replace(variable, value)
    return start_caddy(site, port)


def trusting(caddy: Caddy) -> aiohttp.ClientSession:
    """A session that trusts the authority of Caddy, and inflates nothing."""
    context = ssl.create_default_context(cafile=str(caddy.authority))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), auto_decompress=False)


MEMBERS: Final[dict[str, Any]] = {
    **SERVICE,
    "auth": {"adminToken": "a-token-of-the-operator"},
    "collections": [*SERVICE["collections"], collection("long", maxBodyBytes=100_000)],
}


@pytest_asyncio.fixture
async def caddy(start: Start, start_caddy: StartCaddy) -> Caddy:
    return front(start_caddy, await start(MEMBERS))


@pytest_asyncio.fixture
async def me(caddy: Caddy) -> AsyncIterator[Signed]:
    """A caller who signs for Caddy."""
    async with trusting(caddy) as session:
        yield signer(caddy.url, session)


@pytest.mark.process
async def test_signed_requests_pass_as_they_were_signed(me: Signed) -> None:
    assert (await me.push(f"u/{ME}/a%40b", {"n": 1})).status == 200
    assert (await me.pull(f"u/{ME}/a%40b")).json["data"] == {"n": 1}
    assert (await me.request("GET", "/metrics")).status == 404
    assert [(await me.pull("counted/a")).status for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.process
async def test_request_line_of_16_kb_passes(me: Signed) -> None:
    target = "/batch/pull?collections=notes&unknown=".ljust(16 * 1024 - len("OPTIONS  HTTP/1.1\r\n"), "x")
    assert (await me.request("GET", target)).status == 200
    assert (await me.request("GET", f"{target}x")).json["code"] == "uri_too_long"


async def test_documents_are_compressed_and_known_by_their_etags(me: Signed) -> None:
    anybody = Browser(me.base, me.session)
    await anybody.push("long/a", LONG)
    plain = await anybody.pull("long/a", {"Accept-Encoding": "identity"})
    packed = await anybody.pull("long/a", {"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) / 10
    assert json.loads(gzip.decompress(packed.body))["data"] == plain.json["data"] == LONG
    for reply in (plain, packed):
        known = {"If-None-Match": reply.headers["ETag"], "Accept-Encoding": "gzip"}
        assert (await anybody.pull("long/a", known)).status == 304
    module = await anybody.request("GET", "/client/pysync.js", headers={"Accept-Encoding": "gzip"})
    assert module.headers["Content-Encoding"] == "gzip"


@pytest.mark.process
async def test_stream_over_http2_comes_at_once_and_uncompressed(
    caddy: Caddy, me: Signed, tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    command = (
        "curl", "--http2", "--silent", "--no-buffer", "--compressed", "--cacert", str(caddy.authority),
        "--dump-header", str(tmp_path / "head"), f"{caddy.url}/events?collections=long",
    )  # fmt: skip
    stream = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert stream.stdout is not None
        assert await stream.stdout.readline() == b":\n"
        await Browser(me.base, me.session).push("long/a", LONG)
        while not (line := await stream.stdout.readline()).startswith(b"data:"):
            pass
        assert json.loads(line[5:])["params"] == {"id": "a"}
    finally:
        stream.kill()
        await stream.wait()
    head = (tmp_path / "head").read_text().lower()
    assert head.startswith("http/2 200")
    assert "content-type: text/event-stream" in head
    assert "content-encoding" not in head


@pytest.mark.process
@pytest.mark.slow
async def test_check_finds_nothing_wrong(caddy: Caddy, tmp_path: Path) -> None:
    configuration = tmp_path / "pysync.json"
    configuration.write_text(json.dumps({"version": 1, "store": "memory:", **MEMBERS}))
    check = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "check", str(configuration), "--probe", "--url", caddy.url,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "SSL_CERT_FILE": str(caddy.authority)},
    )  # fmt: skip
    output, _ = await check.communicate()
    found = dict(re.findall(r"^url (\w+) +(.+)$", output.decode(), re.M))
    assert found.pop("streams").startswith("as they come, for ")
    assert found == {
        "clock": "as this machine's",
        "addresses": "forwarded: yours is 127.0.0.1",
        "host": "unchanged",
        "path": "unchanged",
    }
    assert check.returncode == 0


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Process]:
    """A server in a process of its own, which takes large files."""
    files = collection("files", allowedMimeTypes=["application/octet-stream"], maxBodyBytes=FILE_BYTES)
    hops = {"trustedProxyHops": 1}
    async with serving(tmp_path, server=hops, collections=[files, *SERVICE["collections"]]) as started:
        yield started


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.process
@pytest.mark.slow
async def test_files_of_256_mib_pass_up_and_down_in_little_memory(
    server: Process, start_caddy: StartCaddy
) -> None:
    caddy = front(start_caddy, server.base)
    chunk = os.urandom(1024 * 1024)
    sent, received, size = hashlib.sha256(), hashlib.sha256(), 0

    async def body() -> AsyncIterator[bytes]:
        for _ in range(FILE_BYTES // len(chunk)):
            sent.update(chunk)
            yield chunk

    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(FILE_BYTES)}
    async with trusting(caddy) as session:
        async with session.post(f"{caddy.url}/push/files/a", data=body(), headers=headers) as pushed:
            assert pushed.status == 200, await pushed.text()
        async with session.get(f"{caddy.url}/pull/files/a") as pulled:
            assert pulled.status == 200
            async for part in pulled.content.iter_any():
                received.update(part)
                size += len(part)
    assert (size, received.digest()) == (FILE_BYTES, sent.digest())
    assert peak_bytes(server.process.pid) < FILE_BYTES
    assert peak_bytes(caddy.process.pid) < FILE_BYTES
