"""The plain files of a local store. They are written to a temporary name, flushed and renamed, so that a
reader only sees whole files.

These functions block; the store calls slow ones through `in_thread`. The database decides which files exist:
this module only knows their layout on disk.

Symbolic links below the folder are never followed. The folders of a path are checked before anything is
written or removed, and before a file is read that does not match its row.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, Self, TypeVar, cast

import xxhash

from pysync.errors import KeyConflict, StoreUnavailable
from pysync.sqlite.database_file import fsync_dir, make_private_dir

P = ParamSpec("P")
T = TypeVar("T")

TEMP_FOLDER: Final = "~incoming"
"""Folder of files that are not at their keys yet. It lies in the tree, so a rename never crosses file
systems."""

_LONG_TO_HASH: Final = 131_072
"""Bytes from which flushing starts while the chunk is hashed. Both take about as long per megabyte."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, run in a thread. On cancellation, waits until the thread has released its
    files. Raises as `translate_os_errors` does."""
    running = asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))
    try:
        with translate_os_errors():
            return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Turn an OSError into `StoreUnavailable`, or into ValueError if the key is too long for the file
    system."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("key too long for the file system") from error
        raise StoreUnavailable() from error


class FileDigest:
    """Both hashes of the content of a file: `sha256` is its identity, `xxh3` finds damage at the speed of
    memory."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._xxh3 = xxhash.xxh3_64()

    def update(self, chunk: bytes) -> None:
        """Add the next bytes."""
        self._sha256.update(chunk)
        self._xxh3.update(chunk)

    @property
    def sha256(self) -> str:
        """The SHA-256 in hex."""
        return self._sha256.hexdigest()

    @property
    def xxh3(self) -> str:
        """The 64 bits of XXH3 in hex."""
        return self._xxh3.hexdigest()


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of a whole content in hex."""
    return hashlib.sha256(content).hexdigest()


def xxh3_of(content: bytes) -> str:
    """Return the XXH3 of a whole content in hex, as `FileDigest` does."""
    return xxhash.xxh3_64_hexdigest(content)


class FileFingerprint(NamedTuple):
    """Size, modification time and inode: identify the content of a file without reading it."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | str) -> Self:
        """Return the fingerprint of an open file, or of the entry at a path, which may be a symbolic link.
        Raises OSError."""
        found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class FileTree:
    """The folder of finished files, each at the path of its key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temp_folder = root / TEMP_FOLDER

    def create(self) -> None:
        """Create the folder."""
        make_private_dir(self._temp_folder)
        fsync_dir(self.root)

    def entries(self) -> list[Path]:
        """Return the entries of the folder, if it exists, without `lost+found`, which new file systems
        have."""
        try:
            return [path for path in self.root.iterdir() if path.name != "lost+found"]
        except FileNotFoundError:
            return []

    def check(self) -> None:
        """Raise StoreUnavailable if the folder itself is missing, for example because its disk is not
        mounted."""
        if not self._temp_folder.is_dir():
            raise StoreUnavailable(f"{self.root} is not there: is its disk mounted?")

    def lock_abandoned(self) -> dict[str, int]:
        """Return the names of temporary files whose process is dead, each with a descriptor that holds its
        lock. Their writes may be committed all the same: `RenameJournal` knows. The caller closes the
        descriptors."""
        locked = dict[str, int]()
        try:
            for path in self._temp_folder.iterdir():
                with suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                    locked[path.name] = fd
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        os.close(locked.pop(path.name))
        except BaseException:
            for fd in locked.values():
                os.close(fd)
            raise
        return locked

    def remove_temp_file(self, name: str) -> None:
        """Unlink a temporary file, which the caller has locked."""
        (self._temp_folder / name).unlink(missing_ok=True)

    def path(self, key: str) -> str:
        """Return the path of the file of a (valid) key. Raises ValueError for the one reserved segment."""
        if key.partition("/")[0] == TEMP_FOLDER:
            raise ValueError(f"reserved key {key!r}")
        return f"{self.root}/{key}"

    def check_folders(self, key: str) -> None:
        """Raise OSError if one of the folders of a key is a symbolic link."""
        path = str(self.root)
        for name in key.split("/")[:-1]:
            path += "/" + name
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def walk(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the key of each folder (`""`: the top) with the names in it that are not folders, without the
        temporary files."""
        for path, folders, names in os.walk(self.root):
            parent = path[len(str(self.root)) + 1 :]
            if not parent:
                folders[:] = [name for name in folders if name not in (TEMP_FOLDER, "lost+found")]
            yield parent, names

    def fingerprint(self, key: str) -> FileFingerprint | None:
        """Return the fingerprint of the file of a key, or None if there is no file. Raises OSError."""
        try:
            return FileFingerprint.of(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def temp_file(self, name: str) -> "TempFile":
        """Return a new file that is not at a key yet. Its name must never have been used. Nothing is created
        on disk before the first `append`."""
        return TempFile(self._temp_folder, name)

    def probe(self, name: str, size: int) -> None:
        """Write a file that takes up `size` bytes, under a name as `temp_file` takes it, and remove it."""
        incoming = self.temp_file(name)
        try:
            incoming.append([b"\0"])
            incoming.allocate(size)
            incoming.finish([])
        finally:
            incoming.discard()

    def flush_temp_folder(self) -> None:
        """Flush the names of temporary files to disk, so that they survive a power failure."""
        fsync_dir(self._temp_folder)

    def make_parents(self, key: str) -> None:
        """Create the folders of a key, so that a file can be moved there. Raises KeyConflict if another file
        lies above or below the key. The caller must exclude other writers."""
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
        """Rename the finished temporary file to its key, unless that has already happened. Does not flush the
        folders."""
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
                self._create_folders(path)  # another process removed them while they were empty

    def remove(self, key: str) -> None:
        """Unlink the file of a key, if it exists, and the folders that this leaves empty, without flushing.
        The caller must exclude other writers."""
        path = Path(self.path(key))
        try:
            self.check_folders(key)
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()
        except (NotADirectoryError, IsADirectoryError):
            return  # another file lies above or below, so this key's is already gone
        except OSError as error:
            # A symbolic link on the path does not lead to our files.
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ELOOP):
                raise

    def flush(self, keys: Iterable[str]) -> None:
        """Flush the names in the folders that the creation or removal of these files may have changed, so
        that they survive a power failure. Raises OSError."""
        folders = set[str]()
        for key in keys:
            while key:
                key = key.rpartition("/")[0]
                folders.add(f"{self.root}/{key}")
        for folder in folders:
            with suppress(FileNotFoundError, NotADirectoryError):
                fsync_dir(folder)

    def _check_names(self, key: str) -> None:
        """Raise OSError for a key with a name that is too long, as the existing folders on its path show."""
        for name in key.split("/"):
            with suppress(FileNotFoundError):
                os.stat(f"{self.root}/{name}")

    def _create_folders(self, path: str) -> None:
        """Create the folders of `path`. Raises KeyConflict."""
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
    """A file being written. End it by `FileTree.move` and `close`, or by `discard`. It is locked until then,
    so that other processes know that it is not abandoned."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.is_committed = False
        """True once the file belongs to a write that may succeed. It must not be discarded then."""
        self.is_abandoned = False
        """True once nobody waits for the write. It is not made then unless it has begun."""
        self._path = f"{folder}/{self.name}"
        self._fd: int | None = None
        self._digest = FileDigest()

    def append(self, chunks: list[bytes]) -> None:
        """Write the chunks, joined. If they are long, the disk starts writing them while they are hashed."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if not os.fstat(self._fd).st_nlink:
                raise OSError(errno.ESTALE, "another process took it for abandoned", self._path)
        data = b"".join(chunks)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if len(data) >= _LONG_TO_HASH:
            start_flush(self._fd)
        self._digest.update(data)

    def allocate(self, size: int) -> None:
        """Take up `size` bytes of the disk, without writing them. Call `append` first."""
        assert self._fd is not None
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise

    def finish(self, last: list[bytes]) -> tuple[FileDigest, FileFingerprint]:
        """Append the last chunks and flush the file to disk. Returns its hashes and fingerprint."""
        self.append(last)
        assert self._fd is not None
        os.fsync(self._fd)
        return self._digest, FileFingerprint.of(self._fd)

    def discard(self) -> None:
        """Remove the file. Has no effect after the file was moved."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Release the lock. Harmless if it is released."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_SYNC_FILE_RANGE_WRITE: Final = 2


def start_flush(fd: int) -> None:
    """Start writing the data of an open file to disk, without waiting. Only a hint."""
    _sync_file_range()(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    """Return the system call, which `os` lacks. Imported on first use, because a server without files does
    not need it."""
    import ctypes

    call = ctypes.CDLL(None).sync_file_range
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", call)
