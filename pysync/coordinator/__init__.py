"""What the processes of a service share: the protocol of coordinators (`base`), and `open_coordinator`."""

from pysync.coordinator.base import (
    AHEAD_MS,
    EPOCH_MS,
    EPOCHS_KEPT,
    IDEMPOTENCY_TTL_MS,
    LEASE_MS,
    MAX_LIVE_NONCES,
    Coordinator,
    Intent,
    ReplayMemoryFull,
    Standing,
    Window,
    nonce_epoch,
    window_end_ms,
    withdraw_claim,
)
from pysync.coordinator.open import open_coordinator

__all__ = [
    "AHEAD_MS",
    "EPOCHS_KEPT",
    "EPOCH_MS",
    "IDEMPOTENCY_TTL_MS",
    "LEASE_MS",
    "MAX_LIVE_NONCES",
    "Coordinator",
    "Intent",
    "ReplayMemoryFull",
    "Standing",
    "Window",
    "nonce_epoch",
    "open_coordinator",
    "window_end_ms",
    "withdraw_claim",
]
