"""The data types and errors of the `Store` protocol."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from pysync._core import split_key
from pysync.changelog import Change
from pysync.clock import HybridTimestamp
from pysync.errors import DocumentCorrupt, StoreUnavailable
from pysync.protocol import JSON_TYPE
from pysync.store.ledger import Charge


class StoredObject(NamedTuple):
    """A stored object. Its `etag` is unique to the write that created it; `modified_ms` is the time of that
    write."""

    body: bytes
    etag: str
    content_type: str
    modified_ms: int

    @property
    def size(self) -> int:
        """The length of the body in bytes."""
        return len(self.body)


class ObjectInfo(NamedTuple):
    """The etag of a stored object and the `size` of its body in bytes, without the body."""

    etag: str
    size: int


PAGE: Final = 1_000
"""The number of names, changes or entries that those who read all of them read at a time."""
RUN_BYTES: Final = 1024 * 1024
"""Bytes of objects that are read together, approximately: in one tick of the event loop, of a folder."""
RELIST_MS: Final = 3_600_000
"""Milliseconds from the end of a listing of everything to the next one. A bucket charges for each."""


class NotModified:
    """The result of `get` if the stored object still has the etag that the caller passed."""


NOT_MODIFIED: Final = NotModified()


class ByteStream(Protocol):
    """The bytes of a range of a file, in chunks. Iterate to the end, or call `aclose()`."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def __anext__(self) -> Awaitable[bytes]: ...
    def aclose(self) -> Awaitable[None]:
        """Stop reading and release the file."""


class SendfileStream(ByteStream, Protocol):
    """The bytes of a range of a file, which the kernel can also send to a socket."""

    def ensure_cached(self) -> Awaitable[None]:
        """Read the bytes that `send` sends next into memory, so that `send` does not block. Raises
        StoreUnavailable."""

    def send(self, connection: int) -> int:
        """Send the next bytes to the socket with this descriptor and return their number, 0 at the end.
        Raises BlockingIOError if the socket accepts no bytes now, OSError if it fails, and StoreUnavailable
        if the file has become shorter."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of a stored file: `sha256` is the hex digest of its whole content, `size` its length in bytes;
    `etag` is unique to the write that created it."""

    size: int
    sha256: str
    content_type: str
    modified_ms: int
    etag: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class OpenFile(FileStat):
    """A stored file, opened. `chunks` yields the bytes of the requested range, [start, end), until the caller
    closes it. `sendfile` is the same stream if the kernel can send it."""

    start: int
    end: int
    chunks: ByteStream
    sendfile: SendfileStream | None = None

    @property
    def stat(self) -> FileStat:
        """The metadata of the file, without its chunks."""
        return FileStat(self.size, self.sha256, self.content_type, self.modified_ms, etag=self.etag)


Pace = Callable[[int], Awaitable[None]]
"""Awaited with the number of bytes just read. Returns when more may be read."""


async def no_pace(size: int) -> None:
    """Return at once, so that reading continues at full speed."""


