"""Encryption of backups. Packs, which hold what users wrote, are sealed for a public key (X25519,
HKDF-SHA-256, ChaCha20-Poly1305): the machine that makes backups cannot open them again. Pages and snapshots,
which hold keys, sizes and hashes, are sealed with a secret that this machine has too, so that it can tell
what is in the backup."""

import os
from typing import Final, NamedTuple, Self

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
"""Each key encrypts one file only."""
_PACK: Final = b"pysync backup pack"
_METADATA: Final = b"pysync backup metadata"


class WrongKey(ValueError):
    """The key does not open these bytes: it is that of another backup, or they are damaged."""


class BackupKey(NamedTuple):
    """The key of a backup. With `public` and `metadata` a machine writes backups and lists what is in them;
    `private` opens the bytes of the objects as well."""

    public: bytes
    metadata: bytes
    private: bytes | None = None

    @classmethod
    def generate(cls) -> Self:
        """Return a new key."""
        private = X25519PrivateKey.generate()
        return cls(
            private.public_key().public_bytes_raw(), os.urandom(_KEY_BYTES), private.private_bytes_raw()
        )

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Return the key in a file. Raises ValueError."""
        try:
            members = orjson.loads(text)
            private = members.get("private")
            key = cls(
                bytes.fromhex(members["public"]),
                bytes.fromhex(members["metadata"]),
                None if private is None else bytes.fromhex(private),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError("this is no key of a backup: `pysync backup keygen` makes one") from None
        if any(len(part) != _KEY_BYTES for part in key if part is not None):
            raise ValueError("this key of a backup is damaged")
        if key.private is not None:
            own = X25519PrivateKey.from_private_bytes(key.private).public_key().public_bytes_raw()
            if own != key.public:
                raise ValueError("the private part of this key of a backup belongs to another public part")
        return key

    def text(self) -> bytes:
        """Return the key as a file holds it."""
        members = {name: value.hex() for name, value in self._asdict().items() if value is not None}
        return orjson.dumps({"kind": "pysync-backup-key", **members}, option=orjson.OPT_INDENT_2) + b"\n"

    def without_private(self) -> Self:
        """Return the part that the machine needs which makes backups."""
        return self._replace(private=None)

    def seal_pack(self, body: bytes) -> bytes:
        """Encrypt a pack for the public key."""
        ephemeral = X25519PrivateKey.generate()
        sender = ephemeral.public_key().public_bytes_raw()
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(self.public))
        key = _derive(shared, sender + self.public, _PACK)
        return sender + ChaCha20Poly1305(key).encrypt(_NONCE, body, _PACK)

    def check_private(self) -> bytes:
        """Return the private key. Raises WrongKey without one."""
        if self.private is None:
            raise WrongKey("the private key of the backup is needed: name its file with --key")
        return self.private

    def open_pack(self, sealed: bytes) -> bytes:
        """Decrypt a pack. Raises WrongKey, also without the private key."""
        private = self.check_private()
        sender = sealed[:_KEY_BYTES]
        try:
            shared = X25519PrivateKey.from_private_bytes(private).exchange(
                X25519PublicKey.from_public_bytes(sender)
            )
            key = _derive(shared, sender + self.public, _PACK)
            return ChaCha20Poly1305(key).decrypt(_NONCE, sealed[_KEY_BYTES:], _PACK)
        except (InvalidTag, ValueError):
            raise WrongKey("this is not the private key of the backup") from None

    def seal_metadata(self, body: bytes) -> bytes:
        """Encrypt a page or a snapshot."""
        salt = os.urandom(_KEY_BYTES)
        key = _derive(self.metadata, salt, _METADATA)
        return salt + ChaCha20Poly1305(key).encrypt(_NONCE, body, _METADATA)

    def open_metadata(self, sealed: bytes) -> bytes:
        """Decrypt a page or a snapshot. Raises WrongKey."""
        key = _derive(self.metadata, sealed[:_KEY_BYTES], _METADATA)
        try:
            return ChaCha20Poly1305(key).decrypt(_NONCE, sealed[_KEY_BYTES:], _METADATA)
        except (InvalidTag, ValueError):
            raise WrongKey("this is not the key of the backup") from None


def _derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, salt, purpose).derive(secret)
