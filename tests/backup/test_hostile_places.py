"""A place that somebody has forged costs no more memory than an honest one."""

import asyncio
import hashlib
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import pytest
from support.places import Commands, lists, packs, recompressed, snapshots, write

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc"),
]

MAX_BYTES = 300_000_000
MEASURED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2_000_000_000, 2_000_000_000))
from pysync.cli import main
status = main.main(sys.argv[1:])
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) * 1024)
sys.exit(status)
"""
"""The command line, which prints the most memory that it took, and fails at 2 GB."""
COMMANDS = (("list",), ("verify",), ("restore", "--to", "file:restored"))
SMALL_LISTS = b'"x":[' + b"[]," * 10_000_000 + b"[]],"
"""A member of JSON that takes some 600 MB of memory once it is parsed."""


async def peak_of(folder: Path, *arguments: str) -> int:
    """Return the most bytes of memory that `pysync backup` takes with these arguments."""
    command = (sys.executable, "-c", MEASURED, "backup", *arguments, "--from", "file:backup")
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)
    output, errors = await process.communicate()
    assert process.returncode in (0, 1)
    assert b"Traceback" not in errors
    return int(output.splitlines()[-1])


def forge(place: Path, path: Path, stored: bytes) -> None:
    """Replace a file by other bytes, under the name that they have, wherever it stands."""
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    after = hashlib.sha256(stored).hexdigest()
    path.unlink()
    name = path.name.replace(before, after).replace(before[:32], after[:32])
    folder = path.parent
    if folder.name == before[:2]:
        folder = folder.with_name(after[:2])
        folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(stored)
    for other in (*lists(place), *snapshots(place)):
        if other.name == name or not other.exists():
            continue
        renamed = recompressed(
            other.read_bytes(),
            lambda body: (
                body.replace(before.encode(), after.encode())
                .replace(before[:32].encode(), after[:32].encode())
                .replace(bytes.fromhex(before), bytes.fromhex(after))
                .replace(bytes.fromhex(before[:32]), bytes.fromhex(after[:32]))
            ),
        )
        if renamed != other.read_bytes():
            forge(place, other, renamed)


def with_small_lists(body: bytes) -> bytes:
    """A text with many small lists in its first object."""
    return body[:1] + SMALL_LISTS + body[1:] if body[:1] == b"{" else body + SMALL_LISTS


def with_zeros(body: bytes) -> bytes:
    """A body with 400 MB of zeros at its end."""
    return body + bytes(400_000_000)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("files", [snapshots, lists, packs])
@pytest.mark.parametrize("bomb", [with_small_lists, with_zeros])
async def test_forged_file_takes_little_memory(
    commands: Commands,
    data: Path,
    place: Path,
    tmp_path: Path,
    files: Callable[[Path], list[Path]],
    bomb: Callable[[bytes], bytes],
) -> None:
    await write(data, {f"notes/{n}": f"text {n}" for n in range(20)})
    await commands.back_up()
    path = files(place)[0]
    forge(place, path, recompressed(path.read_bytes(), bomb))
    for command in COMMANDS:
        assert await peak_of(tmp_path, *command) < MAX_BYTES, command
