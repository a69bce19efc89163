"""`pysync serve` in a process of its own."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.collections import OWN, collection
from support.configurations import patient

COLLECTIONS = [
    collection("notes"),
    collection("mine", "u/{identity}/{id}", **OWN),
]


class Process:
    """A `pysync serve`; `log` is the file that holds what it logs."""

    def __init__(self, process: asyncio.subprocess.Process, base: str, log: Path) -> None:
        self.process = process
        self.base = base
        self.log = log

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        return await self.process.wait()


@asynccontextmanager
async def serving(folder: Path, port: int = 0, **members: Any) -> AsyncIterator[Process]:
    """A server process on the store in `folder`, on a free port unless it is given, killed at the end if it
    still runs. The member `program` has the arguments with which Python runs pysync."""
    program = members.pop("program", ("-m", "pysync"))
    settings = folder / f"config-{os.urandom(4).hex()}.json"
    settings.write_text(
        json.dumps(
            {"version": 1, "store": f"file:{folder}/data", "collections": COLLECTIONS, **patient(members)}
        )
    )
    log = settings.with_suffix(".log")
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *program, "serve", "--config", str(settings), "--port", str(port),
            stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        first = (await process.stdout.readline()).decode()
        assert " at http://" in first, first
        yield Process(process, first.split(" at ")[1].strip(), log)
    finally:
        if process.returncode is None:
            process.kill()
        assert process.stdout is not None
        await process.stdout.read()  # workers hold it too: all have ended, and it is closed
        await process.wait()
