"""Versions for readers that do not see all members of a document (`fieldPermissions`).

The hash of the document would let them find hidden values by trying, so they get a version keyed with a
secret of the store.
"""

import hmac
import secrets
from collections.abc import Callable
from typing import Final

import orjson

from pysync import _core
from pysync.config.key_templates import RESERVED
from pysync.corruption import CorruptionReporter
from pysync.errors import DocumentCorrupt, StoreUnavailable
from pysync.store import ABSENT, EtagMismatch, Store, StoredObject

SECRET_DOCUMENT_KEY: Final = f"{RESERVED}/secrets/versions"
"""The key of the secret. It is stored as a document, so that damage to it is found."""


class KeyedVersions:
    """The keyed versions of one store: the same in all processes, before and after a restart."""

    def __init__(
        self, store: Store, now_ms: Callable[[], int], corruption: CorruptionReporter | None = None
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._corruption = corruption or CorruptionReporter()
        self._secret = b""

    def compute(self, key: str, hash_: str, written_ms: int, hidden: frozenset[str]) -> str:
        """Return the version that readers without the members `hidden` see in place of `hash_`, the hash of
        the document at `key`. `load` must have been awaited. The version depends on the key and on the time
        of the write, so it cannot be compared with that of another document or of the reader's own push."""
        if not hidden or not hash_:
            return hash_
        assert self._secret, "load must be awaited first"
        text = orjson.dumps([key, hash_, written_ms, *sorted(hidden)])
        return hmac.digest(self._secret, text, "sha256").hex()

    async def load_and_compute(self, key: str, hash_: str, written_ms: int, hidden: frozenset[str]) -> str:
        """Return the version as `compute` does, after `load` if that is needed. Raises as `load`."""
        if hidden and hash_:
            await self.load()
        return self.compute(key, hash_, written_ms, hidden)

    async def load(self) -> None:
        """Load the secret from the store, or create it there. Raises DocumentCorrupt and StoreUnavailable."""
        if self._secret:
            return
        found = await self._store.get(SECRET_DOCUMENT_KEY)
        if not isinstance(found, StoredObject):
            body = b'{"data":{"secret":"%b"}}' % secrets.token_hex(32).encode()
            stored = _core.decode_push(body).stored(self._now_ms())
            try:
                await self._store.put(SECRET_DOCUMENT_KEY, stored, expect=ABSENT)
            except EtagMismatch:
                found = await self._store.get(SECRET_DOCUMENT_KEY)  # another process was faster
                if not isinstance(found, StoredObject):
                    raise StoreUnavailable from None
                stored = found.body
        else:
            stored = found.body
        with self._corruption.reporting("document", SECRET_DOCUMENT_KEY):
            secret = orjson.loads(_core.read_document(stored).data).get("secret")
            if not isinstance(secret, str) or len(secret) < 64:
                raise DocumentCorrupt
        self._secret = secret.encode()
