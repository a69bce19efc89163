"""Documents and logs as they look from here: the server's versions with the edits that wait."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar
from weakref import WeakSet

import orjson

from pysync.client.merge import Dropped, JsonObject, MergeConflict, local_wins
from pysync.client.models import LogElement
from pysync.client.replica.file import Edit, Kind, RemoteVersion, ReplicaFile
from pysync.client.sync import MAX_DROPPED, Cipher, DocumentRules, Merge, sorted_json
from pysync.client.transport import document_key
from pysync.config.key_templates import KeyTemplate
from pysync.errors import UnknownCollection

T = TypeVar("T")
OnConflict = Callable[[MergeConflict], Any]


@dataclass(frozen=True, slots=True)
class CollectionRules:
    """The options of a SyncDocument: one value for all collections, or values by the collection's name."""

    on_conflict: OnConflict | Mapping[str, OnConflict] = local_wins
    id_member: str | Mapping[str, str] = "id"
    resolve: Merge | Mapping[str, Merge] | None = None
    sealing: Cipher | Mapping[str, Cipher | None] | None = None

    def of(self, collection: str) -> DocumentRules:
        """Return the rules of a collection."""

        def chosen(option: T | Mapping[str, T], default: T) -> T:
            return option.get(collection, default) if isinstance(option, Mapping) else option

        return DocumentRules(
            chosen(self.on_conflict, local_wins),
            chosen(self.id_member, "id"),
            chosen(self.resolve, None),
            chosen(self.sealing, None),
        )


