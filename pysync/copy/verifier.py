"""Everything that a store holds, read and compared with its hashes and checksums."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import orjson

from pysync import _core
from pysync.applog.starfish import chunk_key, chunk_names
from pysync.applog.tail import folder, object_key
from pysync.auth.revocation import PREFIX as REVOCATIONS
from pysync.copy.reading import Reader, Unreadable, failing, for_each_key
from pysync.copy.sound import Corrupt, check_chunks, check_object, expanded
from pysync.corruption import Kind
from pysync.keyed_versions import KEY as VERSIONS
from pysync.store import DamagedFile, Pace, Store, no_pace

AT_ONCE: Final = 8
"""Objects that are verified at one time."""

_LEFT_OUT: Final = (folder(""), "_pysync/probe/", "__sync__/config.json")
"""The objects of logs, which are found from their heads; what asking a store has left; what Starfish keeps of
its configuration."""
_LARGE: Final = 65_536
"""Bytes that are better checked beside the event loop."""


class Damage(NamedTuple):
    """An object that is damaged, lost or cannot be read."""

    key: str
    kind: Kind
    why: str


@dataclass(slots=True)
class Verified:
    """The number of objects that were read (a log counts once), of damaged ones among them, and of bytes."""

    objects: int = 0
    damaged: int = 0
    bytes: int = 0


class Verifier:
    """Verifies the objects of `store`, which may be written meanwhile. `tell` is called for each damaged
    object, and `pace` is awaited with the number of bytes read. The store no longer serves damaged files."""

    def __init__(
        self,
        store: Store,
        tell: Callable[[Damage], None],
        pace: Pace = no_pace,
        verified: Verified | None = None,
    ) -> None:
        self.verified = verified or Verified()
        self._store = store
        self._reader = Reader(store)
        self._tell = tell
        self._pace = pace
        self._chunked = asyncio.Lock()
        """A log in Starfish's chunks is held whole to be verified, so one at a time."""

    async def run(self) -> None:
        """Verify everything. Raises StoreUnavailable where the store is out of reach."""
        await for_each_key(self._store, AT_ONCE, self.verify)

    async def verify(self, key: str) -> None:
        """Verify what is at `key`; of a log all that its head names. Raises StoreUnavailable."""
        if key.startswith(_LEFT_OUT):
            return
        self.verified.objects += 1
        found = [damage async for damage in self._damages(key)]
        if found:
            # An object that was replaced or deleted meanwhile is not found damaged in the same way again.
            again = [damage async for damage in self._damages(key)]
            found = [damage for damage in again if damage in found]
        self.verified.damaged += len(found)
        for damage in found:
            self._tell(damage)

    async def _damages(self, key: str) -> AsyncIterator[Damage]:
        kind: Kind = "document"
        try:
            found = await self._reader.get(key)
            if found is None:
                kind = "file"
                await self._verify_file(key)
                return
            await self._count(len(found.body))
            kind = "log" if _core.is_log(found.body) else "document"
            head = await _check(key, found.body)
        except (Corrupt, Unreadable, ValueError) as error:
            yield Damage(key, kind, str(error))
            return
        if head is not None and head.is_chunked:
            async for damage in self._damages_of_chunks(key, head):
                yield damage
        elif head is not None:
            async for damage in self._damages_of_nodes(key, head):
                yield damage

    async def _verify_file(self, key: str) -> None:
        """Raise Corrupt where the file at `key` is damaged."""

        try:
            with failing(f"reading {key}"):
                await self._store.verify(key, self._count)
        except DamagedFile as error:
            raise Corrupt(error.why) from None

    async def _damages_of_nodes(self, key: str, head: _core.LogHead) -> AsyncIterator[Damage]:
        """Yield the damaged segments and index blocks of a log of ours."""
        waiting = deque(head.nodes())
        while waiting:
            node = waiting.popleft()
            at = object_key(head.id, node.name)
            try:
                waiting.extendleft(reversed(expanded(head, node, await self._get(at))))
            except (Corrupt, Unreadable) as error:
                yield Damage(at, "log", f"{error}; it is a part of the log at {key}")

    async def _damages_of_chunks(self, key: str, head: _core.LogHead) -> AsyncIterator[Damage]:
        """Yield the damage of a log that Starfish keeps in chunks. Each chunk is also verified by itself."""
        async with self._chunked:
            try:
                with failing(f"listing the chunks of {key}"):
                    names = await chunk_names(self._store, key)
                check_chunks(head, [await self._get(chunk_key(key, name)) for name in names])
            except (Corrupt, Unreadable) as error:
                yield Damage(key, "log", str(error))

    async def _get(self, key: str) -> bytes:
        found = await self._reader.get(key)
        if found is None:
            raise Corrupt("it is missing")
        await self._count(len(found.body))
        return found.body

    async def _count(self, size: int) -> None:
        self.verified.bytes += size
        await self._pace(size)


async def _check(key: str, body: bytes) -> _core.LogHead | None:
    """`check_object`, for all that the server keeps: below `_pysync/` there is JSON of its own."""
    if key.startswith("_pysync/") and not key.startswith((f"{REVOCATIONS}/", VERSIONS)):
        try:
            orjson.loads(body)
        except ValueError:
            raise Corrupt("it is not JSON") from None
        return None
    if len(body) >= _LARGE:
        return await asyncio.to_thread(check_object, key, body)
    return check_object(key, body)
