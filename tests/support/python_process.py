"""Python code in a process of its own."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

WITH_HELPERS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
"""The environment of code that imports what tests share."""


def run_python(code: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=WITH_HELPERS,
    )


async def run_together(code: str, *args: str) -> list[str]:
    """Run the code in two processes, which print "ready" and wait for a line before they work. Return their
    outputs."""
    processes = [run_python(code, *args) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    return [output for output, _ in outputs]
