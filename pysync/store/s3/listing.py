"""Listings: the names directly under a prefix, and everything below it."""

import hashlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final

from pysync._core import split_key
from pysync.store.base import ListEntry
from pysync.store.s3.conditional_writes import ConditionalWriter
from pysync.store.s3.credentials import S3Client, translate_errors
from pysync.store.s3.versions import TOMBSTONE, unquote_etag

PROBES: Final = "_pysync/probe"
"""The object that the store writes to test its bucket, and the prefix of others. No listing shows them."""

_PAGE: Final = 1_000
_TOMBSTONE_ETAG: Final = hashlib.md5(TOMBSTONE, usedforsecurity=False).hexdigest()


class Listings:
    """Lists the keys of one bucket below `root` (`""`, or with a trailing slash)."""

    def __init__(self, account: S3Client, bucket: str, root: str, writes: ConditionalWriter) -> None:
        self._account = account
        self._bucket = bucket
        self._root = root
        self._writes = writes

    async def names(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `Store.list`."""
        if limit == 0:
            return []
        below = prefix and prefix + "/"
        names: list[str] = []
        # A document often has keys below it, which count as one more entry.
        parameters: dict[str, Any] = {"Delimiter": "/", "MaxKeys": min(_PAGE, 2 * limit)}
        if after:
            parameters["StartAfter"] = self._root + below + after
        async for key, _ in self._entries(below, parameters):
            names.append(key[len(below) :])
            if len(names) == limit:
                break
        return names

    async def walk(self, prefix: str) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""
        async for key, entry in self._entries(prefix and prefix + "/", {}):
            yield ListEntry(key, unquote_etag(entry["ETag"]), _modified_ms(entry["LastModified"]))

    async def _entries(
        self, below: str, parameters: dict[str, Any]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the keys and entries of the visible objects that begin with `below`, page by page."""
        more: dict[str, Any] = {}
        while True:
            with translate_errors():
                page = await self._account.client.list_objects_v2(
                    Bucket=self._bucket, Prefix=self._root + below, **parameters, **more
                )
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._root)
                if _is_key(key) and not await self._is_tombstone(key, entry):
                    yield key, entry
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _is_tombstone(self, key: str, entry: dict[str, Any]) -> bool:
        if entry["Size"] != len(TOMBSTONE):
            return False
        if unquote_etag(entry["ETag"]) == _TOMBSTONE_ETAG:
            return True
        # If the server encrypts objects, an etag is not an MD5 hash.
        found = await self._writes.find(key)
        return found is not None and found.is_tombstone


def _is_key(key: str) -> bool:
    """Return True for a valid key, unless it belongs to a probe."""
    try:
        split_key(key)
    except ValueError:
        return False
    return key != PROBES and not key.startswith(PROBES + "/")


def _modified_ms(text: datetime) -> int:
    """Return the time in milliseconds. Whole seconds are rounded up, so that objects never expire too
    early."""
    modified_ms = round(text.timestamp() * 1000)
    return modified_ms if modified_ms % 1000 else modified_ms + 999
