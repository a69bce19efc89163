"""Files: bytes as they were sent; the last write wins (docs/reference/protocol.md#files)."""

from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from pysync.config import Collection
from pysync.config.key_templates import KeyTemplate
from pysync.corruption import CorruptionReporter
from pysync.engine.changes import WriteContext
from pysync.engine.idempotency import AttemptRecord, IdempotentRequest, result_of
from pysync.engine.outbox import Outbox
from pysync.errors import DocumentCorrupt
from pysync.model import WriteResult
from pysync.protocol import PARQUET_TYPE
from pysync.store import CarriedOut, Claim, FileStat, OpenFile, Store
from pysync.write_ids import new_write_id


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The settings of a collection for files.

    `types` are the media types that are pushed as files, empty if a plugin creates them. With `documents` a
    document may be stored where there is no file. `content_type` is the media type of every response with a
    file, None for the type that it was pushed with. The key of a file is `template`, filled in, and `suffix`;
    without a template it is the key of the path.
    """

    types: tuple[str, ...] = ()
    documents: bool = False
    content_type: str | None = None
    template: KeyTemplate | None = None
    suffix: str = ""

    @classmethod
    def from_collection(cls, collection: Collection) -> Self | None:
        """Return the settings of the collection; None if nothing is pushed to it as a file."""
        types = collection.file_types
        if not types:
            return None
        return cls(types, collection.accepts_json, PARQUET_TYPE if collection.is_parquet else None)

    def matches_key(self, key: str) -> bool:
        """Return True if the key can be that of a file of `template`."""
        bare = key.removesuffix(self.suffix)
        return (
            self.template is not None
            and key.endswith(self.suffix)
            and self.template.matches(bare)
            and not bare.endswith("/")
        )

    def accepts(self, media_type: str) -> bool:
        """Return True if a body of this media type (in lower case, without parameters) is stored as a file.
        `type/*` and `*/*` are wildcards."""
        kind = media_type.partition("/")[0]
        return not {media_type, f"{kind}/*", "*/*"}.isdisjoint(self.types)


def is_expired(stat: FileStat, ttl_ms: int | None, now_ms: int) -> bool:
    """Return True if a file is older than `ttl_ms` and therefore reads as missing."""
    return ttl_ms is not None and stat.modified_ms + ttl_ms < now_ms


class Files:
    """Files on top of a store. `now_ms` is the clock of every timestamp. Damaged files are reported to
    `corruption`."""

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        outbox: Outbox,
        corruption: CorruptionReporter | None = None,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._requests = outbox.idempotent_requests(now_ms)
        self._corruption = corruption or CorruptionReporter()
        self.now_ms = now_ms

    async def stat(self, key: str, ttl_ms: int | None = None) -> FileStat | None:
        """Return the metadata of the file at `key`; None if there is none or it is older than `ttl_ms`.
        Raises DocumentCorrupt if it is damaged, and StoreUnavailable."""
        with self._corruption.reporting("file", key):
            stat = await self._store.stat(key)
        return None if stat is None or is_expired(stat, ttl_ms, self.now_ms()) else stat

    async def open(
        self, key: str, start: int = 0, end: int | None = None, ttl_ms: int | None = None
    ) -> OpenFile | None:
        """Return the file at `key` with the chunks of its bytes [start, end), as `Store.open`; None as
        `stat`. The caller closes the chunks. Raises as `stat`."""
        with self._corruption.reporting("file", key):
            file = await self._store.open(key, start, end)
        if file is not None and is_expired(file, ttl_ms, self.now_ms()):
            await file.chunks.aclose()
            return None
        return file

    async def push(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        context: WriteContext,
        request_key: str | None = None,
    ) -> WriteResult:
        """Store the chunks as one file, durably, and announce it. An error of `chunks` is passed on, and
        nothing is stored then. If a push with this `request_key` was carried out before, returns its result
        once all chunks have come, and stores nothing. Raises KeyConflict, QuotaExceeded and Unavailable, and
        IdempotencyKeyReused if that push was of other bytes."""
        timestamp_ms = self.now_ms()

        def claim(sha256: str) -> Claim:
            assert request_key is not None
            return IdempotentRequest(request_key, sha256).claim(WriteResult(sha256, timestamp_ms))

        def claimed(sha256: str) -> AbstractAsyncContextManager[None]:
            assert request_key is not None
            request = IdempotentRequest(request_key, sha256)
            own = AttemptRecord(new_write_id(), sha256, timestamp_ms, sha256)
            return self._requests.claimed(request, own, lambda first: self._is_stored(key, first))

        try:
            sha256 = await self._outbox.write(
                key,
                chunks,
                content_type,
                lambda sha256: [context.change(sha256, timestamp_ms)],
                context.charge,
                None if request_key is None else claim,
                None if request_key is None else claimed,
            )
        except CarriedOut as earlier:
            return result_of(earlier.outcome)
        return WriteResult(sha256, timestamp_ms)

    async def _is_stored(self, key: str, attempt: AttemptRecord) -> bool:
        """Return True if the file has the bytes of an attempt. Files have no base, so nobody can tell whether
        that attempt or another one stored them."""
        try:
            found = await self._store.stat(key)
        except DocumentCorrupt:
            return False
        return found is not None and found.sha256 == attempt.hash
