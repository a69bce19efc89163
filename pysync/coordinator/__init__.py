"""The state that the processes of a service share besides its store."""

from pysync.coordinator.open import open_coordinator
from pysync.coordinator.protocol import (
    EPOCH_MS,
    IDEMPOTENCY_TTL_MS,
    LEASE_MS,
    LEASE_RENEW_S,
    Coordinator,
    PreparedWrite,
    ReplayMemoryFull,
    Standing,
    holds_lease,
    nonce_epoch,
    release_claim,
    window_end_ms,
)

__all__ = [
    "EPOCH_MS",
    "IDEMPOTENCY_TTL_MS",
    "LEASE_MS",
    "LEASE_RENEW_S",
    "Coordinator",
    "PreparedWrite",
    "ReplayMemoryFull",
    "Standing",
    "holds_lease",
    "nonce_epoch",
    "open_coordinator",
    "release_claim",
    "window_end_ms",
]
