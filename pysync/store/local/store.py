"""The local store: documents in one SQLite database, files as plain files beside it.

    DIR/pysync.db     documents, a row for each file, and the change log; the rows decide what exists
    DIR/files/<key>   the files, at their own key path, so that `files/**/*.parquet` can be queried

Any number of processes may share DIR. Reads run on the event loop's thread: a lookup takes some microseconds,
and handing it to a thread takes ten times as long. Writes go through `GroupCommit`.
"""

import asyncio
import builtins
import itertools
import logging
import os
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from math import inf
from pathlib import Path
from typing import ClassVar, Final, Self

import orjson

from pysync._core import split_key
from pysync.changelog import Change, Retention
from pysync.clock import HybridTimestamp, wall_clock_ms
from pysync.errors import StoreUnavailable
from pysync.model import Diagnosis, Observe, QuotaLimits, unobserved
from pysync.protocol import JSON_TYPE
from pysync.sqlite.changelog import SqliteChangeLog
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.sqlite.database_file import (
    Database,
    make_private_dir,
    open_database,
    purge_database,
    reason_of,
)
from pysync.store.ledger import Charge, ChargeOf
from pysync.store.local import capture, tables
from pysync.store.local.claims import MAX_LIVE, LocalClaims
from pysync.store.local.disk import FileTree
from pysync.store.local.feed import LocalFeed
from pysync.store.local.files import LocalFiles
from pysync.store.local.ledger import LocalLedger, prune_counters, stop_counting
from pysync.store.local.leftovers import end_old_merges, remove_unnamed_files
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.local.tables import SCHEMA
from pysync.store.local.time_index import LocalTimeIndex
from pysync.store.types import (
    ANY,
    NOT_MODIFIED,
    Claim,
    EtagMismatch,
    FileStat,
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
    check_mergeable,
    no_pace,
)

log = logging.getLogger(__name__)

_GET = """
    SELECT etag, content_type, modified_ms, sha256 IS NULL, CASE WHEN etag = ? THEN NULL ELSE body END
    FROM object WHERE parent = ? AND name = ?"""
_GET_MANY = "SELECT object.parent, object.name, etag, content_type, modified_ms, body"
# The length of a blob is in its row's header, so overflow pages are not read.
_INFO_MANY = "SELECT object.parent, object.name, etag, length(body)"
_AT_KEY = " FROM object WHERE parent = ? AND name = ? AND sha256 IS NULL"
_IN_FOLDER = """
    FROM object WHERE parent = ? AND name IN (SELECT value FROM json_each(?)) AND sha256 IS NULL"""
_ANYWHERE = """
    FROM json_each(?) AS pair CROSS JOIN object ON
        object.parent = json_extract(pair.value, '$[0]') AND object.name = json_extract(pair.value, '$[1]')
    WHERE sha256 IS NULL"""
# One row, because each row of a result costs as much as all the rest of a name.
LIST: Final = """
    SELECT json_group_array(name) FROM (
        SELECT name FROM object WHERE parent = ? AND name > ? ORDER BY name LIMIT ?)"""
_WALK = """
    SELECT parent, name, etag, modified_ms, CASE WHEN sha256 IS NULL THEN length(body) ELSE size END
    FROM object WHERE (parent, name) > (?, ?) AND parent < ? ORDER BY parent, name LIMIT 256"""

CACHE_BYTES: Final = 4 * 1024 * 1024
CACHE_OBJECT_BYTES: Final = 64 * 1024
"""The largest document that is cached."""
CACHE_ETAG_BYTES: Final = 256
"""The cost of a cached etag."""

_ABOVE_ALL_TEXT: Final = b""
"""Greater than every text, because SQLite sorts blobs after texts."""


