"""One document in sync with the server: pull, merge, push, retry."""

import asyncio
import copy
import random as random_module
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from pysync.client.client import Client
from pysync.client.merge import Dropped, JsonObject, MergeConflict, ThreeWayMerge, local_wins, same
from pysync.client.models import ParamSet, PullResult, PushResult, encode
from pysync.client.polling import WatchTarget, follow
from pysync.client.transport import document_key
from pysync.errors import BodyTooDeep, Conflict

Merge = Callable[[JsonObject, JsonObject], JsonObject]

MAX_DROPPED: Final = 1000
"""Number of dropped values that a document remembers."""


class UnknownBase(ValueError):
    """The document changed on the server (to `current_hash`), and the version from which the local edit began
    is unknown, so the two cannot be merged. Nothing was changed locally or on the server."""

    def __init__(self, current_hash: str) -> None:
        super().__init__(
            "the document has changed on the server, and the version that `data` began from is not known: "
            "go on from what `dump` returned, or pass a `resolve`, which needs no base"
        )
        self.current_hash = current_hash


class Cipher(Protocol):
    """Encrypts the data of a document before it is stored, and decrypts it:
    `pysync.client.sealed.UnlockedKeyring`. `open` raises for data that was not sealed."""

    def seal(self, data: Mapping[str, Any]) -> JsonObject:
        """Return the data to store."""
        ...

    def open(self, sealed: Mapping[str, Any]) -> JsonObject:
        """Return the data that was sealed."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """How documents are merged, and sealed: the options of a SyncDocument."""

    on_conflict: Callable[[MergeConflict], Any] = local_wins
    id_member: str = "id"
    resolve: Merge | None = None
    sealing: Cipher | None = None

    @property
    def three_way(self) -> ThreeWayMerge:
        """The merge without `resolve`."""
        return ThreeWayMerge(self.on_conflict, self.id_member)

    def merge(
        self, base: JsonObject, edited: JsonObject, theirs: JsonObject
    ) -> tuple[JsonObject, list[Dropped]]:
        """Merge `edited`, which began from `base`, into the server's version; return the result and the
        values that the merge dropped."""
        if self.resolve is None or same(base, theirs) or same(base, edited):
            merged = self.three_way.merge(base, edited, theirs)
        else:
            merged = self.resolve(copy.deepcopy(edited), copy.deepcopy(theirs))
        return merged, self.three_way.dropped(base, edited, theirs, merged)

    def seal(self, data: JsonObject) -> JsonObject:
        """Return the data to store."""
        return data if self.sealing is None else self.sealing.seal(data)

    def open(self, stored: JsonObject) -> JsonObject:
        """Return the data that was sealed. Raises as the cipher, and BodyTooDeep."""
        data = stored if self.sealing is None else self.sealing.open(stored)
        try:
            orjson.dumps(data)
        except TypeError:  # of what was JSON, that alone cannot be written again
            raise BodyTooDeep from None
        return data


class SyncDocument:
    """A local copy of one document: `data`, which you may edit, and the `hash` of the version that it is
    based on (`""` before the first pull, and if nothing is stored).

    The data of that version, the base, is kept. If the server has another version at a pull or a push, local
    and remote edits are merged over the base, with `on_conflict` and `id_member` as for `ThreeWayMerge`.
    `resolve(local, remote)` replaces the merge as a whole: `merge_remote_wins` is the default of other
    clients of the protocol. `dropped` holds the newest 1000 edits that merges discarded; clear it when you
    have dealt with them.

    A push that conflicts is repeated with the merged data up to `retries` times, then raises Conflict. Calls
    of several tasks wait for each other, so one task may `follow` what others `push`. With a `sealing` the
    server stores sealed data only; data that cannot be decrypted is raised as an error and changes nothing.

    `dump` and `restore` preserve all of it across a restart. A `data` and `hash` set by hand are an edit with
    an unknown base: a pull or push raises UnknownBase unless the server still has that version.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        resolve: Merge | None = None,
        on_conflict: Callable[[MergeConflict], Any] = local_wins,
        id_member: str = "id",
        retries: int = 3,
        sign_author: bool = False,
        sealing: Cipher | None = None,
        jitter: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.key = key
        self.data: JsonObject = {}
        self.hash = ""
        self.dropped: deque[Dropped] = deque(maxlen=MAX_DROPPED)
        self._client = client
        self._rules = DocumentRules(on_conflict, id_member, resolve, sealing)
        self._retries = retries
        self._sign_author = sign_author
        self._jitter = jitter
        self._sleep = sleep
        self._has_remote = False
        """True if the server's version is known: it was pulled, pushed or restored."""
        self._base, self._base_hash = b"{}", ""
        """The data of a version, as JSON with its members sorted, and its hash."""
        self._lock = asyncio.Lock()

    async def pull(self) -> JsonObject:
        """Return the data of the server, merged with local edits that are not pushed yet."""
        async with self._lock:
            self._apply_remote(await self._client.pull(self.key))
        return self.data

    async def push(self, data: JsonObject | None = None) -> PushResult:
        """Store `data`, or the edited `self.data` if None. On a conflict it is first merged with the server's
        version, so that the stored data, then in `self.data`, may contain more. If the push fails, `data`
        stays in `self.data` as an edit."""
        async with self._lock:
            if data is not None:
                encode(data)
                self.data = data
            return await self._store(lambda edited: edited)

    async def update(self, change: Callable[[JsonObject], JsonObject]) -> PushResult:
        """Store `change(current data)`. After a conflict `change` is called again with the newer data, each
        time with a copy. If the push fails, nothing changes locally."""
        async with self._lock:
            if not self._has_remote:
                self._apply_remote(await self._client.pull(self.key))
            return await self._store(change)

    @property
    def is_edited(self) -> bool:
        """True if `data` holds edits that are not pushed."""
        return sorted_json(self.data) != self._base if self._is_base_known() else bool(self.data)

    def dump(self) -> JsonObject:
        """Return the state that `restore` continues from, serialisable as JSON: `data` with its unpushed
        edits, and the version that it is based on. It is plain even with a `sealing`: protect it like the
        keys."""
        return {
            "version": 1,
            "key": document_key(self.key),
            "hash": self.hash,
            "base": orjson.loads(self._base) if self._is_base_known() else None,
            "data": _copy(self.data),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` that `dump` returned for a SyncDocument of this key. Unpushed edits are
        merged and pushed as if there had been no restart. Raises ValueError for anything else."""
        data, hash_, base = state.get("data"), state.get("hash"), state.get("base")
        is_whole = isinstance(hash_, str) and isinstance(base, dict | None)
        if state.get("version") != 1 or not isinstance(data, dict) or not is_whole:
            raise ValueError("this is not what dump() of a SyncDocument returned")
        if state.get("key") != document_key(self.key):
            raise ValueError(f"this state is of {state.get('key')!r}, not of {document_key(self.key)!r}")
        if base is not None:
            self._set_base(base, str(hash_))
        self.data, self.hash = _copy(data), str(hash_)

    def follow(
        self,
        *,
        collection: str | None = None,
        params: ParamSet | None = None,
        initial_s: float = 0.25,
        max_s: float = 2.0,
        on_disconnect: Callable[[Exception], None] = lambda _: None,
    ) -> AsyncGenerator[JsonObject]:
        """Yield `data` now and whenever the document has changed, without an end: it is pulled when the
        server's change stream announces another version. Changes pushed from here may be yielded, too.
        Parameters and errors are as for `LogCursor.follow`."""
        given: str | None = None

        async def look() -> tuple[JsonObject | None, bool]:
            nonlocal given
            async with self._lock:
                self._apply_remote(await self._client.pull(self.key))
            is_given, given = given == self.hash, self.hash
            return None if is_given else self.data, False

        return follow(
            self._client,
            WatchTarget(self.key, collection, params),
            look,
            lambda change: change.hash != self.hash,
            has_started=self._has_remote,
            initial_s=initial_s,
            max_s=max_s,
            on_disconnect=on_disconnect,
            sleep=self._sleep,
        )

    def _is_base_known(self) -> bool:
        return self.hash == self._base_hash

    def _set_base(self, data: JsonObject, hash_: str) -> None:
        self.hash, self._base, self._base_hash = hash_, sorted_json(data), hash_
        self._has_remote = True

    def _unseal(self, remote: PullResult) -> JsonObject:
        # A server that says that nothing is stored must not get data in that was not sealed.
        return self._rules.open(remote.data) if remote.hash or remote.data else {}

    def _apply_remote(self, remote: PullResult) -> None:
        theirs = self._unseal(remote)
        if self.is_edited:
            merged, dropped = self._merge_remote(self._base_data(), _copy(self.data), theirs, remote.hash)
            if not same(merged, self.data):
                self.data = merged
            self.dropped += dropped
        elif remote.hash != self.hash or not self._has_remote:
            self.data = theirs
        self._set_base(theirs, remote.hash)

    def _base_data(self) -> JsonObject | None:
        return dict(orjson.loads(self._base)) if self._is_base_known() else None

    def _merge_remote(
        self, base: JsonObject | None, edited: JsonObject, theirs: JsonObject, hash_: str
    ) -> tuple[JsonObject, list[Dropped]]:
        """Merge `edited`, which began from `base`, into the server's version; return the result and the
        values that the merge dropped."""
        if base is None and hash_ != self.hash and self._rules.resolve is None and not same(edited, theirs):
            raise UnknownBase(hash_)
        if base is None:
            base = theirs if hash_ == self.hash else {}
        return self._rules.merge(base, edited, theirs)

    async def _store(self, change: Callable[[JsonObject], JsonObject]) -> PushResult:
        edited, base, base_hash = _copy(self.data), self._base_data(), self.hash
        began = sorted_json(edited)
        dropped: list[Dropped] = []
        attempt = 0
        while True:
            data = _copy(change(copy.deepcopy(edited)))
            try:
                result = await self._client.push(
                    self.key, self._rules.seal(data), base_hash or None, sign_author=self._sign_author
                )
                break
            except Conflict:
                if attempt == self._retries:
                    raise
            remote = await self._client.pull(self.key)
            theirs = self._unseal(remote)
            edited, lost = self._merge_remote(base, edited, theirs, remote.hash)
            base, base_hash = theirs, remote.hash
            dropped += lost
            await self._sleep(min(0.1 * 2**attempt, 2.0) + 0.1 * self._jitter())
            attempt += 1
        # Only now: a copy that named a newer base without holding its data would overwrite it later.
        if sorted_json(self.data) == began:
            self.data = self.data if sorted_json(data) == began else data
        else:  # it was edited while it was on its way
            self.data = self._rules.three_way.merge(orjson.loads(began), _copy(self.data), data)
        self.dropped += dropped
        self._set_base(data, result.hash)
        return result


def _copy(data: JsonObject) -> JsonObject:
    """Return the value as the server would return it. Raises as `encode`."""
    copied: JsonObject = orjson.loads(encode(data))
    return copied


def sorted_json(data: JsonObject) -> bytes:
    """Return the value as JSON text with its members sorted. Raises as `encode`."""
    return encode(data, orjson.OPT_SORT_KEYS)
