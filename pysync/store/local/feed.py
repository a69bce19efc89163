"""The feed of a local store: the row of each object has the number of its last change, as `seq`.

Rows that were never announced, such as those of an upgrade or a copy, have none: they stand before all
others, in the order of their ids. A removal has a row of its own, which is hidden while an object is stored
at the key again. The oldest of these rows is never delivered: it marks the newest removal that is forgotten.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, Final

import orjson

from pysync._core import split_key
from pysync.changelog import Cursor, change_id, split_id
from pysync.config.key_templates import RESERVED
from pysync.feed import FeedPage, LatestChange, ObjectVersion, ResetReason
from pysync.sqlite.changelog import BOUNDS, ChangeRows
from pysync.sqlite.connection import GroupCommit, SnapshotReader

_IN_FEED = f"parent <> '{RESERVED}' AND parent NOT GLOB '{RESERVED}/*'"
TABLES: Final = f"""
    ALTER TABLE object ADD COLUMN seq INTEGER;
    ALTER TABLE object ADD COLUMN hash BLOB;
    ALTER TABLE object ADD COLUMN changed_ms INTEGER;
    CREATE INDEX object_seq ON object(coalesce(seq, id)) WHERE {_IN_FEED};
    CREATE TABLE removed(
        seq INTEGER PRIMARY KEY,
        parent TEXT NOT NULL,
        name TEXT NOT NULL,
        changed_ms INTEGER NOT NULL,
        at_ms INTEGER NOT NULL,
        UNIQUE(parent, name)
    );
    INSERT INTO removed SELECT max(id), '{RESERVED}', '', 0, 0 FROM change
