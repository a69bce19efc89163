"""What tells one write of an object from every other, and who replaced whom.

S3's ETag is of the content: of two writes of the same bytes a condition cannot tell which one it meets. So
every write has an id of its own. A document carries it where no reader of JSON sees it, as white space after
its body; the object's metadata name it too, and before it the ids of the versions that it replaced. From them
the outcome of a write is decided whose answer was lost.

What a bucket's server keeps of S3's promises, as the probe at start found it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple, Self

from pysync.protocol import JSON_TYPE


@dataclass(frozen=True, slots=True)
class BucketCapabilities:
    """`url` is the bucket's. `if_none_match` and `if_match`: `If-None-Match: *` and `If-Match` of a put are
    honoured; `delete_if_match`: `If-Match` of a delete is. `quoted_etags`: etags go into conditions with
    their quotes. `skew_ms`: how far this machine's clock is ahead of the server's, to a second."""

    url: str
    if_none_match: bool
    if_match: bool
    delete_if_match: bool
    quoted_etags: bool
    skew_ms: int

    @property
    def is_conditional(self) -> bool:
        """Whether several processes may write to it."""
        return self.if_none_match and self.if_match

    @property
    def ignored_conditions(self) -> list[str]:
        """The conditions of a put that its server ignores."""
        kept = {"If-None-Match": self.if_none_match, "If-Match": self.if_match}
        return [name for name, is_kept in kept.items() if not is_kept]

    def condition(self, etag: str) -> str:
        """An etag as the value of If-Match and If-None-Match."""
        return f'"{etag}"' if self.quoted_etags else etag


LINEAGE: Final = "x-amz-meta-pysync"
"""Of every object that we write: its time in ms, its own id, the ids of what it replaced, newest first."""
SHA256: Final = "x-amz-meta-pysync-sha256"
"""Of every file that we write."""

MAX_REPLACED: Final = 15
"""Ids of replaced versions that a version names. With more, a slower answer can still be told to be ours; S3
takes 2 KB of metadata."""
NO_WRITE_ID: Final = "0"
"""Stands in a lineage for there having been no object."""

TOMBSTONE: Final = b"deleted by pysync\n"
"""The body of what reads as absent, where a server cannot delete on a condition. No document of ours is as
short."""
TOMBSTONE_TYPE: Final = "application/x-pysync-deleted"


class Lineage(NamedTuple):
    """`ids`: the write's own, then what it replaced, newest first, as far as it is known."""

    modified_ms: int
    ids: tuple[str, ...]

    def header(self) -> str:
        return f"{self.modified_ms} {' '.join(self.ids)}"

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """None for an object that others wrote."""
        modified_ms, *ids = headers.get(LINEAGE, "").split() or [""]
        return cls(int(modified_ms), tuple(ids)) if modified_ms.isdecimal() and ids else None


class Version(NamedTuple):
    """One version of an object, as an answer's headers tell it. `ids` is empty where others wrote it."""

    etag: str
    ids: tuple[str, ...]
    content_type: str
    modified_ms: int
    sha256: str | None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
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
        return self.content_type == TOMBSTONE_TYPE

    @property
    def is_document(self) -> bool:
        """What others wrote is a document where it says that it is JSON."""
        if self.ids:
            return self.sha256 is None and not self.is_tombstone
        return self.content_type.partition(";")[0].strip().lower() == JSON_TYPE

    @property
    def is_file(self) -> bool:
        return not (self.is_document or self.is_tombstone)


class ExpectedVersion(NamedTuple):
    """What a conditional write replaces: the version with `etag`, nothing where that is None. `ids` of that
    version are empty where they are not known."""

    etag: str | None
    ids: tuple[str, ...]

    @property
    def replaced(self) -> tuple[str, ...]:
        """The ids that a write over it names."""
        return self.ids[:MAX_REPLACED]


NO_VERSION: Final = ExpectedVersion(None, (NO_WRITE_ID,))


class WriteOutcome(Enum):
    """What became of a write whose answer is not known."""

    STORED = "it is what is stored"
    REPLACED = "it was stored, and replaced since"
    NOT_STORED = "it was not stored, and never will be: another write was"
    NOT_YET = "it was not stored: what it is to replace still is"
    UNKNOWN = "nobody can tell"


def resolve_outcome(id_: str, base: ExpectedVersion, found: Version | None) -> WriteOutcome:
    """What became of the write `id_` over `base`, where `found` is stored now.

    A version occurs once, so whatever replaced `base` has shut out every other write over it, also one that
    is still on its way. The lineage of `found` reaches back without a gap."""
    if found is None:
        return WriteOutcome.NOT_YET if base.etag is None else WriteOutcome.UNKNOWN
    if id_ in found.ids:
        return WriteOutcome.STORED if found.ids[0] == id_ else WriteOutcome.REPLACED
    if found.etag == base.etag and (not base.ids or found.ids[:1] == base.ids[:1]):
        return WriteOutcome.NOT_YET
    return WriteOutcome.NOT_STORED if base.ids and base.ids[0] in found.ids else WriteOutcome.UNKNOWN


def unquote_etag(header: str) -> str:
    """An ETag without its quotes, and without the `W/` that some proxies put before it."""
    return header.removeprefix("W/").strip('"')


def last_modified_ms(headers: Mapping[str, str]) -> int:
    """Of the Last-Modified header, which has whole seconds; 0 where there is none."""
    said = headers.get("Last-Modified")
    return int(parsedate_to_datetime(said).timestamp() * 1000) if said else 0
