"""The SQLite file of a replica: the server's versions as they were received, and the edits that wait.

An edit has the version that it began from, so it can be merged whatever has been received since. It also has
what was sent of it without an answer. Each method that writes is called in a `transaction`, which is on the
disk when it ends.
"""

import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import orjson

from pysync.client.merge import JsonObject
from pysync.client.models import LogElement
from pysync.client.sync import sorted_json
from pysync.errors import PysyncError, from_response

Kind = Literal["put", "delete", "append"]

FORMAT: Final = "1"

TAIL_ELEMENTS: Final = 1000
"""Number of newest elements that a replica keeps of each log."""

_SCHEMA: Final = """
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE feed (
  collection TEXT, params TEXT, cursor TEXT NOT NULL, PRIMARY KEY (collection, params)
) WITHOUT ROWID;
CREATE TABLE document (
  key TEXT PRIMARY KEY, hash TEXT NOT NULL, data BLOB, written_ms INTEGER NOT NULL, checkpoint_ms INTEGER
);
CREATE INDEX document_without_data ON document (hash) WHERE data IS NULL;
CREATE TABLE element (
  key TEXT, ts_ms INTEGER, members BLOB NOT NULL, PRIMARY KEY (key, ts_ms)
) WITHOUT ROWID;
CREATE TABLE edit (
  id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, kind TEXT NOT NULL, data BLOB, base BLOB,
  base_hash TEXT NOT NULL, sent BLOB, sent_hash TEXT, idempotency_key TEXT NOT NULL, sent_ms INTEGER NOT NULL,
  checkpoint_ms INTEGER, written_ms INTEGER, error BLOB
);
CREATE INDEX edit_key ON edit (key);
"""


class ReplicaFileError(ValueError):
    """The file cannot be opened: another process has it open, it belongs to another caller or server, or it
    is not the file of a replica."""


