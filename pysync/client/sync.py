"""One document kept in step with the server: pull, merge, push, repeat (clients-and-crypto 6.3)."""

import asyncio
import copy
import random as random_module
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

import orjson

from pysync.client.client import Client
from pysync.client.lookout import Where, follow
from pysync.client.results import PullResult, PushResult
from pysync.client.tails import ParamSet
from pysync.errors import BodyTooDeep, Conflict

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


class Sealing(Protocol):
    """What makes of a document's data what is stored, and the other way round:
    `pysync.client.sealed.OpenKeyring`. `open` raises for anything that was not sealed."""

    def seal(self, data: Mapping[str, Any]) -> Data: ...

    def open(self, sealed: Mapping[str, Any]) -> Data: ...


class SyncDocument:
    """A local copy of one document: `data`, and the `hash` it is based on (`""` before the first pull, and
    where nothing is stored).

    `resolve(local, remote)` makes one document of two. A push that meets another's is repeated up to
    `retries` times, over the resolved data, and then raises Conflict. Calls of several tasks wait for each
    other, so that one may `follow` what others `push`. With a `sealing` the server gets and has sealed data
    alone, while `data` and what is resolved is open; what it cannot open is raised, and nothing changes.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        resolve: Resolve = merge_remote_wins,
        retries: int = 3,
        sign_author: bool = False,
        sealing: Sealing | None = None,
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
        self._sealing = sealing
        self._chance = chance
        self._sleep = sleep
        self._pulled = False
        self._stored = b""
        self._turn = asyncio.Lock()

    async def pull(self) -> Data:
        """Take in what the server holds: the first time as it is, later resolved with `data`."""
        async with self._turn:
            self._take(await self._client.pull(self.key), as_it_is=not self._pulled)
        return self.data

    async def push(self, data: Data) -> PushResult:
        """Make `data` the document, over what was last pulled or pushed here. On a conflict `data` is
        resolved with the server's document first, so what is stored (then in `self.data`) may hold more."""
        async with self._turn:
            return await self._store(data, self._resolve)

    async def update(self, change: Callable[[Data], Data]) -> PushResult:
        """Store `change(current data)`. On a conflict `change` is asked again, with the newer data; it gets a
        copy each time."""
        async with self._turn:
            if not self._pulled:
                self._take(await self._client.pull(self.key), as_it_is=True)
            return await self._store(
                change(copy.deepcopy(self.data)), lambda _, remote: change(copy.deepcopy(remote))
            )

    def follow(
        self,
        *,
        collection: str | None = None,
        params: ParamSet | None = None,
        first_s: float = 0.25,
        most_s: float = 2.0,
        lost: Callable[[Exception], None] = lambda _: None,
    ) -> AsyncGenerator[Data]:
        """`data`, now and each time that the document was found to be another, without end. It is pulled when
        the server's change stream tells of a version that is not the one here, and taken in as it is, or
        resolved with `data` where that is no longer what was last pulled or pushed. What was pushed here
        meanwhile may come too.

        `collection` and `params`, the waits where there is no stream, `lost` and what is raised are as for
        `LogCursor.follow`.
        """
        given: str | None = None

        async def look() -> tuple[Data | None, bool]:
            nonlocal given
            async with self._turn:
                remote = await self._client.pull(self.key)
                if not self._pulled or remote.hash != self.hash:
                    self._take(remote, as_it_is=self._is_as_stored())
            is_given, given = given == self.hash, self.hash
            return None if is_given else self.data, False

        return follow(
            self._client,
            Where(self.key, collection, params),
            look,
            lambda change: change.hash != self.hash,
            began=self._pulled,
            first_s=first_s,
            most_s=most_s,
            lost=lost,
            sleep=self._sleep,
        )

    def _take(self, remote: PullResult, *, as_it_is: bool) -> None:
        data = self._opened(remote)
        self.data = data if as_it_is else self._resolve(self.data, data)
        self._base_on(data, remote.hash)

    def _opened(self, remote: PullResult) -> Data:
        # A server that says that nothing is stored must not get data in that was not sealed.
        is_there = remote.hash or remote.data
        data = self._sealing.open(remote.data) if self._sealing and is_there else remote.data
        try:
            orjson.dumps(data)
        except TypeError:  # of what was JSON, that alone cannot be written again
            raise BodyTooDeep from None
        return data

    def _base_on(self, data: Data, hash_: str) -> None:
        self.hash, self._pulled, self._stored = hash_, True, _digest(data)

    def _is_as_stored(self) -> bool:
        """Whether `data` is what was last pulled or pushed here."""
        return not self._pulled or _digest(self.data) == self._stored

    async def _store(self, data: Data, resolve: Resolve) -> PushResult:
        base, attempt = self.hash, 0
        while True:
            try:
                sealed = data if self._sealing is None else self._sealing.seal(data)
                result = await self._client.push(
                    self.key, sealed, base or None, sign_author=self._sign_author
                )
                break
            except Conflict:
                if attempt == self._retries:
                    raise
            remote = await self._client.pull(self.key)
            data, base = resolve(data, self._opened(remote)), remote.hash
            await self._sleep(min(0.1 * 2**attempt, 2.0) + 0.1 * self._chance())
            attempt += 1
        # Only now: a copy that named a newer base without holding its data would overwrite it later.
        self.data = data
        self._base_on(data, result.hash)
        return result


def _digest(data: Data) -> bytes:
    return sha256(orjson.dumps(data, option=orjson.OPT_SORT_KEYS)).digest()
