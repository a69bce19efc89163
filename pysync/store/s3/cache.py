"""What a store remembers of the objects it met last. It is never believed: S3 is always asked."""

from collections import OrderedDict
from typing import Final

from pysync.store.base import StoredObject
from pysync.store.s3.versions import ExpectedVersion

MAX_VERSIONS: Final = 16_384
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_OBJECT_BYTES: Final = 1024 * 1024
_OVERHEAD_BYTES: Final = 512
"""What an object costs beside its body, about."""


class VersionCache:
    """Bodies, so that a read of what has not changed costs no body, and the lineages of versions, which the
    next write names."""

    def __init__(
        self,
        max_versions: int = MAX_VERSIONS,
        max_bytes: int = MAX_BYTES,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        self._max_versions = max_versions
        self._max_bytes = max_bytes
        self._max_object_bytes = max_object_bytes
        self._objects: OrderedDict[str, StoredObject] = OrderedDict()
        self._lineages: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self.bytes = 0

    def get(self, key: str) -> StoredObject | None:
        """The version of `key` that was met last, while it is kept."""
        found = self._objects.get(key)
        if found is not None:
            self._objects.move_to_end(key)
        return found

    def expected_version(self, key: str, etag: str) -> ExpectedVersion:
        """The version `etag` of `key`, as what a write replaces."""
        known, ids = self._lineages.get(key, ("", ""))
        return ExpectedVersion(etag, tuple(ids.split()) if known == etag else ())

    def put(self, key: str, found: StoredObject, ids: tuple[str, ...]) -> None:
        """Remember a document that was read or written."""
        self.evict(key)
        if ids:
            self._lineages[key] = found.etag, " ".join(ids)
            if len(self._lineages) > self._max_versions:
                self._lineages.popitem(last=False)
        if len(found.body) <= self._max_object_bytes:
            self._objects[key] = found
            self.bytes += _size(found)
            while self.bytes > self._max_bytes:
                self.bytes -= _size(self._objects.popitem(last=False)[1])

    def evict(self, key: str) -> None:
        self._lineages.pop(key, None)
        dropped = self._objects.pop(key, None)
        if dropped is not None:
            self.bytes -= _size(dropped)


def _size(found: StoredObject) -> int:
    return len(found.body) + _OVERHEAD_BYTES
