"""Ownership of stored data, which is a cheap way to distinguish users from strangers."""

from collections.abc import AsyncGenerator, Iterator
from typing import Final

from pysync.config import Config
from pysync.store import Store

MAX_CACHED_OWNERS: Final = 10_000


class Ownership:
    """Identities that own stored data. An identity owns the keys below its `{identity}` in collections whose
    path has only literal segments before it; one page of a listing shows them for each such collection. Keys
    elsewhere, for example in rooms that anyone may name, do not count."""

    def __init__(self, config: Config, store: Store) -> None:
        self._store = store
        self._prefixes = sorted(set(_identity_prefixes(config)))
        self._owners: set[str] = set()

    async def owns_data(self, identity: str) -> bool:
        """Return True if `identity` owns any stored data. A positive result is cached. Raises
        StoreUnavailable."""
        if identity in self._owners:
            return True
        for folder, is_whole_key in self._prefixes:
            key = folder + identity
            if await self._exists(key, is_whole_key):
                if len(self._owners) >= MAX_CACHED_OWNERS:
                    self._owners.clear()
                self._owners.add(identity)
                return True
        return False

    async def _exists(self, key: str, is_whole_key: bool) -> bool:
        if is_whole_key:
            return await self._store.get(key) is not None
        walk = self._store.walk(key)
        try:
            return await anext(walk, None) is not None
        finally:
            if isinstance(walk, AsyncGenerator):
                await walk.aclose()


def _identity_prefixes(config: Config) -> Iterator[tuple[str, bool]]:
    """Yield the part of each template before `{identity}`, and True if nothing follows it."""
    for _, _, collection in config.each_collection():
        before, identity, after = collection.storage_path.partition("{identity}")
        if identity and "{" not in before:
            yield before, not after and collection.bundle is None
