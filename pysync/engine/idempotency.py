"""Requests with an Idempotency-Key. Each acts once (docs/reference/protocol.md#idempotency-keys)."""

import hashlib
from collections.abc import Awaitable
from typing import Final, NamedTuple

import orjson

from pysync.coordinator import IDEMPOTENCY_TTL_MS
from pysync.errors import PysyncError, Unavailable
from pysync.model import WriteResult
from pysync.store import CarriedOut, Claim, ClaimTable

ANONYMOUS_SHARE: Final = 0.75
"""The share of all claims that callers without credentials can take."""


class IdempotentRequest(NamedTuple):
    """A request that may be repeated. `key` belongs to one caller and one document (`idempotency_key`), and
    `content` is the hash of what the request asks for: another content under the key is another request."""

    key: str
    content: str

    def claim(self, outcome: WriteResult, *more: str) -> Claim:
        """Return the claim that is committed with the write of this request."""
        return Claim(
            hashlib.sha256(self.key.encode()).digest()[:16],
            self.content,
            orjson.dumps([*outcome, *more]).decode(),
            IDEMPOTENCY_TTL_MS,
            ANONYMOUS_SHARE if self.key.startswith(" ") else 1.0,
        )


def result_of(outcome: str) -> WriteResult:
    """Return the result in the outcome of a claim."""
    hash_, timestamp_ms, *_ = orjson.loads(outcome)
    return WriteResult(hash_, timestamp_ms)


async def carry_out_once(table: ClaimTable, claim: Claim, write: Awaitable[WriteResult]) -> WriteResult:
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
