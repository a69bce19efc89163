"""Keyrings, which say who may open what is sealed, epoch by epoch (docs/reference/protocol.md#keyrings): the
document, its content keys, the keyring of a server, and files that are sealed with one."""

import asyncio
import base64
import os
import random as random_module
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Final

import orjson

from pysync.auth.certificates import decode_base64
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.signing import Signer
from pysync.client.client import Client
from pysync.client.files import FileMethods, check_size
from pysync.client.merge import JsonObject
from pysync.client.models import PushResult, encode
from pysync.client.sealed import crypto
from pysync.client.sealed.crypto import Entry, Random
from pysync.client.sync import SyncDocument
from pysync.client.transport import document_key
from pysync.protocol import OCTET_STREAM

MAX_EPOCH: Final = (1 << 32) - 1
_EPOCH: Final = re.compile("[1-9][0-9]{0,9}")
_EPOCH_BYTES: Final = 4
SEALED_OVERHEAD_BYTES: Final = _EPOCH_BYTES + crypto.IV_BYTES + crypto.TAG_BYTES
"""The number of bytes by which a sealed file exceeds its plaintext."""


class Keyring:
    """A keyring document, read but not unlocked. It is immutable: `add` and `remove` return another one."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Raises MalformedKeyring for the data of any other document."""
        self.data = dict(data)
        """The document, with whatever members it holds beside those of a keyring."""
        self.epoch: int = self.data.get("currentEpoch", 0)
        if self.data.get("v") != 1 or not _is_epoch(self.epoch):
            raise crypto.MalformedKeyring("not a keyring: v must be 1, and currentEpoch an epoch")
        self._entries = _entries_by_epoch(self.data.get("epochs"))
        if self.epoch not in self._entries:
            raise crypto.MalformedKeyring(f"not a keyring: epoch {self.epoch} is missing")

    @classmethod
    def new(
        cls, keys: IdentityKeys, recipients: Iterable[str] = (), *, now_s: int, random: Random = os.urandom
    ) -> "Keyring":
        """Return a keyring at epoch 1 with the recipients `keys` and `recipients` (X25519 public keys).
        Raises ValueError for an invalid key."""
        kems = dict.fromkeys([keys.kem_pub, *recipients])
        return cls({"v": 1, "currentEpoch": 1, "epochs": {"1": _epoch(1, kems, keys, now_s, random)}})

    @property
    def recipients(self) -> tuple[str, ...]:
        """The X25519 public keys in the current epoch, whoever added them."""
        return tuple(entry["subKem"] for entry in self._current if isinstance(entry.get("subKem"), str))

    def open(
        self, keys: IdentityKeys, trusted: Collection[str], *, min_epoch: int = 1, random: Random = os.urandom
    ) -> "UnlockedKeyring":
        """Return the content keys for `keys` that somebody `trusted` (Ed25519 public keys) added. Earlier
        epochs without a valid entry are left out.

        Raises NotARecipient, AmbiguousEntry, UntrustedAdder, ForgedEntry, DecryptionFailed or Truncated for
        the current epoch, and KeyringRolledBack if that is before `min_epoch`, the latest that was seen.
        """
        self._check_epoch(min_epoch)
        content_keys = {self.epoch: self._content_key(self.epoch, keys, trusted)}
        for epoch in self._entries.keys() - {self.epoch}:
            try:
                content_keys[epoch] = self._content_key(epoch, keys, trusted)
            except crypto.SealedError:
                continue
        return UnlockedKeyring(self.epoch, content_keys, random=random)

    def add(
        self,
        recipient: str,
        keys: IdentityKeys,
        trusted: Collection[str],
        *,
        now_s: int,
        min_epoch: int = 1,
        random: Random = os.urandom,
    ) -> "Keyring":
        """Return the keyring with `recipient`, an X25519 public key, in the current epoch, added by `keys`,
        who must be able to open it. Raises AlreadyPresent, ValueError for an invalid key, and as `open`."""
        if recipient in self.recipients:
            raise crypto.AlreadyPresent(f"recipient {recipient} is already present in epoch {self.epoch}")
        content_key = self.open(keys, trusted, min_epoch=min_epoch).content_keys[self.epoch]
        entry = crypto.wrap_key(content_key, recipient, self.epoch, keys, now_s=now_s, random=random)
        epoch = self.data["epochs"][str(self.epoch)]
        return self._with(self.epoch, {**epoch, "wrappedKeys": [*epoch["wrappedKeys"], entry]})

    def remove(
        self,
        recipient: str,
        adder: Signer,
        trusted: Collection[str],
        *,
        now_s: int,
        min_epoch: int = 1,
        random: Random = os.urandom,
    ) -> "Keyring":
        """Return the keyring at a new epoch, whose new content key all others receive, but not `recipient`,
        nor anyone whose entry is not signed by one of `trusted`. Data sealed before stays readable to those
        who could read it.

        Raises NotARecipient, LastRecipient if no recipient would be left, and KeyringRolledBack as `open`.
        """
        self._check_epoch(min_epoch)
        if recipient not in self.recipients:
            raise crypto.NotARecipient(f"recipient {recipient} is not in epoch {self.epoch}")
        kems = dict.fromkeys(
            entry["subKem"]
            for entry in self._current
            if entry.get("subKem") != recipient and _is_trusted(entry, self.epoch, trusted)
        )
        if not kems:
            raise crypto.LastRecipient(f"without {recipient} nobody trusted is left in epoch {self.epoch}")
        return self._with(self.epoch + 1, _epoch(self.epoch + 1, kems, adder, now_s, random))

    @property
    def _current(self) -> list[Entry]:
        return self._entries[self.epoch]

    def _check_epoch(self, min_epoch: int) -> None:
        if self.epoch < min_epoch:
            raise crypto.KeyringRolledBack(
                f"the keyring is at epoch {self.epoch}, and was at {min_epoch} before"
            )

    def _content_key(self, epoch: int, keys: IdentityKeys, trusted: Collection[str]) -> bytes:
        mine = [entry for entry in self._entries[epoch] if entry.get("subKem") == keys.kem_pub]
        if not mine:
            raise crypto.NotARecipient(f"recipient {keys.kem_pub} is not in epoch {epoch}")
        if len(mine) > 1:
            raise crypto.AmbiguousEntry(f"recipient {keys.kem_pub} is in epoch {epoch} more than once")
        crypto.verify_entry(mine[0], epoch, trusted)
        return crypto.unwrap_key(mine[0], keys)

    def _with(self, epoch: int, members: dict[str, Any]) -> "Keyring":
        epochs = {**self.data["epochs"], str(epoch): members}
        return Keyring({**self.data, "currentEpoch": epoch, "epochs": epochs})


