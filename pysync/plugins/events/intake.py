"""What becomes of a push of events: it is claimed where it may be repeated, encoded, and stored."""

import asyncio
import hashlib
from typing import Final, NamedTuple, Self

import orjson

from pysync.changelog import Subject
from pysync.clock import Tick
from pysync.config.template import MAX_KEY_BYTES, document_key
from pysync.coordinator import IDEMPOTENCY_TTL_MS, withdraw_claim
from pysync.errors import IdempotencyKeyReused, InvalidEvents, InvalidPathParameter, StoreUnavailable
from pysync.model import Written
from pysync.plugins import Push, Pushed, Services
from pysync.plugins.events.batches import BATCH_ID, Batch, Tokens, received_at
from pysync.plugins.events.encoder import Encoder
from pysync.plugins.events.places import LEEWAY_MS, Places

GIVEN_UP_S: Final = 25.0
"""How long a push is gone on with: what it stores is there when `SETTLED_MS` have passed, or never will be.
Who repeats it then begins anew."""


class Claim(NamedTuple):
    """What the first attempt at a push says for all of them: of which data, and what makes its batch."""

    hash: str
    token: str
    received_ms: int
    tick: Tick

    def encoded(self) -> bytes:
        return orjson.dumps([self.hash, self.token, self.received_ms, list(self.tick)])

    @classmethod
    def read(cls, text: bytes) -> Self:
        hash_, token, received_ms, tick = orjson.loads(text)
        return cls(hash_, token, received_ms, Tick(*tick))


class Intake:
    """Stores the batches of one template."""

    def __init__(
        self,
        services: Services,
        places: Places,
        encoder: Encoder,
        storage_path: str,
        tokens: Tokens,
    ) -> None:
        self._now_ms = services.now_ms
        self._coordinator = services.coordinator
        self._places = places
        self._encoder = encoder
        *self._folder, last = storage_path.split("/")
        self._id_name = last[1:-1]
        self._tokens = tokens

    async def take(self, push: Push) -> Pushed:
        """Store the events of a push, or find them stored where it is repeated. Raises InvalidEvents,
        InvalidPathParameter where nobody could pull them, IdempotencyKeyReused, Unavailable."""
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                return await self._take(push)
        except TimeoutError:
            raise StoreUnavailable from None

    async def _take(self, push: Push) -> Pushed:
        received_ms = self._now_ms()
        async with self._places.begun(received_ms) as tick:
            claim = own = Claim(push.hash, self._tokens.next(), received_ms, tick)
            _check_keys(push, self._batch(push, own))
            claimed = ""
            if push.request_key is not None:
                claimed, claim = await self._first(push, push.request_key, own)
            if claim.hash != own.hash:
                raise IdempotencyKeyReused
            once = push.request_key is not None
            batch = self._batch(push, claim)
            until_ms = batch.received_ms + IDEMPOTENCY_TTL_MS + LEEWAY_MS if once else None
            try:
                id_, sha256 = await self._places.store(
                    batch,
                    lambda: self._encoder.encode(push.data, received_at(batch.received_ms), until_ms),
                    once=once,
                )
            except InvalidEvents:
                if once:  # whoever claimed it, nobody can have stored these events
                    await withdraw_claim(self._coordinator, claimed, claim.encoded())
                raise
        written = Written(sha256, batch.received_ms)
        return Pushed(written, {BATCH_ID: id_}, batch.params(id_), announced=True)

    async def _first(self, push: Push, request_key: str, own: Claim) -> tuple[str, Claim]:
        """The claim of the first attempt at a push, `own` where this is the first, and its name."""
        name = hashlib.sha256(f"events {request_key}".encode()).hexdigest()
        attempt = 0
        while True:
            key = f"{name}{attempt}"
            first = Claim.read(await self._coordinator.claim(key, own.encoded(), IDEMPOTENCY_TTL_MS))
            if not await self._places.is_lost(self._batch(push, first), own.received_ms):
                return key, first
            attempt += 1

    def _batch(self, push: Push, claim: Claim) -> Batch:
        request = push.request
        subject = Subject(request.collection, request.params, request.namespace, request.caller.identity)
        folder = document_key(self._folder, request.params)
        return Batch(folder, subject, claim.token, claim.received_ms, claim.tick, self._id_name)


def _check_keys(push: Push, batch: Batch) -> None:
    """Raise InvalidPathParameter for a batch whose file no store need take, or that nobody could pull: the
    id that is given is longer than the one that the client wrote there."""
    request = push.request
    pulled_at = len(request.key) - len(request.params[batch.id_name]) + len(batch.id(batch.tick))
    if max(pulled_at, len(batch.key(batch.tick))) > MAX_KEY_BYTES:
        raise InvalidPathParameter
