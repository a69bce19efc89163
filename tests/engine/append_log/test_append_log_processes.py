"""Real server processes append to one log: what they acknowledge is in it once, whoever is killed."""

import asyncio
import signal
import sqlite3
from collections import Counter
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import reference_append_log as twin
from support.clients import Browser
from support.collections import UNSIGNED, collection
from support.depth import depth
from support.server_process import Process, serving

pytestmark = [pytest.mark.process, pytest.mark.long]

COLLECTIONS = [collection("logs", appendOnly=UNSIGNED)]
KEY = "logs/one"
EACH = depth(125, 625)
"""Elements that a client appends."""


class Clients:
    """Clients that append numbered elements to one log, each through a process of its own choice, and what
    they were told: `acknowledged` by client and number, `unknown` where nobody answered yes or no."""

    def __init__(self, session: aiohttp.ClientSession, processes: list[Process]) -> None:
        self.session = session
        self.processes = processes
        self.acknowledged: dict[tuple[int, int], tuple[str, int]] = {}
        self.unknown: set[tuple[int, int]] = set()
        self.first_acknowledged = 0
        self.halfway = asyncio.Event()
        """Set when the first process has acknowledged a hundred."""
        self.restarted = asyncio.Event()

    async def append(self, client: int, count: int) -> None:
        """Append `count` elements, one after another, through the process in the client's place."""
        for n in range(count):
            browser = Browser(self.processes[client % len(self.processes)].base, self.session)
            try:
                answer = await browser.request("POST", f"/push/{KEY}", {"data": {"client": client, "n": n}})
            except aiohttp.ClientError:
                self.unknown.add((client, n))
                await self.restarted.wait()
                continue
            if answer.status == 503:
                self.unknown.add((client, n))
                continue
            assert answer.status == 200, answer.body
            self.acknowledged[client, n] = answer.json["hash"], answer.json["timestamp"]
            self.first_acknowledged += client % len(self.processes) == 0
            if self.first_acknowledged >= 100:
                self.halfway.set()

    async def check(self) -> None:
        """Every process tells the same log, and it is what the clients were told."""
        answers = [await Browser(p.base, self.session).pull(f"{KEY}?full=true") for p in self.processes]
        pulled = answers[0].json
        for answer in answers:
            assert (answer.json["data"], answer.json["hash"]) == (pulled["data"], pulled["hash"])
        elements: list[dict[str, Any]] = pulled["data"]["items"]
        held = [(element["data"]["client"], element["data"]["n"]) for element in elements]
        times = [element["ts"] for element in elements]
        assert max(Counter(held).values()) == 1
        assert times == sorted(set(times))
        assert set(self.acknowledged) <= set(held) <= set(self.acknowledged) | self.unknown
        for position, (name, element) in enumerate(zip(held, elements, strict=True), start=1):
            reported = self.acknowledged.get(name)
            assert reported in (None, (twin.log_hash(position, element["data"]), element["ts"]))
        assert pulled["hash"] == twin.log_hash(len(elements), elements[-1]["data"])
        for client in {client for client, _ in held}:
            own = [n for at, n in held if at == client]
            assert own == sorted(own)
        for last in (1, 7, 500):
            tail = await Browser(self.processes[-1].base, self.session).pull(f"{KEY}?last={last}")
            assert tail.json["data"]["items"] == elements[-last:]


async def four_processes(stack: AsyncExitStack, folder: Path) -> list[Process]:
    """Servers on one folder, until `stack` ends."""
    return [await stack.enter_async_context(serving(folder, collections=COLLECTIONS)) for _ in range(4)]


async def test_four_processes_and_32_clients_append_to_one_log(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        processes = await four_processes(stack, tmp_path)
        clients = Clients(session, processes)
        await asyncio.gather(*(clients.append(client, EACH) for client in range(32)))
        assert len(clients.acknowledged) + len(clients.unknown) == 32 * EACH
        assert len(clients.unknown) < 200
        await clients.check()


async def test_acknowledged_appends_outlive_the_process(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        processes = await four_processes(stack, tmp_path)
        clients = Clients(session, processes)
        appending = asyncio.gather(*(clients.append(client, 200) for client in range(16)))
        await clients.halfway.wait()
        killed = processes[0]
        killed.signal(signal.SIGKILL)
        await killed.ended()
        processes[0] = await stack.enter_async_context(serving(tmp_path, collections=COLLECTIONS))
        clients.restarted.set()
        await appending
        assert 1 <= len(clients.unknown) < 100
        await clients.check()
    with closing(sqlite3.connect(tmp_path / "data" / "pysync.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