class UnlockedKeyring:
    """The content keys of a keyring by epoch, for one recipient. Seals under the current one, and opens data
    sealed under any of them. Thread-safe."""

    def __init__(self, epoch: int, content_keys: Mapping[int, bytes], *, random: Random = os.urandom) -> None:
        self.epoch = epoch
        """The current one."""
        self.content_keys = content_keys
        self._random = random

    def __repr__(self) -> str:
        return f"OpenKeyring(epoch={self.epoch})"  # never the keys

    def seal(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a document or log element, sealed (docs/reference/protocol.md#sealed-documents)."""
        key = self.content_keys[self.epoch]
        sealed = crypto.encrypt(key, encode(data), str(self.epoch).encode(), self._random)
        return {"_encrypted": base64.b64encode(sealed).decode(), "_epoch": self.epoch}

    def open(self, sealed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a sealed document or element, sealed by this client or another of the protocol.
        It may have been sealed for another document, because the key is not bound.

        Raises NotSealed for other data, UnknownEpoch, Truncated and DecryptionFailed.
        """
        payload = sealed.get("_encrypted")
        encrypted = decode_base64(payload) if isinstance(payload, str) else None
        if encrypted is None:
            raise crypto.NotSealed("the document is not sealed: _encrypted must be base64")
        named = sealed.get("_epoch")
        epoch = named if isinstance(named, int) and not isinstance(named, bool) else self.epoch
        plaintext = crypto.decrypt(self._content_key(epoch), encrypted, str(epoch).encode())
        try:
            data = orjson.loads(plaintext)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise crypto.NotSealed("what is sealed is no JSON object")
        return data

    def seal_bytes(self, plaintext: bytes, aad: str = "") -> bytes:
        """Return bytes that only recipients can read, and only with the same `aad`: 32 more than the
        plaintext (docs/reference/protocol.md#sealed-files)."""
        aad_bytes = _sealed_aad(self.epoch, aad)
        sealed = crypto.encrypt(self.content_keys[self.epoch], plaintext, aad_bytes, self._random)
        return self.epoch.to_bytes(_EPOCH_BYTES, "big") + sealed

    def open_bytes(self, sealed: bytes, aad: str = "") -> bytes:
        """Return the plaintext of `seal_bytes`. Raises Truncated, UnknownEpoch and DecryptionFailed."""
        if len(sealed) < SEALED_OVERHEAD_BYTES:
            raise crypto.Truncated("sealed blob shorter than its epoch+iv header and its tag")
        epoch = int.from_bytes(sealed[:_EPOCH_BYTES], "big")
        return crypto.decrypt(
            self._content_key(epoch), memoryview(sealed)[_EPOCH_BYTES:], _sealed_aad(epoch, aad)
        )

    def _content_key(self, epoch: int) -> bytes:
        if epoch not in self.content_keys:
            raise crypto.UnknownEpoch(epoch)
        return self.content_keys[epoch]


def _sealed_aad(epoch: int, aad: str) -> bytes:
    return f"starfish-blob:{epoch}:{aad}".encode()


def _epoch(epoch: int, kems: Iterable[str], adder: Signer, now_s: int, random: Random) -> dict[str, Any]:
    """Return the members of an epoch with a new content key, wrapped for each of `kems`."""
    content_key = random(crypto.KEY_BYTES)
    wrapped = [crypto.wrap_key(content_key, kem, epoch, adder, now_s=now_s, random=random) for kem in kems]
    return {"createdAt": now_s, "wrappedKeys": wrapped}


def _entries_by_epoch(epochs: object) -> dict[int, list[Entry]]:
    """Return the entries by epoch. Values that are not an epoch or an entry are skipped; only the current
    epoch must be present."""
    if not isinstance(epochs, dict):
        return {}
    return {
        int(name): [entry for entry in members["wrappedKeys"] if isinstance(entry, dict)]
        for name, members in epochs.items()
        if _EPOCH.fullmatch(name)
        and _is_epoch(int(name))
        and isinstance(members, dict)
        and isinstance(members.get("wrappedKeys"), list)
    }


def _is_epoch(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EPOCH


def _is_trusted(entry: Entry, epoch: int, trusted: Collection[str]) -> bool:
    try:
        crypto.verify_entry(entry, epoch, trusted)
    except crypto.SealedError:
        return False
    return True


class RemoteKeyring:
    """The keyring `<name>/_keyring`, as the holder of `keys` uses it; `name` is the path of a collection, a
    space (`spaces/<id>`) or a document.

    `trusted` are the Ed25519 public keys of those who may add recipients. `min_epoch` is the latest epoch
    seen. Keep it: given an older keyring, a program would seal for recipients who were removed.

    A change that conflicts is repeated up to `retries` times, then raises Conflict. Methods raise the errors
    of `Keyring`, and KeyringMissing.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        keys: IdentityKeys,
        trusted: Collection[str],
        *,
        min_epoch: int = 1,
        retries: int = 3,
        now_s: Callable[[], int] = lambda: int(time.time()),
        random: Random = os.urandom,
        jitter: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.key = f"{document_key(name)}/_keyring"
        self.min_epoch = min_epoch
        self._client = client
        self._keys = keys
        self._trusted = frozenset(trusted)
        self._retries = retries
        self._now_s = now_s
        self._random = random
        self._jitter = jitter
        self._sleep = sleep

    async def create(self, recipients: Iterable[str] = ()) -> UnlockedKeyring:
        """Create a keyring for `keys` and `recipients` (X25519 public keys). Raises Conflict if one
        exists."""
        keyring = Keyring.new(self._keys, recipients, now_s=self._now_s(), random=self._random)
        opened = self._open(keyring)
        await self._client.push(self.key, keyring.data)
        return self._advance_epoch(opened)

    async def open(self) -> UnlockedKeyring:
        """Return the unlocked keyring. It does not follow changes: after UnknownEpoch open it again."""
        return self._advance_epoch(self._open(await self.read()))

    async def read(self) -> Keyring:
        """Return the keyring as the server stores it."""
        pulled = await self._client.pull(self.key)
        return self._keyring(pulled.data)

    async def add(self, recipient: str) -> UnlockedKeyring:
        """Let `recipient`, an X25519 public key, open everything that is sealed in the current epoch, also
        earlier data."""
        return await self._change(Keyring.add, recipient)

    async def remove(self, recipient: str) -> UnlockedKeyring:
        """Return the keyring whose new key `recipient` does not have; later data is sealed under it. Raises
        NotARecipient also for oneself, because the creator of a key has it."""
        return await self._change(Keyring.remove, recipient)

    async def _change(self, change: Callable[..., Keyring], recipient: str) -> UnlockedKeyring:
        opened: list[UnlockedKeyring] = []

        def changed(data: JsonObject) -> JsonObject:
            keyring = change(
                self._keyring(data),
                recipient,
                self._keys,
                self._trusted,
                now_s=self._now_s(),
                min_epoch=self.min_epoch,
                random=self._random,
            )
            opened.append(self._open(keyring))  # or nobody else gets to see it
            return keyring.data

        document = SyncDocument(
            self._client, self.key, retries=self._retries, jitter=self._jitter, sleep=self._sleep
        )
        await document.update(changed)
        return self._advance_epoch(opened[-1])

    def _open(self, keyring: Keyring) -> UnlockedKeyring:
        return keyring.open(self._keys, self._trusted, min_epoch=self.min_epoch, random=self._random)

    def _advance_epoch(self, opened: UnlockedKeyring) -> UnlockedKeyring:
        self.min_epoch = max(self.min_epoch, opened.epoch)
        return opened

    def _keyring(self, data: JsonObject) -> Keyring:
        if not data:
            raise crypto.KeyringMissing(f"there is no keyring at {self.key}")
        return Keyring(data)


async def seal_and_push_blob(
    client: FileMethods,
    keyring: UnlockedKeyring,
    key: str,
    plaintext: bytes,
    *,
    aad: str | None = None,
    max_bytes: int | None = None,
) -> PushResult:
    """Seal `plaintext` and store it at `key`. It opens only with the same `aad`, by default the key of the
    document, so that a server cannot pass one file off as another. Raises FileTooLarge above `max_bytes`, and
    as `Client.push_blob`. The file and the sealed file are held in memory."""
    check_size(len(plaintext), max_bytes)
    sealed = await asyncio.to_thread(keyring.seal_bytes, plaintext, _aad(key, aad))
    return await client.push_blob(key, sealed, OCTET_STREAM)


async def pull_and_open_blob(
    client: FileMethods,
    keyring: UnlockedKeyring,
    key: str,
    *,
    aad: str | None = None,
    max_bytes: int | None = None,
) -> bytes | None:
    """Return the plaintext of a file stored by `seal_and_push_blob`; None if nothing is stored. Raises as
    `UnlockedKeyring.open_bytes` and `Client.pull_blob`; `max_bytes` applies to the plaintext."""
    sealed_max = None if max_bytes is None else max_bytes + SEALED_OVERHEAD_BYTES
    blob = await client.pull_blob(key, max_bytes=sealed_max)
    if blob is None:
        return None
    return await asyncio.to_thread(keyring.open_bytes, blob.data, _aad(key, aad))


def _aad(key: str, aad: str | None) -> str:
    return document_key(key) if aad is None else aad
