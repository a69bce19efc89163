"""A process that may open few files: it accepts, stores, and refuses clearly what it cannot open."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Signed, root_device
from support.collections import MINE, NOTES, collection
from support.server_process import serving

DESCRIPTORS = 64
FILES = collection("files", allowedMimeTypes=["*/*"])
BODY = b"x" * 1_000_000
TEXT = {"Content-Type": "text/plain"}
LIMITED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from pysync.cli.main import main
sys.exit(main())
"""


@pytest.mark.process
async def test_a_process_of_few_descriptors_goes_on_while_connections_take_all_that_they_may(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, program=("-c", LIMITED), collections=[NOTES, MINE, FILES]) as service,
        # A kept connection may give way to those that come.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        anyone = Browser(service.base, session)
        owner = Signed(service.base, session, ISSUER, root_device(ISSUER, collections=("mine",)))
        assert (await anyone.push("notes/a", {"n": 1})).status == 200
        port = int(service.base.rpartition(":")[2])
        with ExitStack() as idle:
            for n in range(4 * DESCRIPTORS):
                source = (f"127.0.1.{n % 250}", 0)
                idle.enter_context(socket.create_connection(("127.0.0.1", port), source_address=source))
            for n in range(20):
                replies = [
                    await anyone.push(f"notes/{n}", {"n": 1}),
                    await anyone.request("POST", f"/push/files/{n}", b"x" * 100_000, TEXT),
                    await anyone.pull(f"files/{n}"),
                    await owner.push(f"u/{ISSUER.user_id}/{n}", {"n": 1}),
                    await owner.pull(f"u/{ISSUER.user_id}/{n}"),
                ]
                assert {reply.status for reply in replies} == {200}


@pytest.mark.process
async def test_files_that_cannot_be_opened_are_rejected_and_the_others_stored(tmp_path: Path) -> None:
    async with serving(tmp_path, program=("-c", LIMITED), collections=[NOTES, FILES]) as service:

        async def upload(n: int) -> int | None:
            connector = aiohttp.TCPConnector(local_addr=(f"127.0.1.{n}", 0))
            async with aiohttp.ClientSession(connector=connector) as session:
                anyone = Browser(service.base, session)
                try:
                    return (await anyone.request("POST", f"/push/files/{n}", BODY, TEXT)).status
                except aiohttp.ClientError:
                    return None  # the connection was refused

        outcomes = await asyncio.gather(*map(upload, range(60)))
        assert set(outcomes) <= {200, 503, None}
        assert 200 in outcomes
        async with aiohttp.ClientSession() as session:
            anyone = Browser(service.base, session)
            for n, outcome in enumerate(outcomes):
                if outcome == 200:
                    assert (await anyone.pull(f"files/{n}")).body == BODY
            assert (await anyone.request("POST", "/push/files/b", BODY, TEXT)).status == 200
            assert (await anyone.request("GET", "/health/ready")).status == 200
