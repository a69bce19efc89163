"""Where documents and files live: the Store protocol, and the one place that knows which stores exist."""

import builtins
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple, Protocol

from pysync.changelog import Change, ChangeLog
from pysync.clock import HybridTimestamp
from pysync.concurrency import gather_bounded
from pysync.errors import DocumentCorrupt
from pysync.model import Diagnosis
from pysync.protocol import JSON_TYPE

MAX_CONCURRENT_READS: Final = 100
"""Reads on behalf of one request that wait for a store together: all of a batch, by default."""


class StoredObject(NamedTuple):
    """A stored object. `etag` names this write and no other, `modified_ms` is its time."""

    body: bytes
    etag: str
    content_type: str
    modified_ms: int


class ObjectInfo(NamedTuple):
    """The etag of a stored object and the `size` of its body in bytes, without the body."""

    etag: str
    size: int


class NotModified:
    """The answer of `get` when the stored object still has the etag that the caller knows."""


NOT_MODIFIED: Final = NotModified()


class ByteStream(Protocol):
    """The bytes of a file's range, piece by piece. Closed by exhausting it or by `aclose()`."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def __anext__(self) -> Awaitable[bytes]: ...
    def aclose(self) -> Awaitable[None]: ...


class SendfileStream(ByteStream, Protocol):
    """The bytes of a file's range, which the kernel can also send to a socket."""

    def ensure_cached(self) -> Awaitable[None]:
        """Read what `send` sends next into memory, so that `send` does not wait. Raises StoreUnavailable."""

    def send(self, connection: int) -> int:
        """Send the next bytes to the socket of this descriptor, and return their number; 0 at the end. Raises
        BlockingIOError if the socket takes none now, OSError if it fails, StoreUnavailable if the file does
        not have them any more."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """What is known of a stored file: `sha256` is the hex digest of its whole content, `size` its length in
    bytes, `etag` names this write and no other."""

    size: int
    sha256: str
    content_type: str
    modified_ms: int
    etag: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class OpenFile(FileStat):
    """A stored file, opened. `chunks` yields the bytes of the requested range, [start, end), until the caller
    closes it. `sendfile` is `chunks` again, if the kernel can send them."""

    start: int
    end: int
    chunks: ByteStream
    sendfile: SendfileStream | None = None

    @property
    def stat(self) -> FileStat:
        """What is known of it, without the chunks."""
        return FileStat(self.size, self.sha256, self.content_type, self.modified_ms, etag=self.etag)


Pace = Callable[[int], Awaitable[None]]
"""Awaited with the number of bytes read; returns when more may be read."""


async def no_pace(size: int) -> None:
    """Read on at once."""


OnReceived = Callable[[str], Awaitable[None]]
"""Is told the sha256 of a file when all of it has come in and nobody sees it yet."""


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One object met by `walk`."""

    key: str
    etag: str
    modified_ms: int


ANY: Final = "any"
ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Etag:
    """The version that a conditional write expects to replace."""

    value: str


Precondition = Literal["any", "absent"] | Etag


class EtagMismatch(Exception):
    """A conditional write found another version than it expects."""


class ExistingFileFilter(NamedTuple):
    """The files directly under `folder` whose names are greater than `after` and end with `suffix`."""

    folder: str
    after: str
    suffix: str


class FileAlreadyExists(Exception):
    """A write found the file that another one has made: its name, and its sha256."""

    def __init__(self, name: str, sha256: str) -> None:
        super().__init__(name)
        self.name = name
        self.sha256 = sha256


DAMAGED_REASON: Final = "its bytes are not those that were stored: push it again, or copy it from a backup"
"""The reason in the error of a file that was found damaged before."""


class DamagedFile(DocumentCorrupt):
    """A file is lost, or its bytes are not those that were stored; `detail` says which. `etag` is that of the
    version it was: a write that replaces the damaged file expects it."""

    def __init__(self, detail: str, etag: str) -> None:
        super().__init__()
        self.detail = detail
        self.etag = etag


