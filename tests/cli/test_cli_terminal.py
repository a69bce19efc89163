"""What a person at a terminal is told while a command waits."""

import asyncio
import os
import pty
import sys
from asyncio.subprocess import DEVNULL

import pytest
from support.fake_server import silent_until

pytestmark = [pytest.mark.process, pytest.mark.slow]


def read_until(terminal: int, word: str) -> str:
    """What is shown on the terminal up to `word`."""
    shown = ""
    while word not in shown:
        shown += os.read(terminal, 1024).decode()
    return shown


async def test_a_server_that_hangs_is_noticed_on_a_terminal() -> None:
    noticed = asyncio.Event()
    terminal, its_end = pty.openpty()
    async with silent_until(noticed) as url:
        command = ("pull", "notes/a", "--server", url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pysync", *command, stdout=DEVNULL, stderr=its_end
        )
        os.close(its_end)
        shown = await asyncio.to_thread(read_until, terminal, "\n")
        noticed.set()
        assert await process.wait() == 0
    os.close(terminal)
    assert shown == "pysync: no answer for 2 s; waiting, and trying again if none comes\r\n"