class RemoteVersion(NamedTuple):
    """The newest version of the server that was received. `hash` is `""` if it was removed. `data` is as the
    server has it, so perhaps sealed; None for a log or a file. `written_ms` is the server's time of the
    write. `checkpoint_ms` is that of the newest element that was read; None for all but logs."""

    key: str
    hash: str
    data: bytes | None = None
    written_ms: int = 0
    checkpoint_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that the server does not have yet, or has rejected with `error`. `data` is plain JSON, None for
    a deletion. It began from `base`, as the server has it, with `base_hash`.

    If `idempotency_key` is set, `sent` is on its way since `sent_ms`, with the hash `sent_hash`, and the
    answer has not come. For an append the log ended at `checkpoint_ms` before. `written_ms` is set for a
    version that a restored server had before.
    """

    id: int | None
    key: str
    kind: Kind
    data: bytes | None = None
    base: bytes | None = None
    base_hash: str = ""
    sent: bytes | None = None
    sent_hash: str | None = None
    idempotency_key: str = ""
    sent_ms: int = 0
    checkpoint_ms: int | None = None
    written_ms: int | None = None
    error: bytes | None = None

    @property
    def plain(self) -> JsonObject | None:
        """The data; None for a deletion."""
        return None if self.data is None else dict(orjson.loads(self.data))

    def unsent(self, **changes: Any) -> "Edit":
        """Return the edit with changes, and with nothing of it on its way."""
        return replace(self, sent=None, sent_hash=None, idempotency_key="", **changes)


class Followed(NamedTuple):
    """A param-set that is followed, after `cursor`; `""` before the first page."""

    collection: str
    params: dict[str, str]
    cursor: str = ""


class RejectedEdit(NamedTuple):
    """An edit that the server rejects for good, with its error. `kind` is `put`, `delete` or `append`."""

    id: int
    key: str
    kind: Kind
    error: Exception
    data: JsonObject | None


class ReplicaFile:
    """An open file. It belongs to one process and to the thread that has opened it. Errors of the disk are an
    OSError; if it is full, with `errno.ENOSPC`."""

    def __init__(self, path: Path, owner: str) -> None:
        """Open the file, or create it, readable by its owner alone. Raises ReplicaFileError."""
        self.path = path
        with suppress(FileExistsError):  # to open and close it would release the locks of this process
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, timeout=0)
        try:
            self._open(owner)
        except sqlite3.Error as error:
            self._db.close()
            is_busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            reason = "is open in another replica" if is_busy else f"is not the file of a replica: {error}"
            raise ReplicaFileError(f"{path} {reason}") from error
        except ReplicaFileError:
            self._db.close()
            raise

    def _open(self, owner: str) -> None:
        # Held until it is closed, or the process ends: nobody else may send the same edits.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._db:
            self._db.execute("BEGIN EXCLUSIVE")
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self.set("format", FORMAT)
                self.set("owner", owner)
        if (found := self.setting("format")) != FORMAT:
            raise ReplicaFileError(f"{self.path} has the format {found!r}, and this version reads {FORMAT!r}")
        if (found := self.setting("owner")) != owner:
            raise ReplicaFileError(f"{self.path} is a replica of {found}, not of {owner}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes inside, or none of them. Raises OSError, and then none is made."""
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.rollback()
            is_full = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
            text = "the disk is full" if is_full else str(error)
            raise OSError(errno.ENOSPC if is_full else errno.EIO, text, str(self.path)) from error

    def setting(self, name: str) -> str:
        """Return a setting; `""` if it is not set."""
        found = self._db.execute("SELECT value FROM setting WHERE name = ?", (name,)).fetchone()
        return found[0] if found else ""

    def set(self, name: str, value: str) -> None:
        """Change a setting."""
        self._db.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))

    def feeds(self) -> list[Followed]:
        """Return what is followed."""
        rows = self._db.execute("SELECT * FROM feed").fetchall()
        return [Followed(name, orjson.loads(params), cursor) for name, params, cursor in rows]

    def move(self, feed: Followed, cursor: str) -> None:
        """Follow the feed from `cursor` on, also if it is new."""
        self._db.execute(
            "INSERT OR REPLACE INTO feed VALUES (?, ?, ?)",
            (feed.collection, sorted_json(feed.params), cursor),
        )

    def unfollow(self, feed: Followed) -> None:
        """Follow the feed no more."""
        self._db.execute(
            "DELETE FROM feed WHERE collection = ? AND params = ?",
            (feed.collection, sorted_json(feed.params)),
        )

    def version(self, key: str) -> RemoteVersion | None:
        """Return the server's version; None if there never was one."""
        found = self._db.execute("SELECT * FROM document WHERE key = ?", (key,)).fetchone()
        return RemoteVersion._make(found) if found else None

    def stored_keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with `prefix` at which the server has something."""
        query = "SELECT key FROM document WHERE key >= ? AND key < ? AND hash != ''"
        return (key for (key,) in self._db.execute(query, _range(prefix)))

    def store(self, version: RemoteVersion) -> None:
        """Replace the server's version."""
        self._db.execute("INSERT OR REPLACE INTO document VALUES (?, ?, ?, ?, ?)", version)
        if not version.hash:
            self.forget_elements(version.key)

    def forget(self, keys: Iterable[str]) -> None:
        """Delete the server's versions, as if they had never been received. Edits stay."""
        for key in keys:
            self._db.execute("DELETE FROM document WHERE key = ?", (key,))
            self.forget_elements(key)

    def is_kept(self, hash_: str) -> bool:
        """Return True if a file with this hash is at some key."""
        query = "SELECT 1 FROM document WHERE hash = ? AND data IS NULL"
        return self._db.execute(query, (hash_,)).fetchone() is not None

    def forget_removals(self, before_ms: int) -> None:
        """Delete what is known of removals before this time."""
        query = "DELETE FROM document WHERE hash = '' AND data IS NULL AND written_ms < ?"
        self._db.execute(query, (before_ms,))

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below `prefix` at which something is stored, seen from here, in order."""
        query = (
            "SELECT key FROM document WHERE key >= :from AND key < :to AND hash != '' AND key NOT IN "
            "(SELECT key FROM edit WHERE kind = 'delete' AND error IS NULL) UNION SELECT key FROM edit "
            "WHERE key >= :from AND key < :to AND kind != 'delete' AND error IS NULL ORDER BY key"
        )
        first, end = _range(prefix)
        return [key for (key,) in self._db.execute(query, {"from": first, "to": end})]

    def edit(self, key: str) -> Edit | None:
        """Return the put or delete of `key` that waits."""
        query = "SELECT * FROM edit WHERE key = ? AND kind != 'append' AND error IS NULL"
        found = self._db.execute(query, (key,)).fetchone()
        return Edit(*found) if found else None

    def edits(self, key: str | None = None, *, rejected: bool = False) -> list[Edit]:
        """Return the edits that wait, or were `rejected`, of `key` or of all, the oldest first."""
        query = "SELECT * FROM edit WHERE (error IS NOT NULL) = ? AND key = coalesce(?, key) ORDER BY id"
        return [Edit(*found) for found in self._db.execute(query, (rejected, key))]

    def first_edit(self, key: str) -> Edit | None:
        """Return the oldest edit of `key` that waits."""
        query = "SELECT * FROM edit WHERE key = ? AND error IS NULL ORDER BY id LIMIT 1"
        found = self._db.execute(query, (key,)).fetchone()
        return Edit(*found) if found else None

    def edited_keys(self) -> list[str]:
        """Return the keys of the edits that wait, the oldest first."""
        query = "SELECT key FROM edit WHERE error IS NULL GROUP BY key ORDER BY min(id)"
        return [key for (key,) in self._db.execute(query)]

    def unsent(self) -> int:
        """Return the number of edits that wait."""
        return int(self._db.execute("SELECT count(*) FROM edit WHERE error IS NULL").fetchone()[0])

    def save(self, edit: Edit) -> None:
        """Add an edit, or replace the one with this id."""
        values = astuple(edit)
        self._db.execute("INSERT OR REPLACE INTO edit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def drop(self, edit: Edit) -> None:
        """Delete an edit."""
        self._db.execute("DELETE FROM edit WHERE id = ?", (edit.id,))

    def elements(self, key: str, count: int) -> list[LogElement]:
        """Return the newest `count` elements of a log, in its order."""
        query = "SELECT ts_ms, members FROM element WHERE key = ? ORDER BY ts_ms DESC LIMIT ?"
        found = self._db.execute(query, (key, count)).fetchall()
        return [LogElement(ts_ms, *orjson.loads(members)) for ts_ms, members in reversed(found)]

    def forget_elements(self, key: str) -> None:
        """Delete the elements of a log."""
        self._db.execute("DELETE FROM element WHERE key = ?", (key,))

    def add_elements(self, key: str, elements: Iterable[LogElement]) -> None:
        """Add elements to a log, of which the newest 1000 stay."""
        rows = ((key, each.ts_ms, orjson.dumps(astuple(each)[1:])) for each in elements)
        self._db.executemany("INSERT OR REPLACE INTO element VALUES (?, ?, ?)", rows)
        self._db.execute(
            "DELETE FROM element WHERE key = ? AND ts_ms <= "
            "(SELECT ts_ms FROM element WHERE key = ? ORDER BY ts_ms DESC LIMIT 1 OFFSET ?)",
            (key, key, TAIL_ELEMENTS),
        )


def encode_error(error: Exception) -> bytes:
    """Return the error as the file has it."""
    if isinstance(error, PysyncError):
        body = {**error.extras, "status": error.status, "code": error.code, "error": error.message}
        return orjson.dumps(body)
    return orjson.dumps({"status": 0, "error": str(error) or type(error).__name__})


def decode_error(text: bytes) -> Exception:
    """Return the error of `encode_error`: one of `pysync.errors`, or a ValueError for others."""
    body: Mapping[str, object] = orjson.loads(text)
    status = body["status"]
    extras = {name: value for name, value in body.items() if name != "status"}
    return from_response(int(str(status)), extras, {}) if status else ValueError(body["error"])


def _range(prefix: str) -> tuple[str, str]:
    """Return the bounds of the keys that begin with `prefix`. Keys are ASCII."""
    return prefix, prefix + "\x7f"
