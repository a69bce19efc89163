"""Indexes by the time of the last write, of objects whose keys have one of some shapes.

Each is a partial index of the table of objects, so that a write of any other object pays next to nothing.
"""

import hashlib
import re
import sqlite3
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final

from pysync.sqlite.connection import GroupCommit, SnapshotReader
from pysync.store.types import KeyShape, ListEntry

_NAMES: Final = "SELECT name FROM sqlite_master WHERE type = 'index' AND name GLOB 'age_*'"
_OLDEST: Final = """
    SELECT modified_ms, id, parent, name, etag FROM object INDEXED BY {index}
    WHERE {condition} AND modified_ms < ? AND (modified_ms, id) > (?, ?)
    ORDER BY modified_ms, id LIMIT 256"""
_glob_special: Final = re.compile(r"[*?\[]")


class LocalTimeIndex:
    """The `TimeIndex` of a local store."""

    def __init__(self, reader: SnapshotReader, writer: GroupCommit) -> None:
        self._reader = reader
        self._writer = writer

    async def prepare(self, shapes: Collection[KeyShape]) -> None:
        """See `TimeIndex.prepare`."""
        existing = {name for (name,) in self._reader.rows(_NAMES)}
        missing = {name: _condition(shape) for shape in shapes if (name := _name(shape)) not in existing}
        if missing:
            await self._writer.submit(_create_indexes, missing)

    async def written_before(
        self, shape: KeyShape, before_ms: int, after_ms: int = 0
    ) -> AsyncIterator[ListEntry]:
        """See `TimeIndex.written_before`."""
        page = _OLDEST.format(index=_name(shape), condition=_condition(shape))
        last = after_ms, -1
        while rows := self._reader.rows(page, before_ms, *last):
            for modified_ms, _, parent, name, etag in rows:
                yield ListEntry(f"{parent}/{name}" if parent else name, etag, modified_ms)
            last = rows[-1][:2]


def _name(shape: KeyShape) -> str:
    """Return the name of the index. It says which objects the index has, so that it is never taken for
    another."""
    return f"age_{hashlib.sha256(_condition(shape).encode()).hexdigest()[:16]}"


def _condition(shape: KeyShape) -> str:
    """Return the SQL condition of the keys of this shape, as the partial index has it: SQLite uses the index
    only for a query with the same terms."""
    *above, last = shape
    if None in above:
        pattern = "/".join("*" if part is None else _glob_special.sub(r"[\g<0>]", part) for part in above)
        slashes = "length(parent) - length(replace(parent, '/', ''))"
        terms = [f"parent GLOB {_quoted(pattern)}", f"{slashes} = {len(above) - 1}"]
    else:
        terms = [f"parent = {_quoted('/'.join(filter(None, above)))}"]
    return " AND ".join(terms if last is None else [*terms, f"name = {_quoted(last)}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _create_indexes(cursor: sqlite3.Cursor, conditions: Mapping[str, str]) -> None:
    """Create the indexes with these names and conditions."""
    for name, condition in conditions.items():
        cursor.execute(f"CREATE INDEX IF NOT EXISTS {name} ON object(modified_ms) WHERE {condition}")
