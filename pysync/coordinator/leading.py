"""Which process on one folder does what only one should: it holds a lock, and says that it is awake.

DIR/leads/<name>   locked by the process that leads, its time when that was last asked

The kernel takes the lock from a process that ends, so another leads at once. A process that hangs keeps it:
where its file is older than a lease, another makes a file of its own in that place, and the one that hung
finds, when it asks again, that its file is there no more.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from pysync.coordinator import LEASE_MS
from pysync.sqlite.connection import create_folder


class Leading:
    """The leases of this process, among all processes that share `folder`, which is created. No step moves
    the clock `elapsed_ms`. Raises OSError."""

    def __init__(self, folder: Path, elapsed_ms: Callable[[], int]) -> None:
        create_folder(folder)
        self._folder = folder
        self._elapsed_ms = elapsed_ms
        self._held: dict[str, int] = {}

    def leads(self, name: str) -> bool:
        """Whether it leads, until it is asked again, or `LEASE_MS`. Raises OSError."""
        path = self._folder / quote(name, safe="")
        if name in self._held and not _is_at(path, self._held[name]):
            os.close(self._held.pop(name))
        if name not in self._held:
            lock = self._locked(path)
            if lock is None:
                return False
            self._held[name] = lock
        now_ns = self._elapsed_ms() * 1_000_000
        os.utime(self._held[name], ns=(now_ns, now_ns))
        return True

    def close(self) -> None:
        """Lead nothing any more."""
        for lock in self._held.values():
            os.close(lock)
        self._held.clear()

    def _locked(self, path: Path) -> int | None:
        """The file at `path`, locked by this process; None while another leads."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hangs = os.fstat(lock).st_mtime_ns // 1_000_000 + LEASE_MS < self._elapsed_ms()
            if hangs and _is_at(path, lock):
                path.unlink()
            os.close(lock)
            return self._locked(path) if hangs else None
        if _is_at(path, lock):
            return lock
        os.close(lock)
        return None


def _is_at(path: Path, lock: int) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
