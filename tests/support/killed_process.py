"""`pysync` in a process that kills itself at a step: before or after an operation on a file or a call of a
store, or in the middle of what it writes to a backup.

python -m support.killed_process STEP ARGUMENTS
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pysync.backup import make, pack, target
from pysync.cli import main
from pysync.sqlite import database_file
from pysync.sqlite.changelog import SqliteChangeLog
from pysync.store.local.capture import FolderCapture
from pysync.store.local.store import LocalStore

TESTS = Path(__file__).parents[1]
CALLS = ("open", "fsync", "replace", "mkdir", "utime", "unlink", "walk", "scandir")
METHODS = {
    target.FolderTarget: ("_delete",),
    FolderCapture: ("follow", "begin", "next_batch", "end", "trim", "close"),
}
COROUTINES = {LocalStore: ("put", "write", "delete"), SqliteChangeLog: ("begin_epoch",)}


async def is_killed_at(step: int, *arguments: str) -> bool:
    """Run a command until a step, counted from 1, and return True if it was killed there. Otherwise it has
    ended with the status 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", "support.killed_process", str(step), *arguments,
        cwd=TESTS, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    status = await process.wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


class Steps:
    """Counts steps, and kills the process at the last one."""

    def __init__(self, left: int) -> None:
        self._left = left

    def pass_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a step before and after it."""

        def call(*args: Any, **options: Any) -> Any:
            self.pass_one()
            result = function(*args, **options)
            self.pass_one()
            return result

        return call

    def around_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`around` for a coroutine function."""

        async def call(*args: Any, **options: Any) -> Any:
            self.pass_one()
            result = await function(*args, **options)
            self.pass_one()
            return result

        return call

    def torn(self, *args: Any, **options: Any) -> "TornFile":
        """`open`, with a step in each write."""
        return TornFile(open(*args, **options), self)


class CountedOs:
    """Stands in for the module `os` of a module."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._steps.around(real) if name in CALLS else real


class TornFile:
    """A file whose writes consist of two halves, with a step between."""

    def __init__(self, file: Any, steps: Steps) -> None:
        self._file = file
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "TornFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, body: bytes) -> None:
        half = len(body) // 2
        self._file.write(body[:half])
        self._file.flush()
        self._steps.pass_one()
        self._file.write(body[half:])


def _count(steps: Steps) -> None:
    """Make the steps of pysync pass through `steps`."""
    for module in (target, database_file):
        module.os = CountedOs(steps)  # type: ignore[attr-defined]
    target.open = steps.torn  # type: ignore[attr-defined]
    for owners, around in ((METHODS, steps.around), (COROUTINES, steps.around_each)):
        for owner, names in owners.items():
            for name in names:
                setattr(owner, name, around(getattr(owner, name)))


if __name__ == "__main__":
    make.CHECKPOINT_ENTRIES = 5  # type: ignore[misc]
    pack.PACK_BYTES = 100_000  # type: ignore[attr-defined]
    _count(Steps(int(sys.argv[1])))
    sys.exit(main.main(sys.argv[2:]))
