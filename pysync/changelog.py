"""Changes: what is told of a write to those who follow, and the logs that keep it.

A change is encoded once, when its write is made; the text that is kept is the text that is sent.

See docs/reference/protocol.md#delivery.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import orjson

DEFAULT_MAX_COUNT: Final = 100_000
DEFAULT_MAX_AGE_MS: Final = 86_400_000
MAX_RESUMED: Final = 20_000


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of its changes a log keeps at least: the newest `count`, unless they are older than `age_ms`.
    What it keeps beyond is of no promise."""

    count: int = DEFAULT_MAX_COUNT
    age_ms: int = DEFAULT_MAX_AGE_MS


class Change(NamedTuple):
    """One write. `text` is a JSON object with the key and the collection that wrote it. For the server's own
    use, `identity` is the writer (`""`: unknown), and `origin` names the writing collection for `matching`
    (`""`: any)."""

    text: bytes
    identity: str = ""
    origin: str = ""

    def is_for_hash(self, hash_: str) -> bool:
        """Whether it is of a version with this hash."""
        return b'"hash":"%b"' % hash_.encode() in self.text


class DocumentRef(NamedTuple):
    """The document that a write is of: its collection, namespace (None: the root) and path parameters, the
    identity of the writer, and its key in the store (`""`: the key that the collection's path gives). Other
    collections may share the key; `server.key_index` finds them when the change is delivered."""

    collection: str
    params: Mapping[str, str]
    namespace: str | None = None
    identity: str = ""
    key: str = ""

    @property
    def origin(self) -> str:
        return origin(self.namespace, self.collection)

    def change(self, hash_: str, timestamp_ms: int) -> Change:
        """The change that a write with this answer is."""
        told = {
            "collection": self.collection,
            "params": self.params,
            "hash": hash_,
            "timestamp": timestamp_ms,
        }
        if self.namespace is not None:
            told["namespace"] = self.namespace
        if self.key:
            told["key"] = self.key
        return Change(orjson.dumps(told), self.identity, self.origin)

    def is_same_document(self, other: "DocumentRef") -> bool:
        """Return True if both write the same document, whoever writes and through whichever collection."""
        return self.key == other.key if self.key and other.key else self[:3] == other[:3]


def origin(namespace: str | None, collection: str) -> str:
    """Return the `origin` of changes that a collection writes."""
    return f"{namespace or ''}/{collection}"


class ParsedChange(NamedTuple):
    """A change, read again."""

    ref: DocumentRef
    hash: str
    timestamp_ms: int


def parse_change(change: Change) -> ParsedChange:
    """What `DocumentRef.change` was made of."""
    told = orjson.loads(change.text)
    subject = DocumentRef(
        told["collection"], told["params"], told.get("namespace"), change.identity, told.get("key", "")
    )
    return ParsedChange(subject, told["hash"], told["timestamp"])


OriginFilter = Callable[[str], bool]
"""Returns True for the `origin` of changes that are asked for. Changes of an unknown origin always are."""


class ChangePage(NamedTuple):
    """A page of changes with their ids, oldest first. It includes all matching changes up to the id `last`;
    `is_end`: the log has no more for now. The log read `scanned` changes to find them."""

    changes: list[tuple[str, Change]]
    last: str
    is_end: bool
    scanned: int


class ChangeLog(Protocol):
    """Changes in the order of their ids, which is the order in which the writes of one document were made.
    All processes on one store share it. What cannot be told is `Unavailable`."""

    async def append(self, changes: Sequence[Change]) -> str:
        """The id of the last of `read` (one at least), now the newest of the log. Ids are greater, as
        text, than all given before. After an error they may be in the log nevertheless."""

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        """The first `limit` changes after the id `after` and their ids, oldest first; for `""` from the
        oldest one kept. None where some after it are not kept any more, or nobody was given that id."""

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        """Return a page of the changes of some collections after the id `after`. With an index this costs no
        more than their changes; the page may include others. None if changes after `after` are gone."""

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        """Count such changes after an id, up to `most` and perhaps one more; None if only reading them would
        tell."""

    async def last_id(self) -> str:
        """An id that all changes so far are at or before, and none to come is; `read` knows it, even of a
        log that is empty."""

    async def wait_for_change(self, after: str) -> None:
        """Return when there may be a change after `after`: at once where this process has announced one,
        within some 20 ms where another has; after a second in any case."""
