"""A keyring kept on a server, beside what it is for."""

import asyncio
import os
import random as random_module
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from pysync.auth.signing import Keys
from pysync.client.client import Client
from pysync.client.connection import document_key
from pysync.client.keyrings import Keyring, OpenKeyring
from pysync.client.sealed_errors import KeyringMissing
from pysync.client.sync import SyncDocument
from pysync.client.wraps import Random

Data = dict[str, Any]


class SharedKeyring:
    """The keyring `<name>/_keyring`, as the holder of `keys` uses it; `name` is the path of a collection, a
    space (`spaces/<id>`) or a document.

    `trusted` are the Ed25519 public keys of those who may add recipients. Nothing here takes what an older
    keyring than one that was seen says: `min_epoch` is the latest epoch; keep it, for a server could show an
    old keyring to whoever does not know it, and have them seal for somebody who was removed.

    Changes are made to the keyring as it is: again, up to `retries` times, where another was faster, and then
    Conflict is raised. What each raises beside that is as for a `Keyring`, and KeyringMissing.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        keys: Keys,
        trusted: Collection[str],
        *,
        min_epoch: int = 1,
        retries: int = 3,
        now_s: Callable[[], int] = lambda: int(time.time()),
        random: Random = os.urandom,
        chance: Callable[[], float] = random_module.random,
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
        self._chance = chance
        self._sleep = sleep

    async def create(self, recipients: Iterable[str] = ()) -> OpenKeyring:
        """A new keyring for `keys` and `recipients` (X25519 public keys). Raises Conflict where one is."""
        keyring = Keyring.new(self._keys, recipients, now_s=self._now_s(), random=self._random)
        opened = self._open(keyring)
        await self._client.push(self.key, keyring.data)
        return self._seen(opened)

    async def open(self) -> OpenKeyring:
        """The keyring, open. It stays as it is: after UnknownEpoch open it again."""
        return self._seen(self._open(await self.read()))

    async def read(self) -> Keyring:
        """The keyring, as the server shows it."""
        pulled = await self._client.pull(self.key)
        return self._keyring(pulled.data)

    async def add(self, recipient: str) -> OpenKeyring:
        """Let `recipient`, an X25519 public key, open what is sealed in the current epoch, before and from
        now on."""
        return await self._change(
            lambda keyring: keyring.add(
                recipient,
                self._keys,
                self._trusted,
                now_s=self._now_s(),
                min_epoch=self.min_epoch,
                random=self._random,
            )
        )

    async def remove(self, recipient: str) -> OpenKeyring:
        """Seal from now on under a key that `recipient` does not have: under what this returns. NotARecipient
        also for oneself: who makes a key has it."""
        return await self._change(
            lambda keyring: keyring.remove(
                recipient,
                self._keys,
                self._trusted,
                now_s=self._now_s(),
                min_epoch=self.min_epoch,
                random=self._random,
            )
        )

    async def _change(self, change: Callable[[Keyring], Keyring]) -> OpenKeyring:
        opened: list[OpenKeyring] = []

        def changed(data: Data) -> Data:
            keyring = change(self._keyring(data))
            opened.append(self._open(keyring))  # or nobody else gets to see it
            return keyring.data

        document = SyncDocument(
            self._client, self.key, retries=self._retries, chance=self._chance, sleep=self._sleep
        )
        await document.update(changed)
        return self._seen(opened[-1])

    def _open(self, keyring: Keyring) -> OpenKeyring:
        return keyring.open(self._keys, self._trusted, min_epoch=self.min_epoch, random=self._random)

    def _seen(self, opened: OpenKeyring) -> OpenKeyring:
        self.min_epoch = max(self.min_epoch, opened.epoch)
        return opened

    def _keyring(self, data: Data) -> Keyring:
        if not data:
            raise KeyringMissing(f"there is no keyring at {self.key}")
        return Keyring(data)
