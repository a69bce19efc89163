"""The state that the processes of a service share besides its store: the protocol (`base`), and
`open_coordinator`."""

from pysync.coordinator.base import (
    AHEAD_MS,
    EPOCH_MS,
    IDEMPOTENCY_TTL_MS,
    LEASE_MS,
    LIVE_EPOCHS,
    MAX_LIVE_NONCES,
    Coordinator,
    PreparedWrite,
    ReplayMemoryFull,
    Standing,
    Window,
    nonce_epoch,
    release_claim,
    window_end_ms,
)
from pysync.coordinator.open import open_coordinator

__all__ = [
    "AHEAD_MS",
    "EPOCH_MS",
    "IDEMPOTENCY_TTL_MS",
    "LEASE_MS",
    "LIVE_EPOCHS",
    "MAX_LIVE_NONCES",
    "Coordinator",
    "PreparedWrite",
    "ReplayMemoryFull",
    "Standing",
    "Window",
    "nonce_epoch",
    "open_coordinator",
    "release_claim",
    "window_end_ms",
]
