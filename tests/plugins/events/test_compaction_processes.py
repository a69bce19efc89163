"""`pysync events compact` beside a real server, killed again and again: every event is there once."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
from asyncio import subprocess
from collections import Counter
from contextlib import closing
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
    """What a glob finds while nobody merges."""
    found: Counter[str] = Counter()
    for path in folder.glob("data/files/**/*.parquet"):
        found.update(pq.ParquetFile(path).read(["message_id"]).column(0).to_pylist())
    return found


async def queried(config: Path) -> Counter[str]:
    """What `pysync events sql` finds."""
    query = ["events", "sql", "--config", str(config), "SELECT message_id FROM events"]
    command = [sys.executable, "-m", "pysync", *query]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    lines, _ = await process.communicate()
    assert process.returncode == 0
    return Counter(json.loads(line)["message_id"] for line in lines.splitlines())


def is_staged(folder: Path) -> bool:
    """Return True while the merged file is being written."""
    return bool(os.listdir(folder / "data/files/~incoming"))


def is_committed(folder: Path) -> bool:
    """Return True while the merged files are to be removed."""
    with closing(sqlite3.connect(folder / "data/pysync.db")) as database:
        return bool(database.execute("SELECT 1 FROM doomed").fetchall())


async def compacting(config: Path) -> subprocess.Process:
    command = [sys.executable, "-m", "pysync", "events", "compact", "--config", str(config)]
    return await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.timeout(120)
async def test_every_event_is_found_once_whenever_compaction_is_killed(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    rng = random.Random(7)
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
        for round_ in range(ROUNDS):
            await push(20)
            is_merging = (is_staged, is_committed)[round_ % 2]
            compaction = await compacting(config)
            ended = asyncio.ensure_future(compaction.wait())
            while not ended.done() and not is_merging(tmp_path):
                await asyncio.sleep(0)
            await push(rng.randrange(3))
            if not ended.done():
                os.kill(compaction.pid, signal.SIGKILL)
                killed += 1
            await ended
            assert message_ids(tmp_path).keys() == acknowledged.keys()
            assert await queried(config) == acknowledged
            assert message_ids(tmp_path) == acknowledged
        assert killed
        last = await compacting(config)
        await push(20)
        assert await last.wait() == 0
        assert message_ids(tmp_path) == acknowledged
        names: list[str] = []
        while page := await listed(browser, after=names[-1] if names else "", limit=50):
            names += page
        assert names == sorted(path.stem for path in tmp_path.glob("data/files/**/*.parquet"))
        assert len(names) < 100
    assert message_ids(tmp_path) == acknowledged
