"""A service whose disk fails while it serves: a real file system, and the process of a server."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Reply, Signed, root_device
from support.collections import NOTES, OWN, UNSIGNED, collection
from support.faulty_disk import Disk, mounted
from support.server_process import Process, serving

from pysync.coordinator.nonce_log import memory_folder

pytestmark = pytest.mark.process

MEMBERS: dict[str, Any] = {
    "collections": [
        NOTES,
        collection("mine", "u/{identity}/{id}", **OWN),
        collection("log", appendOnly=UNSIGNED),
        collection("files", allowedMimeTypes=["*/*"]),
    ],
}
PROBING = """
import sys
from pysync.cli.main import main
from pysync.server.process import readiness
readiness.PROBE_EVERY_S = -1.0
sys.exit(main())
"""
"""A server that probes its disk for each request for its readiness."""
TEXT = {"Content-Type": "text/plain"}
OWN_KEY = f"u/{ISSUER.user_id}/a"
LONG = "x" * 20_000


class Scene:
    """A server on a disk of its own, and what was acknowledged before it failed."""

    def __init__(self, process: Process, disk: Disk, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.disk = disk
        self.anyone = Browser(process.base, session)
        certificate = root_device(ISSUER, collections=("mine", "*"))
        self.owner = Signed(process.base, session, ISSUER, certificate)

    async def write(self, name: str) -> list[Reply]:
        """One write of each kind, of new keys, and over what is there."""
        document = {"data": {"text": LONG, "name": name}, "baseHash": None}
        return [
            await self.anyone.push(f"notes/{name}", document["data"]),
            await self.anyone.request("POST", "/push/log/a", {"data": {"text": LONG}}),
            await self.anyone.request("POST", f"/push/files/{name}", LONG.encode(), TEXT),
            await self.anyone.request("POST", "/push/files/a", LONG.encode(), TEXT),
            await self.owner.request("POST", f"/push/u/{ISSUER.user_id}/{name}", document),
        ]

    async def read(self, name: str = "a") -> list[Reply]:
        """One read of each kind."""
        return [
            await self.anyone.pull(f"notes/{name}"),
            await self.anyone.pull("log/a?last=3"),
            await self.anyone.pull(f"files/{name}"),
            await self.anyone.request("GET", "/health"),
            *[await self.owner.pull(f"u/{ISSUER.user_id}/{name}") for _ in range(300)],
        ]

    async def ready(self, status: int) -> None:
        """Ask for readiness, which is probed each time, until it is answered so."""
        while (await self.anyone.request("GET", "/health/ready")).status != status:
            pass


@pytest.fixture
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    with mounted(tmp_path / "disk", 16, request.param) as disk:
        folder = disk.data
        async with (
            serving(tmp_path, program=("-c", PROBING), store=f"file:{folder}", **MEMBERS) as process,
            aiohttp.ClientSession() as session,
        ):
            scene = Scene(process, disk, session)
            assert {reply.status for reply in await scene.write("a")} == {200}
            memory = memory_folder(folder / "nonces")
            try:
                yield scene
                assert process.process.returncode is None
            finally:
                shutil.rmtree(memory, ignore_errors=True)


def results_of(replies: list[Reply]) -> set[tuple[int, str]]:
    return {(reply.status, "" if reply.status == 200 else reply.json["code"]) for reply in replies}


UNAVAILABLE = {(503, "store_unavailable"), (503, "coordinator_unavailable")}


@pytest.mark.parametrize("scene", ["tmpfs", "ext4"], indirect=True)
async def test_a_full_disk_rejects_writes_and_serves_reads_until_there_is_space(scene: Scene) -> None:
    scene.disk.fill()
    for n in range(3):
        assert results_of(await scene.write(f"refused-{n}")) <= UNAVAILABLE
        assert results_of(await scene.read()) == {(200, "")}
        await scene.ready(503)
    for n in range(3):
        assert (await scene.anyone.pull(f"notes/refused-{n}")).json["data"] == {}, "it was not acknowledged"
    scene.disk.free()
    assert results_of(await scene.write("b")) == {(200, "")}
    assert results_of(await scene.read("b")) == results_of(await scene.read()) == {(200, "")}
    await scene.ready(200)


@pytest.mark.parametrize("scene", ["ext4"], indirect=True)
async def test_a_disk_that_becomes_read_only_serves_signed_and_unsigned_reads(scene: Scene) -> None:
    scene.disk.become_read_only()
    for n in range(3):
        assert results_of(await scene.write(f"refused-{n}")) <= UNAVAILABLE
        assert results_of(await scene.read()) == {(200, "")}
    await scene.ready(503)


@pytest.mark.parametrize("scene", ["ext4"], indirect=True)
async def test_a_disk_that_answers_every_call_with_an_error_is_not_called_damaged(scene: Scene) -> None:
    scene.disk.fail()
    assert results_of(await scene.write("refused")) <= UNAVAILABLE
    replies = await scene.read()
    assert results_of(replies) <= {(200, ""), *UNAVAILABLE}
    assert replies[3].status == 200, "the process lives"
    await scene.ready(503)
    assert "damaged" not in scene.process.log.read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk", 16, "ext4") as disk:
        disk.data.mkdir()
        (disk.data / "nonces").mkdir(mode=0o700)
        memory = memory_folder(disk.data / "nonces")
        yield disk
        shutil.rmtree(memory, ignore_errors=True)


async def test_server_does_not_start_on_a_read_only_disk_and_says_so(disk: Disk, tmp_path: Path) -> None:
    members = {"store": f"file:{disk.data}", **MEMBERS}
    async with serving(tmp_path, **members) as process, aiohttp.ClientSession() as session:
        scene = Scene(process, disk, session)
        assert results_of(await scene.write("a")) == {(200, "")}
    disk.remount("ro")
    rejected = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "serve", "--store", f"file:{disk.data}", "--port", "0",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await rejected.communicate()
    assert (rejected.returncode, b"the file system is read-only" in errors) == (5, True)
    disk.remount("rw")
    async with serving(tmp_path, **members) as process, aiohttp.ClientSession() as session:
        scene = Scene(process, disk, session)
        assert results_of(await scene.read()) == results_of(await scene.write("b")) == {(200, "")}
