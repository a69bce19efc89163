"""Documents: pull, push with optimistic concurrency, and expiry (docs/reference/protocol.md#documents)."""

import hmac
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import orjson

from pysync import _core
from pysync.cache import BoundedCache
from pysync.concurrency import ATTEMPTS
from pysync.config import HistoryConfig
from pysync.config.key_templates import RESERVED
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.history import History, check_key, new_entry
from pysync.engine.idempotency import Attempt, AttemptRecord, IdempotentRequest
from pysync.engine.outbox import Outbox, outbox_of
from pysync.errors import Conflict, DocumentCorrupt, QuotaExceeded, StoreUnavailable
from pysync.model import WriteResult
from pysync.store import (
    ABSENT,
    AppendedObject,
    DamagedFile,
    Etag,
    EtagMismatch,
    ListEntry,
    NotModified,
    Precondition,
    Store,
    StoredObject,
    Write,
)
from pysync.write_ids import as_whitespace, has_write_id

SECRET_DOCUMENT_KEY: Final = f"{RESERVED}/secrets/versions"
"""The key of the secret. It is stored as a document, so that damage to it is found."""
STALE_BASE: Final = "stale"
"""A base that no document has."""


class CachedVersion(NamedTuple):
    """The version of a document that this process last saw, stored under `etag`."""

    hash: str
    etag: str
    ts_ms: int


