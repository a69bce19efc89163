"""Reads a store's folder for a backup while servers write: rows as of one moment, and which rows change.

While somebody follows the folder, triggers record the key of every written or removed row in the table
`touched`, in the transaction of the write. Without a follower there are no triggers, and a write pays
nothing. The table is a ring: a follower that falls too far behind learns that its position is gone, and lists
all rows.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from pysync._core import split_key
from pysync.changelog import change_id
from pysync.errors import StoreUnavailable
from pysync.sqlite.changelog import LAST
from pysync.sqlite.database_file import DATABASE_ERRORS, DatabaseFile, connect_writer
from pysync.store.local.disk import FileTree
from pysync.store.types import PAGE

RING_ROWS: Final = 1_000_000
"""The number of writes that `touched` records: some 15 MB."""
STALE_MS: Final = 3_600_000
"""Age of a follower's last sign of life from which it counts as dead."""
BATCH_BYTES: Final = 8_388_608
TRIM_ROWS: Final = 10_000
"""Nobody else writes while these are removed: some milliseconds."""
_NO_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
"""Errors of opening where nothing lies, or a link or a socket. Others fail when they are read."""
_FETCH: Final = 64
"""Rows that are read at once: a batch is larger than `BATCH_BYTES` by as many documents at most."""

# A write is recorded by the id of its row, a removal by the key. The first row marks the position before the
# first write, as in the change log. The ring is trimmed with every 1,024th write.
_CREATE: Final = (
    "CREATE TABLE touched(seq INTEGER PRIMARY KEY, object INTEGER, parent TEXT, name TEXT)",
    "INSERT INTO touched(object) VALUES(NULL)",
    """CREATE TABLE follower(id TEXT PRIMARY KEY, seq INTEGER NOT NULL, seen_ms INTEGER NOT NULL)
        WITHOUT ROWID""",
    """CREATE TRIGGER touched_new AFTER INSERT ON object
        BEGIN INSERT INTO touched(object) VALUES(NEW.id); END""",
    """CREATE TRIGGER touched_changed AFTER UPDATE OF etag ON object
        BEGIN INSERT INTO touched(object) VALUES(NEW.id); END""",
    """CREATE TRIGGER touched_gone AFTER DELETE ON object
        BEGIN INSERT INTO touched(parent, name) VALUES(OLD.parent, OLD.name); END""",
    f"""CREATE TRIGGER touched_full AFTER INSERT ON touched WHEN NEW.seq % 1024 = 0
        BEGIN DELETE FROM touched WHERE seq <= NEW.seq - {RING_ROWS}; END""",  # noqa: S608
)
_DROP: Final = (
    *(f"DROP TRIGGER touched_{name}" for name in ("new", "changed", "gone", "full")),
    "DROP TABLE touched",
    "DROP TABLE follower",
)
_COLUMNS: Final = "o.etag, o.content_type, o.modified_ms, o.sha256, o.size, o.body"
_LIST: Final = """
    SELECT parent, name, etag FROM object WHERE (parent, name) > (?, ?) ORDER BY parent, name LIMIT ?"""
_KEY: Final = "iif(o.parent = '', o.name, o.parent || '/' || o.name)"
_LOAD: Final = (
    f"SELECT {_KEY}, {_COLUMNS} FROM json_each(?) AS pair CROSS JOIN object AS o ON "  # noqa: S608
    "o.parent = json_extract(pair.value, '$[0]') AND o.name = json_extract(pair.value, '$[1]')"
)
_CHANGED: Final = (
    f"SELECT {_KEY}, {_COLUMNS} FROM object AS o WHERE o.id IN "  # noqa: S608
    "(SELECT object FROM touched WHERE seq > ?1 AND object IS NOT NULL) "
    f"UNION ALL SELECT {_KEY.replace('o.', 't.')}, {_COLUMNS} FROM "
    "(SELECT DISTINCT parent, name FROM touched WHERE seq > ?1 AND object IS NULL AND name <> '') AS t "
    "LEFT JOIN object AS o ON o.parent = t.parent AND o.name = t.name"
)


class CapturedRow(NamedTuple):
    """The row of a key as of one moment. A document has a `body`, a file a `sha256`. A key whose row is gone
    has no `etag`, one that cannot be read a reason `why`."""

    key: str
    etag: str | None
    content_type: str
    modified_ms: int
    sha256: str | None
    size: int | None
    body: bytes | None
    why: str = ""


