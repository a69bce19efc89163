"""The record of what was erased, by which the backups of a store find it in their snapshots. It has keyed
hashes alone, so nobody who reads or searches the store finds a name in it."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import orjson

from pysync.config.key_templates import RESERVED
from pysync.engine.changes import origin
from pysync.engine.history import PREFIX as HISTORY
from pysync.engine.history import document_of
from pysync.engine.subscriptions import Topic
from pysync.store import ERASED_KEY, Store, StoredObject


class ErasureRecord(NamedTuple):
    """What was erased, as keyed hashes of marks, each with the time in milliseconds up to which what had been
    written is erased. A mark is `key KEY`, `below PREFIX` or `identity ID`. `collections` has the `origin` of
    each collection from which changes were erased, with the newest id of the change log then."""

    salt: bytes
    until_ms: dict[str, int]
    collections: dict[str, str]

    @classmethod
    async def load(cls, store: Store) -> Self:
        """Return the record of a store. Raises StoreUnavailable."""
        found = await store.get(ERASED_KEY)
        return cls.decode(found.body if isinstance(found, StoredObject) else None)

    @classmethod
    def decode(cls, text: bytes | None) -> Self:
        """Return what the object at `ERASED_KEY` records, an empty record without one. Raises ValueError."""
        if text is None:
            return cls(os.urandom(16), {}, {})
        try:
            members = orjson.loads(text)
            salt, until_ms = bytes.fromhex(members["salt"]), dict(members["untilMs"])
            return cls(salt, until_ms, dict(members.get("collections", {})))
        except (LookupError, TypeError, AttributeError):
            raise ValueError("the record of what was erased is damaged") from None

    def encode(self) -> bytes:
        """Return the text of the record."""
        members = {"salt": self.salt.hex(), "untilMs": self.until_ms, "collections": self.collections}
        return orjson.dumps(members)

    def add(self, marks: Iterable[str], until_ms: int) -> None:
        """Record what these marks stand for."""
        self.until_ms.update({self._hash(mark): until_ms for mark in marks})

    def has(self, key: str, modified_ms: int) -> bool:
        """Return True if what was written at a key at this time is erased."""
        return any(modified_ms <= self.until_ms.get(self._hash(mark), -1) for mark in _marks(key))

    def covers(self, cursor: str, topics: Iterable[Topic]) -> bool:
        """Return True if a reader of these collections that has received everything up to `cursor`, an id of
        the change log, may miss changes that were erased. Look here after the feed was read, since erasures
        are recorded first. Ids of another kind of log cover nothing."""
        ids = (self.collections.get(origin(*topic), "") for topic in topics)
        return any(cursor < id_ and ("." in cursor) == ("." in id_) for id_ in ids)

    def _hash(self, mark: str) -> str:
        return hashlib.blake2b(mark.encode(), digest_size=16, key=self.salt).hexdigest()


def _marks(key: str) -> Iterator[str]:
    """Yield the marks that stand for a key, or for the document of which it is an earlier version."""
    if key.startswith(f"{HISTORY}/"):
        key = document_of(key)
    yield f"key {key}"
    segments = key.split("/")
    for end in range(1, len(segments) + 1):
        yield f"below {'/'.join(segments[:end])}"
    if segments[0] != RESERVED:
        for segment in segments:
            yield f"identity {segment}"
