"""The files of a bucket that were found damaged, shared by all its processes.

    _pysync/damaged    {"files": {key: [etag, sha256, time of the write in ms]}}: their versions

A stored file cannot be marked without writing it again, so one object lists the damaged ones. Every process
reads the list when it starts, and again when it opens a file and the last read is a minute ago or more.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import orjson

from pysync.concurrency import ATTEMPTS
from pysync.errors import StoreUnavailable
from pysync.store.protocol import Store
from pysync.store.types import ABSENT, Etag, EtagMismatch, FileStat, StoredObject

KEY: Final = "_pysync/damaged"
READ_EVERY_S: Final = 60.0
MAX_ENTRIES: Final = 1_000
"""Maximum number of listed files. If more are damaged, the oldest findings are dropped."""

log = logging.getLogger(__name__)


class DamagedFiles:
    """The list of damaged files, stored in `objects`. A version is identified by its etag, its sha256 and its
    time: a small file has its first etag again if the same bytes are written twice more."""

    def __init__(self, objects: Store, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._objects = objects
        self._clock_s = clock_s
        self._files: dict[str, list[str | int]] = {}
        self._read_at: float | None = None

    async def load(self) -> str | None:
        """Read the list and return its etag, None if there is no list. Raises StoreUnavailable."""
        found = await self._objects.get(KEY)
        self._read_at = self._clock_s()
        self._files = {}
        if not isinstance(found, StoredObject):
            return None
        with suppress(ValueError, KeyError, TypeError):
            self._files = dict(orjson.loads(found.body)["files"])
        return found.etag

    async def contains(self, key: str, stat: FileStat) -> bool:
        """Return True if this version of the file at `key` was found damaged, a minute ago or earlier."""
        if self._read_at is None or self._clock_s() - self._read_at >= READ_EVERY_S:
            with suppress(StoreUnavailable):
                await self.load()
        return self._files.get(key) == _version(stat)

    async def record(self, key: str, stat: FileStat, *, is_damaged: bool) -> None:
        """Record for every process whether this version of the file at `key` is damaged."""
        version = _version(stat)
        if await self.contains(key, stat) == is_damaged:
            return
        for _ in range(ATTEMPTS):
            etag = await self.load()
            if (self._files.get(key) == version) == is_damaged:
                return
            files = {other: found for other, found in self._files.items() if other != key}
            if is_damaged:
                files[key] = version
            files = dict(list(files.items())[-MAX_ENTRIES:])
            body = orjson.dumps({"files": files})
            with suppress(EtagMismatch):
                await self._objects.put(KEY, body, expect=ABSENT if etag is None else Etag(etag))
                self._files = files
                return
        log.error("failed to record the state of the file at %r in %s: too many concurrent writes", key, KEY)


def _version(stat: FileStat) -> list[str | int]:
    return [stat.etag, stat.sha256, stat.modified_ms]
