"""A drill: clients write while a store is backed up, everything is killed, the folder is deleted, and the
judge examines what a restore gives back.

Nothing that was acknowledged before the moment of the snapshot may be missing. What was acknowledged later
counts as a request without an answer: nobody knows whether the snapshot has it.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Final

from proof.history import History, Operation, numbered, read
from proof.judge import judge_operations
from proof.nodes import Server
from proof.service import JUDGED_LIMIT
from proof.verdict import Verdict
from proof.workload import load, push_last, read_all

WORKERS: Final = 2
EVERY_S: Final = 0.2
_WRITES: Final = ("push", "append", "upload", "batch")
_KEPT: Final = ("setup", "pull", "tail", "download", "list", "rows", "faults", *_WRITES)
"""Of the other kinds the promises are not about what is stored."""


async def drill(folder: Path, *, seconds: float, seed: int) -> Verdict:
    """Run a drill in `folder`, with so many seconds of load, and judge it."""
    random = Random(seed)
    server = Server("drilled", folder, {"store": f"file:{folder}/data", "server": {"workers": WORKERS}})
    ahead_s = time.time() - time.monotonic()
    with History(folder / "before.jsonl") as history:
        setup = {"seed": seed, "limit": JUDGED_LIMIT, "is_ordered": True}
        history.add(_event("setup", setup))
        try:
            await server.start()
            await push_last([server], history, random)
            async with asyncio.TaskGroup() as group:
                group.create_task(load([server], history, random, seconds))
                await _follow_and_kill(folder, server, random, seconds)
        finally:
            await server.kill()
    shutil.rmtree(folder / "data")
    printed = await _pysync(
        "backup", "restore", "--from", f"file:{folder}/backup", "--to", f"file:{folder}/data"
    )
    moment_s = datetime.fromisoformat(json.loads(printed)["time"]).timestamp() - ahead_s
    with History(folder / "after.jsonl") as history:
        try:
            await server.start()
            await read_all([server], history, random)
            history.add(_event("faults", {}))
        finally:
            await server.kill()
    before = [as_of(operation, moment_s) for operation in read(folder / "before.jsonl")]
    kept = [operation for operation in before if operation is not None]
    return judge_operations(numbered([*kept, *read(folder / "after.jsonl")]))


def as_of(operation: Operation, moment_s: float) -> Operation | None:
    """The operation as it is known of a snapshot of this moment: None if it says nothing about it."""
    if operation.kind not in _KEPT:
        return None
    if operation.end <= moment_s:
        return operation
    if operation.kind not in _WRITES:
        return None  # it may have read what the snapshot lacks
    return replace(operation, status=None, answer=None)


async def _follow_and_kill(folder: Path, server: Server, random: Random, seconds: float) -> None:
    """Back up the store while clients write, kill the backup once, and in the end everything."""
    end_s = time.monotonic() + seconds * random.uniform(0.6, 0.9)
    async with _following(folder):
        await asyncio.sleep(seconds * random.uniform(0.2, 0.4))
    async with _following(folder):
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        while not any((folder / "backup/snapshots").glob("*")):
            await asyncio.sleep(0.05)
        workers = server.workers()
        await server.kill()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


@asynccontextmanager
async def _following(folder: Path) -> AsyncIterator[None]:
    """A process that follows the store, killed in the end."""
    command = ("backup", "--store", f"file:{folder}/data", "--to", f"file:{folder}/backup", "--follow")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *command, "--every", str(EVERY_S), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def _pysync(*arguments: str) -> bytes:
    """What a command that succeeds prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *arguments, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed


def _event(kind: Any, sent: dict[str, Any]) -> Operation:
    now = time.monotonic()
    return Operation(kind=kind, who="drill", node=-1, sent=sent, start=now, end=now)
