"""Why sealed data does not open: each failure is a class of its own (clients-and-crypto section 4)."""


class SealedError(Exception):
    """Base of every failure to open sealed data, or to change who may."""


class DecryptionFailed(SealedError):
    """The bytes, their context (`aad`) or their epoch are not those that were sealed."""


class Truncated(SealedError):
    """Too few bytes to be anything sealed."""


class NotSealed(SealedError):
    """What should be sealed has not the form of it."""


class UnknownEpoch(SealedError):
    """Sealed under a content key that this recipient does not have: of before it came, or of after the
    keyring was read, so that reading it again may help."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"No key available for epoch {epoch}: this recipient is not in it, or the keyring is newer"
        )
        self.epoch = epoch


class AadRequired(SealedError):
    """Sealed with a context, and opened without one."""

    def __init__(self) -> None:
        super().__init__(
            "aad required: this envelope (v:1) was sealed with a context, pass the same aad to open it"
        )


class UntrustedAdder(SealedError):
    """A content key comes from somebody who is not trusted to give any."""


class ForgedEntry(SealedError):
    """A wrapped content key whose signature is not by whom it names, or not over what it says."""


class KeyringMissing(SealedError):
    """There is no keyring under the name."""


class MalformedKeyring(SealedError):
    """The document is no keyring."""


class KeyringRolledBack(SealedError):
    """The keyring is older than one that was seen already: somebody may want a key to be used whose holders
    were removed since."""


class NotARecipient(SealedError):
    """The keyring's current epoch has no entry for the key."""


class AmbiguousEntry(SealedError):
    """The keyring's current epoch has more than one entry for the key."""


class AlreadyPresent(SealedError):
    """The key is a recipient already."""


class LastRecipient(SealedError):
    """Without this recipient nobody could open what is sealed."""