class MergeRejected(Exception):
    """Files that cannot be merged, or not now; the text says why. Nothing was done."""


def split_key(key: str) -> tuple[str, str]:
    """The key's parent (`""` at the top) and name. Raises ValueError for a key that no store takes: one with
    an empty, `.` or `..` segment, a NUL, or a lone surrogate."""
    # A segment is bad only beside a slash or an end, so most keys pass on the cheap test alone.
    if not key or key[0] in "/." or key[-1] == "/" or "//" in key or "/." in key or "\0" in key:
        segments = key.split("/")
        if "\0" in key or not {"", ".", ".."}.isdisjoint(segments):
            raise ValueError(f"not a key: {key!r}")
    if not key.isascii():
        key.encode()
    parent, _, name = key.rpartition("/")
    return parent, name


def check_precondition(expect: Precondition, current: str | None) -> None:
    """Raise `EtagMismatch` unless the etag stored now, None for nothing, is what a write expects."""
    if expect == ANY:
        return
    if current != (expect.value if isinstance(expect, Etag) else None):
        raise EtagMismatch


def clamp_range(size: int, start: int, end: int | None) -> tuple[int, int]:
    """The bytes [start, end) that `open` is asked for, of a file that has `size`."""
    begin = min(start, size) if start >= 0 else max(size + start, 0)
    return begin, max(begin, size if end is None else min(end, size))


def check_mergeable(key: str, merged: Mapping[str, str]) -> str:
    """The folder that all these keys lie in. Raises ValueError where there is none, or nothing to merge."""
    parents = {split_key(other)[0] for other in (key, *merged)}
    if len(parents) != 1 or parents == {""} or not merged or key in merged:
        raise ValueError("files are merged into a new one beside them, in one folder")
    return parents.pop()


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """A merge under way: the file at `key`, which has `sha256`, stands for those at the keys `merged`, which
    have the sha256 there."""

    key: str
    sha256: str
    merged: Mapping[str, str]


class ReadableStore(Protocol):
    """What can be read, by the verbs of `Store`: a store, or what others keep their objects in."""

    async def get(self, key: str) -> StoredObject | NotModified | None: ...
    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None: ...
    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]: ...
    def walk(self, prefix: str) -> AsyncIterator[ListEntry]: ...
    async def close(self) -> None: ...


