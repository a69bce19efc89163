"""The ids of batches of events: their order, and how a batch is stored exactly once."""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.changelog import Change
from pysync.clock import HybridTimestamp
from pysync.engine.changes import DocumentRef
from pysync.engine.idempotency import AttemptRecord, IdempotentRequest
from pysync.model import WriteResult
from pysync.plugins import PluginContext
from pysync.protocol import PARQUET_TYPE
from pysync.store import Charge, Claim, TransactionalStore

BATCH_ID: Final = "batchId"
"""The member of a response that holds the id. The path parameter for it may have another name."""
SUFFIX: Final = ".parquet"


def order_prefix(tick: HybridTimestamp) -> str:
    """Return the part of an id that orders batches: these texts sort as their timestamps do."""
    return f"{tick.ms:013d}-{tick.counter:06d}"


class RandomTokens:
    """Random texts of 12 hex digits. Randomness is read for many at once, because each system call may yield
    to another thread."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._digits = ""

    def next(self) -> str:
        """Return the next token."""
        if not self._digits:
            self._digits = self._random_bytes(6 * 256).hex()
        token, self._digits = self._digits[:12], self._digits[12:]
        return token


def received_at(ms: int) -> str:
    """Return milliseconds since the epoch as ISO 8601 in UTC."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC).isoformat()[:19]}.{ms % 1000:03d}Z"


class PendingBatch(NamedTuple):
    """A batch to be stored in `folder` under an id that ends with `token` (12 hex digits). In the document
    that it changes, the parameter `id_name` is still the client's."""

    folder: str
    ref: DocumentRef
    identity: str
    token: str
    received_ms: int
    id_name: str = BATCH_ID

    def id(self, tick: HybridTimestamp) -> str:
        """Return the id at this position."""
        return f"{order_prefix(tick)}-{self.token}"

    def key(self, id_: str) -> str:
        """Return the key of the file."""
        return f"{self.folder}/{id_}{SUFFIX}"

    def params(self, id_: str) -> dict[str, str]:
        """Return the path parameters under which the batch is pulled."""
        return {**self.ref.params, self.id_name: id_}

    def change(self, id_: str, sha256: str) -> Change:
        """Return the change that announces the batch."""
        ref = self.ref._replace(params=self.params(id_), key=self.key(id_))
        return ref.change(sha256, self.received_ms, self.identity)


class CommitTimeSequencer:
    """For a store with a transactional change log: a batch gets its position when its file is committed."""

    def __init__(self, store: TransactionalStore) -> None:
        self._store = store

    def low_watermark(self) -> str | None:
        """Return a name that no future batch precedes; None if all existing names qualify."""
        return None

    async def store(
        self, batch: PendingBatch, body: bytes, request: IdempotentRequest | None
    ) -> tuple[WriteResult, str]:
        """Store the file of a batch, and return its result and id. Raises CarriedOut, with both, if `request`
        was carried out before, IdempotencyKeyReused, OutcomeUnknown, QuotaExceeded and Unavailable."""

        def claim(tick: HybridTimestamp, sha256: str) -> Claim:
            assert request is not None
            return request.claim(WriteResult(sha256, batch.received_ms), batch.id(tick))

        tick, sha256 = await self._store.write_ordered(
            lambda tick: batch.key(batch.id(tick)),
            _single_chunk(body),
            PARQUET_TYPE,
            lambda tick, sha256: [batch.change(batch.id(tick), sha256)],
            Charge(),
            None if request is None else claim,
        )
        return WriteResult(sha256, batch.received_ms), batch.id(tick)


class ReservingSequencer:
    """For any other store: a batch gets its position before its file is written, and its id is the write id
    of the attempt."""

    def __init__(self, services: PluginContext) -> None:
        self._outbox = services.outbox
        self._requests = services.outbox.idempotent_requests(services.now_ms)
        self._store = services.store
        self._coordinator = services.coordinator
        self._in_flight: set[str] = set()

    def low_watermark(self) -> str | None:
        """See `CommitTimeSequencer.low_watermark`."""
        return min(self._in_flight, default=None)

    async def store(
        self, batch: PendingBatch, body: bytes, request: IdempotentRequest | None
    ) -> tuple[WriteResult, str]:
        """See `CommitTimeSequencer.store`."""
        written = WriteResult(hashlib.sha256(body).hexdigest(), batch.received_ms)
        tick = await self._coordinator.next_timestamp()
        id_ = batch.id(tick)
        claimed: AbstractAsyncContextManager[None] = nullcontext()
        if request is not None:
            own = AttemptRecord(id_, *written, request.content)
            claimed = self._requests.claimed(request, own, lambda first: self._is_stored(batch, first))
        with self._track(tick):
            async with claimed:
                await self._outbox.write(
                    batch.key(id_),
                    _single_chunk(body),
                    PARQUET_TYPE,
                    lambda sha256: [batch.change(id_, sha256)],
                )
        return written, id_

    async def _is_stored(self, batch: PendingBatch, first: AttemptRecord) -> bool:
        """Return True if the file of an earlier attempt is there, which is then announced."""
        if await self._store.stat(batch.key(first.write_id)) is None:
            return False
        earlier = batch._replace(received_ms=first.timestamp_ms)
        await self._outbox.reannounce([earlier.change(first.write_id, first.hash)])
        return True

    @contextmanager
    def _track(self, tick: HybridTimestamp) -> Iterator[None]:
        self._in_flight.add(order_prefix(tick))
        try:
            yield
        finally:
            self._in_flight.discard(order_prefix(tick))


async def _single_chunk(body: bytes) -> AsyncIterator[bytes]:
    yield body


BatchSequencer = CommitTimeSequencer | ReservingSequencer
"""Assigns positions to the batches of a service."""
