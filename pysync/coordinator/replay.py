"""Replay memory shared by processes: append-only ledgers of nonce digests, one for each five minutes.

    DIR/lock       held while a nonce is decided
    DIR/<epoch>    16 bytes for each nonce that arrived in that epoch, in order of arrival

Each process holds the same digests in memory and reads only what others appended since. A nonce costs four
small system calls and no flush: it survives the death of the process, which is what a restart needs.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pysync._core import ReplayWindow
from pysync.coordinator import EPOCHS_KEPT, nonce_epoch
from pysync.errors import CoordinatorUnavailable
from pysync.sqlite import create_folder

log = logging.getLogger(__name__)

RECORD_BYTES: Final = 16
READ_BYTES: Final = 1 << 20

CLOSED: Final = bytes(RECORD_BYTES)
"""The last record of a ledger that another one follows. A process whose clock stepped back meets it there and
moves on too, so that no two processes ever decide by different ledgers."""

LOCK_TIMEOUT_S: Final = 1.0
"""The lock is held for some microseconds; only a stopped process holds it longer."""


class Ledger:
    """The nonces of one epoch: the file, and what of it is in memory."""

    def __init__(self, path: Path) -> None:
        self.seen = ReplayWindow()
        self.closed = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._offset = 0

    def catch_up(self) -> None:
        """Take in what other processes appended. The caller holds the lock."""
        while added := os.pread(self._fd, READ_BYTES, self._offset):
            whole = len(added) - len(added) % RECORD_BYTES
            if whole < len(added):
                # Its writer died half-way, or ran out of disk: nobody was told that it was accepted.
                os.ftruncate(self._fd, self._offset + whole)
            added = added[:whole]
            self.closed = self.closed or added[-RECORD_BYTES:] == CLOSED
            self.seen.extend(added)
            self._offset += whole

    def append(self, record: bytes) -> None:
        """Add one record. The caller holds the lock and has caught up. After OSError nothing is added."""
        written = os.write(self._fd, record)
        if written < RECORD_BYTES:
            os.ftruncate(self._fd, self._offset)
            raise OSError("the disk is full")
        self._offset += RECORD_BYTES
        self.seen.add(record)

    def close(self) -> None:
        os.close(self._fd)


class ReplayLedgers:
    """The nonces of the last ten minutes and more, for all processes that use `folder`."""

    def __init__(self, folder: Path, now_ms: Callable[[], int], max_live: int) -> None:
        """Reads the live ledgers. Raises OSError."""
        self._folder = folder
        self._now_ms = now_ms
        self._max_live = max_live
        self._ledgers: dict[int, Ledger] = {}
        self._epoch = -1
        create_folder(folder)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._advance()
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    async def remember(self, digest: bytes) -> bool:
        """As `Coordinator.remember_nonce`."""
        for ledger in self._ledgers.values():
            if digest in ledger.seen:
                return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await self._wait_for_lock()
        try:
            return self._decide(digest)
        except OSError as error:
            raise CoordinatorUnavailable() from error
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()
        os.close(self._lock)

    def _decide(self, digest: bytes) -> bool:
        current = self._ledgers[self._epoch]
        current.catch_up()
        if current.closed or nonce_epoch(self._now_ms()) > self._epoch:
            self._advance()
            current = self._ledgers[self._epoch]
        live = 0
        for ledger in self._ledgers.values():
            if digest in ledger.seen:
                return False
            live += len(ledger.seen)
        if live >= self._max_live:
            raise CoordinatorUnavailable()
        current.append(digest)
        return True

    def _advance(self) -> None:
        """Move to the newest epoch, by the clock or by what others opened, with all that is still live."""
        found = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
        newest = found[-1] if found else -1
        epoch = max(newest, nonce_epoch(self._now_ms()))
        if 0 <= newest < epoch:
            predecessor = self._ledgers.get(newest) or self._open(newest)
            predecessor.catch_up()
            if not predecessor.closed:
                predecessor.append(CLOSED)
                predecessor.closed = True
        live = [known for known in found if known > epoch - EPOCHS_KEPT]
        for known in {*live, epoch}:
            ledger = self._ledgers.get(known) or self._open(known)
            ledger.catch_up()
        self._epoch = epoch
        self._forget(set(found) - set(live))

    def _open(self, epoch: int) -> Ledger:
        ledger = self._ledgers[epoch] = Ledger(self._folder / str(epoch))
        return ledger

    def _forget(self, expired: set[int]) -> None:
        for epoch in expired:
            (self._folder / str(epoch)).unlink(missing_ok=True)
        for epoch in [known for known in self._ledgers if known <= self._epoch - EPOCHS_KEPT]:
            self._ledgers.pop(epoch).close()

    async def _wait_for_lock(self) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            await asyncio.sleep(0)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise CoordinatorUnavailable() from error
