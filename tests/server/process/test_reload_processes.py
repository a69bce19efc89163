"""`SIGHUP`, `POST /admin/reload` and `pysync reload`: a service takes its changed configuration file."""

import asyncio
import json
import signal
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from components import free_port
from support.cli_runner import running
from support.clients import Browser
from support.collections import collection
from support.reloads import ADMIN, NOTES, ReloadedService, follow, reloading

pytestmark = pytest.mark.process

WORKERS = pytest.mark.parametrize("workers", [1, 4])
OTHER = collection("other")


async def served(service: ReloadedService) -> list[str]:
    """The collections that each of some fresh connections finds."""
    found = []
    for _ in range(8):
        async with aiohttp.ClientSession() as session:
            reply = await Browser(service.base, session).request("GET", "/config")
            found.append(" ".join(one["name"] for one in reply.json["collections"]))
    return sorted(set(found))


@WORKERS
async def test_each_way_applies_the_changed_file(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    members: dict[str, Any] = {"configEndpoint": {"auth": "public"}, "collections": [NOTES]}
    server = {"workers": workers, "admin": {"port": free_port()}}
    async with reloading(tmp_path, server=server, **members) as service, aiohttp.ClientSession() as session:
        assert await served(service) == ["notes"]
        service.rewrite(collections=[NOTES, OTHER])
        assert await service.hang_up() == "reloaded the configuration; changed: collections"
        assert await served(service) == ["notes other"]
        service.rewrite(collections=[OTHER], server={"logLevel": "error"})
        assert (await service.post(session)).json == {"changed": ["collections", "server.logLevel"]}
        assert await served(service) == ["other"]
        service.rewrite(collections=[NOTES], server={"logLevel": "info"})
        assert await service.command() == 0
        assert json.loads(capsys.readouterr().out) == {"changed": ["collections", "server.logLevel"]}
        assert await served(service) == ["notes"]
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_the_command_finds_the_token_in_force_while_tokens_rotate(tmp_path: Path) -> None:
    async with reloading(tmp_path, server={"admin": {"port": free_port()}}, collections=[NOTES]) as service:
        service.rewrite(auth={"adminToken": [ADMIN[::-1], ADMIN]})
        assert await service.command() == 0
        service.rewrite(auth={"adminToken": ADMIN[::-1]})
        assert await service.command() == 0
        service.rewrite(auth={"adminToken": ADMIN})
        assert await service.command() == 4


@WORKERS
async def test_a_configuration_that_is_refused_changes_nothing_and_is_explained(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    members: dict[str, Any] = {"configEndpoint": {"auth": "public"}, "collections": [NOTES]}
    async with (
        reloading(tmp_path, server={"workers": workers}, **members) as service,
        aiohttp.ClientSession() as session,
    ):
        good = service.file.read_text()

        async def refused() -> str:
            reply = await service.post(session)
            assert (reply.status, reply.json["code"]) == (409, "reload_refused")
            said = str(reply.json["error"])
            assert await service.hang_up() == f"did not reload the configuration: {said}"
            assert await service.command("--url", service.operators, "--admin-token", ADMIN) == 1
            assert capsys.readouterr().err == f"pysync: {said}\n"
            assert await served(service) == ["notes"]
            return said.replace(str(service.file), "FILE")

        service.file.write_text(good[:-1])
        assert (await refused()).startswith("FILE: Expecting ',' delimiter")
        service.file.write_text(good.replace("storagePath", "path"))
        assert (await refused()).startswith("FILE: 2 problems\n  collections[0].path (notes): unknown member")
        service.file.write_bytes(b"\xff")
        assert (await refused()).startswith("FILE: ")
        service.file.unlink()
        assert await refused() == "FILE: No such file or directory"
        service.file.write_text(good)
        service.rewrite(collections=[OTHER], server={"examples": str(tmp_path / "none")})
        assert "none: No such file or directory" in await refused()
        service.file.write_text(good)
        service.rewrite(collections=[OTHER], server={"workers": 9, "host": "::1"}, changes={"maxCount": 9})
        assert await refused() == (
            "server.host: has changed, and needs a restart\n"
            "server.workers: has changed, and needs a restart\n"
            "changes.maxCount: has changed, and needs a restart"
        )
        assert (await service.post(session, "another-token-of-16")).status == 401
        service.file.write_text(good)
        assert (await service.post(session)).json == {"changed": []}


async def test_a_service_without_a_file_says_that_it_has_none(tmp_path: Path) -> None:
    store = f"file:{tmp_path}/data"
    async with running("serve", "--port", "0", "--store", store) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        said = b""
        while b"reload" not in said:
            said = await process.stderr.readline()
    assert b"the server was started without a configuration file" in said


@pytest.mark.slow
@WORKERS
async def test_no_request_fails_and_no_event_is_lost_in_50_reloads(tmp_path: Path, workers: int) -> None:
    done = asyncio.Event()
    written: list[str] = []
    received: list[str] = []
    async with (
        reloading(tmp_path, server={"workers": workers}, collections=[NOTES]) as service,
        aiohttp.ClientSession() as session,
    ):
        browser = Browser(service.base, session)

        async def write(number: int) -> None:
            base = None
            while not done.is_set():
                reply = await browser.push(f"notes/{number}", {"who": number, "n": len(written)}, base)
                assert reply.status == 200, reply.body
                base = reply.json["hash"]
                written.append(base)

        watching = asyncio.create_task(follow(browser, received))
        for n in count():
            await browser.push(f"notes/first-{n}", {})
            if received:
                break
        writers = [asyncio.create_task(write(number)) for number in range(8)]
        for n in range(50):
            service.rewrite(collections=[NOTES, collection(f"other-{n}")])
            said = await (service.hang_up() if n % 2 else answered(service, session))
            assert said == "reloaded the configuration; changed: collections"
        done.set()
        await asyncio.gather(*writers)
        while not set(written) <= set(received):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching])
    counts = Counter(received)
    assert {counts[hash_] for hash_ in written} == {1}
    assert len(written) > 50


