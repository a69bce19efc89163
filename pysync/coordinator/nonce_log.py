"""Replay memory shared by processes: append-only files of nonce digests, one for each five minutes.

    DIR/lock            held while a nonce is decided
    DIR/<epoch>         16 bytes for each nonce that arrived in that epoch, in order of arrival
    DIR/later-<epoch>   nonces of requests signed by a clock ahead of ours, valid again in that epoch
    DIR/boot            the boot id that epochs are counted from, and their offset

Each process holds the same digests in memory and reads only what others appended since. A nonce costs four
small system calls and no flush: it survives the death of the process, which is what a restart needs.
Requests that are handled in one tick of the event loop share these calls. A request that is likely to be
alone, because the last one was, does not wait for the end of the tick.

Epochs follow the time since the machine was booted, which nobody can set. After a reboot they continue where
they were, as if no time had passed, so that a nonce is kept too long rather than too short.

While the disk takes no nonces, because it is full, read-only or broken, those of reads go to a second log in
memory that all processes of the machine share. It outlives the processes, but not the machine: after a reboot
within ten minutes such a read could be repeated. So writes are refused meanwhile.
"""

import asyncio
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from pysync._core import ReplayWindow
from pysync.clock import elapsed_of, read_saved_number, save_number
from pysync.coordinator.protocol import (
    AHEAD_MS,
    EPOCH_MS,
    LIVE_EPOCHS,
    ReplayMemoryFull,
    Standing,
    nonce_epoch,
)
from pysync.errors import CoordinatorUnavailable
from pysync.protocol import CHUNK_BYTES
from pysync.sqlite.database_file import DatabaseFile, make_private_dir

log = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - our folders in it are private
"""A file system in memory that all processes of the machine share. Only Linux has it."""

RECORD_BYTES: Final = 16

SEAL_RECORD: Final = bytes(RECORD_BYTES)
"""The last record of a file that another one follows. A process whose clock stepped back finds it and moves
on too, so that no two processes ever decide by different files."""

LOOK_EVERY_MS: Final = 10
"""Milliseconds between two looks whether another process has begun to keep nonces in shared memory. A look
costs half as much as all the rest of a nonce. A process that begins waits for longer before it keeps the
first nonce there, so that all others have looked when they decide on the next."""

LOCK_TIMEOUT_S: Final = 1.0
"""Only a stopped process holds the lock for longer than microseconds."""

_LATER: Final = "later-"
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

Nonce = tuple[bytes, int, Standing, bool]
"""A nonce to record: the digest of it and of its key (`ReplayWindow.digest`), and the arguments `signed_ms`,
`standing` and `is_read` of `Coordinator.consume_nonce`. A Python function would make a named tuple, at the
cost of half as much as all the rest of recording a nonce."""


def memory_folder(folder: Path) -> Path:
    """Return the folder in shared memory that stands in for the nonce log in `folder`. Raises OSError."""
    found = os.stat(folder)
    return SHARED_MEMORY / f"pysync-{os.geteuid()}-{found.st_dev:x}-{found.st_ino:x}"


