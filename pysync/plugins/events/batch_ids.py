"""Assign ids to batches of events, and store each batch once (docs/reference/protocol.md#events)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

from pysync.changelog import Change, DocumentRef
from pysync.clock import FIRST_TIMESTAMP, HybridTimestamp
from pysync.engine.outbox import INTENT_TIMEOUT_MS
from pysync.plugins import PluginContext
from pysync.protocol import PARQUET_TYPE
from pysync.store import ExistingFileFilter, FileAlreadyExists

BATCH_ID: Final = "batchId"
"""The member of an answer that holds the id. The path parameter that stands for it may have another name."""
SUFFIX: Final = ".parquet"


def order_prefix(tick: HybridTimestamp) -> str:
    """The part of an id that says where in the order of batches it is: such texts have the order of ticks."""
    return f"{tick.ms:013d}-{tick.counter:06d}"


class RandomTokens:
    """Random texts of 12 hex digits. Randomness is fetched for many of them: whoever asks the system for some
    lets another thread of the process go first."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._digits = ""

    def next(self) -> str:
        if not self._digits:
            self._digits = self._random_bytes(6 * 256).hex()
        token, self._digits = self._digits[:12], self._digits[12:]
        return token


def received_at(ms: int) -> str:
    """Milliseconds since the epoch as ISO 8601 in UTC."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC).isoformat()[:19]}.{ms % 1000:03d}Z"


class PendingBatch(NamedTuple):
    """A batch that is to be stored in `folder`, under an id that ends in `token` (12 hex digits); and of what
    it is a change, whose parameter `id_name` is still the client's. `tick` is what its push remembers of the
    order."""

    folder: str
    document_ref: DocumentRef
    token: str
    received_ms: int
    tick: HybridTimestamp
    id_name: str = BATCH_ID

    @property
    def suffix(self) -> str:
        """What the name of this batch's file ends with, and no other's."""
        return f"-{self.token}{SUFFIX}"

    def id(self, tick: HybridTimestamp) -> str:
        """Its id, in that place."""
        return f"{order_prefix(tick)}-{self.token}"

    def key(self, tick: HybridTimestamp) -> str:
        """The key of its file, in that place."""
        return f"{self.folder}/{order_prefix(tick)}{self.suffix}"

    def params(self, id_: str) -> dict[str, str]:
        """The parameters of the path at which it is pulled."""
        return {**self.document_ref.params, self.id_name: id_}

    def change(self, tick: HybridTimestamp, sha256: str) -> Change:
        """What is told of it, in that place."""
        subject = self.document_ref._replace(params=self.params(self.id(tick)), key=self.key(tick))
        return subject.change(sha256, self.received_ms)


LEEWAY_MS: Final = 60_000
"""How far clocks may be set back, or apart, while a push is repeated."""

Encode = Callable[[], Awaitable[bytes]]
"""Makes the file of a batch."""


class BatchSequencer(Protocol):
    """The order of the batches of a service."""

    def low_watermark(self) -> str | None:
        """A name that all batches which come to light from now on are at or after; None where that goes for
        every name that is there."""

    def reserve(self, received_ms: int) -> AbstractAsyncContextManager[HybridTimestamp]:
        """What a push remembers of the order when it begins."""

    async def is_abandoned(self, batch: PendingBatch, now_ms: int) -> bool:
        """Whether the first attempt at a push has stored nothing and, after all this time, never will, so
        that the next one begins anew. Raises StoreUnavailable."""

    async def store(self, batch: PendingBatch, encode: Encode, *, once: bool) -> tuple[str, str]:
        """Store a batch, `once`: unless another attempt has. Returns its id and sha256. Raises what `encode`
        does, and Unavailable."""


class CommitTimeSequencer:
    """Of a store that keeps a log of its changes: a batch gets its place when its file comes to light, and in
    the same transaction the store looks for that of another attempt."""

    def __init__(self, services: PluginContext) -> None:
        self._outbox = services.outbox
        self._latest = FIRST_TIMESTAMP

    def low_watermark(self) -> str | None:
        return None

    @asynccontextmanager
    async def reserve(self, received_ms: int) -> AsyncIterator[HybridTimestamp]:
        # All places to come are later than either; the later these are, the less there is to look through.
        yield max(self._latest, HybridTimestamp(received_ms - LEEWAY_MS, 0))

    async def is_abandoned(self, batch: PendingBatch, now_ms: int) -> bool:
        return False

    async def store(self, batch: PendingBatch, encode: Encode, *, once: bool) -> tuple[str, str]:
        unless = ExistingFileFilter(batch.folder, order_prefix(batch.tick), batch.suffix) if once else None
        try:
            tick, sha256 = await self._outbox.write_ordered(
                batch.key,
                _single_chunk(await encode()),
                PARQUET_TYPE,
                lambda *made: [batch.change(*made)],
                unless,
            )
        except FileAlreadyExists as found:
            return found.name.removesuffix(SUFFIX), found.sha256
        self._latest = max(self._latest, tick)
        return batch.id(tick), sha256


class ReservingSequencer:
    """Of any other store: a batch gets its place when the push begins, so that all attempts at it write one
    file."""

    def __init__(self, services: PluginContext) -> None:
        self._outbox = services.outbox
        self._store = services.store
        self._coordinator = services.coordinator
        self._in_flight: set[str] = set()

    def low_watermark(self) -> str | None:
        return min(self._in_flight, default=None)

    @asynccontextmanager
    async def reserve(self, received_ms: int) -> AsyncIterator[HybridTimestamp]:
        tick = await self._coordinator.next_timestamp()
        with self._track(tick):
            yield tick

    async def is_abandoned(self, batch: PendingBatch, now_ms: int) -> bool:
        # Who follows has passed its place long ago: nothing is to come to light there any more.
        is_settled = batch.received_ms + INTENT_TIMEOUT_MS < now_ms
        return is_settled and await self._store.stat(batch.key(batch.tick)) is None

    async def store(self, batch: PendingBatch, encode: Encode, *, once: bool) -> tuple[str, str]:
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