class FolderCapture:
    """Reads the rows of the store in `folder`, and follows the writes of all processes. Its methods block,
    may be called in any thread, one at a time, and raise StoreUnavailable."""

    def __init__(self, folder: Path, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._tree = FileTree(folder / "files")
        self._id = os.urandom(8).hex()
        self._seq = self._newest = 0
        self._rows: sqlite3.Cursor | None = None
        with _translated():
            self._file = DatabaseFile(folder / "pysync.db")
            self._connection = connect_writer(folder / "pysync.db", "NORMAL")

    def follow(self) -> None:
        """Record the keys of all writes from now on."""
        with self._writing():
            if not self._is_captured():
                for statement in _CREATE:
                    self._connection.execute(statement)
            self._seq = self._last()
            now_ms = self._now_ms()
            self._connection.execute("DELETE FROM follower WHERE seen_ms < ?", (now_ms - STALE_MS,))
            self._connection.execute(
                "INSERT OR REPLACE INTO follower VALUES(?, ?, ?)", (self._id, self._seq, now_ms)
            )

    def trim(self) -> bool:
        """Forget `TRIM_ROWS` of the writes that every follower has read, and note that this one is alive.
        Returns False if there are more."""
        with self._writing():
            if self._is_following():
                values = (self._seq, self._now_ms(), self._id)
                self._connection.execute("UPDATE follower SET seq = ?, seen_ms = ? WHERE id = ?", values)
                ((oldest,),) = self._connection.execute("SELECT min(seq) FROM follower").fetchall()
                end = min(oldest, self._first() + TRIM_ROWS)
                self._connection.execute("DELETE FROM touched WHERE seq < ?", (end,))
                return bool(end == oldest)
        return True

    def list_page(self, after: str) -> list[tuple[str, str]]:
        """Return the keys and etags of the next rows after the key `after` (`""`: from the start), in the
        order of `split_key`; none at the end. Each page is of a moment of its own."""
        with _translated():
            self._file.check()
            place = split_key(after) if after else ("", "")
            rows = self._connection.execute(_LIST, (*place, PAGE)).fetchall()
        return [(_key(parent, name), etag) for parent, name, etag in rows]

    def load(self, keys: Sequence[str]) -> None:
        """Make `next_batch` return the rows of these keys."""
        with _translated():
            pairs = orjson.dumps([split_key(key) for key in keys]).decode()
            self._rows = self._connection.execute(_LOAD, (pairs,))

    def begin(self, *, exclusive: bool = False) -> bool:
        """Begin to read as of this moment, until `end`: `next_batch` returns the rows that were written or
        removed since `follow` or the last moment. With `exclusive`, nobody writes until `end`. Returns False
        if some of them are not known any more: call `follow`, and list all rows."""
        with _translated():
            self._file.check()
            self._connection.execute("BEGIN IMMEDIATE" if exclusive else "BEGIN")
            if not self._is_following() or self._first() > self._seq:
                return False
            self._newest = self._last()
            self._rows = self._connection.execute(_CHANGED, (self._seq,))
            return True

    def change_position(self) -> str:
        """Return the id of the newest change of the log, as of the moment."""
        with _translated():
            return change_id(*self._connection.execute(LAST).fetchone())

    def next_batch(self) -> list[CapturedRow]:
        """Return the next rows, some megabytes or none at the end."""
        batch: list[CapturedRow] = []
        size = 0
        with _translated():
            while size < BATCH_BYTES and len(batch) < PAGE:
                rows = [] if self._rows is None else self._rows.fetchmany(_FETCH)
                if not rows:
                    break
                batch += [CapturedRow(*row) for row in rows]
                size += sum(len(row[-1] or b"") for row in rows)
        return batch

    def open_file(self, key: str) -> int | None:
        """Return a descriptor of the file at `key`, which the caller closes; None if none is there. Between
        `begin` and `end` it is the file of that moment, unless another one has been written since."""
        with _translated():
            rows = self._connection.execute("SELECT name FROM arriving WHERE key = ?", (key,)).fetchall()
            for path in (*(f"{self._tree.root}/~incoming/{name}" for (name,) in rows), self._tree.path(key)):
                try:
                    self._tree.check_folders(key)
                    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno not in _NO_FILE:
                        raise
        return None

    def end(self, *, done: bool) -> None:
        """End what `begin` began. The next moment continues from this one if it is `done`, else from the one
        before."""
        self._rows = None
        with _translated():
            if self._connection.in_transaction:
                self._connection.rollback()
        if done:
            self._seq = self._newest

    def close(self) -> None:
        """Stop following. The last follower removes the triggers."""
        with suppress(StoreUnavailable), self._writing():
            if self._is_captured():
                self._connection.execute(
                    "DELETE FROM follower WHERE id = ? OR seen_ms < ?", (self._id, self._now_ms() - STALE_MS)
                )
                if not self._connection.execute("SELECT 1 FROM follower").fetchall():
                    for statement in _DROP:
                        self._connection.execute(statement)
        self._connection.close()

    def _is_captured(self) -> bool:
        return bool(self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'touched'").fetchall())

    def _is_following(self) -> bool:
        return self._is_captured() and bool(
            self._connection.execute("SELECT 1 FROM follower WHERE id = ?", (self._id,)).fetchall()
        )

    def _first(self) -> int:
        ((first,),) = self._connection.execute("SELECT min(seq) FROM touched").fetchall()
        return int(first)

    def _last(self) -> int:
        ((last,),) = self._connection.execute("SELECT max(seq) FROM touched").fetchall()
        return int(last)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Commit what the block writes, in one transaction."""
        with _translated():
            self._file.check()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise


def forget_writes(cursor: sqlite3.Cursor) -> None:
    """Forget the keys of all writes, in a function for `GroupCommit`. Followers that have not read them list
    all rows."""
    if cursor.execute("SELECT 1 FROM sqlite_master WHERE name = 'touched'").fetchall():
        cursor.execute("DELETE FROM touched WHERE seq < (SELECT max(seq) FROM touched)")
        cursor.execute("UPDATE touched SET parent = '', name = ''")


def _key(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of SQLite and of the disk into StoreUnavailable."""
    try:
        yield
    except (*DATABASE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise ValueError("key too long for the file system") from error
        raise StoreUnavailable(f"reading the store: {error}") from error
