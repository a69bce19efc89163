"""Seal data that only the recipients of a keyring, or of one envelope, can read. The server stores it and
cannot read it (docs/reference/protocol.md#sealed-data).

`RemoteKeyring` makes a keyring on a server and opens it; an `UnlockedKeyring` seals documents and log
elements, also as the `sealing` of a `SyncDocument`, and bytes. `seal_envelope` needs no keyring.
"""

from pysync.client.sealed.crypto import (
    AadRequired,
    AlreadyPresent,
    AmbiguousEntry,
    DecryptionFailed,
    ForgedEntry,
    KeyringMissing,
    KeyringRolledBack,
    LastRecipient,
    MalformedKeyring,
    NotARecipient,
    NotSealed,
    OpenedEnvelope,
    SealedError,
    Truncated,
    UnknownEpoch,
    UntrustedAdder,
    open_envelope,
    seal_envelope,
)
from pysync.client.sealed.keyring import (
    Keyring,
    RemoteKeyring,
    UnlockedKeyring,
    pull_and_open_blob,
    seal_and_push_blob,
)

__all__ = [
    "AadRequired",
    "AlreadyPresent",
    "AmbiguousEntry",
    "DecryptionFailed",
    "ForgedEntry",
    "Keyring",
    "KeyringMissing",
    "KeyringRolledBack",
    "LastRecipient",
    "MalformedKeyring",
    "NotARecipient",
    "NotSealed",
    "OpenedEnvelope",
    "RemoteKeyring",
    "SealedError",
    "Truncated",
    "UnknownEpoch",
    "UnlockedKeyring",
    "UntrustedAdder",
    "open_envelope",
    "pull_and_open_blob",
    "seal_and_push_blob",
    "seal_envelope",
]
