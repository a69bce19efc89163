"""One document kept in step with the server: pull, merge, push, repeat (clients-and-crypto 6.3)."""

import asyncio
import copy
import random as random_module
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pysync.client.client import Client
from pysync.client.results import PushResult
from pysync.errors import Conflict

Data = dict[str, Any]
Resolve = Callable[[Data, Data], Data]

UNSAFE_KEYS = frozenset({"__proto__", "constructor", "prototype", "__class__", "__dict__"})


def merge_remote_wins(local: Mapping[str, Any], remote: Mapping[str, Any]) -> Data:
    """Both sides' members, objects merged member by member, everything else as `remote` has it. The keys
    that a server drops are dropped here too."""
    return {
        name: _merge_value(local.get(name), value)
        for name, value in {**local, **remote}.items()
        if name not in UNSAFE_KEYS
    }


def _merge_value(local: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return merge_remote_wins(local if isinstance(local, dict) else {}, value)


class SyncDocument:
    """A local copy of one document: `data`, and the `hash` it is based on (`""` before the first pull, and
    where nothing is stored).

    `resolve(local, remote)` makes one document of two. A push that meets another's is repeated up to
    `retries` times, over the resolved data, and then raises Conflict. Not for several tasks at once.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        resolve: Resolve = merge_remote_wins,
        retries: int = 3,
        sign_author: bool = False,
        chance: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.key = key
        self.data: Data = {}
        self.hash = ""
        self._client = client
        self._resolve = resolve
        self._retries = retries
        self._sign_author = sign_author
        self._chance = chance
        self._sleep = sleep
        self._pulled = False

    async def pull(self) -> Data:
        """Take in what the server holds: the first time as it is, later resolved with `data`."""
        remote = await self._client.pull(self.key)
        self.data = self._resolve(self.data, remote.data) if self._pulled else remote.data
        self.hash, self._pulled = remote.hash, True
        return self.data

    async def push(self, data: Data) -> PushResult:
        """Make `data` the document, over what was last pulled or pushed here. On a conflict `data` is
        resolved with the server's document first, so what is stored (then in `self.data`) may hold more."""
        return await self._store(data, self._resolve)

    async def update(self, change: Callable[[Data], Data]) -> PushResult:
        """Store `change(current data)`. On a conflict `change` is asked again, with the newer data; it gets a
        copy each time."""
        if not self._pulled:
            await self.pull()
        return await self._store(
            change(copy.deepcopy(self.data)), lambda _, remote: change(copy.deepcopy(remote))
        )

    async def _store(self, data: Data, resolve: Resolve) -> PushResult:
        base, attempt = self.hash, 0
        while True:
            try:
                result = await self._client.push(self.key, data, base or None, sign_author=self._sign_author)
                break
            except Conflict:
                if attempt == self._retries:
                    raise
            remote = await self._client.pull(self.key)
            data, base = resolve(data, remote.data), remote.hash
            await self._sleep(min(0.1 * 2**attempt, 2.0) + 0.1 * self._chance())
            attempt += 1
        # Only now: a copy that named a newer base without holding its data would overwrite it later.
        self.data, self.hash, self._pulled = data, result.hash, True
        return result
