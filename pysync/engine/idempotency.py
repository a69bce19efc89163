"""Requests with an Idempotency-Key. Each acts once (docs/reference/protocol.md#idempotency-keys).

A transactional store commits a claim with the write. For any other store the coordinator has it: the first
attempt puts it there before the write, and adds after it that the write was carried out. If an attempt ends
in between, the next one decides by what is stored.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import orjson

from pysync.coordinator import IDEMPOTENCY_TTL_MS, Coordinator, release_claim
from pysync.errors import (
    Conflict,
    CoordinatorUnavailable,
    IdempotencyKeyReused,
    OutcomeUnknown,
    PysyncError,
    StoreUnavailable,
    Unavailable,
)
from pysync.model import WriteResult
from pysync.store import CarriedOut, Claim, ClaimTable, NotWritten
from pysync.write_ids import new_write_id

SETTLED_MS: Final = 30_000
"""Age at which a write has been made or never will be: longer than any put may take."""
_POLLS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Times for which a repetition waits for the first attempt before it is sent away."""

ANONYMOUS_SHARE: Final = 0.75
"""The share of all claims that callers without credentials can take."""


class IdempotentRequest(NamedTuple):
    """A request that may be repeated. `key` belongs to one caller and one document (`idempotency_key`), and
    `content` is the hash of what the request asks for: another content under the key is another request."""

    key: str
    content: str

    @property
    def share(self) -> float:
        """The share of all claims up to which this one may be made."""
        return ANONYMOUS_SHARE if self.key.startswith(" ") else 1.0

    def claim(self, outcome: WriteResult, *more: str) -> Claim:
        """Return the claim that is committed with the write of this request."""
        return Claim(
            hashlib.sha256(self.key.encode()).digest()[:16],
            self.content,
            orjson.dumps([*outcome, *more]).decode(),
            IDEMPOTENCY_TTL_MS,
            self.share,
        )


def result_of(outcome: str) -> WriteResult:
    """Return the result in the outcome of a claim."""
    hash_, timestamp_ms, *_ = orjson.loads(outcome)
    return WriteResult(hash_, timestamp_ms)


class Attempt(NamedTuple):
    """One attempt at a write, which has this `result` if it is made. `claims` are committed with it. What it
    stores carries the `write_id`, so that a repetition recognises it. It replaces no other etag than `only`,
    unless that is empty."""

    result: WriteResult
    claims: Sequence[Claim] = ()
    write_id: str = ""
    only: str = ""


class AttemptRecord(NamedTuple):
    """The first attempt at a request, as the coordinator has it. `write_id` and `base`, the etag of what the
    write replaces (`""` if that is nothing, or not known), tell the next attempt what has become of it.
    `is_repeated` is True once a repetition may have made its write."""

    write_id: str
    hash: str
    timestamp_ms: int
    content: str
    base: str = ""
    is_done: bool = False
    is_repeated: bool = False

    @classmethod
    def decode(cls, text: bytes) -> "AttemptRecord":
        """Parse a stored attempt. Version 0.1.0 stored three members, and the content is what was pushed."""
        write_id, hash_, timestamp_ms, *more = orjson.loads(text)
        return cls(write_id, hash_, timestamp_ms, *(more or [hash_]))

    def encode(self) -> bytes:
        """Return the attempt as the coordinator stores it."""
        return orjson.dumps(list(self))

    @property
    def result(self) -> WriteResult:
        """The result of the request, if the attempt was carried out."""
        return WriteResult(self.hash, self.timestamp_ms)


MakeWrite = Callable[[Attempt], Awaitable[WriteResult]]
"""Makes the write of an attempt. Raises Conflict if another write came first."""


