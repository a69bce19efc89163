"""The ids of batches of events: their order, and how a batch is stored exactly once."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.changelog import Change
from pysync.clock import FIRST_TIMESTAMP, HybridTimestamp
from pysync.engine.changes import DocumentRef
from pysync.engine.outbox import INTENT_TIMEOUT_MS
from pysync.plugins import PluginContext
from pysync.protocol import PARQUET_TYPE
from pysync.store import Charge, ExistingFileFilter, FileAlreadyExists

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
    that it changes, the parameter `id_name` is still the client's. `tick` is the position that its push
    reserved."""

    folder: str
    document_ref: DocumentRef
    token: str
    received_ms: int
    tick: HybridTimestamp
    id_name: str = BATCH_ID

    @property
    def suffix(self) -> str:
        """Return the end of this batch's file name, which no other batch has."""
        return f"-{self.token}{SUFFIX}"

    def id(self, tick: HybridTimestamp) -> str:
        """Return the id at this position."""
        return f"{order_prefix(tick)}-{self.token}"

    def key(self, tick: HybridTimestamp) -> str:
        """Return the key of the file at this position."""
        return f"{self.folder}/{order_prefix(tick)}{self.suffix}"

    def params(self, id_: str) -> dict[str, str]:
        """Return the path parameters under which the batch is pulled."""
        return {**self.document_ref.params, self.id_name: id_}

    def change(self, tick: HybridTimestamp, sha256: str) -> Change:
        """Return the change that announces the batch at this position."""
        subject = self.document_ref._replace(params=self.params(self.id(tick)), key=self.key(tick))
        return subject.change(sha256, self.received_ms)


LEEWAY_MS: Final = 60_000
"""Milliseconds by which clocks may differ or be set back while a push is repeated."""

Encode = Callable[[], Awaitable[bytes]]
"""Encodes the file of a batch."""


class CommitTimeSequencer:
    """For a store with a transactional change log: a batch gets its position when its file is committed, and
    the same transaction looks for the file of another attempt."""

    def __init__(self, services: PluginContext) -> None:
        self._outbox = services.outbox
        self._latest = FIRST_TIMESTAMP

    def low_watermark(self) -> str | None:
        """Return a name that no future batch precedes; None if all existing names qualify."""
        return None

    @asynccontextmanager
    async def reserve(self, received_ms: int) -> AsyncIterator[HybridTimestamp]:
        """Return the position that a push reserves when it begins. Its batch gets a later one."""
        # The later this is, the fewer files are searched for another attempt.
        yield max(self._latest, HybridTimestamp(received_ms - LEEWAY_MS, 0))

    async def is_abandoned(self, batch: PendingBatch, now_ms: int) -> bool:
        """Return True if the first attempt at a push stored nothing and, after this time, never will, so that
        the next attempt starts anew. Raises StoreUnavailable."""
        return False

    async def store(self, batch: PendingBatch, encode: Encode, *, once: bool) -> tuple[str, str]:
        """Store a batch, with `once` unless another attempt has stored it, and return its id and sha256.
        Raises the errors of `encode`, and Unavailable."""
        unless = ExistingFileFilter(batch.folder, order_prefix(batch.tick), batch.suffix) if once else None
        try:
            tick, sha256 = await self._outbox.write_ordered(
                batch.key,
                _single_chunk(await encode()),
                PARQUET_TYPE,
                lambda *made: [batch.change(*made)],
                unless,
                Charge(),
            )
        except FileAlreadyExists as found:
            return found.name.removesuffix(SUFFIX), found.sha256
        self._latest = max(self._latest, tick)
        return batch.id(tick), sha256


class ReservingSequencer:
    """For any other store: a batch gets its position when the push begins, so that all attempts write the
    same file."""

    def __init__(self, services: PluginContext) -> None:
        self._outbox = services.outbox
        self._store = services.store
        self._coordinator = services.coordinator
        self._in_flight: set[str] = set()

    def low_watermark(self) -> str | None:
        """See `CommitTimeSequencer.low_watermark`."""
        return min(self._in_flight, default=None)

    @asynccontextmanager
    async def reserve(self, received_ms: int) -> AsyncIterator[HybridTimestamp]:
        """See `CommitTimeSequencer.reserve`."""
        tick = await self._coordinator.next_timestamp()
        with self._track(tick):
            yield tick

    async def is_abandoned(self, batch: PendingBatch, now_ms: int) -> bool:
        """See `CommitTimeSequencer.is_abandoned`."""
        # Subscribers have passed its position long ago, so nothing may appear there any more.
        is_settled = batch.received_ms + INTENT_TIMEOUT_MS < now_ms
        return is_settled and await self._store.stat(batch.key(batch.tick)) is None

    async def store(self, batch: PendingBatch, encode: Encode, *, once: bool) -> tuple[str, str]:
        """See `CommitTimeSequencer.store`."""
        tick = batch.tick
        key, id_ = batch.key(tick), batch.id(tick)
        with self._track(tick):
            found = await self._store.stat(key) if once else None
            if found is not None:
                await self._outbox.reannounce([batch.change(tick, found.sha256)])
                return id_, found.sha256
            chunks = _single_chunk(await encode())
            return id_, await self._outbox.write(
                key, chunks, PARQUET_TYPE, lambda sha256: [batch.change(tick, sha256)]
            )

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
