"""What a backup reads: the objects of a store, and what changes of them, as of one moment.

A folder is read as of one moment, and tells what was written since the last one. Any other store can only be
listed. `FolderSnapshotSource` and `ListedSnapshotSource` give both the same form.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

import orjson

from pysync import _core
from pysync.backup.format import PART_BYTES
from pysync.backup.snapshot import Repository
from pysync.concurrency import ATTEMPTS, closing, gather_bounded
from pysync.config import StoreConfig
from pysync.engine.append_log import log_prefix, object_key
from pysync.errors import DocumentCorrupt
from pysync.migrate.locations import check_exists
from pysync.migrate.reading import SCRUB_KEY, VERIFY_KEY, Reader, Unreadable, as_object
from pysync.migrate.verify import VerificationError, expand_node
from pysync.protocol import JSON_TYPE
from pysync.store import (
    ABSENT,
    ANY,
    RESTORE_KEY,
    RESTORED_KEY,
    STORE_KEY,
    DamagedFile,
    EtagMismatch,
    Store,
    open_store,
)
from pysync.store.local.capture import CapturedRow, FolderCapture

EXCLUDED: Final = (
    "_pysync/probe/",
    "_pysync/damaged",
    "_pysync/usage",
    STORE_KEY,
    RESTORE_KEY,
    RESTORED_KEY,
    SCRUB_KEY,
    VERIFY_KEY,
)
"""Keys of what says something about this store alone, so that a restored one must not have it."""
_CONCURRENT_READS: Final = 16
_PAGE: Final = 256

P = ParamSpec("P")
T = TypeVar("T")
Rows = AsyncGenerator[list[CapturedRow], None]


class FileParts(Protocol):
    """An open file."""

    def read(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the file, in parts of `PART_BYTES`. Raises Unreadable."""

    def close(self) -> None:
        """Release the file."""


class SnapshotSource(Protocol):
    """A store that is backed up."""

    async def follow(self) -> None:
        """Note what is written from now on, for `changes`."""

    def list_pages(self) -> AsyncIterator[list[tuple[str, str]]]:
        """Yield the keys and etags of everything that is stored, in the order of `split_key`."""

    def load(self, keys: Sequence[str]) -> Rows:
        """Yield what is stored at these keys now, as far as there is anything, in batches."""

    def changes(self, *, exclusive: bool, also: Sequence[str] = ()) -> Rows:
        """Yield what was written or removed since `follow` or the last call, and what is stored at the keys
        `also`, all as of the moment of this call. With `exclusive`, nobody can write until it ends. Raises
        PositionLost if what was written is not known."""

    async def open(self, row: CapturedRow) -> "FileParts | None":
        """Return the file of a row, None if it is lost. The caller compares its hash with that of the row. If
        it is opened while `changes` is read, it is the file of that moment unless it has been replaced
        since."""

    @property
    def change(self) -> str:
        """The newest id of the change log at the last moment; `""` if it is unknown."""

    async def trim(self) -> bool:
        """Let the store forget what was read, or a part of it. Returns False if there is more."""

    async def close(self) -> None:
        """Release all resources."""


class PositionLost(Exception):
    """It is not known any more what was written since the last moment. List everything."""


async def identify_store(config: StoreConfig, repository: Repository, *, adopts: bool = False) -> str:
    """Return the id of a store, which is made if it has none. Raises ValueError if the backup is that of
    another store, unless it `adopts` the id of that one; if there is no store, or a restore into it has not
    ended; and StoreUnavailable."""
    if config.url.startswith("memory:"):
        raise ValueError("a memory: store exists only inside its server")
    if config.url.startswith("file:"):
        check_exists(config.url)
    newest = await repository.newest("", lambda *_: None)
    adopted = newest.store_id if adopts and newest is not None else ""
    async with closing(open_store(config)) as store:  # upgrades the database of an earlier version
        while True:
            found = as_object(await store.get(STORE_KEY))
            if found is not None and not adopted:
                id_ = str(orjson.loads(found.body)["id"])
                break
            id_ = adopted or os.urandom(16).hex()
            with suppress(EtagMismatch):
                await store.put(STORE_KEY, orjson.dumps({"id": id_}), JSON_TYPE, ANY if adopted else ABSENT)
                break
    if newest is not None and newest.store_id != id_ and not await repository.newest(id_, lambda *_: None):
        raise ValueError(
            f"this is the backup of another store, {newest.store or newest.store_id}: name another place, or "
            "continue it with `pysync backup --adopt` if this store is a restored copy of that one"
        )
    return id_


