"""Identification of the writes of an object, and of the versions that each write replaced.

S3's ETag depends on the content only, so a condition cannot distinguish two writes of the same bytes. Every
write therefore has an id of its own. A document carries it as white space after its body, which JSON parsers
ignore. The object's metadata contain it too, followed by the ids of the replaced versions. They determine the
outcome of a write whose response was lost.

Also the conditions that the bucket's server honours, as the probe at start found them, and a cache of the
versions read or written last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple, Self

from pysync.cache import BoundedCache
from pysync.protocol import JSON_TYPE
from pysync.store.types import StoredObject


@dataclass(frozen=True, slots=True)
class BucketCapabilities:
    """The URL of a bucket, and the conditions that its server honours. `if_none_match` and `if_match`:
    `If-None-Match: *` and `If-Match` of a put; `delete_if_match`: `If-Match` of a delete. `quoted_etags`:
    etags in conditions need quotes. `skew_ms`: how far this machine's clock is ahead of the server's, to a
    second."""

    url: str
    if_none_match: bool
    if_match: bool
    delete_if_match: bool
    quoted_etags: bool
    skew_ms: int

    @property
    def is_conditional(self) -> bool:
        """True if several processes may write to the bucket."""
        return self.if_none_match and self.if_match

    @property
    def ignored_conditions(self) -> list[str]:
        """The conditions of a put that the server ignores."""
        kept = {"If-None-Match": self.if_none_match, "If-Match": self.if_match}
        return [name for name, is_kept in kept.items() if not is_kept]

    def condition(self, etag: str) -> str:
        """Return an etag as the value of If-Match and If-None-Match."""
        return f'"{etag}"' if self.quoted_etags else etag


LINEAGE: Final = "x-amz-meta-pysync"
"""Metadata of every object that pysync writes: its time in ms, its id, the ids of replaced versions, newest
first."""
SHA256: Final = "x-amz-meta-pysync-sha256"
"""Metadata of every file that pysync writes."""

MAX_REPLACED: Final = 15
"""Maximum number of ids of replaced versions in a lineage. More would recognise a write after more later
ones; S3 limits metadata to 2 KB."""
NO_WRITE_ID: Final = "0"
"""Id in a lineage for the absence of an object."""

TOMBSTONE: Final = b"deleted by pysync\n"
"""Body of an object that counts as absent, for servers without conditional deletes. It is shorter than any
document that pysync writes."""
TOMBSTONE_TYPE: Final = "application/x-pysync-deleted"


class Lineage(NamedTuple):
    """The time of a write, and `ids`: its own id, then those of the replaced versions, newest first, as far
    as they are known."""

    modified_ms: int
    ids: tuple[str, ...]

    def header(self) -> str:
        """Return the value of the metadata header."""
        return f"{self.modified_ms} {' '.join(self.ids)}"

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """Return the lineage in the headers, None for an object that another program wrote."""
        modified_ms, *ids = headers.get(LINEAGE, "").split() or [""]
        return cls(int(modified_ms), tuple(ids)) if modified_ms.isdecimal() and ids else None


class Version(NamedTuple):
    """One version of an object, from the headers of a response. `ids` is empty if another program wrote
    it."""

    etag: str
    ids: tuple[str, ...]
    content_type: str
    modified_ms: int
    sha256: str | None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Return the version in the headers."""
        lineage = Lineage.of(headers)
        return cls(
            unquote_etag(headers.get("ETag", "")),
            () if lineage is None else lineage.ids,
            headers.get("Content-Type", ""),
            last_modified_ms(headers) if lineage is None else lineage.modified_ms,
            headers.get(SHA256),
        )

    @property
    def is_tombstone(self) -> bool:
        """True for a tombstone."""
        return self.content_type == TOMBSTONE_TYPE

    @property
    def is_document(self) -> bool:
        """True for a document. An object of another program is one if its content type is JSON."""
        if self.ids:
            return self.sha256 is None and not self.is_tombstone
        return self.content_type.partition(";")[0].strip().lower() == JSON_TYPE

    @property
    def parts(self) -> int:
        """The number of parts in which the object was sent; 0 if it was sent as a whole."""
        _, _, count = self.etag.partition("-")
        return int(count) if count.isdecimal() else 0

    @property
    def is_file(self) -> bool:
        """True for a file."""
        return not (self.is_document or self.is_tombstone)


class ExpectedVersion(NamedTuple):
    """The version that a conditional write replaces; an `etag` of None stands for no object. `ids` is empty
    if the lineage is unknown."""

    etag: str | None
    ids: tuple[str, ...]

    @classmethod
    def of(cls, found: Version | None) -> Self:
        """Return the version that was found, as the version that a write replaces."""
        return cls(None, (NO_WRITE_ID,)) if found is None else cls(found.etag, found.ids)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The ids of replaced versions in the lineage of a write over it."""
        return self.ids[:MAX_REPLACED]


NO_VERSION: Final = ExpectedVersion.of(None)


MAX_VERSIONS: Final = 16_384
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_OBJECT_BYTES: Final = 1024 * 1024
_OVERHEAD_BYTES: Final = 512
"""Approximate size of a cached object without its body."""


class VersionCache:
    """A cache of the versions read or written last. Every read revalidates it with S3. It has bodies, so that
    reading an unchanged object transfers no body, and lineages, which the next write names."""

    def __init__(
        self,
        max_versions: int = MAX_VERSIONS,
        max_bytes: int = MAX_BYTES,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        self._max_object_bytes = max_object_bytes
        self._objects = BoundedCache[str, StoredObject](
            max_bytes, lambda found: len(found.body) + _OVERHEAD_BYTES
        )
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


class WriteOutcome(Enum):
    """The outcome of a write whose response was lost."""

    STORED = "it is what is stored"
    REPLACED = "it was stored, and replaced since"
    NOT_STORED = "it was not stored, and never will be: another write was"
    NOT_YET = "it was not stored: what it is to replace still is"
    UNKNOWN = "it cannot be determined"


def resolve_outcome(id_: str, base: ExpectedVersion, found: Version | None) -> WriteOutcome:
    """Return the outcome of the write `id_` over `base`, given the currently stored version.

    Each version occurs once, so the write that replaced `base` has excluded every other write over it, also
    one that is still in flight. The lineage of `found` has no gaps.
    """
    if found is None:
        return WriteOutcome.NOT_YET if base.etag is None else WriteOutcome.UNKNOWN
    if id_ in found.ids:
        return WriteOutcome.STORED if found.ids[0] == id_ else WriteOutcome.REPLACED
    if found.etag == base.etag and (not base.ids or found.ids[:1] == base.ids[:1]):
        return WriteOutcome.NOT_YET
    return WriteOutcome.NOT_STORED if base.ids and base.ids[0] in found.ids else WriteOutcome.UNKNOWN


def unquote_etag(header: str) -> str:
    """Return an ETag without its quotes, and without the `W/` that some proxies add."""
    return header.removeprefix("W/").strip('"')


def last_modified_ms(headers: Mapping[str, str]) -> int:
    """Return the time of the Last-Modified header, which has whole seconds; 0 without one."""
    said = headers.get("Last-Modified")
    return int(parsedate_to_datetime(said).timestamp() * 1000) if said else 0
