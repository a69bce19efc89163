"""The stores that arguments of `pysync copy` name, by a URL or by a configuration file. The folder of a
Starfish server is one that is only read, with a plain file for each key.

DIR/<key>             a document, or an object of a log: JSON text
DIR/<key>.__meta__    the media type of a binary file, bare or as {"contentType": ..}
"""

import builtins
import os
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Final

import orjson

from pysync import config
from pysync._core import split_key
from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.protocol import JSON_TYPE, OCTET_STREAM
from pysync.store import ReadableStore, Store, open_store
from pysync.store.local.disk import in_thread, translate_os_errors
from pysync.store.local.file_reader import FileReader
from pysync.store.types import PAGE, ListEntry, OpenFile, StoredObject, clamp_range

Location = StoreConfig | Path
"""A store, or the folder of a Starfish server."""

_DATABASE: Final = "pysync.db"
_SIDECAR: Final = ".__meta__"


def parse_location(text: str) -> Location:
    """Return the location that `text` names. Raises ValueError or ConfigError if it names none."""
    kind, _, rest = text.partition(":")
    if kind == "folder" and rest:
        return Path(rest)
    if kind in ("memory", "file", "s3"):
        return config.parse({"version": 1, "store": text}).store
    if Path(text).suffix in (".json", ".yaml", ".yml", ".toml"):
        return config.load(text).store
    raise ValueError(f"{text}: name file:DIR, s3://BUCKET/PREFIX, folder:DIR or a configuration file")


async def open_source(location: Location) -> ReadableStore:
    """Open the location to copy from, which must exist. Raises ValueError and StoreUnavailable."""
    if isinstance(location, Path):
        if (location / _DATABASE).exists():
            raise ValueError(f"folder:{location} is a store: name it file:{location}")
        return FolderSource(location)
    check_exists(location.url)
    return await open_store(location)


async def open_target(location: Location) -> Store:
    """Open or create the location to copy to. Raises ValueError and StoreUnavailable."""
    if isinstance(location, Path):
        raise ValueError(f"folder:{location} can only be copied from")
    return await open_store(location)


def check_exists(url: str) -> None:
    """Raise ValueError if a `file:` store does not exist yet."""
    kind, _, folder = url.partition(":")
    if kind == "file" and not (Path(folder) / _DATABASE).exists():
        advice = f"; a folder of plain files is folder:{folder}" if Path(folder).is_dir() else ""
        raise ValueError(f"{url}: there is no store{advice}")


class FolderSource:
    """A `ReadableStore` over a folder. A key with a media type beside it is a file, any other a document."""

    def __init__(self, root: Path) -> None:
        """Open the folder `root`. Raises ValueError if it does not exist."""
        if not root.is_dir():
            raise ValueError(f"{root}: there is no such folder")
        self._root = root

    async def get(self, key: str) -> StoredObject | None:
        """See `ReadableStore.get`."""
        return await in_thread(self._get, self._path(key))

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """See `ReadableStore.open`."""
        path = self._path(key)
        content_type = await in_thread(_content_type, path)
        if content_type is None:
            return None
        outgoing = FileReader(path, follows_links=True)
        try:
            stamp = await in_thread(outgoing.open)
            if stamp is None:
                return None
            sha256 = (await in_thread(outgoing.digest)).sha256
        except BaseException:
            await outgoing.aclose()
            raise
        begin, finish = clamp_range(stamp.size, start, end)
        outgoing.select(begin, finish)
        modified_ms = stamp.mtime_ns // 1_000_000
        return OpenFile(stamp.size, sha256, content_type, modified_ms, begin, finish, outgoing, etag=sha256)

    async def list(self, prefix: str, after: str | None, limit: int) -> builtins.list[str]:
        """See `ReadableStore.list`."""
        entries = [entry async for entry in self._entries(prefix)]
        names = sorted(entry.name for entry in entries if entry.is_file() and not _is_sidecar(entry))
        return [name for name in names if after is None or name > after][:limit]

    async def walk(self, prefix: str) -> AsyncIterator[ListEntry]:
        """See `ReadableStore.walk`."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            async for entry in self._entries(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(key)
                elif not _is_sidecar(entry):
                    yield ListEntry(key, "", 0)

    async def close(self) -> None:
        """See `ReadableStore.close`."""
        return

    def _path(self, key: str) -> Path:
        split_key(key)
        return self._root / key

    def _get(self, path: Path) -> StoredObject | None:
        if _content_type(path) is not None:
            return None
        try:
            found = path.stat()
            return StoredObject(
                path.read_bytes(), str(found.st_mtime_ns), JSON_TYPE, found.st_mtime_ns // 1_000_000
            )
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    async def _entries(self, folder: str) -> AsyncIterator["os.DirEntry[str]"]:
        """Yield the entries of a folder; none if it is gone, unless it is the root."""
        try:
            with translate_os_errors():
                entries = os.scandir(self._root / folder)
        except StoreUnavailable as error:
            if folder and isinstance(error.__cause__, FileNotFoundError):
                return
            raise
        with entries:
            while page := await in_thread(lambda: [*islice(entries, PAGE)]):
                for entry in page:
                    yield entry


def _content_type(path: Path) -> str | None:
    """Return the media type that is stored beside a binary file; None if there is none."""
    try:
        text = path.with_name(path.name + _SIDECAR).read_text("utf-8", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not text.startswith("{"):
        return text or OCTET_STREAM
    try:
        content_type = orjson.loads(text).get("contentType")
    except ValueError:
        content_type = None
    return content_type if isinstance(content_type, str) and content_type else OCTET_STREAM


def _is_sidecar(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(_SIDECAR) and os.path.exists(entry.path.removesuffix(_SIDECAR))
