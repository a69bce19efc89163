"""The log of changes of the embedded store: in its database, so that a write and its changes are one."""

from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any

from pysync.changelog import Change, Retention
from pysync.clock import Tick
from pysync.errors import StoreUnavailable
from pysync.sqlite.changelog import SqliteChanges
from pysync.sqlite.connection import GroupCommit, TurnReader
from pysync.store.base import JSON_TYPE, Expect, Namesakes
from pysync.store.local import tables
from pysync.store.local.files import LocalFiles
from pysync.store.local.rename_journal import Arrivals


class LocalChanges(SqliteChanges):
    """`StoredChanges`. `new_row` gives a document's etag and row, as `writes.put` takes it."""

    def __init__(
        self,
        reader: TurnReader,
        writer: GroupCommit,
        files: LocalFiles,
        arrivals: Arrivals,
        new_row: Callable[[str, bytes, str], tuple[str, tuple[Any, ...]]],
        now_ms: Callable[[], int],
        retention: Retention,
    ) -> None:
        super().__init__(reader, writer, StoreUnavailable, now_ms, retention)
        self._files = files
        self._arrivals = arrivals
        self._new_row = new_row

    async def put(self, key: str, body: bytes, expect: Expect, changes: Sequence[Change]) -> str:
        etag, row = self._new_row(key, body, JSON_TYPE)
        was_file, last = await self._writer.submit(
            tables.put_changed, self._arrivals, row, expect, self.rows_of(changes)
        )
        self.tell(last)
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
        self._files.check(key)
        async with self._files.incoming(chunks) as flushed:
            rows = self.rows_of(changes_of(flushed.sha256))
            last = await self._files.place(flushed, tables.place_changed, content_type, key, rows)
        self.tell(last)
        return flushed.sha256

    async def write_next(
        self,
        key_of: Callable[[Tick], str],
        chunks: AsyncIterable[bytes],
        content_type: str,
        changes_of: Callable[[Tick, str], Sequence[Change]],
        unless: Namesakes | None = None,
    ) -> tuple[Tick, str]:
        async with self._files.incoming(chunks) as flushed:
            tick, last = await self._files.place(
                flushed,
                tables.place_next,
                content_type,
                key_of,
                self._now_ms,
                lambda tick: self.rows_of(changes_of(tick, flushed.sha256)),
                unless,
            )
        self.tell(last)
        return tick, flushed.sha256
