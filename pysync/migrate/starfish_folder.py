"""A folder of plain files, one for each key, as Starfish keeps its objects: to be read, never written.

DIR/<key>             a document, or an object of a log: JSON text
DIR/<key>.__meta__    beside a binary file: its media type, bare or as {"contentType": ..}
"""

import builtins
import os
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Final

import orjson

from pysync.errors import StoreUnavailable
from pysync.protocol import JSON_TYPE, OCTET_STREAM
from pysync.store.base import ListEntry, OpenFile, StoredObject, clamp_range, split_key
from pysync.store.local.disk import FileReader, in_thread, translate_os_errors

_SIDECAR: Final = ".__meta__"
_PAGE: Final = 256


class FolderSource:
    """A `Source`. A key holds a file where its media type lies beside it, else a document."""

    def __init__(self, root: Path) -> None:
        """The source in the folder `root`. Raises ValueError where there is none."""
        if not root.is_dir():
            raise ValueError(f"{root}: there is no such folder")
        self._root = root

    async def get(self, key: str) -> StoredObject | None:
        return await in_thread(self._get, self._path(key))

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        path = self._path(key)
        content_type = await in_thread(_content_type, path)
        if content_type is None:
            return None
        outgoing = FileReader(path, follows_links=True)
        try:
            stamp = await in_thread(outgoing.open)
            if stamp is None:
                return None
            sha256 = await in_thread(outgoing.sha256)
        except BaseException:
            await outgoing.aclose()
            raise
        begin, finish = clamp_range(stamp.size, start, end)
        outgoing.select(begin, finish)
        modified_ms = stamp.mtime_ns // 1_000_000
        return OpenFile(stamp.size, sha256, content_type, modified_ms, begin, finish, outgoing, etag=sha256)

    async def list(self, prefix: str, after: str | None, limit: int) -> builtins.list[str]:
        entries = [entry async for entry in self._entries(prefix)]
        names = sorted(entry.name for entry in entries if entry.is_file() and not _is_sidecar(entry))
        return [name for name in names if after is None or name > after][:limit]

    async def walk(self, prefix: str) -> AsyncIterator[ListEntry]:
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
        """What lies directly in a folder; nothing where it is gone, unless it is the whole source."""
        try:
            with translate_os_errors():
                entries = os.scandir(self._root / folder)
        except StoreUnavailable as error:
            if folder and isinstance(error.__cause__, FileNotFoundError):
                return
            raise
        with entries:
            while page := await in_thread(lambda: [*islice(entries, _PAGE)]):
                for entry in page:
                    yield entry


def _content_type(path: Path) -> str | None:
    """The media type that lies beside a binary file; None where none does."""
    try:
        text = path.with_name(path.name + _SIDECAR).read_text("utf-8", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not text.startswith("{"):
        return text or OCTET_STREAM
    try:
        said = orjson.loads(text).get("contentType")
    except ValueError:
        said = None
    return said if isinstance(said, str) and said else OCTET_STREAM


def _is_sidecar(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(_SIDECAR) and os.path.exists(entry.path.removesuffix(_SIDECAR))
