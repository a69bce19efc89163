"""Reads a file of a folder: as chunks, by the kernel into a socket, or as a whole to hash it."""

import os
from io import FileIO
from pathlib import Path
from typing import Final, Self

from pysync.errors import StoreUnavailable
from pysync.protocol import CHUNK_BYTES
from pysync.store.local.disk import FileDigest, FileFingerprint, in_thread, translate_os_errors

STEP_BYTES: Final = 1_048_576
"""Bytes of a file that the kernel sends, or that a thread writes, in one call. Most files fit at once."""
_CACHE_SAMPLE_STRIDE: Final = 65_536
"""Distance of the samples. The kernel caches and evicts files in ranges of about this length."""


class FileReader:
    """An open file: an asynchronous iterator over the bytes of a range.

    It keeps reading the file that it opened, even if the key is overwritten. Iterate to the end, or call
    `aclose`.
    """

    def __init__(self, path: str | Path, *, follows_links: bool = False) -> None:
        self._path = path
        self._flags = 0 if follows_links else os.O_NOFOLLOW
        self._file: FileIO | None = None
        self._at = self._end = 0

    def open(self) -> FileFingerprint | None:
        """Open the file at the path and return its fingerprint, or None if there is no file. Raises
        OSError."""
        self.close()
        try:
            self._file = open(self._path, "rb", buffering=0, opener=self._open)  # noqa: SIM115 - closed by close
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileFingerprint.of(self._file.fileno())

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | self._flags | os.O_NONBLOCK)  # a pipe would wait for a writer

    async def read(self, size: int) -> bytes:
        """Return the first `size` bytes, fewer if the file has become shorter. Raises StoreUnavailable."""
        self.select(0, size)
        fd, at, _ = self._next(size)
        if not size or _is_cached(fd, at, size):
            with translate_os_errors():
                return os.pread(fd, size, at)
        return await in_thread(os.pread, fd, size, at)

    def digest(self) -> FileDigest:
        """Return the hashes of the whole file, read anew."""
        digest, at = FileDigest(), 0
        while size := self.hash_into(digest, at):
            at += size
        return digest

    def flush(self) -> None:
        """Flush the file to disk, so that what is there survives a power failure."""
        assert self._file is not None
        os.fsync(self._file.fileno())

    def hash_into(self, digest: FileDigest, at: int) -> int:
        """Add the next bytes from `at` on to `digest`, and return their number, 0 at the end."""
        assert self._file is not None
        chunk = os.pread(self._file.fileno(), CHUNK_BYTES, at)
        digest.update(chunk)
        return len(chunk)

    def select(self, start: int, end: int) -> None:
        """Set the range of bytes to yield, [start, end)."""
        self._at, self._end = start, end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._file is None or self._at >= self._end:
            self.close()
            raise StopAsyncIteration
        fd, at, wanted = self._next(CHUNK_BYTES)
        if _is_cached(fd, at, wanted):
            with translate_os_errors():
                chunk = os.pread(fd, wanted, at)
        else:
            chunk = await in_thread(os.pread, fd, wanted, at)
        if not chunk:
            raise StoreUnavailable()  # truncated by someone else: abort the response, never shorten it
        self._at += len(chunk)
        return chunk

    async def ensure_cached(self) -> None:
        """Read the bytes that `send` sends next into memory, so that it does not wait for the disk. Raises
        StoreUnavailable."""
        fd, at, wanted = self._next(STEP_BYTES)
        if not _is_cached(fd, at, wanted):
            await in_thread(os.pread, fd, wanted, at)

    def send(self, connection: int) -> int:
        """Have the kernel send the next bytes to a socket, without copying them here. Returns the number of
        bytes sent, 0 once all are. Raises BlockingIOError if the socket accepts no bytes now, OSError if it
        fails, and StoreUnavailable if the file has become shorter."""
        fd, at, wanted = self._next(STEP_BYTES)
        if not wanted:
            return 0
        sent = os.sendfile(connection, fd, at, wanted)
        if not sent:
            raise StoreUnavailable()
        self._at += sent
        return sent

    def _next(self, max_bytes: int) -> tuple[int, int, int]:
        """Return the descriptor, and the position and number of the next bytes, at most `max_bytes`."""
        assert self._file is not None
        return self._file.fileno(), self._at, min(max_bytes, self._end - self._at)

    async def aclose(self) -> None:
        """Close the file. Harmless if it is closed."""
        self.close()

    def close(self) -> None:
        """Close the file. Harmless if it is closed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_cached(fd: int, start: int, size: int) -> bool:
    """Return True if these bytes of a file can probably be read without waiting for the disk. Only samples
    are checked: a non-blocking read of them all would be exact, but cost as much as the read itself."""
    byte = bytearray(1)
    try:
        for at in (*range(start, start + size - 1, _CACHE_SAMPLE_STRIDE), start + size - 1):
            os.preadv(fd, [byte], at, os.RWF_NOWAIT)
    except OSError:
        return False  # it would block, or the file system does not support the flag
    return True
