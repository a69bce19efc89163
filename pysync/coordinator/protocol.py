"""The protocol of coordinators: nonces, rate counters, idempotency records, leases and the change log."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from pysync.changelog import Change, ChangeLog
from pysync.clock import CLOCK_TOLERANCE_MS, HybridTimestamp
from pysync.errors import CoordinatorUnavailable
from pysync.model import Diagnosis

EPOCH_MS: Final = 300_000
LIVE_EPOCHS: Final = 3
"""A signed request is good for 300 s on either side of its time, so its nonce must be known for 600 s after
it arrived: throughout the epoch of its arrival and the two that follow."""

AHEAD_MS: Final = EPOCH_MS + CLOCK_TOLERANCE_MS
"""A request signed more than this ahead of now was served while the clock was ahead. Its signature is valid
again when that time comes, so its nonce is kept until then, too."""

MAX_LIVE_NONCES: Final = 4_000_000
"""Nonces remembered at one time by default; beyond it signed requests are refused."""

IDEMPOTENCY_TTL_MS: Final = 600_000
"""For how long a write is recognised again by its Idempotency-Key.

See docs/reference/protocol.md#idempotency-keys.
"""

LEASE_MS: Final = 5_000
"""Milliseconds for which a lease holds after it was last acquired."""

LEASE_RENEW_S: Final = 1.0
"""Seconds after which the process that holds a lease acquires it again."""


class Standing(IntEnum):
    """The class of a caller, and the eighths of replay memory that this class can fill. Strangers leave a
    share to identities that own something, and these leave one to callers whom the configuration trusts."""

    STRANGER = 6
    OWNER = 7
    TRUSTED = 8


class ReplayMemoryFull(CoordinatorUnavailable):
    """There is no room for the nonce of a caller of this standing."""


def nonce_epoch(elapsed_ms: int) -> int:
    """Return the number of the epoch in which a nonce arrives now, by a clock that no step moves."""
    return elapsed_ms // EPOCH_MS


def window_end_ms(now_ms: int, window_ms: int) -> int:
    """Return the end of the fixed window that contains `now_ms`."""
    return now_ms - now_ms % window_ms + window_ms


class PreparedWrite(NamedTuple):
    """The changes of a write that was prepared `age_ms` ago."""

    name: str
    age_ms: int
    changes: list[Change]


class Coordinator(ChangeLog, Protocol):
    """Shared, short-lived memory. `CoordinatorContract` in `tests/contracts` is its promise as tests. Methods
    raise CoordinatorUnavailable rather than promise something that may be forgotten."""

    async def consume_nonce(
        self,
        presenter: str,
        nonce: str,
        signed_ms: int,
        standing: Standing = Standing.TRUSTED,
        *,
        is_read: bool = False,
    ) -> bool:
        """Return True the first time that any process consumes this nonce (text of the header) of this key
        (hex), and False within the ten minutes after. At least 1,000,000 live nonces are kept. The nonce of a
        read (`is_read`) may be kept in a memory that outlives the processes and not the machine, where that
        of a write is refused.

        Raises ReplayMemoryFull if the share of this `standing` is full, and CoordinatorUnavailable if the
        request was signed (`signed_ms`) before memory was lost that may have contained its nonce."""

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> int:
        """Count `by` more in the current window of `bucket`, and return the count of all processes. Windows
        start at multiples of `window_ms`."""

    async def put_if_absent(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        """Return the value of `key`, which is set to `value` for `ttl_ms` unless it has one. Of several
        concurrent calls one sets its value, and all of them return it."""

    async def compare_and_set(self, key: str, expected: bytes, value: bytes | None) -> bool:
        """Replace the value of `key` for the rest of its time, or delete it if `value` is None. Does nothing
        and returns False unless its value is still `expected`."""

    async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
        """Append changes, and delete the prepared write of this name, if one is given: both or neither."""

    async def prepare(self, changes: Sequence[Change]) -> str:
        """Remember, beyond the end of this process, that a write with these changes is about to be made.
        Return a name for `append` and `abort`. Stores that keep changes with their writes do not need it."""

    async def abort(self, name: str) -> None:
        """Delete a prepared write, which was not made. Does nothing if it does not exist any more."""

    async def prepared(self, limit: int) -> list[PreparedWrite]:
        """Return the oldest prepared writes of all processes, at most `limit`."""

    async def next_timestamp(self) -> HybridTimestamp:
        """Return a timestamp after all earlier ones of any process, even if a clock was set back."""

    async def acquire_lease(self, name: str) -> bool:
        """Acquire or renew the lease `name` for `LEASE_MS`, and return True if this process holds it. Renew
        it well before it ends. If the holder ends or hangs, another process acquires the lease after that
        time at the latest. Two processes may hold it for a moment, so the work must tolerate that."""

    async def forget(
        self, buckets: Callable[[str], bool], claims: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """Delete the counters whose bucket, and the keys whose value, these functions select. Returns the
        numbers of both. They may be called in another thread."""

    async def purge_deleted(self) -> None:
        """See `Store.purge_deleted`. Raises CoordinatorUnavailable."""

    async def probe(self) -> None:
        """Raise CoordinatorUnavailable if signed, metered or announced requests would fail."""

    async def diagnose(self) -> Diagnosis:
        """Return the state of the coordinator's server. Raises CoordinatorUnavailable."""

    async def close(self) -> None:
        """Release all resources."""


async def holds_lease(coordinator: Coordinator, name: str) -> bool:
    """Acquire or renew a lease. Returns False also if the coordinator does not answer."""
    try:
        return await coordinator.acquire_lease(name)
    except CoordinatorUnavailable:
        return False


async def release_claim(coordinator: Coordinator, key: str, value: bytes) -> None:
    """Release the claim of a refused write. If the coordinator does not answer, the claim stays: a repetition
    then costs more, but is answered correctly."""
    with suppress(CoordinatorUnavailable):
        await coordinator.compare_and_set(key, value, None)
