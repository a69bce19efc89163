"""What is to be erased."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pysync._core import split_key
from pysync.auth.certificates import is_user_id
from pysync.config.key_templates import RESERVED

Kind = Literal["key", "prefix", "identity"]
_KINDS: Final[tuple[Kind, ...]] = ("key", "prefix", "identity")
_KEM_KEYS: Final = "kemKeys"
is_public_key: Final = re.compile("[0-9a-f]{64}").fullmatch
"""Matches a public key, as certificates and keyrings spell it."""


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """The object at a key, everything at and below a prefix, or everything of an identity. `kem_keys` are the
    X25519 public keys of that identity, whose entries leave the keyrings of others."""

    kind: Kind
    value: str
    kem_keys: tuple[str, ...] = ()

    @classmethod
    def parse(cls, members: Mapping[str, Any]) -> Self:
        """Return the request with these members: one of `key`, `prefix` and `identity`, and perhaps
        `kemKeys`. Raises ValueError for others."""
        given: list[Kind] = [kind for kind in _KINDS if members.get(kind) is not None]
        unknown = members.keys() - {*_KINDS, _KEM_KEYS}
        if unknown or len(given) != 1:
            raise ValueError(
                f"unknown member {min(unknown)!a}" if unknown else "name one of key, prefix and identity"
            )
        (kind,) = given
        value, kem_keys = members[kind], members.get(_KEM_KEYS) or ()
        if not isinstance(value, str):
            raise ValueError(f"{kind} is not a string")
        if kind == "prefix":
            value = value.removesuffix("/")
        if kind == "identity":
            if not is_user_id(value):
                raise ValueError(
                    f"{value!a} is not an identity: name the user id that `pysync keys show` prints, 32 hex "
                    "digits in lower case; for other data name its key or prefix"
                )
        else:
            split_key(value)
            if value.partition("/")[0] == RESERVED:
                raise ValueError(f"the keys below {RESERVED} are the server's own")
        is_list = isinstance(kem_keys, list | tuple)
        if not is_list or not all(isinstance(key, str) and is_public_key(key) for key in kem_keys):
            raise ValueError(f"{_KEM_KEYS} are X25519 public keys, 64 hex digits in lower case each")
        if kem_keys and kind != "identity":
            raise ValueError(f"{_KEM_KEYS} belong to an identity")
        return cls(kind, value, tuple(kem_keys))

    @property
    def members(self) -> dict[str, Any]:
        """The members that `parse` takes."""
        return {self.kind: self.value} | ({_KEM_KEYS: list(self.kem_keys)} if self.kem_keys else {})
