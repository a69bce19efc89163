"""The `Store` protocol, what stores may add to it, and helpers that its implementations share."""

import builtins
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Mapping, Sequence
from math import inf
from typing import Final, Protocol

from pysync.changelog import Change, ChangeLog
from pysync.clock import HybridTimestamp
from pysync.concurrency import gather_bounded
from pysync.feed import Feed
from pysync.model import Diagnosis, QuotaLimits
from pysync.protocol import JSON_TYPE
from pysync.store.ledger import Charge, ChargeOf, CountableLedger, Ledger
from pysync.store.types import (
    ANY,
    Claim,
    FileStat,
    KeyShape,
    Leftover,
    ListEntry,
    MergeRecord,
    NotModified,
    ObjectInfo,
    OnReceived,
    OpenFile,
    Pace,
    Precondition,
    StoredObject,
    Write,
    no_pace,
)

MAX_CONCURRENT_READS: Final = 100
"""Maximum number of concurrent reads for one request. By default it covers all reads of a batch."""


class TimeIndex(Protocol):
    """An index of objects by the time of their last write, so that old ones are found without a walk."""

    async def prepare(self, shapes: Collection[KeyShape]) -> None:
        """Index the objects whose keys have one of these shapes, from now on, in every process. Reads all
        objects once if a shape is new. Raises StoreUnavailable."""

    def written_before(self, shape: KeyShape, before_ms: int, after_ms: int = 0) -> AsyncIterator[ListEntry]:
        """Yield the objects of a shape, which is prepared, that were last written before this time and at or
        after `after_ms`, oldest first. Reads no others. Raises StoreUnavailable."""


class ReadableStore(Protocol):
    """The reading methods of `Store`: implemented by stores, and by other sources that objects can be copied
    from."""

    async def get(self, key: str) -> StoredObject | NotModified | None:
        """See `Store.get`."""

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """Open the file at `key`, or return None if there is no file. Its chunks are limited to the bytes
        [start, end) that the file has; a negative `start` counts from the end. Raises DamagedFile if the file
        is lost, or is known not to be what was written: a folder finds all damage of short files here, and of
        long ones what changes size, time or inode; a bucket what `verify` found."""

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """Return the names of objects and files directly under `prefix` (no trailing slash; `""`: the top),
        in code-point order: at most `limit`, all greater than `after`. Deeper keys neither appear nor cost.
        """

    def walk(self, prefix: str) -> AsyncIterator[ListEntry]:
        """Yield every object and file below `prefix` (no trailing slash; `""`: all), at any depth, in no
        particular order. Concurrent writes may or may not appear."""

    async def close(self) -> None:
        """Finish pending writes and release all resources. The store must not be used afterwards."""