class LocalStore:
    """A `Store` in a folder. Create one with `open_folder`."""

    counting: ClassVar[None] = None
    is_remote: ClassVar[bool] = False
    # A row that fits into one page of 4096 bytes needs one page write.
    cheap_put_bytes: ClassVar[int] = 3_880
    added_bytes: ClassVar[int] = 0

    def __init__(
        self,
        database: Database,
        tree: FileTree,
        now_ms: Callable[[], int],
        retention: Retention,
        max_claims: int,
        observe: Observe,
    ) -> None:
        self._name = os.urandom(8).hex()
        self._numbers = itertools.count()
        self._now_ms = now_ms
        self._database = database.file
        self._reader = SnapshotReader(database, StoreUnavailable)
        self._read, self._version = self._reader.rows, self._reader.version
        # The documents that were read lately, or only their etags if the reader had them already. Small and
        # frequently read ones are found without a query, until any process commits.
        self._cache: dict[str, StoredObject | str] = {}
        self._cache_version = -1
        self._cache_bytes = 0
        self._tree = tree
        self._renames = RenameJournal(tree)
        self._writer = GroupCommit(database, StoreUnavailable, self._renames, observe)
        self._files = LocalFiles(tree, self._renames, self._writer, self._reader, self._new_etag, now_ms)
        self.change_log = SqliteChangeLog(self._reader, self._writer, now_ms, retention)
        self.feed = LocalFeed(self._reader, self._writer)
        self.time_index = LocalTimeIndex(self._reader, self._writer)
        self.claims = LocalClaims(self._reader, self._writer, now_ms, max_claims)
        self.ledger: LocalLedger | None = None

    @property
    def transactional(self) -> Self:
        """The store itself: it commits changes together with writes."""
        return self

    @classmethod
    async def open_folder(
        cls,
        folder: str | Path,
        now_ms: Callable[[], int] = wall_clock_ms,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        max_claims: int = MAX_LIVE,
        observe: Observe = unobserved,
    ) -> Self:
        """Open the store in `folder`, and create it if it is missing. Raises ValueError if a newer version
        wrote it or its database is missing, StoreUnavailable if it cannot be used."""
        try:
            database, tree = await asyncio.to_thread(_prepare, Path(folder))
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(
                f"cannot open the store in {folder}: {reason_of(error, folder)}"
            ) from error
        store = cls(database, tree, now_ms, retention, max_claims, observe)
        try:
            await end_old_merges(tree, store._writer, store._reader)
            await store._files.recover()
        except BaseException:
            await store.close()
            raise
        return store

    async def track_usage(self, limits: QuotaLimits, charge_of: ChargeOf) -> None:
        """See `TransactionalStore.track_usage`."""
        self.ledger = await LocalLedger.open(self._reader, self._writer, limits, charge_of)

    async def stop_tracking_usage(self) -> None:
        """See `TransactionalStore.stop_tracking_usage`."""
        if self._read("SELECT 1 FROM usage_state WHERE state != 0"):
            await self._writer.submit(stop_counting)

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        """See `Store.get`."""
        cached = self._cached().get(key)
        if type(cached) is StoredObject:
            return NOT_MODIFIED if cached.etag == if_none_match else cached
        if cached is not None and cached == if_none_match:
            return NOT_MODIFIED
        parent, name = split_key(key)
        rows = self._read(_GET, if_none_match, parent, name)
        if not rows:
            return None
        etag, content_type, modified_ms, is_document, body = rows[0]
        if not is_document:
            return None
        if etag == if_none_match:
            self._put_cached(key, etag, CACHE_ETAG_BYTES)
            return NOT_MODIFIED
        found = StoredObject(body, etag, content_type, modified_ms)
        self._put_cached(key, found, len(body))
        return found

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        """See `Store.get_many`."""
        cached = self._cached()
        found: dict[str, StoredObject | None] = {
            key: known for key in keys if type(known := cached.get(key)) is StoredObject
        }
        if len(found) == len(keys):
            return found
        unread = [key for key in keys if key not in found]
        size = 0
        rows = self._reader.iterate(*_select(_GET_MANY, unread)) if unread else ()
        for parent, name, etag, content_type, modified_ms, body in rows:
            key = f"{parent}/{name}" if parent else name
            found[key] = object_ = StoredObject(body, etag, content_type, modified_ms)
            self._put_cached(key, object_, len(body))
            size += len(body)
            if size > max_bytes:
                return found
        found.update((key, None) for key in unread if key not in found)
        return found

    async def info_many(self, keys: Sequence[str]) -> dict[str, StoredObject | ObjectInfo | None] | None:
        """See `Store.info_many`."""
        cached = self._cached()
        found: dict[str, StoredObject | ObjectInfo | None] = {
            key: known for key in keys if type(known := cached.get(key)) is StoredObject
        }
        unread = [key for key in keys if key not in found]
        for parent, name, etag, size in self._read(*_select(_INFO_MANY, unread)) if unread else ():
            found[f"{parent}/{name}" if parent else name] = ObjectInfo(etag, size)
        found.update((key, None) for key in unread if key not in found)
        return found

    def _cached(self) -> dict[str, StoredObject | str]:
        """Return the cache, which is empty if a process has committed since it was filled."""
        version = self._version()
        if version != self._cache_version:
            self._cache, self._cache_version, self._cache_bytes = {}, version, 0
        return self._cache

    def _put_cached(self, key: str, found: StoredObject | str, size: int) -> None:
        """Cache what was read at the version of the last `_cached`."""
        if size > CACHE_OBJECT_BYTES:
            return
        if self._cache_bytes + size > CACHE_BYTES:
            self._cache, self._cache_bytes = {}, 0
        self._cache[key] = found
        self._cache_bytes += size

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        """See `Store.put`."""
        return await self.commit(Write(key, body, expect, content_type=content_type))

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        await self.commit(Write(key, None, expect))

    async def commit(self, write: Write) -> str:
        """See `TransactionalStore.commit`."""
        etag = self._new_etag()
        rows = self.change_log.rows_of(write.changes)
        counted = None
        if (ledger := self.ledger) is not None:
            counted = ledger.owners, ledger.charge(write.key, write.charge)
        size = 0 if write.body is None else len(write.body)
        for each in write.also:
            size += len(each.body)
        for segment in write.segments:
            size += len(segment.body)
        step: Callable[..., tuple[bool, int]] = tables.delete if write.body is None else tables.put
        if write.claims:
            step = self.claims.bind(step, write.claims)
        try:
            was_file, last = await self._writer.submit(
                step, self._renames, write, etag, rows, counted, size=size
            )
        except EtagMismatch as error:
            error.__traceback__ = None  # frames of the writer, which have the body and lead to the error
            raise
        self.change_log.notify(last)
        if was_file:
            await self._files.unlink(write.key)
        return "" if write.body is None else etag

    async def delete_all(self, keys: Sequence[str]) -> None:
        """See `TransactionalStore.delete_all`."""
        unannounced = self.change_log.rows_of(())
        for key in await self._writer.submit(tables.delete_all, self._renames, keys, unannounced):
            await self._files.unlink(key)

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        """See `Store.open`."""
        return await self._files.open(key, start, end)

    async def stat(self, key: str) -> FileStat | None:
        """See `Store.stat`."""
        return await self._files.stat(key)

    async def verify(self, key: str, pace: Pace = no_pace) -> FileStat | None:
        """See `Store.verify`."""
        return await self._files.verify(key, pace)

    async def adopt(self, key: str) -> str:
        """See `TransactionalStore.adopt`."""
        return await self._files.adopt(key)

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
        """See `Store.write`."""
        self._files.check_key(key)
        async with self._files.stage(chunks) as staged:
            if received is not None:
                await received(staged.sha256)
            rows = self.change_log.rows_of(() if changes_of is None else changes_of(staged.sha256))
            owner_of = None if self.ledger is None else self.ledger.owner_of_file(charge)
            insert = self._insert(None if claim_of is None else claim_of(staged.sha256))
            last = await self._files.commit(staged, insert, content_type, key, rows, owner_of)
        self.change_log.notify(last)
        return staged.sha256

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        charge: Charge | None = None,
        claim_of: Callable[[HybridTimestamp, str], Claim] | None = None,
    ) -> tuple[HybridTimestamp, str]:
        """See `TransactionalStore.write_ordered`."""
        async with self._files.stage(chunks) as staged:
            timestamp, last = await self._files.commit(
                staged,
                tables.insert_next_file,
                content_type,
                key_of,
                self._now_ms,
                lambda timestamp: self.change_log.rows_of(changes_of(timestamp, staged.sha256)),
                lambda timestamp: self._insert(
                    None if claim_of is None else claim_of(timestamp, staged.sha256)
                ),
                None if self.ledger is None else self.ledger.owner_of_file(charge),
            )
        self.change_log.notify(last)
        return timestamp, staged.sha256

    def _insert(self, claim: Claim | None) -> Callable[..., int]:
        return tables.insert_file if claim is None else self.claims.bind(tables.insert_file, (claim,))

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """See `Store.merge`."""
        check_mergeable(key, merged)
        self._files.check_key(key)
        async with self._files.stage(chunks) as staged:
            await self._files.commit(staged, tables.merge_files, content_type, key, merged)
        await self.recover_merges()
        return staged.sha256

    async def pending_merges(self) -> builtins.list[MergeRecord]:
        """See `Store.pending_merges`."""
        return []

    async def recover_merges(self) -> None:
        """See `Store.recover_merges`: removes the files that were merged."""
        await self._writer.submit(self._renames.recover)

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `Store.list`."""
        if prefix:
            split_key(prefix)
        ((names,),) = self._read(LIST, prefix, after or "", limit)
        found: list[str] = orjson.loads(names)
        return found

    async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
        """See `Store.walk`."""
        if prefix:
            split_key(prefix)
            # Sorted by parent, `prefix` itself and the keys below it are two ranges, with "p-x" between them.
            ranges: list[tuple[str, str | bytes]] = [(prefix, prefix + "\0"), (prefix + "/", prefix + "0")]
        else:
            ranges = [("", _ABOVE_ALL_TEXT)]
        first = ("", "") if after is None else split_key(after)
        for start, end in ranges:
            parent, name = max((start, ""), first)
            while rows := self._read(_WALK, parent, name, end):
                for parent, name, etag, modified_ms, size in rows:
                    yield ListEntry(f"{parent}/{name}" if parent else name, etag, modified_ms, size)
                await asyncio.sleep(0)

    async def remove_leftovers(self, before_ms: int, *, dry_run: bool = False) -> builtins.list[Leftover]:
        """See `Store.remove_leftovers`."""
        unnamed = await remove_unnamed_files(
            self._tree, self._writer, self._reader, before_ms, dry_run=dry_run
        )
        return [*unnamed, *await self._files.remove_leftovers(before_ms, dry_run=dry_run)]

    async def purge_deleted(self) -> None:
        """See `Store.purge_deleted`."""
        await self._files.purge_deleted()
        await self._writer.submit(capture.forget_writes)
        await self._writer.submit(prune_counters)
        try:
            await purge_database(self._database.path)
        except (sqlite3.Error, TimeoutError) as error:
            raise StoreUnavailable(f"cannot write {self._database.path} anew: {error}") from error

    async def probe(self) -> None:
        """See `Store.probe`."""
        if (fault := self._database.fault) is not None:
            raise StoreUnavailable(fault)
        await self._writer.submit(tables.probe, self._new_etag())
        if not self._read("SELECT 1 FROM probe WHERE id = 1"):
            raise StoreUnavailable()
        await self.list("", None, 1)
        await self.change_log.last_id()
        await self._files.probe()

    async def diagnose(self) -> Diagnosis:
        """See `Store.diagnose`."""
        return Diagnosis()

    async def close(self) -> None:
        """See `Store.close`."""
        await self._writer.close()
        self._reader.close()

    def _new_etag(self) -> str:
        """Return a unique etag: a random name of this store, and a number. The name belongs to
        this object and not to the module, because forked processes would share that."""
        return f"{self._name}{next(self._numbers):x}"


def _select(columns: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the query for these columns of the documents at `keys`, and its parameters."""
    pairs = [split_key(key) for key in keys]
    parent, name = pairs[0]
    if len(pairs) == 1:
        return columns + _AT_KEY, parent, name
    if all(other == parent for other, _ in pairs):
        return columns + _IN_FOLDER, parent, orjson.dumps([name for _, name in pairs]).decode()
    return columns + _ANYWHERE, orjson.dumps(pairs).decode()


def _prepare(folder: Path) -> tuple[Database, FileTree]:
    folder = folder.absolute()
    make_private_dir(folder, may_be_link=True)
    files = FileTree(folder / "files")
    # The database is created before any of these. Its lock exists earlier, but is empty until then.
    traces = [*files.entries(), folder / "pysync.db-wal"]
    lock = folder / "pysync.lock"
    is_marked = lock.exists() and lock.stat().st_size > 0
    if is_marked:
        traces.append(lock)
    with ExitStack() as opened:
        database = opened.enter_context(closing(open_database(folder / "pysync.db", SCHEMA, "FULL", traces)))
        if not is_marked:
            with suppress(OSError):  # a full disk is still readable
                lock.write_bytes(b"pysync.db was made here\n")
        files.create()
        opened.pop_all()
    return database, files
