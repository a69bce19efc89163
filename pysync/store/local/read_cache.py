"""The documents of a local store that were read lately, until any process commits."""

from collections.abc import Sequence
from typing import Final

from pysync.store.types import StoredObject

CACHE_BYTES: Final = 4 * 1024 * 1024
CACHE_OBJECT_BYTES: Final = 64 * 1024
CACHE_ETAG_BYTES: Final = 256
"""What a cached etag counts for."""


class ReadCache:
    """The documents read since the last commit by any process, and the etags of those that their readers had
    already. Small and frequently read ones are then found without a query."""

    def __init__(self) -> None:
        self._version = -1
        self._objects: dict[str, StoredObject] = {}
        self._etags: dict[str, str] = {}
        self._bytes = 0

    def get(self, key: str, version: int) -> StoredObject | None:
        """Return the document at `key`, if it was cached while the database was at `version`."""
        if version != self._version:
            self._move_to(version)
        return self._objects.get(key)

    def get_many(self, keys: Sequence[str], version: int) -> dict[str, StoredObject | None]:
        """Return those of the documents at `keys` that `get` returns."""
        if version != self._version:
            self._move_to(version)
        objects = self._objects
        try:
            return {key: objects[key] for key in keys}
        except KeyError:
            return {key: objects[key] for key in keys if key in objects}

    def put(self, key: str, found: StoredObject) -> None:
        """Cache a document that was read at the version of the last `get`."""
        if len(found.body) <= CACHE_OBJECT_BYTES:
            self._make_room(len(found.body))
            self._objects[key] = found

    def is_unmodified(self, key: str, etag: str) -> bool:
        """Return True if the document at `key` is known to have this etag at the version of the last
        `get`."""
        return self._etags.get(key) == etag

    def put_etag(self, key: str, etag: str) -> None:
        """Cache the etag of a document that was looked up at the version of the last `get`."""
        self._make_room(CACHE_ETAG_BYTES)
        self._etags[key] = etag

    def _make_room(self, size: int) -> None:
        if self._bytes + size > CACHE_BYTES:
            self._clear()
        self._bytes += size

    def _move_to(self, version: int) -> None:
        self._clear()
        self._version = version

    def _clear(self) -> None:
        self._objects.clear()
        self._etags.clear()
        self._bytes = 0
