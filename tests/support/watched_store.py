"""A store that counts what is read."""

from typing import Any

from pysync.store import NotModified, StoredObject
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
