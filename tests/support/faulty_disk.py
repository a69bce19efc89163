"""Disks that fail: calls of `os` that fail below a folder, files that this process can use no longer, and
small file systems that are really mounted."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WRITES = ("write", "ftruncate", "fsync", "mkdir", "open-to-write", "replace", "rename", "unlink")
READS = ("read", "pread", "preadv", "lstat", "stat", "open-to-read")


class FaultyOs:
    """Stands in for the module `os` of a module under test: the calls in `failing` fail with `number` where
    they concern anything below `folder`. Names of `failing` that it does not know are errors."""

    def __init__(self, folder: Path, number: int = errno.EIO) -> None:
        self.folder = folder
        self.number = number
        self.failing: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in {*WRITES, *READS, "open"}:
            return real

        def call(target: Any, *args: Any, **options: Any) -> Any:
            self._check(name, target, *args)
            return real(target, *args, **options)

        return call

    def _check(self, name: str, target: Any, *args: Any) -> None:
        if name == "open":
            writes = args[0] & (os.O_WRONLY | os.O_RDWR)
            name = "open-to-write" if writes else "open-to-read"
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if name in self.failing and Path(path).is_relative_to(self.folder):
            raise OSError(self.number, os.strerror(self.number), path)


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, calls: tuple[str, ...], *modules: ModuleType
) -> Iterator[None]:
    """Let these calls of the modules fail with `number` below the folder, until the context is left."""
    faulty = FaultyOs(folder, number)
    faulty.failing = calls
    with monkeypatch.context() as patched:
        for module in modules:
            patched.setattr(module, "os", faulty)
        yield


@contextmanager
def broken_descriptors(path: Path) -> Iterator[None]:
    """Every read, write and flush of this file, as this process has it open, fails as on a broken disk."""
    broken = os.open("/proc/self/mem", os.O_RDWR)  # nothing lies at its low addresses: EIO
    found = [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd) == str(path)]
    assert found, "the file is open"
    kept = {fd: os.dup(fd) for fd in found}
    for fd in found:
        os.dup2(broken, fd)
    try:
        yield
    finally:
        for fd, real in kept.items():
            os.dup2(real, fd)
            os.close(real)
        os.close(broken)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


class Disk:
    """A file system of its own, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"

    def fill(self) -> None:
        """Use up all space, to the last byte."""
        with (self.path / "filler").open("ab", buffering=0) as filler:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(size))

    def free(self) -> None:
        """Give back the space that `fill` used."""
        (self.path / "filler").unlink()
        os.sync()

    def remount(self, option: str) -> None:
        """Mount it again, `ro` or `rw`. No file may be open for writing."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True)

    def become_read_only(self) -> None:
        """Refuse writes from now on, as ext4 does once it has met an error, although files are open."""
        device = os.stat(self.path).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test")

    def fail(self) -> None:
        """Answer every call with EIO from now on."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(folder)


_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = (2).to_bytes(4, "little")


@contextmanager
def mounted(folder: Path, megabytes: int, kind: str) -> Iterator[Disk]:
    """Mount a new file system (`tmpfs`, or `ext4` in a file) at `folder`. Skips the test where that is not
    allowed."""
    folder.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    else:
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        command = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
        _run("mkfs.ext4", "-q", "-F", str(image))
    _run(*command)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
