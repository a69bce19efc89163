"""Encrypt content keys for recipients (docs/reference/protocol.md#keyrings), and seal envelopes, which are
for one recipient who shares no keyring with the sealer (docs/reference/protocol.md#sealed-envelopes).
"""

import base64
import os
import re
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pysync._core import PublicKey, canonicalize
from pysync.auth.certificates import decode_base64
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.signing import Signer


class SealedError(Exception):
    """Base of all errors on opening sealed data, or on changing its recipients."""


class DecryptionFailed(SealedError):
    """The bytes, their context (`aad`) or their epoch differ from what was sealed."""


class Truncated(SealedError):
    """Too few bytes for sealed data."""


class NotSealed(SealedError):
    """The data does not have the form of sealed data."""


class UnknownEpoch(SealedError):
    """The data is sealed under a content key that this recipient does not have: from before it was added, or
    from after the keyring was read. Reading the keyring again may help."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"No key available for epoch {epoch}: this recipient is not in it, or the keyring is newer"
        )
        self.epoch = epoch


class AadRequired(SealedError):
    """The data was sealed with a context, and opened without one."""

    def __init__(self) -> None:
        super().__init__(
            "aad required: this envelope (v:1) was sealed with a context, pass the same aad to open it"
        )


class UntrustedAdder(SealedError):
    """A content key was added by somebody who is not trusted."""


class ForgedEntry(SealedError):
    """The signature of a wrapped content key does not match its signer or its content."""


class KeyringMissing(SealedError):
    """There is no keyring of that name."""


class MalformedKeyring(SealedError):
    """The document is not a keyring."""


class KeyringRolledBack(SealedError):
    """The keyring is older than one seen before. Accepting it would use a key that removed recipients
    hold."""


class NotARecipient(SealedError):
    """The keyring's current epoch has no entry for the key."""


class AmbiguousEntry(SealedError):
    """The keyring's current epoch has more than one entry for the key."""


class AlreadyPresent(SealedError):
    """The key is a recipient already."""


class LastRecipient(SealedError):
    """Without this recipient nobody could read the sealed data."""


Random = Callable[[int], bytes]
"""Returns this many random bytes: `os.urandom`."""
Entry = dict[str, Any]
"""A content key wrapped for `subKem`: `ephKem` and `ct`, with its adder and time `addedBy`, `addedSig`,
`addedAt` (seconds)."""

KEY_BYTES: Final = 32
IV_BYTES: Final = 12
TAG_BYTES: Final = 16
_SIGNED: Final = ("addedAt", "addedBy", "ct", "ephKem", "subKem")
_KEY: Final = re.compile("[0-9a-f]{64}")


def encrypt(key: bytes, plaintext: bytes, aad: bytes, random: Random) -> bytes:
    """Return a random iv of 12 bytes, followed by the AES-256-GCM ciphertext and its tag."""
    iv = random(IV_BYTES)
    return iv + AESGCM(key).encrypt(iv, plaintext, aad)


def decrypt(key: bytes, sealed: bytes | memoryview, aad: bytes) -> bytes:
    """Return the plaintext. Raises Truncated, and DecryptionFailed unless key, bytes and aad are those of
    `encrypt`."""
    if len(sealed) < IV_BYTES + TAG_BYTES:
        raise Truncated("Encrypted payload is too short")
    try:
        return AESGCM(key).decrypt(sealed[:IV_BYTES], sealed[IV_BYTES:], aad)
    except InvalidTag:
        raise DecryptionFailed("Decryption failed: the bytes, the context or the epoch are others") from None


def wrap_key(
    content_key: bytes, recipient_kem: str, epoch: int, adder: Signer, *, now_s: int, random: Random
) -> Entry:
    """Return the content key of `epoch`, encrypted for the holder of `recipient_kem` and signed by `adder`.
    Raises ValueError if that is not an X25519 public key."""
    if not _is_key(recipient_kem):
        raise ValueError("a recipient is an X25519 public key, 64 hex digits in lower case")
    ephemeral = X25519PrivateKey.from_private_bytes(random(KEY_BYTES))
    wrap_key = _derive_wrapping_key(ephemeral, recipient_kem)
    entry = {
        "subKem": recipient_kem,
        "ephKem": ephemeral.public_key().public_bytes_raw().hex(),
        "ct": base64.b64encode(encrypt(wrap_key, content_key, b"", random)).decode(),
        "addedBy": adder.ed_pub,
        "addedAt": now_s,
    }
    return entry | {"addedSig": adder.sign(_message(entry, epoch))}


