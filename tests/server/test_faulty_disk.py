"""A service whose disk fails while it serves: a real file system, and the process of a server."""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Reply, Signed, root_device
from support.collections import NOTES, OWN, UNSIGNED, collection
from support.faulty_disk import Disk, mounted
from support.server_process import Process, serving
from support.worker_processes import workers

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
from pysync.server import readiness
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


def told(replies: list[Reply]) -> set[tuple[int, str]]:
    return {(reply.status, "" if reply.status == 200 else reply.json["code"]) for reply in replies}


UNAVAILABLE = {(503, "store_unavailable"), (503, "coordinator_unavailable")}


@pytest.mark.parametrize("scene", ["tmpfs", "ext4"], indirect=True)
async def test_a_full_disk_refuses_writes_and_serves_reads_until_there_is_space(scene: Scene) -> None:
    scene.disk.fill()
    for n in range(3):
        assert told(await scene.write(f"refused-{n}")) <= UNAVAILABLE
        assert told(await scene.read()) == {(200, "")}
        await scene.ready(503)
    for n in range(3):
        assert (await scene.anyone.pull(f"notes/refused-{n}")).json["data"] == {}, "it was not acknowledged"
    scene.disk.free()
    assert told(await scene.write("b")) == {(200, "")}
    assert told(await scene.read("b")) == told(await scene.read()) == {(200, "")}
    await scene.ready(200)


@pytest.mark.parametrize("scene", ["ext4"], indirect=True)
async def test_a_disk_that_becomes_read_only_serves_signed_and_unsigned_reads(scene: Scene) -> None:
    scene.disk.become_read_only()
    for n in range(3):
        assert told(await scene.write(f"refused-{n}")) <= UNAVAILABLE
        assert told(await scene.read()) == {(200, "")}
    await scene.ready(503)


@pytest.mark.parametrize("scene", ["ext4"], indirect=True)
async def test_a_disk_that_answers_every_call_with_an_error_is_not_called_damaged(scene: Scene) -> None:
    scene.disk.fail()
    assert told(await scene.write("refused")) <= UNAVAILABLE
    replies = await scene.read()
    assert told(replies) <= {(200, ""), *UNAVAILABLE}
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


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_server_that_starts_on_a_read_only_disk_serves_reads(
    disk: Disk, tmp_path: Path, is_killed: bool
) -> None:
    target, port, used = f"/pull/{OWN_KEY}", 0, list[dict[str, str]]()

    @asynccontextmanager
    async def started() -> AsyncIterator[Scene]:
        options: dict[str, Any] = {"program": ("-c", PROBING), "store": f"file:{disk.data}", **MEMBERS}
        async with serving(tmp_path, port, **options) as process, aiohttp.ClientSession() as session:
            scene = Scene(process, disk, session)
            for headers in used:
                assert (await scene.anyone.request("GET", target, None, headers)).status == 401, "a replay"
            yield scene
            if not is_killed:
                process.process.terminate()
                await process.process.wait()

    async def read_signed(scene: Scene) -> None:
        used.append(scene.owner.headers("GET", target, b""))
        for status in (200, 401):
            assert (await scene.anyone.request("GET", target, None, used[-1])).status == status

    async with started() as scene:
        port = int(scene.process.base.rpartition(":")[2])
        assert told(await scene.write("a")) == {(200, "")}
        await read_signed(scene)
    disk.remount("ro")
    for _ in range(2):
        async with started() as scene:
            assert told(await scene.read()) == {(200, "")}
            assert told(await scene.write("refused")) <= UNAVAILABLE
            await read_signed(scene)
            await scene.ready(503)
            assert scene.process.log.read_text().count("is read-only: writes fail until a restart") == 1
    disk.remount("rw")
    async with started() as scene:
        assert told(await scene.write("b")) == told(await scene.read("b")) == {(200, "")}
        await scene.ready(200)


async def test_a_worker_is_replaced_on_a_disk_that_became_read_only(disk: Disk, tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": f"file:{disk.data}", "server": {"workers": 2}, **MEMBERS}
    async with workers(tmp_path, **options) as service, aiohttp.ClientSession() as session:
        scene = Scene(service, disk, session)
        assert told(await scene.write("a")) == {(200, "")}
        disk.become_read_only()
        for number in service.pids():
            await service.kill(number)
            assert told(await scene.read()) == {(200, "")}
            assert told(await scene.write("refused")) <= UNAVAILABLE