class Store(Protocol):
    """Objects under keys: UTF-8, `/` between segments; `split_key` says which are valid. The same promise on
    every back end; `StoreContract` in `pysync.testing` is that promise as tests. Whatever goes wrong beside
    the named errors is `StoreUnavailable`. A reader sees the old bytes of an object or the new, never a part.

    Small objects (documents) go through `get` and `put`, big ones (files) through `open` and `write`; a key
    holds one or the other, and the last write wins between them.
    """

    is_remote: ClassVar[bool]
    """Whether `get` waits for others, as behind a network: then many are worth asking for at once."""
    cheap_put_bytes: ClassVar[int]
    """How many bytes a `put` carries at about the price of none."""

    @property
    def transactional(self) -> "TransactionalStore | None":
        """This store, if it commits changes together with the writes that they announce. None if it keeps no
        changes: a coordinator announces them then."""

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """The object at `key`, None where there is none. Never stale: a `put` that returned is seen."""

    async def get_many(self, keys: Sequence[str]) -> list[StoredObject | None]:
        """What `get` would say of each of `keys`, which are distinct, in their order; cheaper than to ask for
        each. Raises StoreUnavailable where any of them cannot be told."""

    async def info_many(self, keys: Sequence[str]) -> list[ObjectInfo | None] | None:
        """Return etag and size of the object at each of `keys`, which are distinct, in their order; None if
        there is no object. No body is read. A store in which that would cost as much as `get` returns None in
        place of the list."""

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """Write `body` and return its etag, once it would survive the loss of power.

        `expect=ABSENT` succeeds only where nothing is stored, `Etag(value)` only over that version: of two
        writers with one expectation exactly one succeeds, in any number of processes. Raises `EtagMismatch`.
        """

    async def stat(self, key: str) -> FileStat | None:
        """What is known of the file at `key`, at the price of a look. None where there is no file."""

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """The file at `key`, its chunks limited to bytes [start, end) as far as it has them; a negative
        `start` counts from its end. None where there is no file. Raises DamagedFile, as `stat` does, for one
        that is lost or that `verify` found damaged."""

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """Read the whole file at `key` and compare its bytes with its sha256; None if there is no file.

        Raises DamagedFile where they differ, or the file is lost. From then on `stat` and `open` raise it,
        too, until the file is written anew or a later `verify` finds it right."""

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
    ) -> str:
        """Store the chunks as one file, durably, and return its sha256. A failing iterable leaves no trace,
        and neither does one whose sha256 `received` refuses, by raising. Raises `KeyConflict` where the key
        would lie below or above another file's on a store of folders."""

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """`write` at `key`, where nothing is, and remove what it stands for: the files at the keys `merged`,
        which lie in the folder of `key` (not at the top) and have these sha256. Who looks at that folder sees
        either those files or the one: where a store can, they change in one moment; else both are there while
        they are removed. What a crash leaves half done `recover_merges` finishes.

        Raises EtagMismatch where something is at `key`, or one of `merged` is not or not any more what it is
        said to be, and MergeRejected where the folder or the store does not allow it; nothing is done
        then."""

    async def pending_merges(self) -> "builtins.list[MergeRecord]":
        """Return the merges under way, as of one moment during the call, of which a listing may show both the
        merged files and the new one."""

    async def recover_merges(self) -> None:
        """Finish the merges, or undo them, of which a crash of this or another process left a part."""

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """Names of objects and files directly under `prefix` (no trailing slash; `""`: the top), in
        code-point order, at most `limit`, greater than `after`. Deeper keys neither appear nor cost."""

    def walk(self, prefix: str) -> AsyncIterator[ListEntry]:
        """Every object and file whose key is below `prefix` (no trailing slash; `""`: all), at any depth, in
        no promised order. What is written meanwhile may or may not be met."""

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """Remove what is at `key`; nothing there is fine. Raises `EtagMismatch` as `put` does, except that an
        absent object satisfies every expectation."""

    async def probe(self) -> None:
        """Return when the store can be read and written, else raise `StoreUnavailable`."""

    async def diagnose(self) -> Diagnosis:
        """Return what is known of the store's server. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Finish the writes under way and let go of everything. The store is not used afterwards."""


class TransactionalStore(Store, Protocol):
    """A `Store` that keeps a change log beside its objects. A write and its changes are committed together:
    both, or neither."""

    @property
    def change_log(self) -> ChangeLog: ...

    async def put(
        self,
        key: str,
        body: bytes,
        content_type: str = JSON_TYPE,
        expect: Precondition = ANY,
        changes: Sequence[Change] = (),
    ) -> str:
        """`Store.put`, with these changes."""

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
        changes_of: Callable[[str], Sequence[Change]] | None = None,
    ) -> str:
        """`Store.write`, with the changes of the file that has this sha256."""

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        unless: ExistingFileFilter | None = None,
    ) -> tuple[HybridTimestamp, str]:
        """`write` at a key that is made of a timestamp: later than that of every `write_ordered` before, in
        any process, whatever the clock says. A listing shows the files in the order of their timestamps: none
        appears after a later one. Both functions are called in another thread. Returns timestamp and sha256.

        Raises FileAlreadyExists if one of `unless` exists: of several writes with the same filter, in any
        processes, one succeeds."""


async def get_many_concurrently(
    store: ReadableStore, keys: Sequence[str], concurrency: int = MAX_CONCURRENT_READS
) -> list[StoredObject | None]:
    """`Store.get_many` for a store that has nothing better: `concurrency` of its gets wait together."""

    async def get(key: str) -> StoredObject | None:
        found = await store.get(key)
        return None if isinstance(found, NotModified) else found

    return await gather_bounded(concurrency, keys, get)
