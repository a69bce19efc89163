"""A process that edits a `Replica` until it is killed, and a device that starts one after another.

The process reports each edit when it begins and when the replica has accepted it. From then on it must not be
lost.
"""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pysync.client import Client, Replica, RetryPolicy, Unreachable
from pysync.errors import Unavailable
from support.clients import ISSUER
from support.edit_ledger import entries_of
from support.python_process import WITH_HELPERS
from support.replicas import ME, MINE, nap

HOME = f"users/{ME}"
LOGS = [f"{HOME}/logs/log-{n}" for n in range(2)]
SHARED_COUNT = 3
ROTATED_LIVES = 12
"""Lives after which devices go on to other documents: each stays small, and their number grows."""


@dataclass(frozen=True)
class Life:
    """One process of a device. It makes `edits` edits at random, and between them waits for the server if it
    `is_online`. A last one makes none, and reports what the replica holds."""

    file: str
    url: str
    device: str
    number: int
    seed: int
    edits: int
    is_online: bool

    @property
    def is_last(self) -> bool:
        return self.edits == 0


def report(**members: Any) -> None:
    """Write a line at once and as a whole: who is killed later has reported it."""
    os.write(sys.stdout.fileno(), json.dumps(members).encode() + b"\n")


class Editor:
    """Makes one edit after another. Each adds an entry that no other edit adds."""

    def __init__(self, replica: Replica, life: Life) -> None:
        self._replica = replica
        self._life = life
        self._random = Random(life.seed)
        self._count = 0

    async def run(self) -> None:
        for _ in range(self._life.edits):
            edit = self._random.choice(
                [self._add, self._add, self._append, self._append, self._own, self._drop]
            )
            edit()
            if self._life.is_online and self._random.random() < 0.3:
                await synced(self._replica)
            else:  # let some of what is under way come further
                for _ in range(self._random.randrange(100)):
                    await asyncio.sleep(0)

    def _entry(self) -> str:
        self._count += 1
        return f"{self._life.device}-{self._life.number:04}-{self._count:02}"

    def _shared(self) -> str:
        return shared_key(self._life.number, self._random)

    def _add(self) -> None:
        """Add an entry to a document that others edit too, as a member or to its list."""
        key, entry = self._shared(), self._entry()
        data = self._replica.get(key) or {}
        if self._random.random() < 0.5:
            data[entry] = True
        else:
            data.setdefault("items", []).append({"id": entry})
        report(begun="add", key=key, entry=entry)
        self._replica.put(key, data)
        report(done="add", key=key, entry=entry)

    def _append(self) -> None:
        key, entry = self._random.choice(LOGS), self._entry()
        report(begun="append", key=key, entry=entry)
        self._replica.append(key, {"id": entry})
        report(done="append", key=key, entry=entry)

    def _own(self) -> None:
        """Write, or else remove, a document that no other device edits."""
        key = f"{HOME}/docs/own-{self._life.device}"
        entry = None if self._replica.get(key) and self._random.random() < 0.4 else self._entry()
        report(begun="own", key=key, entry=entry)
        if entry is None:
            self._replica.delete(key)
        else:
            self._replica.put(key, {"id": entry})
        report(done="own", key=key, entry=entry)

    def _drop(self) -> None:
        """Delete a document that others edit, with the entries that are seen in it."""
        key = self._shared()
        data = self._replica.get(key)
        if data is not None and self._random.random() < 0.3:
            report(begun="drop", key=key, seen=entries_of(data))
            self._replica.delete(key)
            report(done="drop", key=key)


def shared_key(life: int, random: Random) -> str:
    return f"{HOME}/docs/shared-{life // ROTATED_LIVES}-{random.randrange(SHARED_COUNT)}"


async def synced(replica: Replica) -> None:
    """Sync with a server that sometimes fails."""
    while True:
        try:
            return await replica.synced()
        except (Unreachable, Unavailable):
            await asyncio.sleep(0)


async def _live(life: Life) -> None:
    client = Client(life.url, keys=ISSUER, backoff=RetryPolicy(attempts=1), sleep=nap)
    async with client, Replica(Path(life.file), client, MINE, sleep=nap) as replica:
        report(pid=os.getpid())
        await Editor(replica, life).run()
        if life.is_online:
            await synced(replica)
        if life.is_last:
            status = replica.status
            report(
                documents={key: replica.get(key) for key in replica.keys(f"{HOME}/docs")},
                logs={key: [element.data["id"] for element in replica.tail(key, 100_000)] for key in LOGS},
                unsent=status.unsent,
                rejected=[repr(each) for each in status.rejected],
            )
        report(idle=True)
        await asyncio.Event().wait()


def _main() -> None:
    """Read lives from standard input, and live each in a process of its own that has imported all."""
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(_live(Life(**json.loads(line))))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        report(ended=status)


class DeviceProcess:
    """Starts the processes of one device, each when the last one has been killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pid = 0

    async def live(self, life: Life, on_report: Callable[[dict[str, Any]], None]) -> None:
        """Live, hand over each report, and return when the process has been killed. Raises AssertionError if
        it ends by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(vars(life)).encode() + b"\n")
        while True:
            line = await self._process.stdout.readline()
            assert line, "the processes of a device have ended"
            members = json.loads(line)
            if "ended" in members:
                self._pid = 0
                assert members["ended"] == 9, f"the process ended by itself: {members}"
                return
            self._pid = members.get("pid", self._pid)
            on_report(members)

    def kill(self) -> None:
        """Kill the process, unless that has happened."""
        if self._pid:
            os.kill(self._pid, 9)
            self._pid = 0


@asynccontextmanager
async def device_process() -> AsyncIterator[DeviceProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", "support.replica_process",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=WITH_HELPERS, limit=1 << 26,
    )  # fmt: skip
    device = DeviceProcess(process)
    try:
        yield device
    finally:
        device.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    _main()
