"""Keys of people and devices, and their key files (docs/reference/protocol.md#identities-and-keys).

Importing this module imports cryptography, which the server does not need.
"""

import base64
import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pysync.auth.certificates import user_id


@dataclass(frozen=True, slots=True)
class IdentityKeys:
    """An Ed25519 pair for signatures and an X25519 pair that receives sealed keys, each half 64 hex digits.
    The private halves are excluded from the repr."""

    ed_priv: str = field(repr=False)
    ed_pub: str
    kem_priv: str = field(repr=False)
    kem_pub: str
    user_id: str
    _signing: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def from_private(cls, ed_priv: bytes, kem_priv: bytes) -> "IdentityKeys":
        """Return the keys with these private halves, 32 bytes each. Raises ValueError."""
        signing = Ed25519PrivateKey.from_private_bytes(ed_priv)
        ed_pub = signing.public_key().public_bytes_raw().hex()
        kem_pub = X25519PrivateKey.from_private_bytes(kem_priv).public_key().public_bytes_raw().hex()
        return cls(ed_priv.hex(), ed_pub, kem_priv.hex(), kem_pub, user_id(ed_pub), signing)

    @classmethod
    def generate(cls, random: Callable[[int], bytes] = os.urandom) -> "IdentityKeys":
        """Return new keys from `random`."""
        return cls.from_private(random(32), random(32))

    @classmethod
    def from_passphrase(cls, passphrase: str) -> "IdentityKeys":
        """Return the root keys of a passphrase, which are the same on every machine. Takes about 47 MB and a
        tenth of a second on purpose. Raises ValueError for a blank passphrase."""
        if not passphrase.strip():
            raise ValueError("the passphrase is empty")
        secret = Argon2id(
            salt=b"starfish-v3-root", length=32, iterations=3, lanes=1, memory_cost=47_104
        ).derive(unicodedata.normalize("NFC", passphrase).encode())
        return cls.from_private(
            _hkdf(secret, b"starfish-root-sign", b"ed25519"),
            _hkdf(secret, b"starfish-root-kem", b"x25519"),
        )

    def sign(self, message: bytes) -> str:
        """Return the Ed25519 signature over `message`, in base64."""
        return base64.b64encode(self._signing.sign(message)).decode()

    def to_json(self) -> bytes:
        """Return the text of a key file, which includes the private halves."""
        members = {
            "edPriv": self.ed_priv,
            "edPub": self.ed_pub,
            "kemPriv": self.kem_priv,
            "kemPub": self.kem_pub,
            "userId": self.user_id,
        }
        return orjson.dumps(members, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, text: bytes) -> "IdentityKeys":
        """Return the keys of a key file. Raises ValueError if it is malformed or its halves do not match."""
        members = orjson.loads(text)
        if not isinstance(members, dict):
            raise ValueError("not a key file: a JSON object is expected")
        try:
            keys = cls.from_private(bytes.fromhex(members["edPriv"]), bytes.fromhex(members["kemPriv"]))
        except (KeyError, TypeError, ValueError):
            # The original error would quote the private key.
            raise ValueError("not a key file: edPriv and kemPriv must be 64 hex digits") from None
        known = {"edPub": keys.ed_pub, "kemPub": keys.kem_pub, "userId": keys.user_id}
        for name, value in known.items():
            if members.get(name, value) != value:
                raise ValueError(f"damaged key file: {name} does not belong to its private key")
        return keys

    def save(self, path: Path) -> None:
        """Write the key file, readable only by its owner. Raises FileExistsError if there is one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.to_json())


def _hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)