async def open_snapshot_source(config: StoreConfig, now_ms: Callable[[], int]) -> SnapshotSource:
    """Open the store that is to be backed up. Raises ValueError and StoreUnavailable."""
    kind, _, folder = config.url.partition(":")
    if kind == "file":
        return FolderSnapshotSource(await asyncio.to_thread(FolderCapture, Path(folder), now_ms))
    return ListedSnapshotSource(await open_store(config))


class FolderSnapshotSource:
    """A store in a folder. Between `changes` and its end the files that it names are held open.

    One thread reads it, so what a cancelled call has begun ends before the next one: to close a connection to
    SQLite while another thread uses it ends the process.
    """

    def __init__(self, capture: FolderCapture) -> None:
        self._capture = capture
        self._thread = ThreadPoolExecutor(1, "capture")
        self.change = ""

    async def follow(self) -> None:
        """See `SnapshotSource.follow`."""
        await self._run(self._capture.follow)

    async def list_pages(self) -> AsyncIterator[list[tuple[str, str]]]:
        """See `SnapshotSource.list_pages`."""
        after = ""
        while page := await self._run(self._capture.list_page, after):
            yield page
            after = page[-1][0]

    async def load(self, keys: Sequence[str]) -> Rows:
        """See `SnapshotSource.load`."""
        await self._run(self._capture.load, keys)
        while batch := await self._run(self._capture.next_batch):
            yield batch

    async def changes(self, *, exclusive: bool, also: Sequence[str] = ()) -> Rows:
        """See `SnapshotSource.changes`."""
        is_done = False
        try:
            if not await self._run(self._begin, exclusive):
                raise PositionLost
            while batch := await self._run(self._capture.next_batch):
                yield batch
            if also:
                async for batch in self.load(also):
                    yield batch
            is_done = True
        finally:
            await self._run(self._capture.end, done=is_done)

    def _begin(self, exclusive: bool) -> bool:
        if not self._capture.begin(exclusive=exclusive):
            return False
        self.change = self._capture.change_position()
        return True

    async def trim(self) -> bool:
        """See `SnapshotSource.trim`."""
        return await self._run(self._capture.trim)

    async def open(self, row: CapturedRow) -> "FileParts | None":
        """See `SnapshotSource.open`."""
        fd = await self._run(self._capture.open_file, row.key)
        return None if fd is None else _LocalFile(fd)

    async def close(self) -> None:
        """See `SnapshotSource.close`."""
        try:
            await self._run(self._capture.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **options))


class _LocalFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def read(self) -> AsyncGenerator[bytes, None]:
        at = 0
        try:
            while chunk := await asyncio.to_thread(os.pread, self._fd, PART_BYTES, at):
                yield chunk
                at += len(chunk)
        except OSError as error:
            raise Unreadable(str(error)) from error

    def close(self) -> None:
        os.close(self._fd)