async def answered(service: ReloadedService, session: aiohttp.ClientSession) -> str:
    """The outcome in the log of a reload that the operators' listener is asked for."""
    reply = await service.post(session)
    assert reply.status == 200, reply.body
    return service.outcomes()[-1]


@pytest.mark.slow
@WORKERS
async def test_a_second_hangup_finds_what_was_written_before_it(tmp_path: Path, workers: int) -> None:
    members: dict[str, Any] = {"configEndpoint": {"auth": "public"}, "collections": [NOTES]}
    async with reloading(tmp_path, server={"workers": workers}, **members) as service:
        for n in range(5):
            for name in (f"first-{n}", f"second-{n}"):
                service.rewrite(collections=[collection(name)])
                service.signal(signal.SIGHUP)
            while await served(service) != [f"second-{n}"]:
                pass


@pytest.mark.slow
async def test_a_worker_that_starts_during_a_reload_has_the_configuration_in_force(tmp_path: Path) -> None:
    members: dict[str, Any] = {"configEndpoint": {"auth": "public"}, "collections": [NOTES]}
    async with reloading(tmp_path, server={"workers": 2}, **members) as service:
        for number, name in ((1, "other"), (2, "another"), (1, "last")):
            killing = asyncio.create_task(service.kill(number))
            service.rewrite(collections=[collection(name)])
            while "changed: collections" not in await service.hang_up():
                pass  # it was killed while it prepared
            await killing
            assert await served(service) == [name]


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_number_of_reloads(tmp_path: Path) -> None:
    collections = [collection(f"c{n}") for n in range(20)]
    async with reloading(tmp_path, collections=collections) as service, aiohttp.ClientSession() as session:
        used = []
        for n in range(201):
            assert (await service.post(session)).status == 200
            if n % 200 == 0:
                statm = Path(f"/proc/{service.process.pid}/statm").read_text()
                used.append(int(statm.split()[1]))
        assert used[-1] < 1.05 * used[0]
