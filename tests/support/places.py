"""The place of a backup as an operator sees it: the commands that use it, and its files on disk."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from pysync.store.local.store import LocalStore
from support.backups import MemoryTarget
from support.bit_rot import rot
from support.cli_runner import Shell
from support.store_samples import contents, document

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STORE_ID: Final = "_pysync/store"
"""The key of the id of a store, which its backups do not have."""
DAY_MS: Final = 86_400_000
_FRAME: Final = bytes.fromhex("28b52ffd")
_SHIFTED: Final = """
import sys, time
real_ns, shift_ns = time.time_ns, int(sys.argv[1]) * 1_000_000
time.time_ns = lambda: real_ns() + shift_ns
from pysync.cli import main
sys.exit(main.main(sys.argv[2:]))
"""
"""The command line, with a clock that is ahead by so many milliseconds."""


class Outcome(NamedTuple):
    """The exit status of a command, the lines that it printed, and its errors."""

    status: int
    lines: list[Any]
    errors: str

    @property
    def counts(self) -> Any:
        """The last line."""
        return self.lines[-1]


class Commands:
    """`pysync backup` for the store in `data` and the place `backup`. Each command must end with `status`,
    unless that is None."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    async def run(self, *arguments: str, status: int | None = 0) -> Outcome:
        found, output, errors = await self.shell.run_async(*arguments)
        assert status in (None, found), errors
        return Outcome(found, [json.loads(line) for line in output.splitlines()], errors)

    async def back_up(self, *options: str, store: str = "file:data", status: int | None = 0) -> Outcome:
        return await self.run("backup", "--store", store, "--to", "file:backup", *options, status=status)

    async def list(self, *options: str, status: int | None = 0) -> Outcome:
        return await self.run("backup", "list", "--from", "file:backup", *options, status=status)

    async def verify(self, *options: str, status: int | None = 0) -> Outcome:
        return await self.run("backup", "verify", "--from", "file:backup", *options, status=status)

    async def prune(self, *options: str, status: int | None = 0) -> Outcome:
        return await self.run("backup", "prune", "--from", "file:backup", *options, status=status)

    async def rebuild(self, *options: str, status: int | None = 0) -> Outcome:
        return await self.run("backup", "rebuild", "--from", "file:backup", *options, status=status)

    async def restore(self, *options: str, to: str = "restored", status: int | None = 0) -> Outcome:
        locations = ("--from", "file:backup", "--to", f"file:{to}")
        return await self.run("backup", "restore", *locations, *options, status=status)


@pytest.fixture
def commands(shell: Shell) -> Commands:
    """`pysync backup` for the store in `data` and the place in `backup`."""
    return Commands(shell)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of the store that is backed up, which is not there yet."""
    return tmp_path / "data"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the backup, which is not there yet."""
    return tmp_path / "backup"


async def run_at(shift_ms: int, folder: Path, *arguments: str) -> Outcome:
    """Run a command in a process whose clock is ahead by `shift_ms`, in `folder`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SHIFTED, str(shift_ms), *arguments, cwd=folder, stdout=PIPE, stderr=PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return Outcome(process.returncode, [json.loads(line) for line in output.splitlines()], errors.decode())


async def write(folder: Path, texts: dict[str, str]) -> None:
    """Put documents with these texts into the store in a folder, which is created."""
    store = await LocalStore.open_folder(folder)
    for key, text in texts.items():
        await store.put(key, document(json.dumps({"text": text}).encode()))
    await store.close()


async def held(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Everything that the store in a folder holds, apart from its id."""
    store = await LocalStore.open_folder(folder)
    found = await contents(store)
    await store.close()
    return {key: each for key, each in found.items() if key != STORE_ID}


def packs(place: Path) -> list[Path]:
    """The packs of a place."""
    return sorted(place.glob("packs/*/*"))


def lists(place: Path) -> list[Path]:
    """The pages of the lists of a place."""
    return sorted([*place.glob("pages/*/*"), *place.glob("lists/*/*")])


def snapshots(place: Path) -> list[Path]:
    """The files of the snapshots of a place, oldest first."""
    return sorted(place.glob("snapshots/*"))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, as a disk does."""
    rot(path, path.stat().st_size // 2)


def cut(path: Path) -> None:
    """Cut a file short by its last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def save(target: MemoryTarget, place: Path) -> None:
    """Write the files of a backup in memory to a folder."""
    for name, body in target.files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def load(target: MemoryTarget, place: Path) -> None:
    """Replace the files of a backup in memory by those of a folder."""
    found = (path for path in place.rglob("*") if path.is_file())
    target.files = {path.relative_to(place).as_posix(): path.read_bytes() for path in found}


def files_with(place: Path, text: str) -> list[str]:
    """The names of all files of a place that have a text in their name or their bytes, also in compressed
    ones."""
    wanted = text.encode()
    files = ((path.relative_to(place).as_posix(), path) for path in place.rglob("*") if path.is_file())
    return sorted(
        name for name, path in files if text in name or any(wanted in body for body in _bodies(path))
    )


def recompressed(stored: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a file whose only zstd frame holds what `edit` makes of its body; without a frame the file as it
    is."""
    at = stored.find(_FRAME)
    if at < 0:
        return stored
    decompressor = zstd.ZstdDecompressor()
    body = edit(bytes(decompressor.decompress(stored[at:])))
    return stored[:at] + zstd.compress(body) + decompressor.unused_data


def _bodies(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, and those of each zstd frame in it."""
    stored = path.read_bytes()
    yield stored
    at = stored.find(_FRAME)
    while at >= 0:
        with suppress(zstd.ZstdError):  # the four bytes may be there by chance
            yield bytes(zstd.ZstdDecompressor().decompress(stored[at:], max_length=1 << 26))
        at = stored.find(_FRAME, at + 1)