class Store(ReadableStore, Protocol):
    """Objects stored under keys: UTF-8 with `/` between segments; `split_key` rejects invalid keys. Every
    back end keeps the same contract, and `StoreContract` in `tests/contracts` tests it. Every failure other
    than the named errors is `StoreUnavailable`. A reader sees either the old or the new bytes of an object,
    never a part.

    Small objects (documents) use `get` and `put`, large ones (files) `open` and `write`. A key contains one
    or the other, and the last write wins between them.
    """

    @property
    def is_remote(self) -> bool:
        """True if `get` waits for another machine, so that concurrent reads pay off."""

    @property
    def cheap_put_bytes(self) -> int:
        """Number of body bytes up to which a `put` costs about as much as an empty one."""

    @property
    def added_bytes(self) -> int:
        """Bytes that `put` stores besides each body, and that `walk` includes in sizes."""

    @property
    def transactional(self) -> "TransactionalStore | None":
        """The store itself, if it commits changes together with the writes that they announce. None if it
        keeps no changes; a coordinator then announces them."""

    @property
    def counting(self) -> "CountingStore | None":
        """The store itself, if it counts what is stored and is not transactional."""

    @property
    def time_index(self) -> TimeIndex | None:
        """The index by time of this store; None if old objects are found only by a walk."""

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """Return the object at `key`, or None if there is none. Never stale: it sees every `put` that has
        returned."""

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        """Return the result of `get` for each of `keys`, which must be distinct. Cheaper than separate gets.
        Stops reading once the bodies exceed `max_bytes`: the result then lacks some of the keys, but never
        all. Raises StoreUnavailable if any of them fails."""

    async def info_many(self, keys: Sequence[str]) -> dict[str, StoredObject | ObjectInfo | None] | None:
        """Return etag and size of the object at each of `keys`, which must be distinct; the object itself if
        it is in memory, and None for a key without an object. Reads no bodies. A store for which this would
        cost as much as `get` returns None instead of the dictionary."""

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """Write `body` and return its etag, once the write would survive a power failure.

        `expect=ABSENT` succeeds only if nothing is stored, `Etag(value)` only if that version is stored. Of
        two writers with one expectation exactly one succeeds, in any number of processes. Raises
        `EtagMismatch`.
        """

    def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """Yield the entries of `ReadableStore.walk` in an order of the store's own. With `after`, a key below
        `prefix`, the walk begins behind that key, whether or not it still exists."""

    async def stat(self, key: str) -> FileStat | None:
        """Return the metadata of the file at `key`, or None if there is no file. Does not read its content,
        unless something may have changed it. Raises DamagedFile if it is lost, or known to be damaged."""

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """Read the whole file at `key` and compare its bytes with its sha256. Returns None if there is no
        file.

        Raises DamagedFile if they differ or the file is lost. `stat` and `open` then raise it too, until the
        file is written again or is found intact. `walk` and the etag of the error still say what was written.
        """

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
    ) -> str:
        """Store the chunks as one file, durably, and return its sha256. Nothing is left if the iterable
        fails, or if `received` rejects the sha256 by raising. Raises `KeyConflict` if a file already lies
        above or below the key, in a store of folders."""

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """Write a file at `key`, where nothing may exist, and remove the files that it replaces: those in
        `merged`, which maps keys to the expected sha256. They must lie in the folder of `key`, which is not
        the top level. In a transactional store the change is atomic: `list` and `open` show either the old
        files or the new one. In others they may show both during the removal. `recover_merges` finishes a
        merge that a crash interrupted.

        Raises EtagMismatch if `key` exists, or if a file of `merged` is missing, has another sha256 or is
        just being written, MergeRejected if another merge includes one of them, and KeyConflict as `write`
        does. Nothing is changed then."""

    async def pending_merges(self) -> "builtins.list[MergeRecord]":
        """Return the pending merges as of one moment during the call. A listing may show both the old files
        and the new file of each."""

    async def recover_merges(self) -> None:
        """Finish or undo the merges that a crash of this or another process interrupted. A merge that was
        cancelled may need it too."""

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """Remove the object or file at `key`, if there is one. Raises `EtagMismatch` as `put` does: of
        several deletes and puts that expect one version exactly one succeeds."""

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool = False) -> "builtins.list[Leftover]":
        """Remove what interrupted writes left outside of all keys and nobody has written to since
        `before_ms`: temporary files, parts of uploads, journals of merges; and files that no row names.
        Returns what was removed or, with `dry_run`, what would be. Raises StoreUnavailable."""

    async def purge_deleted(self) -> None:
        """Remove what deleted data left in the files of the store: free space of a database, logs, uploads
        of dead processes. Objects that other processes write meanwhile are kept. Raises StoreUnavailable if
        something may be left."""

    async def probe(self) -> None:
        """Return if the store can be read and written, else raise `StoreUnavailable`."""

    async def diagnose(self) -> Diagnosis:
        """Return the findings about the store's server. Raises StoreUnavailable."""


class CountingStore(Store, Protocol):
    """A `Store` without a change log that counts what is stored for whom."""

    @property
    def ledger(self) -> Ledger:
        """The usage of subjects."""

    async def check_room(self, write: Write) -> None:
        """Raise QuotaExceeded if there is no room for an object together with its segments, which are stored
        before it, and its charge is checked. Raises EtagMismatch first if its precondition fails."""

    async def put(
        self,
        key: str,
        body: bytes,
        content_type: str = JSON_TYPE,
        expect: Precondition = ANY,
        charge: Charge | None = None,
    ) -> str:
        """Put an object as `Store.put` does. It counts for the account of its key, or that of the log that
        `charge` names, whatever the account of `charge`. Raises QuotaExceeded if `charge` is checked. Without
        a charge it is not checked."""

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
        charge: Charge | None = None,
    ) -> str:
        """Write a file as `Store.write` does. `charge` is that of `put`."""