class NonceLogFile:
    """The nonces of one epoch, in a file and in memory."""

    def __init__(self, path: Path, flags: int = _FLAGS) -> None:
        self.seen = ReplayWindow()
        self.is_sealed = False
        self._fd = os.open(path, flags | os.O_APPEND, 0o600)
        self._is_writable = flags != _READ_FLAGS
        self._offset = 0

    def catch_up(self) -> None:
        """Read the records that other processes appended. The caller holds the lock."""
        while added := os.pread(self._fd, CHUNK_BYTES, self._offset):
            whole = len(added) - len(added) % RECORD_BYTES
            if whole < len(added):
                # Its writer died or ran out of disk before it accepted the nonce.
                if not self._is_writable and not whole:
                    return
                if self._is_writable:
                    os.ftruncate(self._fd, self._offset + whole)
            added = added[:whole]
            self.is_sealed = self.is_sealed or added[-RECORD_BYTES:] == SEAL_RECORD
            self.seen.extend(added)
            self._offset += whole

    def append(self, records: bytes) -> None:
        """Add records. The caller holds the lock and has caught up. After OSError nothing is added."""
        written = os.write(self._fd, records)
        if written < len(records):
            os.ftruncate(self._fd, self._offset)
            raise OSError("the disk is full")
        self._offset += len(records)
        self.seen.extend(records)

    def seal(self) -> None:
        """Mark the file as one that another file follows. Raises as `append`."""
        if not self.is_sealed:
            self.append(SEAL_RECORD)
            self.is_sealed = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class NonceLog:
    """The nonces of the last ten minutes and more, for all processes that use `folder`."""

    def __init__(
        self,
        folder: Path,
        now_ms: Callable[[], int],
        max_live: int,
        boot: str,
        database: DatabaseFile | None = None,
    ) -> None:
        """Read the live files. The elapsed time of `now_ms` is that since the boot that `boot` identifies. No
        nonce is accepted once `database`, which watches this folder from now on, was moved. Without a
        database this is the log in shared memory of another one. Raises OSError."""
        self._folder = folder
        self._boot = boot
        self._memory: NonceLog | None = None
        self._memory_path: str | None = None
        self._look_from_ms = 0
        self._memory_from_s = 0.0
        """When this process may keep nonces in shared memory, by the monotonic clock."""
        self._unopened: dict[int, NonceLogFile] = {}
        self._is_writable = True
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._database = database
        self._max_live = max_live
        self._files: dict[int, NonceLogFile] = {}
        self._in_tick = 0
        """The number of nonces in this tick of the event loop."""
        self._shares_calls = False
        """True if there were several in the last tick that had any."""
        self._waiting: list[tuple[Nonce, asyncio.Future[bool]]] = []
        make_private_dir(folder)
        self._lock = os.open(folder / "lock", _FLAGS, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._epoch_offset = self._load_epoch_offset(boot or "-")
            self._advance()
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        if database is not None:
            database.watch(folder / "lock")
            self._memory_path = str(memory_folder(folder))

    async def consume(
        self,
        presenter: str,
        nonce: str,
        signed_ms: int,
        standing: Standing = Standing.TRUSTED,
        *,
        is_read: bool = False,
    ) -> bool:
        """See `Coordinator.consume_nonce`."""
        if self._database is not None and self._database.moved:
            raise CoordinatorUnavailable()
        new = ReplayWindow.digest(presenter, nonce), signed_ms, standing, is_read
        loop = asyncio.get_running_loop()
        is_first = not self._in_tick
        if is_first:
            loop.call_soon(self._end_tick, time.monotonic() + LOCK_TIMEOUT_S)
        self._in_tick += 1  # once its end is certain
        if is_first and not self._shares_calls:
            with suppress(BlockingIOError):
                (outcome,) = self._decide([new])
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome
        decided: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((new, decided))
        return await decided

    def close(self) -> None:
        """Close all files."""
        for _, decided in self._waiting:
            if not decided.done():
                decided.set_exception(CoordinatorUnavailable())
        self._waiting = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for file in (*self._files.values(), *self._unopened.values()):
            file.close()
        self._files.clear()
        self._unopened.clear()
        os.close(self._lock)

    def _end_tick(self, deadline: float) -> None:
        """Decide the nonces of this tick that wait. If they must wait for another process, decide them later,
        together with those of other ticks."""
        waiting, outcomes = self._waiting, list[bool | Exception]()
        try:
            waiting = [(nonce, decided) for nonce, decided in waiting if not decided.done()]
            if waiting:
                outcomes = [*self._decide([nonce for nonce, _ in waiting])]
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                asyncio.get_running_loop().call_at(self._memory_from_s, self._end_tick, deadline)
                return
            outcomes = [_unavailable(error) for _ in waiting]
        except Exception as error:
            outcomes = [error for _ in waiting]
        self._waiting = []
        self._shares_calls = self._in_tick > 1
        self._in_tick = 0
        for (_, decided), outcome in zip(waiting, outcomes, strict=True):
            if decided.done():
                continue
            if isinstance(outcome, bool):
                decided.set_result(outcome)
            else:
                decided.set_exception(outcome)

    def _decide(self, nonces: Sequence[Nonce]) -> Sequence[bool | Exception]:
        """Record these nonces, and return for each True if it is new, or an error. Raises BlockingIOError,
        and records none, if another process holds the lock or must look for nonces in shared memory."""
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return self._record(nonces)
        except OSError as error:
            return [self._record_in_memory(nonce, error) for nonce in nonces]
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _record(self, nonces: Sequence[Nonce]) -> list[bool | Exception]:
        """Do as `_decide`, under the lock. Raises OSError if the disk takes none of them."""
        elapsed_ms = self._catch_up()
        if elapsed_ms >= self._look_from_ms:
            self._look_for_memory(elapsed_ms)
        if self._memory is not None:
            self._memory._catch_up()
        now_ms = self._now_ms()
        new: dict[bytes, int] = {}
        outcomes: list[bool | Exception] = []
        for digest, _, standing, _ in nonces:
            if digest in new or self._is_used(digest):
                outcomes.append(False)
            elif not self._has_room(standing, len(new)):
                outcomes.append(ReplayMemoryFull())
            else:
                new[digest] = len(outcomes)
                outcomes.append(True)
        if new:
            self._current.append(b"".join(new))
            if not self._is_writable:
                self._set_writable()
            for digest, at in new.items():
                ahead_ms = nonces[at][1] - now_ms
                if ahead_ms > AHEAD_MS:
                    try:
                        self._record_for_later(digest, ahead_ms)
                    except OSError as error:
                        outcomes[at] = _unavailable(error)
        return outcomes

    def _catch_up(self) -> int:
        """Read what other processes recorded, and move on if the epoch has ended. Return the elapsed time."""
        self._current.catch_up()
        elapsed_ms = self._elapsed_ms()
        if elapsed_ms >= self._ends_ms or self._current.is_sealed:
            self._advance()
        return elapsed_ms

    def _is_used(self, digest: bytes) -> bool:
        for seen in (self._current.seen, *self._earlier):
            if digest in seen:
                return True
        return self._memory is not None and self._memory._is_used(digest)

    def _has_room(self, standing: Standing, added: int) -> bool:
        live = len(self._current.seen) + self._earlier_count + added
        return live * Standing.TRUSTED < self._max_live * standing

    def _record_in_memory(self, nonce: Nonce, cause: OSError) -> bool | Exception:
        """Record the nonce of a read that the disk does not take, for this `cause`. Return True if it is new,
        or an error, also if the disk cannot be read either, or there is no shared memory. Raises
        BlockingIOError as `_decide`."""
        *_, is_read = nonce
        if not is_read:
            return _unavailable(cause)
        try:
            outcome = self._find_or_record(nonce)
        except BlockingIOError:
            raise
        except OSError:
            return _unavailable(cause)
        self._set_writable(cause)
        return outcome

    def _find_or_record(self, nonce: Nonce) -> bool | Exception:
        digest, *_ = nonce
        stored = self._stored_epochs()
        oldest = max(self._files or stored, default=0) - LIVE_EPOCHS + 1
        for epoch in (epoch for epoch in stored if epoch >= oldest):
            file = self._files.get(epoch) or self._unopened.get(epoch)
            if file is None:  # another process created it, and it cannot be opened for writing
                file = self._unopened[epoch] = NonceLogFile(self._folder / str(epoch), _READ_FLAGS)
            file.catch_up()
            if digest in file.seen:
                return False
        if any(digest in seen for seen in self._earlier):
            return False
        now_s = time.monotonic()
        memory = self._open_memory()
        if now_s < self._memory_from_s:
            raise BlockingIOError(errno.EAGAIN, "other processes have not looked for nonces in memory")
        return memory._record([nonce])[0]

    def _look_for_memory(self, elapsed_ms: int) -> None:
        """Open the log in shared memory if a process, perhaps an earlier one, has created it."""
        if self._memory_path is not None and self._memory is None:
            if os.access(self._memory_path, os.F_OK):
                self._open_memory()
            self._look_from_ms = elapsed_ms + LOOK_EVERY_MS

    def _open_memory(self) -> "NonceLog":
        """Return the log in shared memory. The caller holds the lock of this log, which excludes all who use
        the other. Raises OSError, also if somebody else may have prepared the folder."""
        if self._memory is None:
            if self._memory_path is None:
                raise FileNotFoundError(errno.ENOENT, "nothing stands in for shared memory")
            with suppress(FileExistsError):
                os.mkdir(self._memory_path, 0o700)
            found = os.lstat(self._memory_path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(errno.EPERM, "not a private folder", self._memory_path)
            self._memory = NonceLog(Path(self._memory_path), self._now_ms, self._max_live, self._boot)
            self._memory_from_s = time.monotonic() + (LOOK_EVERY_MS + 1) / 1000
        return self._memory

    def _set_writable(self, error: OSError | None = None) -> None:
        """Log it when the disk begins to refuse nonces, and when it takes them again."""
        if error is None:
            self._is_writable = True
            for file in self._unopened.values():
                file.close()
            self._unopened.clear()
            log.warning("nonces can be written to %s again", self._folder)
        elif self._is_writable:
            self._is_writable = False
            log.error(
                "nonces cannot be written to %s: %s; refusing signed writes, keeping nonces of reads in %s",
                self._folder,
                error,
                self._memory_path,
            )

    def _advance(self) -> None:
        """Move to the newest epoch, by the clock or by the files of other processes."""
        found = self._stored_epochs()
        epoch = nonce_epoch(self._elapsed_ms()) + self._epoch_offset
        if found:
            newest = max(found)
            last = self._open_file(newest)
            if epoch > newest:
                last.seal()
            # The epochs increase even if the clock stepped back: a sealed file is followed by the next.
            epoch = max(epoch, newest + last.is_sealed)
        live = [known for known in {*found, epoch} if known > epoch - LIVE_EPOCHS]
        files = {known: self._open_file(known) for known in live}
        for expired in self._files.keys() - files.keys():
            self._files.pop(expired).close()
        for expired in set(found) - files.keys():
            (self._folder / str(expired)).unlink(missing_ok=True)
        self._ends_ms = (epoch + 1 - self._epoch_offset) * EPOCH_MS
        self._current = files.pop(epoch)
        self._earlier = [*(file.seen for file in files.values()), *self._read_later(epoch)]
        self._earlier_count = sum(map(len, self._earlier))

    def _record_for_later(self, digest: bytes, ahead_ms: int) -> None:
        """Record the nonce for the time when its request is valid again. All processes read these files at
        the start of their next epoch; until then the nonce is in the file of this one."""
        epoch = nonce_epoch(self._elapsed_ms() + ahead_ms) + self._epoch_offset
        with closing(NonceLogFile(self._folder / f"{_LATER}{epoch}")) as later:
            later.catch_up()
            later.append(digest)

    def _read_later(self, epoch: int) -> Iterator[ReplayWindow]:
        """Yield the nonces recorded for this epoch or later, and remove the files of earlier epochs."""
        for path in self._folder.glob(f"{_LATER}*"):
            if int(path.name.removeprefix(_LATER)) <= epoch - LIVE_EPOCHS:
                path.unlink(missing_ok=True)
                continue
            with closing(NonceLogFile(path)) as later:
                later.catch_up()
                yield later.seen

    def _stored_epochs(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    def _load_epoch_offset(self, boot: str) -> int:
        """Return the number of epochs by which the files are ahead of the clock. All processes share it until
        the machine is restarted. Then it is chosen so that epochs continue after the newest file."""
        path = self._folder / "boot"
        epoch = nonce_epoch(self._elapsed_ms())
        found = self._stored_epochs()
        ahead = read_saved_number(path, boot)
        # If the clock is far behind the newest file, the machine was restarted, even without a boot id.
        if ahead is not None and epoch + ahead >= max(found, default=0) - 2:
            return ahead
        # The first start, or one after a reboot. Continue one epoch before the newest file: an earlier
        # version may have created it a moment ago, by another clock.
        ahead = max(found) - 1 - epoch if found else 0
        save_number(path, boot, ahead)
        return ahead

    def _open_file(self, epoch: int) -> NonceLogFile:
        file = self._files.get(epoch)
        if file is None:
            file = self._files[epoch] = NonceLogFile(self._folder / str(epoch))
        file.catch_up()
        return file


def _unavailable(cause: BaseException | None) -> CoordinatorUnavailable:
    error = CoordinatorUnavailable()
    error.__cause__ = cause
    return error