class KeyedVersions:
    """Versions for readers that do not see all members of a document (`fieldPermissions`). The hash of the
    document would let them find hidden values by trying, so they get a version keyed with a secret of the
    store: the same in all processes, before and after a restart."""

    def __init__(
        self, store: Store, now_ms: Callable[[], int], corruption: CorruptionReporter | None = None
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._corruption = corruption or CorruptionReporter()
        self._secret = b""

    def compute(self, key: str, hash_: str, written_ms: int, hidden: frozenset[str]) -> str:
        """Return the version that readers without the members `hidden` see in place of `hash_`, the hash of
        the document at `key`. `load` must have been awaited. The version depends on the key and on the time
        of the write, so it cannot be compared with that of another document or of the reader's own push."""
        if not hidden or not hash_:
            return hash_
        assert self._secret, "load must be awaited first"
        text = orjson.dumps([key, hash_, written_ms, *sorted(hidden)])
        return hmac.digest(self._secret, text, "sha256").hex()

    async def load_and_compute(self, key: str, hash_: str, written_ms: int, hidden: frozenset[str]) -> str:
        """Return the version as `compute` does, after `load` if that is needed. Raises as `load`."""
        if hidden and hash_:
            await self.load()
        return self.compute(key, hash_, written_ms, hidden)

    async def load(self) -> None:
        """Load the secret from the store, or create it there. Raises DocumentCorrupt and StoreUnavailable."""
        if self._secret:
            return
        found = await self._store.get(SECRET_DOCUMENT_KEY)
        if found is None:
            body = b'{"data":{"secret":"%b"}}' % secrets.token_hex(32).encode()
            stored = _core.decode_push(body).stored(self._now_ms())
            with suppress(EtagMismatch):  # another process was faster
                await self._store.put(SECRET_DOCUMENT_KEY, stored, expect=ABSENT)
            found = await self._store.get(SECRET_DOCUMENT_KEY)
        if not isinstance(found, StoredObject):
            raise StoreUnavailable
        with self._corruption.reporting("document", SECRET_DOCUMENT_KEY):
            secret = orjson.loads(_core.read_document(found.body).data).get("secret")
            if not isinstance(secret, str) or len(secret) < 64:
                raise DocumentCorrupt
        self._secret = secret.encode()


class Documents:
    """Documents on top of a store. `now_ms` is the clock of every timestamp."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        now_ms: Callable[[], int],
        outbox: Outbox | None = None,
        corruption: CorruptionReporter | None = None,
    ) -> None:
        self._store = store
        self._outbox = outbox or outbox_of(store, coordinator)
        self._requests = self._outbox.idempotent_requests(now_ms)
        self._corruption = corruption or CorruptionReporter()
        self.versions = KeyedVersions(store, now_ms, self._corruption)
        self.history = History(store, now_ms, self._corruption)
        self.now_ms = now_ms
        # The verified versions that were written, requested by version or, in a remote store, read.
        self._cache = BoundedCache[str, CachedVersion]()

    async def pull(self, key: str, ttl_ms: int | None = None) -> _core.Document | None:
        """Return the document at `key`; None if nothing is stored or it is older than `ttl_ms`.

        Raises:
            DocumentCorrupt: the stored object is not a document, or not the one that was written.
            StoreUnavailable: the store cannot be read.
        """
        found = await self._store.get(key)
        if found is None or isinstance(found, NotModified):
            return None
        document = self._read(key, found)
        if self._store.is_remote:
            self._cache.put(key, CachedVersion(document.hash, found.etag, document.ts_ms))
        return None if self._is_expired(document.ts_ms, ttl_ms) else document

    async def get_version(self, key: str, ttl_ms: int | None = None) -> _core.Document | CachedVersion | None:
        """Return the stored version without its data. A version that this process has cached is not read
        again. Raises as `pull`."""
        cached = self._cache.get(key)
        found = await self._store.get(key, None if cached is None else cached.etag)
        if found is None:
            return None
        if isinstance(found, NotModified):
            return None if cached is None or self._is_expired(cached.ts_ms, ttl_ms) else cached
        document = self._read(key, found)
        self._cache.put(key, CachedVersion(document.hash, found.etag, document.ts_ms))
        return None if self._is_expired(document.ts_ms, ttl_ms) else document

    def push(
        self,
        key: str,
        body: _core.PushBody,
        ttl_ms: int | None = None,
        context: WriteContext | None = None,
        history: HistoryConfig | None = None,
        request: IdempotentRequest | None = None,
    ) -> Coroutine[None, None, WriteResult]:
        """Write `body` if its base is the stored version. Of two pushes with one base exactly one succeeds,
        in any number of processes. The write is announced unless `context` is None. With `history` the
        replaced version is kept, unless a quota leaves room for the new one alone. A repetition of `request`
        returns the result of the push that was carried out.

        Raises:
            Conflict: the base is stale, or null although something is stored.
            QuotaExceeded: more would be stored than a quota allows.
            StoreUnavailable: the write may or may not have taken effect.
            IdempotencyKeyReused, OutcomeUnknown: as `IdempotentRequests.carry_out`.
        """
        written = WriteResult(body.hash, self.now_ms())
        if request is None:
            return self._write(key, body, ttl_ms, context, history, Attempt(written))
        return self._requests.carry_out(
            request,
            written,
            partial(self._write, key, body, ttl_ms, context, history),
            base=lambda: self._etag_of(key, body.base_hash),
            stored=lambda first: self._etag_unless_written(key, first, context),
        )

    async def _etag_of(self, key: str, base_hash: str | None) -> str:
        """Return the etag of the document with this hash, `""` if it is not stored."""
        if not base_hash:
            return ""
        version = self._cache.get(key)
        if version is None or version.hash != base_hash:
            with suppress(DocumentCorrupt):
                await self.get_version(key)
            version = self._cache.get(key)
        return "" if version is None or version.hash != base_hash else version.etag

    async def _etag_unless_written(
        self, key: str, first: AttemptRecord, context: WriteContext | None
    ) -> str | None:
        """Return the etag of the stored document, `""` without one. Returns None if an earlier attempt has
        written it, which is then announced again."""
        found = await self._store.get(key)
        if self._is_written(key, found, first.write_id):
            await self._outbox.reannounce([] if context is None else [context.change(*first.result)])
            return None
        return found.etag if isinstance(found, StoredObject) else ""

    async def delete(
        self,
        key: str,
        base_hash: str,
        ttl_ms: int | None = None,
        context: WriteContext | None = None,
        history: HistoryConfig | None = None,
        request: IdempotentRequest | None = None,
    ) -> WriteResult:
        """Remove the document or file at `key` if `base_hash` is its version, and announce the removal as a
        change of `context`, whose reference names the key. With `history` the version is kept. Of several
        deletes and pushes of one version exactly one succeeds. `base_hash=""` removes a damaged document or
        file; it is also the version of nothing. Returns the removed version and the time, also to a
        repetition of `request`. Raises as `push`."""
        remove = partial(self._remove, key, ttl_ms, context, history)
        removed = WriteResult(base_hash, self.now_ms())
        if request is None:
            return await remove(Attempt(removed))
        return await self._requests.carry_out(
            request,
            removed,
            remove,
            base=lambda: self._stored_etag(key),
            stored=lambda first: self._stored_etag(key),
        )

    async def _stored_etag(self, key: str) -> str:
        """Return the etag of the document or file at `key`, `""` if there is none."""
        found = await self._store.get(key)
        if isinstance(found, StoredObject):
            return found.etag
        try:
            file = await self._store.stat(key)
        except DamagedFile as error:
            return error.etag
        return "" if file is None else file.etag

    async def _remove(
        self,
        key: str,
        ttl_ms: int | None,
        context: WriteContext | None,
        history: HistoryConfig | None,
        attempt: Attempt,
    ) -> WriteResult:
        """Delete the version with the hash of the result, and return the result. Raises as `delete`."""
        removed, claims, _, only = attempt
        base_hash = removed.hash
        changes = [] if context is None else [context.change(base_hash, removed.timestamp_ms, removed=True)]
        for _ in range(ATTEMPTS):
            found = await self._store.get(key)
            expect = await self._check_base(key, found, base_hash, ttl_ms)
            if only and expect != Etag(only):
                raise Conflict("")
            if expect == ABSENT and not claims:
                return removed
            also: list[AppendedObject] = []
            if history is not None:
                identity = "" if context is None else context.identity
                also = [new_entry(key, _kept(found, base_hash), "", removed.timestamp_ms, identity)]
            try:
                charge = None if context is None else context.charge
                write = Write(
                    key, None, expect, changes, base_hash, charge, also, (), claims, version=removed
                )
                await self._outbox.commit(write)
            except EtagMismatch:
                continue
            if history is not None:
                await self.history.after_write(key, history)
            return removed
        raise StoreUnavailable

    async def delete_expired(self, listed: ListEntry, ref: DocumentRef, ttl_ms: int) -> bool:
        """Delete a document or file if it is older than `ttl_ms` and still the listed version, and announce
        its removal as a change of `ref`, which names the key. Returns True if it was deleted."""
        now_ms = self.now_ms()
        if listed.modified_ms + ttl_ms >= now_ms:
            return False
        hash_, written_ms = await self._latest(listed.key)
        if written_ms + ttl_ms >= now_ms:
            return False  # other programs write files to a bucket that keep their etag
        removal = ref.change(hash_, now_ms, removed=True)
        try:
            await self._outbox.commit(Write(listed.key, None, Etag(listed.etag), [removal], hash_))
        except EtagMismatch:
            return False
        return True

    async def _latest(self, key: str) -> tuple[str, int]:
        """Return the hash of the document or file at `key`, and when it was written; `""` and 0 if it is
        damaged or gone."""
        try:
            found = await self._store.get(key)
            if isinstance(found, StoredObject):
                document = _core.read_document(found.body)
                return document.hash, document.ts_ms
            file = await self._store.stat(key)
        except DocumentCorrupt:
            return "", 0
        return ("", 0) if file is None else (file.sha256, file.modified_ms)

    async def _write(
        self,
        key: str,
        body: _core.PushBody,
        ttl_ms: int | None,
        context: WriteContext | None,
        history: HistoryConfig | None,
        attempt: Attempt,
    ) -> WriteResult:
        """Store `body` if its base is the stored version, unless the write of this attempt is stored already.
        Returns the result of the attempt. Raises as `push`."""
        written, claims, write_id, only = attempt
        stored = body.stored(written.timestamp_ms, as_whitespace(write_id) if write_id else b"")
        changes = [] if context is None else [context.change(written.hash, written.timestamp_ms)]
        charge = None if context is None else context.charge
        expect: Precondition | None = None
        replaced: bytes | None = None
        if history is not None:
            check_key(key)
        if body.base_hash is None and (history is None or self._outbox.is_transactional):
            expect = ABSENT
        elif body.base_hash is not None and history is None:
            expect = self._cached_precondition(key, body.base_hash, ttl_ms)
        for _ in range(ATTEMPTS):
            if expect is None:
                found = await self._store.get(key)
                # Decide with this read: before the next one another push may replace the object.
                if write_id and self._is_written(key, found, write_id):
                    await self._outbox.reannounce(changes)
                    return written
                expect = await self._check_base(key, found, body.base_hash, ttl_ms)
                replaced = _kept(found, body.base_hash)
            if only and expect != Etag(only):
                raise Conflict("")
            also: list[AppendedObject] = []
            if history is not None:
                identity = "" if context is None else context.identity
                also = [new_entry(key, replaced, written.hash, written.timestamp_ms, identity)]
            try:
                base = body.base_hash or ""
                write = Write(key, stored, expect, changes, base, charge, also, (), claims, version=written)
                etag = await self._outbox.commit(write)
            except EtagMismatch:
                expect = None
            except QuotaExceeded as error:
                if history is None or not error.is_of_bytes:
                    raise
                if not await self.history.make_room(key, history):
                    history = None
            else:
                if history is not None:
                    await self.history.after_write(key, history)
                self._cache.put(key, CachedVersion(body.hash, etag, written.timestamp_ms))
                return written
        raise StoreUnavailable

    def _read(self, key: str, found: StoredObject) -> _core.Document:
        try:
            return _core.read_document(found.body)
        except DocumentCorrupt as error:
            self._corruption.report_once(error, "document", key)
            raise

    def _is_written(self, key: str, found: StoredObject | NotModified | None, write_id: str) -> bool:
        """Return True if the stored document is the undamaged write of another attempt with this
        `write_id`."""
        if not (isinstance(found, StoredObject) and has_write_id(found.body, write_id)):
            return False
        try:
            self._read(key, found)
        except DocumentCorrupt:
            return False
        return True

    def _cached_precondition(self, key: str, base_hash: str, ttl_ms: int | None) -> Precondition | None:
        """Return the precondition for a push with `base_hash` if this process has cached that version, which
        then need not be read again; None if it has not."""
        cached = None if ttl_ms is not None else self._cache.get(key)
        return None if cached is None or cached.hash != base_hash else Etag(cached.etag)

    def _is_expired(self, written_ms: int, ttl_ms: int | None) -> bool:
        return ttl_ms is not None and written_ms + ttl_ms < self.now_ms()

    async def _check_base(
        self, key: str, found: StoredObject | NotModified | None, base_hash: str | None, ttl_ms: int | None
    ) -> Precondition:
        """Return the precondition for a push with `base_hash`. A file may be stored in place of a document;
        its hash is then the base. Raises Conflict, also for a damaged object unless `base_hash` is `""`, and
        DocumentCorrupt for a damaged log."""
        if found is None or isinstance(found, NotModified):
            try:
                file = await self._store.stat(key)
            except DamagedFile as error:
                if base_hash != "":
                    raise Conflict("") from None
                return Etag(error.etag)
            current_hash = "" if file is None or self._is_expired(file.modified_ms, ttl_ms) else file.sha256
            if current_hash != (base_hash or ""):
                raise Conflict(current_hash)
            return ABSENT if file is None else Etag(file.etag)
        try:
            document = self._read(key, found)
        except DocumentCorrupt:
            if _core.is_log(found.body):
                raise  # a push that repairs a document would delete a log
            if base_hash != "":
                raise Conflict("") from None
            return Etag(found.etag)
        current_hash = "" if self._is_expired(document.ts_ms, ttl_ms) else document.hash
        if current_hash != (base_hash or ""):
            raise Conflict(current_hash, document.ts_ms)
        return Etag(found.etag)


def _kept(found: StoredObject | NotModified | None, base_hash: str | None) -> bytes | None:
    """Return the stored document that a write with this base replaces, if its history keeps it: `""` is the
    base over a damaged one."""
    return found.body if base_hash and isinstance(found, StoredObject) else None
