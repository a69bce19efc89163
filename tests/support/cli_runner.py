"""The command line, run in this process or in one of its own."""

import asyncio
import io
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pysync.cli import main


class Shell:
    """Runs command lines in a folder of their own, standard output and error kept apart."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit status, output, errors. Whoever listens to the log still does so afterwards."""
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        self._capsys.readouterr()
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            status = main.main(arguments)
        except SystemExit as ended:
            status = int(str(ended.code or 0))
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        output, errors = self._capsys.readouterr()
        return status, output, errors

    def json(self, *arguments: str, stdin: str = "") -> Any:
        """What a command that succeeds prints."""
        status, output, errors = self.run(*arguments, stdin=stdin)
        assert (status, errors) == (0, "")
        return json.loads(output)

    async def run_async(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """`run`, while a service in this process answers."""
        return await asyncio.to_thread(self.run, *arguments, stdin=stdin)


@asynccontextmanager
async def running(*arguments: str, stdout: int = PIPE) -> AsyncIterator[Process]:
    """A `pysync` in a process of its own, killed at the end if it still runs."""
    command = (sys.executable, "-m", "pysync", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
