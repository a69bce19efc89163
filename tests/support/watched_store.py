"""A store that counts what is read."""

from collections.abc import Sequence
from math import inf
from typing import Any

from pysync.store import NotModified, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

MB = 1024 * 1024
OPEN: dict[str, Any] = {"readRoles": ["public"], "writeRoles": ["public"], "maxBodyBytes": 2 * MB}
LOG = {"type": "by_timestamp", "requireAuthorSignature": False}


class Watched(MemoryStore):
    """Knows which bodies were read, and how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.size = 0

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        found = await super().get(key, if_none_match)
        if isinstance(found, StoredObject):
            self.read.append(key)
            self.size += len(found.body)
        return found

    def forget(self) -> None:
        self.read, self.size = [], 0


class WatchedFolder(LocalStore):
    """A store in a folder that knows which bodies were read."""

    read: list[str]

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        self.read.append(key)
        return await super().get(key, if_none_match)

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        found = await super().get_many(keys, max_bytes)
        self.read += found
        return found
