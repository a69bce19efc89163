"""The plain files of a local store: written beside, flushed and renamed, so that a reader sees whole files.

Nothing here waits for the event loop: `in_thread` is how the store calls what takes long. Which files exist
is the database's word; this module only knows how they lie on disk.

No symbolic link below the folder is followed. Folders on the way are looked at before something is written or
removed, and before a file is adopted that is not the one of its row.
"""

import asyncio
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, ParamSpec, Self, TypeVar, cast

from pysync.errors import KeyConflict, StoreUnavailable
from pysync.sqlite.database_file import fsync_dir, make_private_dir

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES: Final = 262_144
SEND_BYTES: Final = 1_048_576
"""What the kernel is asked to send at once."""
TEMP_FOLDER: Final = "~incoming"
"""Folder of files not yet at their keys. It lies in the tree, so that a rename never crosses file systems."""

TEMP_MAX_AGE_S: Final = 86_400
"""An incomplete file untouched for a day belongs to a process that died."""

_LONG_TO_HASH: Final = 131_072
"""Bytes that the disk may begin with while they are hashed: a megabyte takes about as long for either."""

_CACHE_SAMPLE_STRIDE: Final = 65_536
"""The kernel reads files ahead, and forgets them, in stretches about as long."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` in a thread. A cancelled caller waits until the thread has let go of its files.
    Errors as in `translate_os_errors`."""
    running = asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))
    try:
        with translate_os_errors():
            return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """OSError becomes `StoreUnavailable`, or ValueError where a key is longer than the file system takes."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("key too long for the file system") from error
        raise StoreUnavailable() from error


class FileFingerprint(NamedTuple):
    """What tells one content of a file from the next without reading it."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | str) -> Self:
        """The identity of an open file, or of the entry at a path, even a symbolic link. Raises OSError."""
        found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class FileTree:
    """The folder of finished files, each at the path that its key spells."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temp_folder = root / TEMP_FOLDER

    def create(self) -> None:
        """Make the folder."""
        make_private_dir(self._temp_folder)
        fsync_dir(self.root)

    def entries(self) -> list[Path]:
        """The entries of the folder, if it exists, without the one that every new file system has."""
        try:
            return [path for path in self.root.iterdir() if path.name != "lost+found"]
        except FileNotFoundError:
            return []

    def check(self) -> None:
        """Raise StoreUnavailable where the folder itself is gone, as that of a disk that is not mounted."""
        if not self._temp_folder.is_dir():
            raise StoreUnavailable(f"{self.root} is not there: is its disk mounted?")

    def clear(self, named: Container[str]) -> None:
        """Remove what dead processes left half written, but nothing of a name in `named`."""
        oldest = time.time() - TEMP_MAX_AGE_S
        for path in self._temp_folder.iterdir():
            with suppress(FileNotFoundError):
                if path.name not in named and path.lstat().st_mtime < oldest:
                    path.unlink()

    def path(self, key: str) -> str:
        """Where the file of a (valid) key lies. Raises ValueError for the one reserved segment."""
        if key.partition("/")[0] == TEMP_FOLDER:
            raise ValueError(f"reserved key {key!r}")
        return f"{self.root}/{key}"

    def check_folders(self, key: str) -> None:
        """Raise OSError where one of the folders that lead to a key is a symbolic link."""
        path = str(self.root)
        for name in key.split("/")[:-1]:
            path += "/" + name
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def fingerprint(self, key: str) -> FileFingerprint | None:
        """That of the file of a key; None where there is none. Raises OSError."""
        try:
            return FileFingerprint.of(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def temp_file(self, name: str) -> "TempFile":
        """A new file, not yet at a key, under a name that no other has or had. Nothing is on disk before its
        first `append`."""
        return TempFile(self._temp_folder, name)

    def probe(self, name: str) -> None:
        """Write and remove a byte, under a name as `temp_file` takes it."""
        incoming = self.temp_file(name)
        try:
            incoming.finish([b"\0"])
        finally:
            incoming.discard()

    def flush_temp_folder(self) -> None:
        """Make the names of incoming files survive the loss of power."""
        fsync_dir(self._temp_folder)

    def make_parents(self, key: str) -> None:
        """Make the folders that lead to a key, so that a file can be moved there. Raises KeyConflict where
        another file lies above or below. The caller keeps other writers out."""
        path = self.path(key)
        self.check_folders(key)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if not os.path.isdir(os.path.dirname(path)):
                self._check_names(key)
                self._create_folders(path)
            return
        except NotADirectoryError:
            raise KeyConflict() from None
        if stat.S_ISDIR(found.st_mode):
            try:
                os.rmdir(path)
            except OSError as error:
                raise KeyConflict() from error

    def move(self, name: str, key: str) -> None:
        """Rename the finished incoming file to its key, unless somebody has. The folders are not flushed."""
        source, path = f"{self._temp_folder}/{name}", self.path(key)
        while True:
            try:
                self.check_folders(key)
                os.replace(source, path)
                return
            except OSError as error:
                if not os.path.exists(source):
                    return
                if not isinstance(error, FileNotFoundError):
                    raise
                self._create_folders(path)  # they were empty, and another's removal took them

    def move_out(self, name: str, path: Path) -> None:
        """Rename the finished incoming file to a place outside the tree. Raises OSError."""
        os.rename(self._temp_folder / name, path)

    def remove(self, key: str) -> None:
        """Unlink the file of a key, if there is one, and the folders it leaves empty, unflushed. The caller
        keeps other writers out."""
        path = Path(self.path(key))
        try:
            self.check_folders(key)
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()
        except (NotADirectoryError, IsADirectoryError):
            return  # another file lies above or below: this key's is long gone
        except OSError as error:
            # A symbolic link in the way leads to nothing that is ours.
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ELOOP):
                raise

    def folders(self, key: str) -> Iterator[str]:
        """The folders, from the innermost, whose names a file's coming or going may have changed."""
        while key:
            key = key.rpartition("/")[0]
            yield f"{self.root}/{key}"

    def flush(self, folder: str) -> None:
        """Make the names in a folder survive the loss of power, if it is there. Raises OSError."""
        with suppress(FileNotFoundError, NotADirectoryError):
            fsync_dir(folder)

    def _check_names(self, key: str) -> None:
        """Raise OSError for a key with a name that is too long: where its folder is there a look tells."""
        for name in key.split("/"):
            with suppress(FileNotFoundError):
                os.stat(f"{self.root}/{name}")

    def _create_folders(self, path: str) -> None:
        """Make the folders of `path`. Raises KeyConflict."""
        parent = os.path.dirname(path)
        if os.path.isdir(parent):
            return
        for folder in reversed(Path(path).relative_to(self.root).parents[:-1]):
            folder = self.root / folder
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if not folder.is_dir():
                    raise KeyConflict() from None


