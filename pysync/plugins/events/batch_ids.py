"""How batches get their places in the order of ids, and are stored there once (service, Events plugin 4).

Batch ids, and what is known of a batch that is to be stored (service, Events plugin 4).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

from pysync.changelog import Change, Subject
from pysync.clock import FIRST_TICK, Tick
from pysync.engine.outbox import SETTLED_MS
from pysync.plugins import Services
from pysync.protocol import PARQUET_TYPE
from pysync.store import AlreadyWritten, Namesakes

BATCH_ID: Final = "batchId"
"""The member of an answer that holds the id. The path parameter that stands for it may have another name."""
SUFFIX: Final = ".parquet"


def place(tick: Tick) -> str:
    """The part of an id that says where in the order of batches it is: such texts have the order of ticks."""
    return f"{tick.ms:013d}-{tick.number:06d}"


class Tokens:
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


class Batch(NamedTuple):
    """A batch that is to be stored in `folder`, under an id that ends in `token` (12 hex digits); and of what
    it is a change, whose parameter `id_name` is still the client's. `tick` is what its push remembers of the
    order."""

    folder: str
    subject: Subject
    token: str
    received_ms: int
    tick: Tick
    id_name: str = BATCH_ID

    @property
    def ending(self) -> str:
        """What the name of this batch's file ends with, and no other's."""
        return f"-{self.token}{SUFFIX}"

    def id(self, tick: Tick) -> str:
        """Its id, in that place."""
        return f"{place(tick)}-{self.token}"

    def key(self, tick: Tick) -> str:
        """The key of its file, in that place."""
        return f"{self.folder}/{place(tick)}{self.ending}"

    def params(self, id_: str) -> dict[str, str]:
        """The parameters of the path at which it is pulled."""
        return {**self.subject.params, self.id_name: id_}

    def change(self, tick: Tick, sha256: str) -> Change:
        """What is told of it, in that place."""
        subject = self.subject._replace(params=self.params(self.id(tick)), key=self.key(tick))
        return subject.change(sha256, self.received_ms)


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