OnReceived = Callable[[str], Awaitable[None]]
"""Called with the sha256 (hex) of a file once all of it has been received, before the file becomes
visible."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something of `size` bytes that an interrupted write left outside of all keys, or a file that no row
    names. `name` says which to the operator."""

    kind: Literal["files", "temporary_files", "uploads", "merges"]
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An object or file found by `walk`. `size` is in bytes; None if the store would have to read it."""

    key: str
    etag: str
    modified_ms: int
    size: int | None = None


ANY: Final = "any"
ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Etag:
    """The version that a conditional write expects to replace."""

    value: str


Precondition = Literal["any", "absent"] | Etag


class EtagMismatch(Exception):
    """A conditional write found another version than the expected one."""


class Claim(NamedTuple):
    """A record that is committed with a write, so that a repetition of its request writes nothing for
    `ttl_ms`. `name` is that of the request's Idempotency-Key, `request` distinguishes other requests with
    that name, and `outcome` is what a repetition gets. The claim is rejected once this `share` of the claims
    that a store keeps are taken."""

    name: bytes
    request: str
    outcome: str
    ttl_ms: int
    share: float = 1.0


class CarriedOut(Exception):
    """Some requests were carried out before, so nothing is written. `outcomes` are theirs, by the names of
    the claims."""

    def __init__(self, outcomes: Mapping[bytes, str]) -> None:
        super().__init__()
        self.outcomes = outcomes

    @property
    def outcome(self) -> str:
        """The outcome of the only request."""
        (outcome,) = self.outcomes.values()
        return outcome


class ClaimsFull(StoreUnavailable):
    """There is no room for a claim, and nothing is written."""


class NotWritten(StoreUnavailable):
    """The store cannot be reached, and nothing of the write has reached it."""


DAMAGED_REASON: Final = "its bytes are not those that were stored: push it again, or copy it from a backup"
"""The reason in the error for a file that an earlier `verify` found damaged."""


class DamagedFile(DocumentCorrupt):
    """A file is lost, or its bytes are not those that were stored; `detail` says which. `etag` is that of the
    damaged version: pass it as the precondition of the write that replaces the file."""

    def __init__(self, detail: str, etag: str) -> None:
        super().__init__()
        self.detail = detail
        self.etag = etag


class MergeRejected(Exception):
    """The files cannot be merged, or not now; the message says why. Nothing was changed."""


def check_precondition(expect: Precondition, current: str | None) -> None:
    """Raise EtagMismatch unless `current`, the stored etag or None for nothing, satisfies `expect`."""
    if expect == ANY:
        return
    if current != (expect.value if isinstance(expect, Etag) else None):
        raise EtagMismatch


def clamp_range(size: int, start: int, end: int | None) -> tuple[int, int]:
    """Return the byte range [start, end) that `Store.open` reads from a file of `size` bytes."""
    begin = min(start, size) if start >= 0 else max(size + start, 0)
    return begin, max(begin, size if end is None else min(end, size))


def check_mergeable(key: str, merged: Mapping[str, str]) -> str:
    """Return the folder that contains all these keys. Raises ValueError if they have no common folder or lie
    at the top level, if there is nothing to merge, or if `key` is itself merged."""
    parents = {split_key(other)[0] for other in (key, *merged)}
    if len(parents) != 1 or parents == {""} or not merged or key in merged:
        raise ValueError("files are merged into a new one beside them, in one folder")
    return parents.pop()


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """A pending merge: the file at `key`, with hash `sha256`, replaces the files in `merged`, which maps
    their keys to their hashes."""

    key: str
    sha256: str
    merged: Mapping[str, str]


class AppendedObject(NamedTuple):
    """A JSON object that is stored behind all others in `folder`. Its name is 24 digits, which are greater
    than those of all names there and at least `at_ms`, and `suffix`."""

    folder: str
    at_ms: int
    suffix: str
    body: bytes

    def key(self, timestamp: HybridTimestamp) -> str:
        """Return the key of this object at a timestamp. A later timestamp gives a greater key."""
        return f"{self.folder}/{timestamp.ms:016d}{timestamp.counter:08d}{self.suffix}"


KeyShape = tuple[str | None, ...]
"""The segments of keys: None for any one segment, a text for itself."""


class Segment(NamedTuple):
    """An object of JSON that another one refers to, and so has to be stored with it or before it. It counts
    for the account of that one, and quotas are checked for both together."""

    key: str
    body: bytes


class Write(NamedTuple):
    """A write of the document or log at `key`, or its removal if `body` is None, and what is committed with
    it: `changes`, objects that are appended (`also`), `segments` and `claims`. `base` is the hash of the
    version that it replaces, `""` for none. If usage is tracked, it counts as `charge`, by default as its key
    says. `version` is the hash and the time of what is written, or the time of the removal, if the caller
    knows them: the feed then need not read the body."""

    key: str
    body: bytes | None
    expect: Precondition = ANY
    changes: Sequence[Change] = ()
    base: str = ""
    charge: Charge | None = None
    also: Sequence[AppendedObject] = ()
    segments: Sequence[Segment] = ()
    claims: Sequence[Claim] = ()
    content_type: str = JSON_TYPE
    version: tuple[str, int] | None = None
