"""A drill: clients write while a store is backed up, everything is killed, the folder is deleted, and the
judge examines what a restore gives back.

Meanwhile the backup is suspended and killed, files of it are lost and flipped, and its place is full or
read-only for a while. The next backup heals all of this. Nothing that was acknowledged before the moment of
the snapshot may be missing. What was acknowledged later counts as a request without an answer: nobody knows
whether the snapshot has it.
"""

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    """Back up the store while clients write, with all kinds of faults, and in the end kill everything."""
    end_s = time.monotonic() + seconds * random.uniform(0.6, 0.9)
    backup = folder / "backup"
    async with _following(folder) as follower:
        await _snapshot_after(backup, 0)
        await asyncio.sleep(seconds * random.uniform(0.05, 0.15))
        follower.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds * random.uniform(0.0, 0.1))
        if random.random() < 0.5:  # else it is killed in its sleep
            follower.send_signal(signal.SIGCONT)
            await asyncio.sleep(seconds * random.uniform(0.0, 0.1))
    _damage(backup, random)
    await _pysync("backup", "verify", "--from", f"file:{backup}", statuses=(0, 1))
    async with _following(folder) as follower:
        await asyncio.sleep(seconds * random.uniform(0.0, 0.2))
        with random.choice((_full, _read_only))(backup, follower):
            await asyncio.sleep(seconds * random.uniform(0.0, 0.1))
        last = _last_number(backup)
        if random.random() < 0.5:
            prune = ("backup", "prune", "--from", f"file:{backup}", "--keep-last", "2")
            await _pysync(*prune, statuses=(0, 1))
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        await _snapshot_after(backup, last)
        workers = server.workers()
        await server.kill()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def _last_number(backup: Path) -> int:
    """The number of the newest snapshot, 0 if there is none."""
    return max((int(path.name.partition("-")[0]) for path in (backup / "snapshots").glob("*")), default=0)


async def _snapshot_after(backup: Path, number: int) -> None:
    """Wait for a snapshot after the one of this number."""
    while _last_number(backup) <= number:
        await asyncio.sleep(0.05)


def _damage(backup: Path, random: Random) -> None:
    """Flip a bit in some files of a backup, and lose others."""
    files = sorted(path for kind in ("packs", "lists") for path in (backup / kind).glob("*/*"))
    for path in random.sample(files, min(len(files), random.randint(1, 4))):
        if random.random() < 0.5:
            path.unlink()
        else:
            stored = bytearray(path.read_bytes())
            stored[random.randrange(len(stored))] ^= 1
            path.write_bytes(stored)


@contextmanager
def _full(backup: Path, follower: Process) -> Iterator[None]:
    """The follower cannot write a byte."""
    before = resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def _read_only(backup: Path, follower: Process) -> Iterator[None]:
    """Nobody can write to the place: new files begin in a folder that is a file now."""
    temporary, aside = backup / "~tmp", backup.parent / "aside"
    temporary.rename(aside)
    temporary.touch()
    try:
        yield
    finally:
        temporary.unlink()
        aside.rename(temporary)


@asynccontextmanager
async def _following(folder: Path) -> AsyncIterator[Process]:
    """A process that follows the store, killed in the end."""
    command = ("backup", "--store", f"file:{folder}/data", "--to", f"file:{folder}/backup", "--follow")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *command, "--every", str(EVERY_S),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _pysync(*arguments: str, statuses: Collection[int] = (0,)) -> bytes:
    """What a command prints that ends with one of these statuses."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *arguments, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode in statuses, f"{arguments}: {process.returncode}"
    return printed


def _event(kind: Any, sent: dict[str, Any]) -> Operation:
    now = time.monotonic()
    return Operation(kind=kind, who="drill", node=-1, sent=sent, start=now, end=now)
