"""The plain files of a local store: written beside, flushed and renamed, so that a reader sees whole files.

Nothing here waits for the event loop: `in_thread` is how the store calls it. Which files exist is the
database's word; this module only knows how they lie on disk.
"""

import asyncio
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, ParamSpec, Self, TypeVar

from pysync.errors import KeyConflict, StoreUnavailable
from pysync.sqlite import create_folder, sync_folder

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES: Final = 262_144
INCOMING: Final = "~incoming"
"""Folder of files not yet complete. It lies in the tree, so that a rename never crosses file systems."""

ABANDONED_S: Final = 86_400
"""An incomplete file untouched for a day belongs to a process that died."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` in a thread. A cancelled caller waits until the thread has let go of its files.
    Errors as in `disk_errors`."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        with disk_errors():
            return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


@contextmanager
def disk_errors() -> Iterator[None]:
    """OSError becomes `StoreUnavailable`, or ValueError where a key is longer than the file system takes."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("key too long for the file system") from error
        raise StoreUnavailable() from error


class Stamp(NamedTuple):
    """What tells one content of a file from the next without reading it."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: BinaryIO) -> Self:
        found = os.fstat(file.fileno())
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class FileTree:
    """The folder of finished files, each at the path that its key spells."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._incoming = root / INCOMING

    def create(self) -> None:
        """Make the folder, and clear away what dead processes left half written."""
        create_folder(self._incoming)
        oldest = time.time() - ABANDONED_S
        for path in self._incoming.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """Where the file of a (valid) key lies. Raises ValueError for the one reserved segment."""
        if key.partition("/")[0] == INCOMING:
            raise ValueError(f"reserved key {key!r}")
        return self.root / key

    def incoming(self) -> "Incoming":
        """A new file, not yet at a key. Nothing is on disk before its first `append`."""
        return Incoming(self._incoming / secrets.token_hex(16))

    def probe(self) -> None:
        """Write and remove a byte."""
        incoming = self.incoming()
        try:
            incoming.finish(b"\0")
        finally:
            incoming.discard()

    def place(self, incoming: "Incoming", key: str) -> None:
        """Rename a finished file to its key, durably. Raises KeyConflict. The caller keeps others out."""
        path = self.path(key)
        touched = self._create_parents(path)
        try:
            os.replace(incoming.path, path)
        except IsADirectoryError:
            try:
                path.rmdir()
            except OSError as error:
                raise KeyConflict() from error
            os.replace(incoming.path, path)
        for folder in touched:
            sync_folder(folder)

    def remove(self, key: str) -> None:
        """Unlink the file of a key, if there is one, and the folders it leaves empty. The caller keeps other
        writers out."""
        path = self.path(key)
        try:
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()
        except (NotADirectoryError, IsADirectoryError):
            return  # another file lies above or below: this key's is long gone
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise

    def _create_parents(self, path: Path) -> list[Path]:
        """Make the folders of `path`; returns those whose names changed, or will."""
        touched = [path.parent]
        for folder in reversed(path.relative_to(self.root).parents[:-1]):
            folder = self.root / folder
            try:
                folder.mkdir(mode=0o700)
                touched.append(folder.parent)
            except FileExistsError:
                if not folder.is_dir():
                    raise KeyConflict() from None
        return touched


class Incoming:
    """A file being written. Ends by `FileTree.place` or by `discard`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def append(self, chunk: bytes | bytearray) -> None:
        if self._file is None:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by finish or discard
        self._hash.update(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[self._file.write(rest) :]

    def finish(self, last: bytes | bytearray) -> tuple[str, Stamp]:
        """Append the last chunk and flush it all to disk; returns the sha256 (hex) and stamp."""
        self.append(last)
        assert self._file is not None
        os.fsync(self._file.fileno())
        stamp = Stamp.of(self._file)
        self._file.close()
        return self._hash.hexdigest(), stamp

    def discard(self) -> None:
        """Leave no trace. Harmless after the file was placed."""
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


class Outgoing:
    """A finished file being read: an asynchronous iterator over the bytes of a range.

    It holds the file that it opened, whatever is written at the key meanwhile. Exhaust it or `aclose` it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._at = self._end = 0

    def open(self) -> Stamp | None:
        """None where there is no file."""
        try:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - closed by aclose
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stamp.of(self._file)

    def sha256(self) -> str:
        """Hex digest of the whole file, read anew."""
        assert self._file is not None
        digest = hashlib.sha256()
        while chunk := self._file.read(CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()

    def select(self, start: int, end: int) -> None:
        """Yield bytes [start, end)."""
        self._at, self._end = start, end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._file is None or self._at >= self._end:
            await self.aclose()
            raise StopAsyncIteration
        wanted = min(CHUNK_BYTES, self._end - self._at)
        chunk = await in_thread(os.pread, self._file.fileno(), wanted, self._at)
        if not chunk:
            raise StoreUnavailable()  # cut short behind our back: a torn answer, never a short one
        self._at += len(chunk)
        return chunk

    async def aclose(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