"""  # noqa: S608

MAX_BY_KEY: Final = 5_000
"""Rows below the keys of a query up to which all of them are read, in place of those of all keys."""

_KEY = "iif(parent = '', name, parent || '/' || name)"
_HASH = "coalesce(sha256, nullif(lower(hex(hash)), ''))"
_TIME = "iif(sha256 IS NULL, changed_ms, modified_ms)"
_OBJECT = f"SELECT coalesce(seq, id), {_KEY}, {_HASH}, {_TIME}, 0 FROM object "  # noqa: S608
_REMOVED = f"""
    SELECT seq, {_KEY}, '', changed_ms, iif(EXISTS(
        SELECT 1 FROM object WHERE object.parent = removed.parent AND object.name = removed.name), NULL, 1)
    FROM removed """  # noqa: S608
_PAGE = " ORDER BY 1 LIMIT ?1"
BY_SEQUENCE: Final = (
    f"{_OBJECT} INDEXED BY object_seq WHERE {_IN_FEED} AND coalesce(seq, id) > ?2 "
    f"UNION ALL {_REMOVED} WHERE seq > ?3 {_PAGE}"
)
_BELOW = "((parent = ?4 AND name = ?5) OR parent = ?6 OR (parent > ?7 AND parent < ?8))"
# The plus keeps the index of all keys out of it.
BY_KEY: Final = (
    f"{_OBJECT} WHERE {_BELOW} AND +coalesce(seq, id) > ?2 "
    f"UNION ALL {_REMOVED} WHERE {_BELOW} AND +seq > ?3 {_PAGE}"
)
COUNT: Final = f"""
    SELECT count(*) FROM (
        SELECT 1 FROM object WHERE {_BELOW} UNION ALL SELECT 1 FROM removed WHERE {_BELOW} LIMIT ?1)"""  # noqa: S608
_VERSIONS = f"""
    SELECT {_KEY}, {_HASH}, {_TIME} FROM object
    WHERE parent = ? AND name IN (SELECT value FROM json_each(?)) AND coalesce(sha256, hash) IS NOT NULL"""  # noqa: S608
# The oldest row is no removal, so that at most two are deleted.
_LAST_OLD = "SELECT max(seq) FROM (SELECT seq, at_ms FROM removed ORDER BY seq LIMIT 3) WHERE at_ms < ?"
_BLANK = "UPDATE removed SET parent = ?, name = '', at_ms = 0 WHERE seq = ?"


class LocalFeed:
    """The `Feed` of a local store."""

    def __init__(self, reader: SnapshotReader, writer: GroupCommit) -> None:
        self._reader = reader
        self._writer = writer

    async def latest(self, folders: Collection[str], since: str, limit: int) -> FeedPage | ResetReason:
        """See `Feed.latest`."""
        # In one tick of the event loop, and so in one snapshot.
        cursor = Cursor.parse(since) if since else Cursor("", "", "")
        ((_, newest, epoch, is_issued),) = self._reader.rows(BOUNDS, *split_id(cursor.latest))
        ((forgotten,),) = self._reader.rows("SELECT min(seq) FROM removed")
        position, first = 0, change_id(newest, epoch)
        if since:
            position, first = split_id(cursor.position)[0], cursor.first
            if not is_issued or position > newest:
                return ResetReason.OTHER_EPOCH
        # A reader that began without a cursor has no use for the removals of before.
        held = max(position, split_id(first)[0])
        if held < forgotten:
            return ResetReason.FORGOTTEN
        args = limit, position, held
        count, rows = self._rows_by_key(folders, min(newest - position, MAX_BY_KEY), *args)
        below: tuple[str, ...] = ("",)
        if rows is None:
            rows = self._reader.rows(BY_SEQUENCE, *args)
            count, below = len(rows), tuple(folder and f"{folder}/" for folder in folders)
        is_end = len(rows) < limit
        run = f"~{first}~{change_id(newest, epoch)}"
        after = change_id(newest, epoch) if is_end else f"{rows[-1][0]:017d}{run}"
        changes = [
            LatestChange(f"{seq:017d}", key, hash_, at_ms, removed=bool(kind))
            for seq, key, hash_, at_ms, kind in rows
            if kind is not None and f"{key}/".startswith(below)
        ]
        return FeedPage(changes, count, is_end, after, run)

    def _rows_by_key(
        self, folders: Collection[str], most: int, limit: int, position: int, held: int
    ) -> tuple[int, list[Any] | None]:
        """Return the number of rows at or below these keys, and the first of them after a position; None if
        there are more than `most`."""
        count, found = 0, dict[int, Any]()
        if "" in folders:
            return count, None
        places = [(*split_key(folder), folder, f"{folder}/", f"{folder}0") for folder in folders]
        for place in places:
            ((some,),) = self._reader.rows(COUNT, most + 1 - count, None, None, *place)
            count += some
            if count > most:
                return count, None
        for place in places:
            found.update((row[0], row) for row in self._reader.rows(BY_KEY, limit, position, held, *place))
        return count, [found[at] for at in sorted(found)[:limit]]

    async def versions(self, keys: Collection[str]) -> dict[str, ObjectVersion]:
        """See `Feed.versions`."""
        names = defaultdict[str, list[str]](list)
        for key in keys:
            parent, name = split_key(key)
            names[parent].append(name)
        return {
            key: ObjectVersion(hash_, at_ms)
            for parent, some in names.items()
            for key, hash_, at_ms in self._reader.rows(_VERSIONS, parent, orjson.dumps(some).decode())
        }

    async def erase(self, selects: Callable[[str], bool]) -> None:
        """See `Feed.erase`."""
        await self._writer.submit(_erase, selects)


def _erase(cursor: sqlite3.Cursor, selects: Callable[[str], bool]) -> None:
    rows = cursor.execute(f"SELECT seq, {_KEY} FROM removed WHERE name <> ''").fetchall()  # noqa: S608
    cursor.executemany("DELETE FROM removed WHERE seq = ?", [(seq,) for seq, key in rows if selects(key)])


def add_removal(
    cursor: sqlite3.Cursor, seq: int, location: tuple[str, str], changed_ms: int | None, changes: ChangeRows
) -> None:
    """Add the removal of an object, and forget up to two that are too old, so that no backlog builds up."""
    if location[0].partition("/")[0] == RESERVED:
        return
    now_ms, _, retention, _ = changes
    row = (seq, *location, now_ms if changed_ms is None else changed_ms, now_ms)
    cursor.execute("INSERT OR REPLACE INTO removed VALUES(?, ?, ?, ?, ?)", row)
    ((last_old,),) = cursor.execute(_LAST_OLD, (now_ms - retention.removals_ms,)).fetchall()
    if last_old is not None and cursor.execute("DELETE FROM removed WHERE seq < ?", (last_old,)).rowcount:
        cursor.execute(_BLANK, (RESERVED, last_old))
