"""Real server processes store batches of events: what they acknowledge is there once, whoever is killed."""

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import duckdb
import pytest
from support.clients import Browser
from support.event_batches import EVENTS, SECTION, listed
from support.server_process import Process, serving

pytestmark = pytest.mark.process

SETTINGS: dict[str, Any] = {"collections": [EVENTS], "events": [SECTION]}
EVENTS_A_BATCH = 20


class Senders:
    """Clients that push numbered batches, each under an Idempotency-Key of its own: what was `acknowledged`,
    by client and number, and what is `unknown`, because nobody answered."""

    def __init__(self, session: aiohttp.ClientSession, processes: list[Process]) -> None:
        self.session = session
        self.processes = processes
        self.acknowledged: dict[tuple[int, int], dict[str, Any]] = {}
        self.unknown: list[tuple[int, int]] = []
        self.halfway = asyncio.Event()
        self.restarted = asyncio.Event()

    async def send(self, client: int, count: int) -> None:
        for n in range(count):
            try:
                answer = await self.push(client, n, self.processes[client % len(self.processes)])
            except aiohttp.ClientError:
                self.unknown.append((client, n))
                await self.restarted.wait()
                continue
            self.acknowledged[client, n] = answer
            if len(self.acknowledged) >= 60:
                self.halfway.set()

    async def push(self, client: int, n: int, process: Process) -> dict[str, Any]:
        events = [
            {"event": f"{client}-{n}", "message_id": f"{client}-{n}-{i}"} for i in range(EVENTS_A_BATCH)
        ]
        once = {"Idempotency-Key": f"{client}-{n}"}
        browser = Browser(process.base, self.session)
        answer = await browser.push("events/web/new", {"events": events}, headers=once)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found


async def test_acknowledged_batches_survive_a_kill_and_retries_add_none(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(serving(tmp_path, **SETTINGS)) for _ in range(2)]
        senders = Senders(session, processes)
        sending = asyncio.gather(*(senders.send(client, 20) for client in range(8)))
        await senders.halfway.wait()
        processes[0].signal(signal.SIGKILL)
        await processes[0].ended()
        processes[0] = await stack.enter_async_context(serving(tmp_path, **SETTINGS))
        senders.restarted.set()
        await sending
        assert senders.unknown
        ids = await all_listed(Browser(processes[0].base, session))
        assert {answer["batchId"] for answer in senders.acknowledged.values()} <= set(ids)
        assert len(ids) <= len(senders.acknowledged) + len(senders.unknown)
        assert ids == sorted(path.stem for path in tmp_path.glob("data/files/**/*.parquet"))
        for client, n in senders.unknown:
            await senders.push(client, n, processes[1])
        for (client, n), answer in list(senders.acknowledged.items())[::7]:
            assert await senders.push(client, n, processes[0]) == answer
        assert len(await all_listed(Browser(processes[1].base, session))) == 8 * 20
    found = duckdb.sql(
        f"SELECT message_id FROM read_parquet('{tmp_path}/data/files/**/*.parquet')"
    ).fetchall()
    assert Counter(found) == Counter(
        (f"{client}-{n}-{i}",) for client in range(8) for n in range(20) for i in range(EVENTS_A_BATCH)
    )


async def all_listed(browser: Browser) -> list[str]:
    """What who follows the list from its beginning gets."""
    found: list[str] = []
    while page := await listed(browser, after=found[-1] if found else "", limit=50):
        found += page
    return found
