"""A cache of the objects read or written last. Every read revalidates it with S3."""

from typing import Final

from pysync.cache import BoundedCache
from pysync.store.base import StoredObject
from pysync.store.s3.versions import ExpectedVersion

MAX_VERSIONS: Final = 16_384
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_OBJECT_BYTES: Final = 1024 * 1024
_OVERHEAD_BYTES: Final = 512
"""Approximate size of a cached object without its body."""


class VersionCache:
    """Caches bodies, so that reading an unchanged object transfers no body, and the lineages of versions,
    which the next write names."""

    def __init__(
        self,
        max_versions: int = MAX_VERSIONS,
        max_bytes: int = MAX_BYTES,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        self._max_object_bytes = max_object_bytes
        self._objects = BoundedCache[str, StoredObject](max_bytes, _size)
        self._lineages = BoundedCache[str, tuple[str, str]](max_versions)

    @property
    def bytes(self) -> int:
        """The size of the cached bodies, including the overhead of each."""
        return self._objects.cost

    def get(self, key: str) -> StoredObject | None:
        """Return the cached version of `key`, None if there is none."""
        return self._objects.get(key)

    def expected_version(self, key: str, etag: str) -> ExpectedVersion:
        """Return the version `etag` of `key`, as the version that a write replaces."""
        known, ids = self._lineages.get(key) or ("", "")
        return ExpectedVersion(etag, tuple(ids.split()) if known == etag else ())

    def put(self, key: str, found: StoredObject, ids: tuple[str, ...]) -> None:
        """Cache a document that was read or written."""
        self.evict(key)
        if ids:
            self._lineages.put(key, (found.etag, " ".join(ids)))
        if len(found.body) <= self._max_object_bytes:
            self._objects.put(key, found)

    def evict(self, key: str) -> None:
        """Remove `key` from the cache."""
        self._lineages.evict(key)
        self._objects.evict(key)


def _size(found: StoredObject) -> int:
    return len(found.body) + _OVERHEAD_BYTES