class IdempotentRequests:
    """Carries out each request once. `claims` are those of a transactional store, None for any other."""

    def __init__(
        self, claims: ClaimTable | None, coordinator: Coordinator, now_ms: Callable[[], int]
    ) -> None:
        self._claims = claims
        self._coordinator = coordinator
        self._now_ms = now_ms

    async def carry_out(
        self,
        request: IdempotentRequest,
        result: WriteResult,
        write: MakeWrite,
        base: Callable[[], Awaitable[str]],
        stored: Callable[[AttemptRecord], Awaitable[str | None]],
    ) -> WriteResult:
        """Return the result of `write`, or that of the earlier attempt that was carried out.

        If the store is not transactional, `base` returns the etag that the write replaces, `""` if that is
        nothing or not known. `stored` returns the etag of what is stored, and None if that is the write of an
        earlier attempt. If what that attempt replaces is still there, its write is repeated. A write that is
        rejected leaves no claim.

        Raises IdempotencyKeyReused, StoreUnavailable while an earlier attempt may be under way,
        OutcomeUnknown after that, and the errors of `write`.
        """
        if self._claims is not None:
            claim = request.claim(result)
            return await commit_once(self._claims, claim, write(Attempt(result, (claim,))))
        own = AttemptRecord(new_write_id(), *result, request.content, await base())

        async def is_carried_out(first: AttemptRecord) -> bool:
            etag = await stored(first)
            if etag is None:
                return True
            if not etag or etag != first.base or first.hash != result.hash:
                return False
            return await self._repeat(_name(request), first, write)

        try:
            async with self.claimed(request, own, is_carried_out):
                return await write(Attempt(result, write_id=own.write_id))
        except CarriedOut as earlier:
            return result_of(earlier.outcome)

    @asynccontextmanager
    async def claimed(
        self,
        request: IdempotentRequest,
        own: AttemptRecord,
        is_carried_out: Callable[[AttemptRecord], Awaitable[bool]],
    ) -> AsyncIterator[None]:
        """Claim the request in the coordinator for the attempt `own`, which is made meanwhile. Raises
        CarriedOut with the hash, time and write id of an earlier one that was carried out, StoreUnavailable
        while that may be under way, OutcomeUnknown, and IdempotencyKeyReused."""
        name = _name(request)
        await self._claim(name, own, is_carried_out)
        try:
            yield
        except Unavailable as error:
            if isinstance(error, (NotWritten, CoordinatorUnavailable)):
                await release_claim(self._coordinator, name, own.encode())
            raise
        except PysyncError:
            with suppress(CoordinatorUnavailable):
                await self._withdraw(name, own)
            raise
        await self._complete(name, own)

    async def _claim(
        self, name: str, own: AttemptRecord, is_carried_out: Callable[[AttemptRecord], Awaitable[bool]]
    ) -> None:
        for pause_s in (*_POLLS_S, None):
            held = await self._coordinator.put_if_absent(name, own.encode(), IDEMPOTENCY_TTL_MS)
            first = AttemptRecord.decode(held)
            if first == own:
                return
            if first.content != own.content:
                raise IdempotencyKeyReused
            if first.is_done:
                raise _carried_out(name, first)
            if await is_carried_out(first):
                await self._complete(name, first)
                raise _carried_out(name, first)
            if first.timestamp_ms + SETTLED_MS <= self._now_ms():
                raise OutcomeUnknown
            if pause_s is None:
                raise StoreUnavailable("an earlier attempt at this request may be under way")
            await asyncio.sleep(pause_s)

    async def _repeat(self, name: str, first: AttemptRecord, write: MakeWrite) -> bool:
        """Make the write of the first attempt, which may still be under way. If its own write is then
        rejected, it learns from its claim that this one was made. Returns False if another write came
        first."""
        repeated = first._replace(is_repeated=True).encode()
        if not await self._coordinator.compare_and_set(name, first.encode(), repeated):
            return False
        try:
            await write(Attempt(first.result, write_id=first.write_id, only=first.base))
        except Conflict:
            return False
        return True

    async def _withdraw(self, name: str, own: AttemptRecord) -> None:
        """Withdraw an attempt that was rejected, unless a repetition may have made its write: that is the
        reason then. Raises CarriedOut if it has, StoreUnavailable if it does not say so in time."""
        text = own.encode()
        for pause_s in (*_POLLS_S, None):
            if await self._coordinator.compare_and_set(name, text, None):
                return
            held = AttemptRecord.decode(await self._coordinator.put_if_absent(name, text, IDEMPOTENCY_TTL_MS))
            if held.write_id != own.write_id:
                return
            if held.is_done:
                raise _carried_out(name, held)
            if pause_s is None:
                raise StoreUnavailable("a repetition of this request may be under way")
            await asyncio.sleep(pause_s)

    async def _complete(self, name: str, attempt: AttemptRecord) -> None:
        """Add that the attempt was carried out. Without the coordinator only what is stored says it."""
        with suppress(CoordinatorUnavailable):
            for held in (attempt, attempt._replace(is_repeated=True)):
                done = held._replace(is_done=True).encode()
                if await self._coordinator.compare_and_set(name, held.encode(), done):
                    break


async def commit_once(table: ClaimTable, claim: Claim, write: Awaitable[WriteResult]) -> WriteResult:
    """Return the result of `write`, which commits `claim` with it, or that of the earlier attempt that was
    carried out. Raises IdempotencyKeyReused, and the errors of `write`."""
    try:
        return await write
    except CarriedOut as earlier:
        return result_of(earlier.outcomes[claim.name])
    except Unavailable:
        raise
    except PysyncError:
        # A repetition is rejected by what the first attempt has changed.
        outcome = table.find(claim)
        if outcome is None:
            raise
        return result_of(outcome)


def _carried_out(name: str, attempt: AttemptRecord) -> CarriedOut:
    return CarriedOut({name.encode(): orjson.dumps([*attempt.result, attempt.write_id]).decode()})


def _name(request: IdempotentRequest) -> str:
    return hashlib.sha256(request.key.encode()).hexdigest()
