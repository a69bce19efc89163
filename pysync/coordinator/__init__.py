"""The state that the processes of a service share besides its store."""

from pysync.coordinator.base import (
    EPOCH_MS,
    IDEMPOTENCY_TTL_MS,
    LEASE_MS,
    Coordinator,
    Nonce,
    PreparedWrite,
    ReplayMemoryFull,
    Standing,
    Window,
    nonce_epoch,
    release_claim,
)
from pysync.coordinator.open import open_coordinator

__all__ = [
    "EPOCH_MS",
    "IDEMPOTENCY_TTL_MS",
    "LEASE_MS",
    "Coordinator",
    "Nonce",
    "PreparedWrite",
    "ReplayMemoryFull",
    "Standing",
    "Window",
    "nonce_epoch",
    "open_coordinator",
    "release_claim",
]