class TempFile:
    """A file being written. Ends by `FileTree.move` or by `discard`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.is_committed = False
        """Whether somebody else may count on the file: then it is not to be discarded."""
        self._path = f"{folder}/{self.name}"
        self._fd: int | None = None
        self._hash = hashlib.sha256()

    def append(self, chunks: list[bytes]) -> None:
        """Write the pieces, joined. The disk begins with many of them while they are hashed."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        data = b"".join(chunks)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if len(data) >= _LONG_TO_HASH:
            start_flush(self._fd)
        self._hash.update(data)

    def finish(self, last: list[bytes]) -> tuple[str, FileFingerprint]:
        """Append the last pieces and flush it all to disk; returns the sha256 (hex) and stamp."""
        self.append(last)
        assert self._fd is not None
        os.fsync(self._fd)
        stamp = FileFingerprint.of(self._fd)
        self._close()
        return self._hash.hexdigest(), stamp

    def discard(self) -> None:
        """Leave no trace. Harmless after the file was moved."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class FileReader:
    """A finished file being read: an asynchronous iterator over the bytes of a range.

    It holds the file that it opened, whatever is written at the key meanwhile. Exhaust it or `aclose` it.
    """

    def __init__(self, path: str | Path, *, follows_links: bool = False) -> None:
        self._path = path
        self._flags = 0 if follows_links else os.O_NOFOLLOW
        self._file: BinaryIO | None = None
        self._at = self._end = 0

    def open(self) -> FileFingerprint | None:
        """Open what lies at the path now; None where there is no file. Raises OSError."""
        self.close()
        try:
            self._file = open(self._path, "rb", buffering=0, opener=self._open)  # noqa: SIM115 - closed by close
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileFingerprint.of(self._file.fileno())

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | self._flags)

    def sha256(self) -> str:
        """Hex digest of the whole file, read anew."""
        assert self._file is not None
        digest = hashlib.sha256()
        while chunk := self._file.read(CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()

    def hash_into(self, digest: "hashlib._Hash", at: int) -> int:
        """Add the next bytes from `at` on to `digest`, and say how many; 0 at the end."""
        assert self._file is not None
        chunk = os.pread(self._file.fileno(), CHUNK_BYTES, at)
        digest.update(chunk)
        return len(chunk)

    def select(self, start: int, end: int) -> None:
        """Yield bytes [start, end)."""
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
            raise StoreUnavailable()  # cut short behind our back: a torn answer, never a short one
        self._at += len(chunk)
        return chunk

    async def ensure_cached(self) -> None:
        """Have what `send` sends next in memory, so that it does not wait for the disk. Raises
        StoreUnavailable."""
        fd, at, wanted = self._next(SEND_BYTES)
        if not _is_cached(fd, at, wanted):
            await in_thread(os.pread, fd, wanted, at)

    def send(self, connection: int) -> int:
        """Have the kernel write the next bytes to a socket, without a copy of them here; how many it took, 0
        where all have been sent. Raises BlockingIOError where it takes none now, OSError where that socket
        fails, StoreUnavailable where the file has fewer bytes than it had."""
        fd, at, wanted = self._next(SEND_BYTES)
        if not wanted:
            return 0
        sent = os.sendfile(connection, fd, at, wanted)
        if not sent:
            raise StoreUnavailable()
        self._at += sent
        return sent

    def _next(self, max_bytes: int) -> tuple[int, int, int]:
        """The file, and the place and number of the next bytes, at most `max_bytes`."""
        assert self._file is not None
        return self._file.fileno(), self._at, min(max_bytes, self._end - self._at)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_cached(fd: int, start: int, size: int) -> bool:
    """Whether these bytes of a file can be read without waiting for the disk, as far as samples tell. A read
    that only takes what is there could tell for sure, but into a buffer that costs as much as the read."""
    byte = bytearray(1)
    try:
        for at in (*range(start, start + size - 1, _CACHE_SAMPLE_STRIDE), start + size - 1):
            os.preadv(fd, [byte], at, os.RWF_NOWAIT)
    except OSError:
        return False  # it would wait, or the file system cannot tell
    return True


_SYNC_FILE_RANGE_WRITE: Final = 2


def start_flush(fd: int) -> None:
    """Have the disk begin to write what an open file holds, without waiting for it. A hint, no more."""
    _sync_file_range()(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    """The system call, which `os` lacks. Imported where it is used: a server without files needs none."""
    import ctypes

    call = ctypes.CDLL(None).sync_file_range
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", call)