def ledger_of(store: Store) -> Ledger | None:
    """Return the ledger of a store; None if it does not count what is stored."""
    counting = store.transactional or store.counting
    return None if counting is None else counting.ledger


class ClaimTable(Protocol):
    """The claims that were committed with writes. Raises the errors of the store."""

    def find(self, claim: Claim) -> str | None:
        """Return the outcome of a request that was carried out, None if it was not. Raises
        IdempotencyKeyReused if another request has its name."""

    async def forget(self, selects: Callable[[str], bool]) -> int:
        """Delete the claims whose outcome this function selects, and return their number."""


class TransactionalStore(Store, Protocol):
    """A `Store` that keeps a change log beside its objects. A write, its changes and its claims are committed
    atomically."""

    @property
    def change_log(self) -> ChangeLog:
        """The change log of this store."""

    @property
    def feed(self) -> Feed:
        """The latest changes of the objects of this store."""

    @property
    def claims(self) -> ClaimTable:
        """The claims of this store."""

    @property
    def ledger(self) -> CountableLedger | None:
        """The usage of subjects; None unless usage is tracked."""

    async def track_usage(self, limits: QuotaLimits, charge_of: ChargeOf) -> None:
        """Track usage from now on, in every process, and enforce these limits in this one. Call it before the
        first write."""

    async def stop_tracking_usage(self) -> None:
        """Stop tracking usage, in every process."""

    async def commit(self, write: Write) -> str:
        """Carry out a write or a removal, as `Store.put` and `Store.delete` do, and commit its parts with it.
        Returns the etag, `""` after a removal. A removal of nothing commits its claims alone.

        If usage is tracked, the write counts as its charge, and the objects of `also` count as bytes for the
        same account. Raises QuotaExceeded; a removal is never rejected. The segments count; after
        QuotaExceeded they may be stored, after EtagMismatch none is.

        Raises CarriedOut if a request of the claims was carried out before, IdempotencyKeyReused if another
        request has the name of one, and ClaimsFull. Nothing is written then, and these errors come before all
        others."""

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
        changes_of: Callable[[str], Sequence[Change]] | None = None,
        charge: Charge | None = None,
        claim_of: Callable[[str], Claim] | None = None,
    ) -> str:
        """Write a file as `Store.write` does, and commit the changes that `changes_of` returns for its
        sha256, and the claim that `claim_of` returns for it. `charge` and the claim are those of `commit`."""

    async def adopt(self, key: str) -> str:
        """Take what another program has written in place of the file at `key`, or where there was none, as a
        new version of it. No change announces it. Returns the sha256. Raises ValueError if nothing is there,
        or a document is stored at `key`, and EtagMismatch if it is a file that was written here."""

    async def delete_all(self, keys: Sequence[str]) -> None:
        """Remove the objects and files at these keys, as far as there are any, in one transaction."""

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[HybridTimestamp, str], Claim] | None = None,
    ) -> tuple[HybridTimestamp, str]:
        """Write a file at a key made from a timestamp. The timestamp is later than that of every earlier
        `write_ordered` in any process, even if the clock steps back, so a listing shows files in the order of
        their timestamps and none ever appears before an existing one. The functions are called in another
        thread. Returns the timestamp and the sha256. The claim is as those of `commit`."""


async def get_many_concurrently(
    store: ReadableStore, keys: Sequence[str], max_bytes: float = inf, concurrency: int = MAX_CONCURRENT_READS
) -> dict[str, StoredObject | None]:
    """Implement `Store.get_many` by up to `concurrency` concurrent gets."""
    found: dict[str, StoredObject | None] = {}
    size = 0

    async def get(key: str) -> None:
        nonlocal size
        if found and size > max_bytes:
            return
        object_ = await store.get(key)
        found[key] = object_ = None if isinstance(object_, NotModified) else object_
        size += 0 if object_ is None else object_.size

    await gather_bounded(concurrency, keys, get)
    return found
