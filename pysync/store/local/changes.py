"""The log of changes of the embedded store: in its database, so that a write and its changes are one."""

from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any

from pysync.changelog import Change, Retention
from pysync.clock import HybridTimestamp
from pysync.errors import StoreUnavailable
from pysync.sqlite.changelog import SqliteChangeLog
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.base import JSON_TYPE, ExistingFileFilter, Precondition
from pysync.store.local import tables
from pysync.store.local.files import LocalFiles
from pysync.store.local.rename_journal import RenameJournal


class LocalChanges(SqliteChangeLog):
    """`TransactionalChangeLog`. `new_row` gives a document's etag and row, as `writes.put` takes it."""

    def __init__(
        self,
        reader: SnapshotReader,
        writer: GroupCommit,
        files: LocalFiles,
        renames: RenameJournal,
        new_row: Callable[[str, bytes, str], tuple[str, tuple[Any, ...]]],
        now_ms: Callable[[], int],
        retention: Retention,
    ) -> None:
        super().__init__(reader, writer, StoreUnavailable, now_ms, retention)
        self._files = files
        self._renames = renames
        self._new_row = new_row

    async def put(self, key: str, body: bytes, expect: Precondition, changes: Sequence[Change]) -> str:
        etag, row = self._new_row(key, body, JSON_TYPE)
        was_file, last = await self._writer.submit(
            tables.put_with_changes, self._renames, row, expect, self.rows_of(changes)
        )
        self.notify(last)
        if was_file:
            await self._files.unlink(key)
        return etag

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[str], Sequence[Change]],
    ) -> str:
        self._files.check_key(key)
        async with self._files.stage(chunks) as flushed:
            rows = self.rows_of(changes_of(flushed.sha256))
            last = await self._files.commit(flushed, tables.insert_file_with_changes, content_type, key, rows)
        self.notify(last)
        return flushed.sha256

    async def write_ordered(
        self,
        key_of: Callable[[HybridTimestamp], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[HybridTimestamp, str], Sequence[Change]],
        unless: ExistingFileFilter | None = None,
    ) -> tuple[HybridTimestamp, str]:
        async with self._files.stage(chunks) as flushed:
            tick, last = await self._files.commit(
                flushed,
                tables.insert_next_file,
                content_type,
                key_of,
                self._now_ms,
                lambda tick: self.rows_of(changes_of(tick, flushed.sha256)),
                unless,
            )
        self.notify(last)
        return tick, flushed.sha256
