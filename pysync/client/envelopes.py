"""Envelopes: bytes sealed for one recipient, who shares no keyring with the sealer (clients-and-crypto
section 4.4, the form of keyrings)."""

import base64
import os
from typing import Any, Final, NamedTuple

from pysync.auth.certificates import base64_bytes
from pysync.auth.signing import Keys, Signer
from pysync.client import wraps
from pysync.client.sealed_errors import AadRequired, NotSealed
from pysync.client.wraps import Random

_EPOCH: Final = 0  # an envelope has a key of its own


class Opened(NamedTuple):
    """What was sealed, and the Ed25519 public key of who sealed it."""

    plaintext: bytes
    sealed_by: str


def seal_envelope(
    plaintext: bytes,
    recipient_kem: str,
    sealer: Signer,
    *,
    aad: str = "",
    now_s: int,
    random: Random = os.urandom,
) -> dict[str, Any]:
    """An envelope, as members of JSON, that only the holder of `recipient_kem` can open, and only with the
    same `aad`. Raises ValueError where that is no X25519 public key."""
    content_key = random(wraps.KEY_BYTES)
    sealed = wraps.encrypt(content_key, plaintext, aad.encode(), random)
    envelope = {
        "entry": wraps.wrap(content_key, recipient_kem, _EPOCH, sealer, now_s=now_s, random=random),
        "ct": base64.b64encode(sealed).decode(),
    }
    return envelope | {"v": 1} if aad else envelope


def open_envelope(
    envelope: dict[str, Any], keys: Keys, *, aad: str = "", sealer: str | None = None
) -> Opened:
    """What `seal_envelope` was given. `sealer` is the Ed25519 public key that it must be sealed by; None:
    anybody's.

    Raises AadRequired, NotSealed, UntrustedAdder (another sealer), ForgedEntry, Truncated, DecryptionFailed
    (for another recipient as well).
    """
    if envelope.get("v") == 1 and not aad:
        raise AadRequired
    entry, payload = envelope.get("entry"), envelope.get("ct")
    sealed = base64_bytes(payload) if isinstance(payload, str) else None
    if not isinstance(entry, dict) or sealed is None:
        raise NotSealed("not an envelope: entry must be an object, and ct base64")
    wraps.check(entry, _EPOCH, None if sealer is None else (sealer,))
    return Opened(wraps.decrypt(wraps.unwrap(entry, keys), sealed, aad.encode()), entry["addedBy"])
