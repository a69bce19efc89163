"""A `pysync serve` of several workers, and what becomes of them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from support.clients import Browser, Reply
from support.collections import OWN, UNSIGNED, collection
from support.server_process import COLLECTIONS, Process, serving

WORKERS = 4
LOGS = collection("logs", "logs/{identity}/{id}", appendOnly=UNSIGNED, **OWN)


class Service(Process):
    """A `pysync serve` with workers, and what is known of them."""

    def entries(self) -> list[dict[str, Any]]:
        """What was logged."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def pids(self) -> dict[int, int]:
        """The process that last served under each number."""
        serving = (entry for entry in self.entries() if entry["message"].startswith("serving, pid "))
        return {entry["worker"]: int(entry["message"].split()[-1]) for entry in serving}

    async def kill(self, number: int) -> None:
        """Kill the worker of that number and wait until another has its place."""
        killed = self.pids()[number]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: self.pids()[number] != killed)


@asynccontextmanager
async def workers(folder: Path, port: int = 0, **members: Any) -> AsyncIterator[Service]:
    server = {"workers": WORKERS, **members.pop("server", {})}
    members.setdefault("collections", [*COLLECTIONS, LOGS])
    async with serving(folder, port, server=server, **members) as process:
        yield Service(process.process, process.base, process.log)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a process of ours will do; the test's time limit is the limit."""
    while not holds():
        await asyncio.sleep(0.01)


async def on_fresh_connection(base: str, send: Callable[[Browser], Awaitable[Reply]]) -> Reply:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        return await send(Browser(base, session))


def worker_of(reply: Reply) -> str:
    """The worker that answered: each begins its request ids in its own way."""
    return str(reply.headers["X-Request-Id"]).partition("-")[0]


async def replies_of_all_workers(
    base: str, send: Callable[[Browser], Awaitable[Reply]], count: int = WORKERS
) -> list[Reply]:
    """Send on fresh connections until `count` workers have answered; the answers."""
    replies: list[Reply] = []
    while len(set(map(worker_of, replies))) < count:
        replies.append(await on_fresh_connection(base, send))
    return replies


def runs(pid: int) -> bool:
    """Whether there is such a process, and not just what its parent has not asked after yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: Iterable[int]) -> None:
    await until(lambda: not any(map(runs, pids)))
