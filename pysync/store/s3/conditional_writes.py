"""Conditional writes, and the outcome of a write whose response was lost."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from pysync.concurrency import KeyLocks
from pysync.errors import StoreUnavailable
from pysync.store.s3.http import S3ConnectionError, S3Error, S3Request, S3RequestSender
from pysync.store.s3.versions import (
    LINEAGE,
    NO_VERSION,
    SHA256,
    TOMBSTONE,
    TOMBSTONE_TYPE,
    BucketCapabilities,
    ExpectedVersion,
    Lineage,
    Version,
    VersionCache,
    WriteOutcome,
    resolve_outcome,
    unquote_etag,
)
from pysync.store.types import (
    ANY,
    Etag,
    EtagMismatch,
    NotWritten,
    Precondition,
    StoredObject,
    check_precondition,
)
from pysync.write_ids import new_write_id, with_write_id


@dataclass(slots=True)
class PendingWrite:
    """A write of a document, tombstone or small file, for all its attempts. `sent` is the body as it is
    stored; `sha256` is set for files."""

    id: str
    key: str
    body: bytes
    sent: bytes
    content_type: str
    modified_ms: int
    sha256: str | None = None

    def lineage(self, base: ExpectedVersion | None) -> Lineage:
        """Return the lineage of a write over `base`. None, for an unconditional write, names no replaced
        version."""
        return Lineage(self.modified_ms, (self.id, *(base.replaced if base else ())))

    def request(self, base: ExpectedVersion | None, condition: Mapping[str, str]) -> S3Request:
        """Return the request for one attempt, with the headers of `condition`."""
        headers = {
            "Content-Type": self.content_type,
            LINEAGE: self.lineage(base).header(),
            **({} if self.sha256 is None else {SHA256: self.sha256}),
            **condition,
        }
        return S3Request("PUT", self.key, headers, self.sent)


@contextmanager
def before_writing() -> Iterator[None]:
    """Raise NotWritten in place of StoreUnavailable: no request was sent yet that stores the object."""
    try:
        yield
    except StoreUnavailable as error:
        raise NotWritten from error.__cause__


class ConditionalWriter:
    """The writes of whole objects to one bucket. If the bucket does not honour conditions, this object
    enforces them, and the writers to one key wait for each other."""

    def __init__(
        self,
        requests: S3RequestSender,
        cache: VersionCache,
        bucket: BucketCapabilities,
        now_ms: Callable[[], int],
    ) -> None:
        self._requests = requests
        self._cache = cache
        self._bucket = bucket
        self._now_ms = now_ms
        self._locks = KeyLocks()

    async def put(self, key: str, body: bytes, content_type: str, expect: Precondition) -> str:
        """See `Store.put`."""
        id_ = new_write_id()
        write = PendingWrite(id_, key, body, with_write_id(body, id_), content_type, self._now_ms())
        if not self._bucket.is_conditional:
            return await self._put_locked(write, expect)
        if expect == ANY:
            return await self._put_any(write)
        base = self._cache.expected_version(key, expect.value) if isinstance(expect, Etag) else NO_VERSION
        return await self._compare_and_swap(write, base)

    async def put_file(self, key: str, body: bytes, content_type: str, sha256: str) -> bool:
        """Put a file over the current version, exactly once: the condition that this version is still stored
        prevents a late attempt from restoring the file over a newer write. Returns False if the same bytes
        are stored as a whole: the file would have their ETag, and a delete of them would delete it."""
        write = PendingWrite(new_write_id(), key, b"", body, content_type, self._now_ms(), sha256)
        while True:
            with before_writing():
                found = await self.find(key)
            if found is not None and found.sha256 == sha256 and not found.parts:
                return False
            if not self._bucket.is_conditional:
                await self._put_locked(write, ANY)
                return True
            with contextlib.suppress(EtagMismatch):
                await self._compare_and_swap(write, ExpectedVersion.of(found))
                return True

    async def delete(self, key: str, expect: Precondition) -> None:
        """See `Store.delete`."""
        is_conditional = self._bucket.is_conditional
        async with self.exclusive(key):
            if is_conditional and isinstance(expect, Etag):
                await self._delete_version(key, expect)
            elif expect == ANY:
                await self._delete_any(key)
            else:
                found = await self._find_live(key)
                check_precondition(expect, found and found.etag)
                if found is not None:
                    await self._delete_any(key)
        self._cache.evict(key)

    @asynccontextmanager
    async def exclusive(self, key: str) -> AsyncIterator[None]:
        """Enclose an unconditional write. If conditions hold only within this process, other writers to the
        key wait."""
        async with contextlib.nullcontext() if self._bucket.is_conditional else self._locks[key]:
            yield

    async def find(self, key: str) -> Version | None:
        """Return the version at `key`, which may be a tombstone, without its body. None if there is no
        object."""
        response = await self._requests.send(S3Request("HEAD", key), 404)
        return None if response.status == 404 else Version.of(response.headers)

    async def _compare_and_swap(self, write: PendingWrite, base: ExpectedVersion) -> str:
        """Store `write` over `base` only, and return its etag. Raises EtagMismatch if another version is
        stored, StoreUnavailable if the outcome cannot be determined."""
        attempts = self._requests.retry_state()
        maybe_stored = False
        while True:
            trouble: S3ConnectionError | S3Error
            try:
                response = await self._requests.send_once(write.request(base, self._condition(base)))
                if response.status == 200 and "ETag" in response.headers:
                    return self._cache_written(write, base, unquote_etag(response.headers["ETag"]))
                if response.is_precondition_failed and not maybe_stored:
                    tombstone = await self._tombstone_in_place_of(write.key, base)
                    if tombstone is not None:
                        base = tombstone
                        continue
                trouble = S3Error(response)
            except S3ConnectionError as broken:
                trouble = broken
            maybe_stored = maybe_stored or trouble.may_have_executed
            if maybe_stored and (trouble.may_have_executed or trouble.is_precondition_failed):
                etag = await self._resolve_outcome(write, base, trouble)
                if etag is not None:
                    return etag
            elif not (trouble.is_transient or trouble.is_precondition_failed):
                raise (StoreUnavailable if maybe_stored else NotWritten) from trouble
            if not await attempts.next_attempt():
                raise (StoreUnavailable if maybe_stored else NotWritten) from trouble

    async def _tombstone_in_place_of(self, key: str, base: ExpectedVersion) -> ExpectedVersion | None:
        """Return the tombstone that made a write of a new object fail; None if the write should be retried.
        Raises EtagMismatch if it should not."""
        if base.etag is not None:
            raise EtagMismatch
        found = await self.find(key)
        if found is None:
            return None
        if not found.is_tombstone:
            raise EtagMismatch
        return ExpectedVersion.of(found)

    async def _resolve_outcome(
        self, write: PendingWrite, base: ExpectedVersion, error: S3ConnectionError | S3Error
    ) -> str | None:
        """Return the etag of `write` after `error`, None if it should be retried. Raises as
        `_compare_and_swap` does."""
        found = await self.find(write.key)
        outcome = resolve_outcome(write.id, base, found)
        if outcome is WriteOutcome.STORED:
            assert found is not None
            return self._cache_written(write, base, found.etag)
        if outcome is WriteOutcome.REPLACED:
            return f"replaced-{write.id}"
        if outcome is WriteOutcome.NOT_STORED:
            raise EtagMismatch
        if outcome is WriteOutcome.UNKNOWN:
            raise StoreUnavailable from error
        return None

    async def _put_any(self, write: PendingWrite) -> str:
        response = await self._requests.send(write.request(None, {}))
        return self._cache_written(write, None, unquote_etag(response.headers["ETag"]))

    async def _put_locked(self, write: PendingWrite, expect: Precondition) -> str:
        async with self._locks[write.key]:
            if expect != ANY:
                found = await self._find_live(write.key)
                check_precondition(expect, found and found.etag)
            return await self._put_any(write)

    async def _delete_any(self, key: str) -> None:
        await self._requests.send(S3Request("DELETE", key), 204, 404)

    async def _delete_version(self, key: str, expect: Etag) -> None:
        """Replace a version by a tombstone, which only one writer can do, and remove the tombstone if the
        server honours conditions of deletes: another writer may have replaced it."""
        write = PendingWrite(new_write_id(), key, TOMBSTONE, TOMBSTONE, TOMBSTONE_TYPE, self._now_ms())
        base = self._cache.expected_version(key, expect.value)
        if not base.ids:
            found = await self._find_live(key)
            check_precondition(expect, found and found.etag)
            base = ExpectedVersion.of(found)
        tombstone = await self._compare_and_swap(write, base)
        if self._bucket.delete_if_match:
            condition = {"If-Match": self._bucket.condition(tombstone)}
            with contextlib.suppress(StoreUnavailable):  # the tombstone stays, and reads as nothing
                await self._requests.send(S3Request("DELETE", key, condition), 204, 404, 412)

    async def _find_live(self, key: str) -> Version | None:
        found = await self.find(key)
        return None if found is None or found.is_tombstone else found

    def _condition(self, base: ExpectedVersion) -> dict[str, str]:
        if base.etag is None:
            return {"If-None-Match": "*"}
        return {"If-Match": self._bucket.condition(base.etag)}

    def _cache_written(self, write: PendingWrite, base: ExpectedVersion | None, etag: str) -> str:
        """Cache the stored version, unless it is a file, and return its etag."""
        if write.sha256 is not None:
            self._cache.evict(write.key)
            return etag
        found = StoredObject(write.body, etag, write.content_type, write.modified_ms)
        self._cache.put(write.key, found, write.lineage(base).ids)
        return etag