class ChangedKeys:
    """An async iterator over the keys of what changes, each once until it is returned. It ends when the
    replica is closed."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._signal = asyncio.Event()
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._keys:
            if self._is_closed:
                raise StopAsyncIteration
            self._signal.clear()
            await self._signal.wait()
        key = next(iter(self._keys))
        del self._keys[key]
        return key

    def add(self, key: str) -> None:
        """Have the key returned."""
        self._keys[key] = None
        self._signal.set()

    def close(self) -> None:
        """End the iteration after the keys that are known."""
        self._is_closed = True
        self._signal.set()


class LocalCopy:
    """The methods that need no network. They are immediate, and an edit is on the disk when they return.
    Call them in the thread of the event loop.

    An edit raises OSError if the disk fails: nothing has changed then. Its `errno` is ENOSPC if the disk is
    full. A deletion of what is not known here waits as well, and deletes what the server has.
    """

    _file: ReplicaFile

    def __init__(self, rules: CollectionRules, now_ms: Callable[[], int]) -> None:
        self.dropped: deque[tuple[str, Dropped]] = deque(maxlen=MAX_DROPPED)
        """The newest 1000 edits that merges discarded, each with the key of its document."""
        self._rules = rules
        self._now_ms = now_ms
        self._paths: dict[str, str] = {}
        """The key templates of collections, as far as the server has named them."""
        self._iterators: WeakSet[ChangedKeys] = WeakSet()

    def get(self, key: str) -> JsonObject | None:
        """Return the document with the edits that wait; None if there is none. Raises as the cipher if it is
        sealed and cannot be opened."""
        key = document_key(key)
        if (edit := self._file.edit(key)) is not None:
            return edit.plain
        version = self._file.version(key)
        return None if version is None or version.data is None else self._open(key, version.data)

    def put(self, key: str, data: Mapping[str, Any]) -> None:
        """Replace the document. Raises TypeError and ValueError for what JSON cannot hold."""
        self._edit(document_key(key), "put", sorted_json(dict(data)))

    def delete(self, key: str) -> None:
        """Remove the document, log or file, where its collection is `deletable`. An edit that somebody else
        has made meanwhile wins over it."""
        self._edit(document_key(key), "delete", None)

    def append(self, key: str, data: Mapping[str, Any]) -> None:
        """Append `data` to the log. Raises as `put`."""
        edit = Edit(None, document_key(key), "append", sorted_json(dict(data)), written_ms=self._now_ms())
        with self._file.transaction():
            self._file.save(edit)
        self._edited(edit.key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all documents, logs and files that begin with `prefix`, in order."""
        return self._file.keys(document_key(prefix))

    def tail(self, key: str, n: int) -> list[LogElement]:
        """Return the newest `n` elements of the log, in its order; at most 1000 and those that wait. These
        come last, without an author, and with the time of their `append`. Sealed data that cannot be opened
        is left as it is."""
        key = document_key(key)
        edit, found = self._file.edit(key), list[LogElement]()
        is_deleted = edit is not None and edit.data is None
        for element in () if is_deleted else self._file.elements(key, n):
            try:
                found.append(replace(element, data=self._rules_of(key).open(element.data)))
            except Exception:  # of any cipher
                found.append(element)
        for edit in self._file.edits(key):
            if edit.kind == "append" and edit.data is not None:
                found.append(LogElement(edit.written_ms or 0, orjson.loads(edit.data)))
        return found[max(len(found) - n, 0) :]

    def changes(self) -> ChangedKeys:
        """Return an async iterator over the keys of documents, logs and files that change from now on,
        whoever changes them, and of edits that are rejected."""
        iterator = ChangedKeys()
        self._iterators.add(iterator)
        return iterator

    def retry(self, key: str) -> None:
        """Send the rejected edits of `key` again, merged with what is there now."""
        with self._file.transaction():
            for edit in self._file.edits(document_key(key), rejected=True):
                waiting = None if edit.kind == "append" else self._file.edit(edit.key)
                if waiting is None:
                    self._file.save(replace(edit, error=None))
                    continue
                if edit.data is not None and waiting.data is not None:
                    base, rejected = self._open(edit.key, edit.base), orjson.loads(edit.data)
                    data, _ = self._rules_of(edit.key).merge(base, orjson.loads(waiting.data), rejected)
                    self._file.save(replace(waiting, data=sorted_json(data)))
                self._file.drop(edit)
        self._edited(document_key(key))

    def discard(self, key: str) -> None:
        """Delete the rejected edits of `key`."""
        with self._file.transaction():
            for edit in self._file.edits(document_key(key), rejected=True):
                self._file.drop(edit)
        self._notify(document_key(key))

    def _edit(self, key: str, kind: Kind, data: bytes | None) -> None:
        found, version = self._file.edit(key), self._file.version(key)
        known = version or RemoteVersion(key, "")
        edit = found or Edit(None, key, kind, base=known.data, base_hash=known.hash)
        is_elsewhere = edit.base_hash != "" or edit.idempotency_key != "" or (found or version) is None
        with self._file.transaction():
            if data is None and not is_elsewhere:
                self._file.drop(edit)  # the server has never had it, or not any more
            else:
                self._file.save(replace(edit, kind=kind, data=data, written_ms=None))
        self._edited(key)

    def _edited(self, key: str) -> None:
        """Called after each edit from here."""
        self._notify(key)

    def _notify(self, key: str) -> None:
        """Tell the iterators that what is at `key` has changed."""
        for iterator in self._iterators:
            iterator.add(key)

    def _collection_of(self, key: str) -> str | None:
        """Return the collection of a key; None if the server has not named one to which it belongs. As on the
        server, literal segments win."""
        templates = [(KeyTemplate.of(path), name) for name, path in self._paths.items()]
        found = [(each.open_segments, name) for each, name in templates if each.matches(key)]
        return min(found)[1] if found else None

    def _rules_of(self, key: str) -> DocumentRules:
        """Return the rules of the collection of `key`. Raises UnknownCollection if `sealing` is by collection
        and does not name that one: it is the server that says which one it is."""
        name, sealing = self._collection_of(key) or "", self._rules.sealing
        if isinstance(sealing, Mapping) and name not in sealing:
            raise UnknownCollection(
                f"`sealing` does not say whether {key} is sealed, of the collection {name!r}"
            )
        return self._rules.of(name)

    def _open(self, key: str, stored: bytes | None) -> JsonObject:
        """Return what the server has as plain data, `{}` for nothing. Raises as the cipher."""
        return {} if stored is None else self._rules_of(key).open(orjson.loads(stored))
