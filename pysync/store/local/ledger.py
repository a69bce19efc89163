"""The ledger of a local store: writes that are counted, and what its subjects use."""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from pysync.errors import QuotaExceeded
from pysync.model import QuotaLimits, Usage
from pysync.sqlite.changelog import ChangeRows
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.local import tables, usage
from pysync.store.local.put_statements import APPEND_COUNTED, PUT_COUNTED
from pysync.store.local.rename_journal import RenameJournal
from pysync.store.local.usage import NO_RECEIPT, UsageCounters, amounts_of
from pysync.store.types import ABSENT, ANY, Precondition
from pysync.store.usage import (
    Charge,
    ChargeOf,
    CountedRow,
    Subject,
    SubjectKind,
    UncountedRow,
)

_USED = "SELECT bytes, documents, elements, files FROM usage WHERE kind = ? AND name = ?"
_LARGEST = """
    SELECT name, bytes, documents, elements, files FROM usage
    WHERE kind = ? ORDER BY bytes DESC, name LIMIT ?"""
_WINDOW = "SELECT max(id) FROM (SELECT id FROM object WHERE id > ? ORDER BY id LIMIT 256)"
_UNCOUNTED = """
    SELECT o.id, parent, o.name, etag, CASE WHEN sha256 IS NULL THEN length(body) ELSE o.size END,
        sha256 IS NOT NULL
    FROM object AS o WHERE o.id > ? AND o.id <= ? AND (owner IS NULL OR owner != 0
        AND NOT EXISTS(SELECT 1 FROM charge WHERE charge.owner = abs(o.owner))) ORDER BY o.id"""


class LocalLedger:
    """The `Ledger` of a local store. Create one with `open`."""

    def __init__(
        self, reader: SnapshotReader, writer: GroupCommit, counters: UsageCounters, charge_of: ChargeOf
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._charge_of = charge_of
        self.counters = counters

    @classmethod
    async def open(
        cls, reader: SnapshotReader, writer: GroupCommit, limits: QuotaLimits, charge_of: ChargeOf
    ) -> "LocalLedger":
        """Switch the counters on, if they are off, and return their ledger."""
        if not reader.rows("SELECT 1 FROM usage_state WHERE state != 0"):
            await writer.submit(usage.switch_on)
        counters = UsageCounters(limits)
        writer.add_hooks(counters)
        return cls(reader, writer, counters, charge_of)

    def charge(self, key: str, charge: Charge | None) -> Charge:
        """Return what a write of `key` counts as, if the writer says `charge`."""
        if charge is None:
            return self._charge_of(key)
        if charge.account is None:
            return charge._replace(account=self._charge_of(charge.key or key).account)
        return charge

    def owner_of_file(self, charge: Charge | None) -> tables.OwnerOf:
        """Return the function that charges for a file."""

        def owner_of(cursor: sqlite3.Cursor, key: str, size: int) -> int | None:
            return self.counters.charge_file(cursor, key, size, self.charge(key, charge))

        return owner_of

    async def used(self, subjects: Iterable[Subject]) -> dict[Subject, Usage]:
        """See `Ledger.used`."""
        return {
            subject: next((Usage(*row) for row in self._reader.rows(_USED, *subject)), Usage())
            for subject in subjects
        }

    async def largest(self, kind: SubjectKind, limit: int) -> list[tuple[str, Usage]]:
        """See `Ledger.largest`."""
        return [(name, Usage(*amounts)) for name, *amounts in self._reader.rows(_LARGEST, kind, limit)]

    async def is_complete(self) -> bool:
        """See `Ledger.is_complete`."""
        ((state,),) = self._reader.rows("SELECT state FROM usage_state")
        return bool(state == usage.COMPLETE)

    async def begin_count(self) -> None:
        """See `CountableLedger.begin_count`."""
        await self._writer.submit(usage.set_state, usage.INCOMPLETE, usage.COUNTING)

    async def end_count(self) -> None:
        """See `CountableLedger.end_count`."""
        await self._writer.submit(usage.set_state, usage.COUNTING, usage.COMPLETE)

    def uncounted(self, after: int) -> tuple[list[UncountedRow], int | None]:
        """See `CountableLedger.uncounted`."""
        ((end,),) = self._reader.rows(_WINDOW, after)
        if end is None:
            return [], None
        rows = self._reader.rows(_UNCOUNTED, after, end)
        return [
            UncountedRow(id_, f"{parent}/{name}" if parent else name, etag, size, bool(is_file))
            for id_, parent, name, etag, size, is_file in rows
        ], end

    async def count(self, rows: Sequence[CountedRow]) -> None:
        """See `CountableLedger.count`."""
        if rows:
            await self._writer.submit(self.counters.count_rows, rows)

    async def prune(self) -> None:
        """See `CountableLedger.prune`."""
        await self._writer.submit(self.counters.prune)


def put_counted(
    cursor: sqlite3.Cursor,
    renames: RenameJournal,
    row: tuple[Any, ...],
    expect: Precondition,
    changes: ChangeRows,
    counters: UsageCounters,
    charge: Charge,
    also: tables.Rows = (),
) -> tuple[bool, int]:
    """Call `tables.put`, append objects, and count all in the same transaction. Raises QuotaExceeded
    if the precondition holds."""
    if not counters.is_on(cursor):
        return tables.put_with(cursor, also, renames, row, expect, changes)
    etag, content_type, now_ms, body, parent, name = row
    size, elements = len(body), charge.elements
    amounts = amounts_of(size, elements)
    old = NO_RECEIPT if expect is ABSENT else counters.replaced(cursor, parent, name, expect)
    wanted = amounts
    if (
        also
        and counters.owner_of_kept(cursor, old, charge).id == counters.owner_of(cursor, charge.account).id
    ):
        wanted = (size + sum(len(each[3]) for each in also), *amounts[1:])
    try:
        owner = counters.charge(cursor, old, charge, wanted)
    except QuotaExceeded:
        tables.check_current(cursor, parent, name, expect)
        raise
    counted = (etag, content_type, now_ms, body, size, -owner.id, elements, parent, name)
    result = tables.put(cursor, renames, counted, expect, changes, PUT_COUNTED)
    counters.replace(cursor, old, owner, amounts, etag)
    if also:
        _append_counted(cursor, counters, counters.owner_of_kept(cursor, old, charge), also)
    return result


def append_objects(
    cursor: sqlite3.Cursor,
    counters: UsageCounters,
    charge: Charge,
    also: tables.Rows,
    parent: str,
    name: str,
) -> None:
    """Call `tables.append_objects` before an object is deleted, and count the appended ones as bytes."""
    if not counters.is_on(cursor):
        tables.append_objects(cursor, also)
        return
    old = counters.replaced(cursor, parent, name, ANY)
    _append_counted(cursor, counters, counters.owner_of_kept(cursor, old, charge), also)


def _append_counted(
    cursor: sqlite3.Cursor, counters: UsageCounters, owner: usage.Owner, also: tables.Rows
) -> None:
    for row in also:
        cursor.execute(APPEND_COUNTED, (*row[:4], len(row[3]), -owner.id, 0, *row[4:]))
    counters.add_bytes(owner, sum(len(each[3]) for each in also))
