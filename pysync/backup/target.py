"""Where a backup lies: a folder, or a bucket. Both hold files that are written once and never change.

    format.json           the format of the backup, and who can read it
    packs/XX/<name>       the bytes of many objects together, and what they are
    lists/XX/<name>       pages of lists of objects, sorted by key
    snapshots/<number>-…  one snapshot of the store each, written last
    claims/<id>           what a running process protects from `prune`
    damaged/<name>        marks the file of this name as damaged

A name begins with a part of the SHA-256 of the bytes and ends with their number, so that each file can be
verified by itself. In between is the id of the claim of the process that wrote it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

from pysync.backup.format import MAX_FILE_BYTES
from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.protocol import OCTET_STREAM
from pysync.sqlite.database_file import fsync_dir, make_private_dir
from pysync.store import Store, open_store

P = ParamSpec("P")
T = TypeVar("T")

FORMAT_FILE: Final = "format.json"
_TEMPORARY: Final = "~tmp"
_LEFTOVER_S: Final = 86_400


class FileTooLong(ValueError):
    """A file is longer than any that a backup writes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it has {size} bytes, more than any file of a backup")


class BackupTarget(Protocol):
    """Holds files by their names. Every failure is StoreUnavailable."""

    async def put(self, name: str, body: bytes) -> None:
        """Write a file, which survives a power failure when this returns. Readers see all of it or
        nothing."""

    async def get(self, name: str) -> bytes | None:
        """Return the bytes of a file, None if there is none. Raises FileTooLong."""

    async def list_files(self, folder: str) -> dict[str, int]:
        """Return the names and sizes of all files below `folder` (`""`: of all), sorted by name."""

    async def delete(self, name: str) -> None:
        """Remove a file, if it exists."""

    async def delete_leftovers(self) -> None:
        """Remove files that killed processes have written in part. Other processes may write meanwhile."""

    async def close(self) -> None:
        """Release all resources."""


async def open_backup_target(config: StoreConfig, *, create: bool = False) -> BackupTarget:
    """Open the folder or the bucket of a backup; `create` makes a folder that is missing. Raises ValueError
    if there is none, or if it is a store or would be made in one, and StoreUnavailable."""
    kind, _, rest = config.url.partition(":")
    if kind == "s3":
        return BucketTarget(await open_store(config))
    if kind != "file" or not rest:
        raise ValueError(f"{config.url}: a backup lies in file:DIR or s3://BUCKET/PREFIX")
    root = Path(os.path.realpath(rest))  # noqa: ASYNC240
    if (root / "pysync.db").exists():
        advice = ": name another folder for the backup" if create else ", not a backup"
        raise ValueError(f"{config.url} is a store{advice}")
    if create:
        try:
            make_private_dir(root, may_be_link=True)
        except OSError as error:
            raise StoreUnavailable(f"{config.url}: {error}") from error
    elif not root.is_dir():  # noqa: ASYNC240
        raise ValueError(f"{config.url}: there is no backup")
    return FolderTarget(root)


def check_apart(store_url: str, place_url: str) -> None:
    """Raise ValueError if a store and a backup lie in one folder, or one of them in the other: both would be
    lost together."""
    store, place = map(_folder_of, (store_url, place_url))
    stores = () if store is None else (store, Path(os.path.realpath(store / "files")))
    for folder in () if store is None else (store, *store.parents):
        if (folder == place != store) or (folder / FORMAT_FILE).exists():
            raise ValueError(f"{store_url} lies in the backup {folder}: name another folder")
    for folder in () if place is None else (place, *place.parents):
        if folder in stores or (folder != place and (folder / "pysync.db").exists()):
            raise ValueError(f"{place_url} lies in a store, and would be lost with it: name another folder")


def _folder_of(url: str) -> Path | None:
    kind, _, folder = url.partition(":")
    return Path(os.path.realpath(folder)) if kind == "file" and folder else None


class FolderTarget:
    """A backup in a folder of a local or mounted file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, name: str, body: bytes) -> None:
        """See `BackupTarget.put`."""
        await _in_thread(self._put, name, body)

    async def get(self, name: str) -> bytes | None:
        """See `BackupTarget.get`."""
        return await _in_thread(self._get, name)

    async def list_files(self, folder: str) -> dict[str, int]:
        """See `BackupTarget.list_files`."""
        return await _in_thread(self._files, folder)

    async def delete(self, name: str) -> None:
        """See `BackupTarget.delete`."""
        await _in_thread(self._delete, name)

    async def delete_leftovers(self) -> None:
        """See `BackupTarget.delete_leftovers`. A process writes a file in less than a day."""
        await _in_thread(self._delete_leftovers)

    async def close(self) -> None:
        """See `BackupTarget.close`."""

    def _put(self, name: str, body: bytes) -> None:
        path = self._root / name
        temporary = self._root / _TEMPORARY / os.urandom(12).hex()
        for folder in (path.parent, temporary.parent):
            if not folder.is_dir():
                make_private_dir(folder)
                fsync_dir(folder.parent)
        try:
            with open(temporary, "xb", opener=_open_private) as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fsync_dir(path.parent)

    def _get(self, name: str) -> bytes | None:
        try:
            with open(self._root / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_FILE_BYTES:
                    raise FileTooLong(size)
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _files(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for path, _, names in os.walk(self._root / folder, onerror=_raise_unless_gone):
            for name in names:
                with suppress(FileNotFoundError):
                    file = Path(path) / name
                    found[file.relative_to(self._root).as_posix()] = file.stat(follow_symlinks=False).st_size
        return {name: found[name] for name in sorted(found) if not name.startswith(_TEMPORARY)}

    def _delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _delete_leftovers(self) -> None:
        folder = self._root / _TEMPORARY
        with suppress(FileNotFoundError):
            os.utime(folder)  # the time by the clock that sets the times of the files
            oldest_s = folder.stat().st_mtime - _LEFTOVER_S
            with os.scandir(folder) as entries:
                left = [one for one in entries if one.stat(follow_symlinks=False).st_mtime < oldest_s]
            for entry in left:
                with suppress(FileNotFoundError):
                    os.unlink(entry)


class BucketTarget:
    """A backup below a prefix of a bucket, or in any other store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, name: str, body: bytes) -> None:
        """See `BackupTarget.put`."""
        await self._store.write(name, _once(body), OCTET_STREAM)

    async def get(self, name: str) -> bytes | None:
        """See `BackupTarget.get`."""
        file = await self._store.open(name)
        if file is None:
            return None
        async with aclosing(file.chunks) as chunks:
            if file.size > MAX_FILE_BYTES:
                raise FileTooLong(file.size)
            return b"".join([chunk async for chunk in chunks])

    async def list_files(self, folder: str) -> dict[str, int]:
        """See `BackupTarget.list_files`."""
        found = {entry.key: entry.size or 0 async for entry in self._store.walk(folder)}
        return dict(sorted(found.items()))

    async def delete(self, name: str) -> None:
        """See `BackupTarget.delete`."""
        await self._store.delete(name)

    async def delete_leftovers(self) -> None:
        """See `BackupTarget.delete_leftovers`. Nothing shows in a bucket before all of it is there."""

    async def close(self) -> None:
        """See `BackupTarget.close`."""
        await self._store.close()


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, run in a thread."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        raise StoreUnavailable(f"the backup cannot be used: {error}") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
