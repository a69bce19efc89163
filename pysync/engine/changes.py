"""The members of a change: the document that was written, by whom, and the hash and time of its new version.

See docs/reference/protocol.md#delivery.
"""

from collections.abc import Mapping
from typing import NamedTuple

import orjson

from pysync.changelog import Change
from pysync.store import Charge


class DocumentRef(NamedTuple):
    """A reference to a document: its collection, namespace (None: the root), path parameters, and its key in
    the store (`""`: the key that the collection's path gives). Other collections may share the key;
    `KeyMatcher` finds them when a change is delivered."""

    collection: str
    params: Mapping[str, str]
    namespace: str | None = None
    key: str = ""

    def change(self, hash_: str, timestamp_ms: int, identity: str = "", *, removed: bool = False) -> Change:
        """Return the change that announces a write by `identity` with this hash and time. With `removed` it
        announces that the version with this hash was removed."""
        members = {
            "collection": self.collection,
            "params": self.params,
            "hash": hash_,
            "timestamp": timestamp_ms,
        }
        if self.namespace is not None:
            members["namespace"] = self.namespace
        if self.key:
            members["key"] = self.key
        if removed:
            members["removed"] = True
        return Change(orjson.dumps(members), identity, origin(self.namespace, self.collection))

    def is_same_document(self, other: "DocumentRef") -> bool:
        """Return True if both refer to the same document, regardless of the writer and the collection."""
        return self.key == other.key if self.key and other.key else self[:3] == other[:3]


class WriteContext(NamedTuple):
    """The document that a write concerns, the identity of the writer (`""` for none), and what the write
    counts as, as the route decided (None: as the key says)."""

    ref: DocumentRef
    identity: str = ""
    charge: Charge | None = None

    def change(self, hash_: str, timestamp_ms: int, *, removed: bool = False) -> Change:
        """Return the change that announces the write, as `DocumentRef.change`."""
        return self.ref.change(hash_, timestamp_ms, self.identity, removed=removed)


def origin(namespace: str | None, collection: str) -> str:
    """Return the `origin` of changes that a collection writes."""
    return f"{namespace or ''}/{collection}"


class ParsedChange(NamedTuple):
    """The fields of a change. The hash of a removal is that of the removed version."""

    ref: DocumentRef
    hash: str
    timestamp_ms: int
    removed: bool = False
    identity: str = ""


def parse_change(change: Change) -> ParsedChange:
    """Return the document, hash, time and kind that a change was made from. It is the inverse of
    `DocumentRef.change`."""
    members = orjson.loads(change.text)
    ref = DocumentRef(
        members["collection"],
        members["params"],
        members.get("namespace"),
        members.get("key", ""),
    )
    return ParsedChange(ref, members["hash"], members["timestamp"], change.removed, change.identity)
