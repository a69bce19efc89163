"""The ledger of a local store: writes that are counted, and what its subjects use."""

import sqlite3
from collections.abc import Iterable, Sequence

from pysync._core import split_key
from pysync.model import QuotaLimits, Usage
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.ledger import (
    Charge,
    ChargeOf,
    CountedRow,
    Subject,
    SubjectKind,
    UncountedRow,
)
from pysync.store.local import counters, tables
from pysync.store.local.counters import CountState, Owners

_USED = "SELECT bytes, documents, elements, files FROM usage WHERE kind = ? AND name = ?"
_LARGEST = """
    SELECT name, bytes, documents, elements, files FROM usage
    WHERE kind = ? ORDER BY bytes DESC, name LIMIT ?"""
_WINDOW = "SELECT max(id) FROM (SELECT id FROM object WHERE id > ? ORDER BY id LIMIT 256)"
_UNCOUNTED = """
    SELECT o.id, parent, o.name, etag, CASE WHEN sha256 IS NULL THEN length(body) ELSE o.size END,
        sha256 IS NOT NULL
    FROM object AS o WHERE o.id > ? AND o.id <= ? AND (owner IS NULL OR owner != 0
        AND NOT EXISTS(SELECT 1 FROM charge WHERE charge.owner = o.owner)) ORDER BY o.id"""


class LocalLedger:
    """The `Ledger` of a local store. Create one with `open`."""

    def __init__(
        self, reader: SnapshotReader, writer: GroupCommit, owners: Owners, charge_of: ChargeOf
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._charge_of = charge_of
        self.owners = owners

    @classmethod
    async def open(
        cls, reader: SnapshotReader, writer: GroupCommit, limits: QuotaLimits, charge_of: ChargeOf
    ) -> "LocalLedger":
        """Switch the counters on, if they are off, and return their ledger."""
        if not reader.rows("SELECT 1 FROM usage_state WHERE state != 0"):
            await writer.submit(counters.switch_on)
        return cls(reader, writer, Owners(limits), charge_of)

    def charge(self, key: str, charge: Charge | None) -> Charge:
        """Return what a write of `key` counts as, if the writer says `charge`."""
        if charge is None:
            return self._charge_of(key)
        if charge.account is None:
            return charge._replace(account=self._charge_of(charge.key or key).account)
        return charge

    def owner_of_file(self, charge: Charge | None) -> tables.OwnerOf:
        """Return the function that charges for a file."""

        def owner_of(cursor: sqlite3.Cursor, key: str, size: int) -> int:
            return self.owners.charge_file(cursor, *split_key(key), size, self.charge(key, charge))

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
        return bool(state == CountState.COMPLETE)

    async def begin_count(self) -> None:
        """See `CountableLedger.begin_count`."""
        await self._writer.submit(counters.set_state, CountState.INCOMPLETE, CountState.COUNTING)

    async def end_count(self) -> None:
        """See `CountableLedger.end_count`."""
        await self._writer.submit(counters.set_state, CountState.COUNTING, CountState.COMPLETE)

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
            await self._writer.submit(self.owners.count_rows, rows)

    async def prune(self) -> None:
        """See `CountableLedger.prune`."""
        await self._writer.submit(counters.prune)
