"""Progress of commands that take long: shown to a person at a terminal, and to nobody else."""

import asyncio
import os
import pty
import re
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.clients import Start
from support.collections import NOTES, PUBLIC
from support.configurations import collection, config
from support.faulty_store import FaultyStore
from support.store_samples import fill

from pysync.cli.progress import describe_progress
from pysync.client import Client
from pysync.migrate import SCRUB_KEY, VerificationReport
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

COMMANDS = {
    "verify": ["verify", "--store", "file:data"],
    "gc": ["gc", "--store", "file:data"],
    "erase": ["erase", "--config", "pysync.yaml", "--prefix", "notes", "--dry-run"],
    "copy": ["copy", "file:data", "file:copy"],
    "backup": ["backup", "--store", "file:data", "--to", "file:backup"],
    "backup verify": ["backup", "verify", "--from", "file:backup"],
    "restore": ["backup", "restore", "--from", "file:backup", "--to", "file:restored"],
}
LINE = r"\r\x1b\[K[\d,]+ (of [\d,]+ )?objects, [\d.,]+ MB"


def test_progress_has_the_rate_and_the_time_left() -> None:
    assert describe_progress(0, 0, 0.0) == "0 objects, 0.0 MB"
    assert describe_progress(1000, 2_000_000, 0.5) == "1,000 objects, 2.0 MB"
    rate = "(100 objects/s, 0.2 MB/s)"
    assert describe_progress(1000, 2_000_000, 10.0) == f"1,000 objects, 2.0 MB {rate}"
    left = f"1,000 of 10,000 objects, 2.0 MB {rate}, 1 min 30 s left"
    assert describe_progress(1000, 2_000_000, 10.0, 10_000) == left
    assert describe_progress(1000, 2_000_000, 10.0, 1000) == f"1,000 objects, 2.0 MB {rate}"


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a store and a configuration of it."""
    monkeypatch.chdir(tmp_path)
    store = await LocalStore.open_folder(tmp_path / "data")
    await fill(store)
    await VerificationReport(objects=99).record(store, SCRUB_KEY, 1)
    await store.close()
    (tmp_path / "pysync.yaml").write_text(f"{config(collection(), store='file:data')}")
    return tmp_path


async def on_terminal(*command: str) -> str:
    """The output of a command on a terminal that is its standard error."""
    terminal, its_end = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *command, stdout=DEVNULL, stderr=its_end
    )
    os.close(its_end)
    shown = await asyncio.to_thread(read_all, terminal)
    os.close(terminal)
    assert await process.wait() == 0, shown
    return shown


def read_all(terminal: int) -> str:
    """The text that is shown until the other end is closed."""
    shown = b""
    try:
        while piece := os.read(terminal, 1024):
            shown += piece
    except OSError:  # Linux reports the end as an error
        pass
    return shown.decode()


@pytest.mark.process
@pytest.mark.slow
async def test_person_at_a_terminal_sees_progress_and_a_script_does_not(folder: Path, shell: Shell) -> None:
    for name, command in COMMANDS.items():
        shown = await on_terminal(*command)
        assert re.match(LINE, shown), (name, shown)
        assert shown.endswith("\r\x1b[K"), "the line is erased at the end"
        assert (" of " in shown) == (name in ("verify", "copy", "restore")), name
        if name in ("verify", "copy"):
            assert " of 99 objects" in shown, "the last scrub has counted them"
    for path in ("copy", "backup", "restored"):
        (folder / path).rename(folder / f"{path}-1")
    for name, command in COMMANDS.items():
        status, _, errors = await shell.run_async(*command)
        assert (status, errors) == (0, ""), name


@pytest.mark.process
@pytest.mark.slow
async def test_person_at_a_terminal_sees_the_progress_of_export_and_import(
    start: Start, tmp_path: Path
) -> None:
    url = await start({"collections": [collection(**PUBLIC, listable=True)]})
    async with Client(url) as client:
        for name in ("a", "b"):
            await client.push(f"notes/{name}", {"n": 1})
    folder = str(tmp_path / "folder")
    for command in (["export", folder, "notes"], ["import", folder]):
        shown = await on_terminal(*command, "--server", url)
        assert re.match(LINE, shown), shown
        assert shown.endswith("\r\x1b[K"), "the line is erased at the end"
        assert " of 2 objects" in shown or command[0] == "export", "which begins before it knows how many"


@pytest.mark.process
@pytest.mark.slow
async def test_person_at_a_terminal_sees_that_a_request_is_tried_again(start: Start) -> None:
    store = FaultyStore(MemoryStore())
    url = await start({"collections": [NOTES]}, store=store)
    store.fail("get", times=1)
    assert "trying again in" in await on_terminal("pull", "notes/a", "--server", url)