def verify_entry(entry: Entry, epoch: int, trusted: Collection[str] | None) -> None:
    """Raise UntrustedAdder unless the entry was added by one of `trusted` (Ed25519 public keys; None: by
    anyone), and ForgedEntry unless the adder signed it for this epoch."""
    # The message names a key only: a writer of the keyring can put any text in its place.
    adder = entry["addedBy"] if _is_key(entry.get("addedBy")) else None
    if trusted is not None and (adder is None or adder not in trusted):
        raise UntrustedAdder(f"the key of epoch {epoch} was added by {adder or 'nobody'}: not trusted")
    if not _is_signed(entry, epoch):
        raise ForgedEntry(f"the key of epoch {epoch} is not signed by {adder or 'anybody'}")


def unwrap_key(entry: Entry, keys: IdentityKeys) -> bytes:
    """Return the content key of a verified entry. Raises DecryptionFailed and Truncated."""
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(keys.kem_priv))
    try:
        wrap_key = _derive_wrapping_key(private, entry["ephKem"])
    except ValueError:
        raise DecryptionFailed("Decryption failed: the wrapped key was made with a weak key") from None
    content_key = decrypt(wrap_key, decode_base64(entry["ct"]) or b"", b"")
    if len(content_key) != KEY_BYTES:
        raise DecryptionFailed("Decryption failed: the wrapped key has not 32 bytes")
    return content_key


def _is_signed(entry: Entry, epoch: int) -> bool:
    added_at, signature = entry.get("addedAt"), entry.get("addedSig")
    if not all(_is_key(entry.get(name)) for name in ("subKem", "ephKem", "addedBy")):
        return False
    if not isinstance(added_at, int) or isinstance(added_at, bool) or abs(added_at) >= 1 << 53:
        return False
    if not isinstance(entry.get("ct"), str) or decode_base64(entry["ct"]) is None:
        return False
    try:
        signer = PublicKey(entry["addedBy"])
    except ValueError:
        return False
    return isinstance(signature, str) and signer.verify(_message(entry, epoch), signature)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def _message(entry: Entry, epoch: int) -> bytes:
    return canonicalize(orjson.dumps({name: entry[name] for name in _SIGNED} | {"epoch": epoch}))


def _derive_wrapping_key(private: X25519PrivateKey, public: str) -> bytes:
    """Return the key of the exchange. Raises ValueError if the shared secret would be all zero."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=b"starfish-wrap", info=b"starfish-wrap").derive(
        shared
    )


_EPOCH: Final = 0  # an envelope has a key of its own


class OpenedEnvelope(NamedTuple):
    """The plaintext of an envelope, and the Ed25519 public key of its sealer."""

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
    """Return an envelope, as JSON members, that only the holder of `recipient_kem` can open, and only with
    the same `aad`. Raises ValueError if that is not an X25519 public key."""
    content_key = random(KEY_BYTES)
    sealed = encrypt(content_key, plaintext, aad.encode(), random)
    envelope = {
        "entry": wrap_key(content_key, recipient_kem, _EPOCH, sealer, now_s=now_s, random=random),
        "ct": base64.b64encode(sealed).decode(),
    }
    return envelope | {"v": 1} if aad else envelope


def open_envelope(
    envelope: dict[str, Any], keys: IdentityKeys, *, aad: str = "", sealer: str | None = None
) -> OpenedEnvelope:
    """Return the plaintext of an envelope. `sealer` is the Ed25519 public key that must have sealed it; None
    accepts any.

    Raises AadRequired, NotSealed, UntrustedAdder (another sealer), ForgedEntry, Truncated and
    DecryptionFailed (also for another recipient).
    """
    if envelope.get("v") == 1 and not aad:
        raise AadRequired
    entry, payload = envelope.get("entry"), envelope.get("ct")
    sealed = decode_base64(payload) if isinstance(payload, str) else None
    if not isinstance(entry, dict) or sealed is None:
        raise NotSealed("not an envelope: entry must be an object, and ct base64")
    verify_entry(entry, _EPOCH, None if sealer is None else (sealer,))
    return OpenedEnvelope(decrypt(unwrap_key(entry, keys), sealed, aad.encode()), entry["addedBy"])
