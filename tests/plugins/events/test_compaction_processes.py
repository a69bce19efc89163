"""`pysync events compact` beside a real server, killed again and again: every event is there once."""

import asyncio
import os
import random
import signal
import sys
from asyncio import subprocess
from collections import Counter
from pathlib import Path

import aiohttp
import pyarrow.parquet as pq
import pytest
from support.clients import Browser
from support.event_batches import EVENTS, SECTION, listed, pushed
from support.server_process import serving

pytestmark = pytest.mark.process

ROUNDS = 5


def message_ids(folder: Path) -> Counter[str]:
    """What a glob finds. Where a file is gone when it is opened, it looks again."""
    while True:
        found: Counter[str] = Counter()
        try:
            for path in list(folder.glob("data/files/**/*.parquet")):
                found.update(pq.ParquetFile(path).read(["message_id"]).column(0).to_pylist())
        except FileNotFoundError:
            continue
        return found


async def compacting(config: Path) -> subprocess.Process:
    command = [sys.executable, "-m", "pysync", "events", "compact", "--config", str(config)]
    return await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.timeout(120)
async def test_every_event_is_found_once_whenever_compaction_is_killed(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    chance = random.Random(7)
    async with serving(tmp_path, collections=[EVENTS], events=[SECTION]) as server:
        browser = Browser(server.base, session)
        [config] = tmp_path.glob("config-*.json")
        acknowledged: Counter[str] = Counter()

        async def push(count: int) -> None:
            for _ in range(count):
                name = f"e{len(acknowledged)}"
                await pushed(browser, {"event": "seen", "message_id": name})
                acknowledged[name] += 1

        await push(100)
        killed = 0
        for _ in range(ROUNDS):
            before = folders_of_merges(tmp_path) | {"lock"}
            compaction = await compacting(config)
            ended = asyncio.ensure_future(compaction.wait())
            # Whatever is seen of a merge by now, it goes on for a few pushes more.
            while not ended.done() and folders_of_merges(tmp_path) <= before:
                await push(1)
            await push(chance.randrange(4))
            if not ended.done():
                os.kill(compaction.pid, signal.SIGKILL)
                killed += 1
            await ended
            assert await asyncio.to_thread(message_ids, tmp_path) == acknowledged
        assert killed
        last = await compacting(config)
        await push(20)
        assert await last.wait() == 0
        assert await asyncio.to_thread(message_ids, tmp_path) == acknowledged
        names: list[str] = []
        while page := await listed(browser, after=names[-1] if names else "", limit=50):
            names += page
        assert names == sorted(path.stem for path in tmp_path.glob("data/files/**/*.parquet"))
        assert len(names) < 100
    assert message_ids(tmp_path) == acknowledged


def folders_of_merges(folder: Path) -> set[str]:
    merging = folder / "data/merging"
    return set(os.listdir(merging)) if merging.exists() else set()