class ListedSnapshotSource:
    """A store that can only be listed. Its snapshot has everything that was written before the moment, and
    may have some of what is written while it is made. A log is as of one moment: its head is read again if
    something that it names has gone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = Reader(store)
        self._etags: dict[str, str] = {}
        self._heads: dict[str, str | None] = {}
        """The keys and etags of logs that were read since the last moment."""
        self._leaving: set[str] = set()
        self.change = ""

    async def follow(self) -> None:
        """See `SnapshotSource.follow`."""
        self._etags, self._heads, self._leaving = {}, {}, set()

    async def list_pages(self) -> AsyncIterator[list[tuple[str, str]]]:
        """See `SnapshotSource.list_pages`."""
        listed = sorted(await self._list(), key=lambda pair: _core.split_key(pair[0]))
        self._etags = dict(listed)
        for at in range(0, len(listed), _PAGE):
            yield listed[at : at + _PAGE]

    async def load(self, keys: Sequence[str]) -> Rows:
        """See `SnapshotSource.load`."""
        for at in range(0, len(keys), _PAGE):
            found = await gather_bounded(_CONCURRENT_READS, keys[at : at + _PAGE], self._load)
            rows = [row for row in found if row is not None]
            self._heads |= {row.key: row.etag for row in rows if is_head(row)}
            yield rows

    async def changes(self, *, exclusive: bool, also: Sequence[str] = ()) -> Rows:
        """See `SnapshotSource.changes`."""
        before, self._etags = self._etags, dict(await self._list())
        gone = before.keys() - self._etags.keys()
        # A listing is of no one moment, and may show the head of before. The next one shows that of after.
        leaving = {key for key in gone if key.startswith(log_prefix(""))}
        yield [removed_row(key) for key in sorted((gone - leaving) | (self._leaving - self._etags.keys()))]
        self._leaving = leaving
        changed = [key for key, etag in self._etags.items() if before.get(key) != etag]
        async for batch in self.load([*{*changed, *also}]):
            yield batch
        heads, self._heads = self._heads, {}
        for key, etag in sorted(heads.items()):
            async for row in self._complete(key):
                if row.key != key or row.etag != etag or row.why:
                    yield [row]

    async def open(self, row: CapturedRow) -> FileParts | None:
        """See `SnapshotSource.open`."""
        return _StoredFile(self._reader, row.key)

    async def trim(self) -> bool:
        """See `SnapshotSource.trim`."""
        return True

    async def close(self) -> None:
        """See `SnapshotSource.close`."""
        await self._store.close()

    async def _list(self) -> list[tuple[str, str]]:
        return [
            (entry.key, entry.etag)
            async for entry in self._store.walk("")
            if not entry.key.startswith(EXCLUDED)
        ]

    async def _load(self, key: str) -> CapturedRow | None:
        """Return what is stored at `key`. What has gone since it was listed is not listed any more."""
        etag = self._etags.get(key, "?")
        try:
            found = await self._reader.get(key)
            if found is not None:
                return CapturedRow(
                    key, found.etag, found.content_type, found.modified_ms, None, found.size, found.body
                )
            stat = await self._store.stat(key)
        except DamagedFile as error:
            return CapturedRow(key, error.etag, "", 0, "", 0, None, error.detail)
        except Unreadable as error:
            return CapturedRow(key, etag, "", 0, None, 0, None, str(error))
        if stat is None:
            self._etags.pop(key, None)
            return None
        return CapturedRow(key, stat.etag, stat.content_type, stat.modified_ms, stat.sha256, stat.size, None)

    async def _complete(self, key: str) -> AsyncIterator[CapturedRow]:
        """Yield the objects that the head of a log names and that are not in the backup yet, then the head.
        If they go faster than they are read, the head is yielded with a reason."""
        row = None
        for _ in range(ATTEMPTS):
            row = await self._load(key)
            if row is None or row.body is None or not is_head(row):
                break
            try:
                async for part in self._parts_of(row.body):
                    yield part
            except Unreadable:
                continue
            break
        else:
            assert row is not None, "it was read"
            row = row._replace(body=None, why="parts of the log were deleted each time that it was read")
        if row is not None:
            yield row

    async def _parts_of(self, stored: bytes) -> AsyncIterator[CapturedRow]:
        """Yield the objects that the head of a log names and that are not in the backup yet. Raises
        Unreadable if one is gone."""
        try:
            head = _core.LogHead.read(stored, "")
        except DocumentCorrupt:
            return
        waiting = head.nodes()
        while waiting:
            node = waiting.pop()
            key = object_key(head.id, node.name)
            is_known = key in self._etags
            if is_known and not node.level:
                continue
            row = await self._load(key)
            if row is None:
                raise Unreadable("a part of the log is gone")
            self._etags[key] = row.etag or ""
            try:
                waiting += [] if row.body is None else expand_node(head, node, row.body)
            except VerificationError as error:
                row = row._replace(body=None, why=str(error))
            if not is_known or row.why:
                yield row


def is_head(row: CapturedRow) -> bool:
    """Return True if a row is the head of a log that pysync wrote."""
    return row.body is not None and _core.is_log(row.body) and not row.key.startswith(log_prefix(""))


def removed_row(key: str) -> CapturedRow:
    """Return the row of a key at which nothing is stored."""
    return CapturedRow(key, None, "", 0, None, 0, None)


class _StoredFile:
    def __init__(self, reader: Reader, key: str) -> None:
        self._reader = reader
        self._key = key

    async def read(self) -> AsyncGenerator[bytes, None]:
        file = await self._reader.open(self._key)
        if file is None:
            raise Unreadable("the file is gone")
        part = bytearray()
        async with aclosing(file.chunks):
            async for chunk in self._reader.chunks(self._key, file):
                part += chunk
                while len(part) >= PART_BYTES:
                    yield bytes(part[:PART_BYTES])
                    del part[:PART_BYTES]
        if part:
            yield bytes(part)

    def close(self) -> None:
        return
