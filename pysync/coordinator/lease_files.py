"""Leases of processes on one machine. Each is a file that its holder locks, and touches at each renewal.

The kernel releases the lock of a process that ends, so that another acquires the lease at once. A process
that hangs keeps its lock. Once its file is older than a lease, another process replaces the file, and the
process that hung finds at its next renewal that its file is gone.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from pysync.coordinator.base import LEASE_MS
from pysync.sqlite.database_file import make_private_dir


class LeaseFiles:
    """The leases that this process holds, of all processes that share `folder`. Raises OSError."""

    def __init__(self, folder: Path, elapsed_ms: Callable[[], int]) -> None:
        make_private_dir(folder)
        self._folder = folder
        self._elapsed_ms = elapsed_ms
        self._leases: dict[str, int] = {}

    def acquire_lease(self, name: str) -> bool:
        """Acquire or renew the lease for `LEASE_MS`; return True if this process holds it. Raises OSError."""
        path = self._folder / quote(name, safe="")
        if name in self._leases and not _is_same_file(path, self._leases[name]):
            os.close(self._leases.pop(name))
        if name not in self._leases:
            lock = self._try_lock(path)
            if lock is None:
                return False
            self._leases[name] = lock
        now_ns = self._elapsed_ms() * 1_000_000
        os.utime(self._leases[name], ns=(now_ns, now_ns))
        return True

    def close(self) -> None:
        """Release all leases."""
        for lock in self._leases.values():
            os.close(lock)
        self._leases.clear()

    def _try_lock(self, path: Path) -> int | None:
        """Return the file at `path`, locked by this process; None while another process holds the lease."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hangs = os.fstat(lock).st_mtime_ns // 1_000_000 + LEASE_MS < self._elapsed_ms()
            if hangs and _is_same_file(path, lock):
                path.unlink()
            os.close(lock)
            return self._try_lock(path) if hangs else None
        if _is_same_file(path, lock):
            return lock
        os.close(lock)
        return None


def _is_same_file(path: Path, lock: int) -> bool:
    """Return True if the open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
