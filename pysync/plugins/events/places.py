"""How batches get their places in the order of ids, and are stored there once (service, Events plugin 4)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, Protocol

from pysync.clock import FIRST_TICK, Tick
from pysync.engine.outbox import SETTLED_MS
from pysync.plugins import Services
from pysync.plugins.events.batches import SUFFIX, Batch, place
from pysync.protocol import PARQUET_TYPE
from pysync.store import AlreadyWritten, Namesakes

LEEWAY_MS: Final = 60_000
"""How far clocks may be set back, or apart, while a push is repeated."""

Encode = Callable[[], Awaitable[bytes]]
"""Makes the file of a batch."""


class Places(Protocol):
    """The order of the batches of a service."""

    def oldest_under_way(self) -> str | None:
        """A name that all batches which come to light from now on are at or after; None where that goes for
        every name that is there."""

    def begun(self, received_ms: int) -> AbstractAsyncContextManager[Tick]:
        """What a push remembers of the order when it begins."""

    async def is_lost(self, batch: Batch, now_ms: int) -> bool:
        """Whether the first attempt at a push has stored nothing and, after all this time, never will, so
        that the next one begins anew. Raises StoreUnavailable."""

    async def store(self, batch: Batch, encode: Encode, *, once: bool) -> tuple[str, str]:
        """Store a batch, `once`: unless another attempt has. Returns its id and sha256. Raises what `encode`
        does, and Unavailable."""


class PlacesOfStore:
    """Of a store that keeps a log of its changes: a batch gets its place when its file comes to light, and in
    the same transaction the store looks for that of another attempt."""

    def __init__(self, services: Services) -> None:
        self._outbox = services.outbox
        self._latest = FIRST_TICK

    def oldest_under_way(self) -> str | None:
        return None

    @asynccontextmanager
    async def begun(self, received_ms: int) -> AsyncIterator[Tick]:
        # All places to come are later than either; the later these are, the less there is to look through.
        yield max(self._latest, Tick(received_ms - LEEWAY_MS, 0))

    async def is_lost(self, batch: Batch, now_ms: int) -> bool:
        return False

    async def store(self, batch: Batch, encode: Encode, *, once: bool) -> tuple[str, str]:
        unless = Namesakes(batch.folder, place(batch.tick), batch.ending) if once else None
        try:
            tick, sha256 = await self._outbox.write_next(
                batch.key, _one(await encode()), PARQUET_TYPE, lambda *made: [batch.change(*made)], unless
            )
        except AlreadyWritten as found:
            return found.name.removesuffix(SUFFIX), found.sha256
        self._latest = max(self._latest, tick)
        return batch.id(tick), sha256


class PlacesBeforehand:
    """Of any other store: a batch gets its place when the push begins, so that all attempts at it write one
    file."""

    def __init__(self, services: Services) -> None:
        self._outbox = services.outbox
        self._store = services.store
        self._coordinator = services.coordinator
        self._under_way: set[str] = set()

    def oldest_under_way(self) -> str | None:
        return min(self._under_way, default=None)

    @asynccontextmanager
    async def begun(self, received_ms: int) -> AsyncIterator[Tick]:
        tick = await self._coordinator.tick()
        with self._waited_for(tick):
            yield tick

    async def is_lost(self, batch: Batch, now_ms: int) -> bool:
        # Who follows has passed its place long ago: nothing is to come to light there any more.
        is_settled = batch.received_ms + SETTLED_MS < now_ms
        return is_settled and await self._store.stat(batch.key(batch.tick)) is None

    async def store(self, batch: Batch, encode: Encode, *, once: bool) -> tuple[str, str]:
        tick = batch.tick
        key, id_ = batch.key(tick), batch.id(tick)
        with self._waited_for(tick):
            found = await self._store.stat(key) if once else None
            if found is not None:
                await self._outbox.repeat([batch.change(tick, found.sha256)])
                return id_, found.sha256
            chunks = _one(await encode())
            return id_, await self._outbox.write(
                key, chunks, PARQUET_TYPE, lambda sha256: [batch.change(tick, sha256)]
            )

    @contextmanager
    def _waited_for(self, tick: Tick) -> Iterator[None]:
        self._under_way.add(place(tick))
        try:
            yield
        finally:
            self._under_way.discard(place(tick))


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body
