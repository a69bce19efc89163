"""Claims: which requests with an Idempotency-Key a store has carried out, each a row that is committed with
its write."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, TypeVarTuple

from pysync.errors import IdempotencyKeyReused
from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.types import CarriedOut, Claim, ClaimsFull

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_LIVE: Final = 4_000_000
"""Rows at one time, as many as nonces. Beyond it writes with an Idempotency-Key are rejected."""

TABLE: Final = """
    CREATE TABLE claim(
        id INTEGER PRIMARY KEY,
        name BLOB NOT NULL UNIQUE,
        request TEXT NOT NULL,
        outcome TEXT NOT NULL,
        expires_ms INTEGER NOT NULL
    )
    """
_FIND: Final = "SELECT request, outcome FROM claim WHERE name = ? AND expires_ms > ?"
_ALL: Final = "SELECT id, outcome FROM claim WHERE id > ? ORDER BY id LIMIT 1000"
_LIVE = "SELECT coalesce((SELECT max(id) FROM claim) - (SELECT min(id) FROM claim) + 1, 0)"
# Rows expire nearly in the order of their ids. Each insert removes up to two, so that those of a busy time go
# although fewer come.
_SWEEP = """
    DELETE FROM claim WHERE id IN (SELECT id FROM claim ORDER BY id LIMIT 2) AND expires_ms <= ?"""
# A clock that was ahead has left rows that expire later than any new one.
_SWEEP_IF_FULL = """
    DELETE FROM claim WHERE id IN (SELECT id FROM claim ORDER BY id LIMIT 1000)
        AND (expires_ms <= ? OR expires_ms > ?)"""
_INSERT = """
    INSERT OR REPLACE INTO claim(name, request, outcome, expires_ms) VALUES(?, ?, ?, ?)"""


class LocalClaims:
    """The claims of a local store: at most `max_live` at one time."""

    def __init__(
        self, reader: SnapshotReader, writer: GroupCommit, now_ms: Callable[[], int], max_live: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._now_ms = now_ms
        self._max_live = max_live

    def find(self, claim: Claim) -> str | None:
        """See `ClaimTable.find`."""
        rows = self._reader.rows(_FIND, claim.name, self._now_ms())
        return _outcome_of(claim, rows[0] if rows else None)

    async def forget(self, selects: Callable[[str], bool]) -> int:
        """See `ClaimTable.forget`."""
        deleted = after = 0
        while rows := self._reader.rows(_ALL, after):
            after = rows[-1][0]
            ids = [(id_,) for id_, outcome in rows if selects(outcome)]
            if ids:
                await self._writer.submit(_delete, ids)
            deleted += len(ids)
            await asyncio.sleep(0)
        return deleted

    def bind(
        self, write: Callable[[sqlite3.Cursor, *Ts], T], claims: Sequence[Claim]
    ) -> Callable[[sqlite3.Cursor, *Ts], T]:
        """Return `write` as a write that also inserts the rows of these claims. It raises as `check`, with
        nothing written."""
        max_live, now_ms = self._max_live, self._now_ms()

        def carry_out(cursor: sqlite3.Cursor, *args: *Ts) -> T:
            check(cursor, claims, max_live, now_ms)
            result = write(cursor, *args)
            insert(cursor, claims, now_ms)
            return result

        return carry_out


def check(cursor: sqlite3.Cursor, claims: Sequence[Claim], max_live: int, now_ms: int) -> None:
    """Raise CarriedOut if a request of `claims` was carried out, IdempotencyKeyReused if another request was
    under the name of one, and ClaimsFull if there are `max_live` rows, or less where a claim may not use all
    of them."""
    earlier = dict[bytes, str]()
    for claim in claims:
        outcome = _outcome_of(claim, cursor.execute(_FIND, (claim.name, now_ms)).fetchone())
        if outcome is not None:
            earlier[claim.name] = outcome
    if earlier:
        raise CarriedOut(earlier)
    room = min((int(max_live * claim.share) for claim in claims), default=max_live)
    if _live(cursor) + len(claims) > room:
        latest_ms = now_ms + max((claim.ttl_ms for claim in claims), default=0)
        cursor.execute(_SWEEP_IF_FULL, (now_ms, latest_ms))
        if _live(cursor) + len(claims) > room:
            raise ClaimsFull


def _live(cursor: sqlite3.Cursor) -> int:
    (live,) = cursor.execute(_LIVE).fetchone()
    return int(live)


def insert(cursor: sqlite3.Cursor, claims: Sequence[Claim], now_ms: int) -> None:
    """Insert the rows of claims that were checked."""
    for claim in claims:
        cursor.execute(_SWEEP, (now_ms,))
        cursor.execute(_INSERT, (claim.name, claim.request, claim.outcome, now_ms + claim.ttl_ms))


def _outcome_of(claim: Claim, found: tuple[str, str] | None) -> str | None:
    """Return the outcome in a row that `_FIND` found for the name of `claim`, None without one. Raises
    IdempotencyKeyReused if the row is of another request."""
    if found is None:
        return None
    request, outcome = found
    if request != claim.request:
        raise IdempotencyKeyReused
    return outcome


def _delete(cursor: sqlite3.Cursor, ids: Sequence[tuple[int]]) -> None:
    cursor.executemany("DELETE FROM claim WHERE id = ?", ids)
