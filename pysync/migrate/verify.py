"""Verification: every object of a store is read, and compared with its hashes and checksums."""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import orjson

from pysync import _core
from pysync.auth.certificates import parse_revocation_list
from pysync.auth.revocation import PREFIX as REVOCATIONS
from pysync.concurrency import CONCURRENT, PYTHON_IN_THREAD_ABOVE
from pysync.corruption import Kind
from pysync.engine.append_log import chunk_keys, log_prefix, object_key
from pysync.engine.documents import SECRET_DOCUMENT_KEY as VERSIONS
from pysync.engine.history import PREFIX as HISTORY
from pysync.errors import BadRequest, BadSignature, DocumentCorrupt
from pysync.migrate.reading import VERIFY_KEY, Reader, Unreadable, error_context, for_each_key
from pysync.store import DamagedFile, OpenFile, Pace, ReadableStore, Store, StoredObject, no_pace

HASH_MISMATCH: Final = "its bytes do not match its sha256"
_CHUNK: Final = re.compile(r"(.+)__seg/[0-9]{16}")
_FIELD: Final = "items"
"""Any name will do, because elements in chunks have none."""


class VerificationError(Exception):
    """A stored object fails a check; the text has the reason."""


def check_object(key: str, stored: bytes) -> _core.LogHead | None:
    """Raise VerificationError unless the object at `key` is sound, as far as it shows by itself. Returns the
    head of a log, whose objects are still to be checked."""
    if _core.is_log(stored):
        try:
            head = _core.LogHead.read(stored, "")
        except DocumentCorrupt:
            raise VerificationError("its checksum does not match its contents") from None
        if not head.verify():
            raise VerificationError("its hash does not match its newest element")
        return head
    if key.startswith(f"{REVOCATIONS}/"):
        check_revocations(key, stored)
    elif log_of_chunk(key, stored) is not None:
        check_chunk(stored)
    else:
        return check_document(stored)
    return None


def expand_node(head: _core.LogHead, node: _core.LogNode, stored: bytes) -> list[_core.LogNode]:
    """Return the nodes below a block of the index of a log; for a segment there are none. Raises
    VerificationError unless `stored` is the object that the head, or the block above it, names."""
    try:
        if node.level:
            return head.expand(stored, node)
        head.slice([(node, stored)], False)
    except DocumentCorrupt:
        raise VerificationError("it does not match the head of its log") from None
    return []


def log_of_chunk(key: str, stored: bytes) -> str | None:
    """Return the key of the log of Starfish's that has this object as a chunk; None if it is not a chunk."""
    found = _CHUNK.fullmatch(key)
    return found[1] if found is not None and stored.startswith(b"[") else None


def check_revocations(key: str, stored: bytes) -> int:
    """Return the generation of a revocation list. Raises VerificationError if another issuer signed it."""
    try:
        found = parse_revocation_list(stored)
    except (BadRequest, BadSignature) as error:
        raise VerificationError(str(error)) from None
    if found.iss_user_id != key.rpartition("/")[2]:
        raise VerificationError("it is the revocation list of another issuer")
    return found.generation


def check_document(stored: bytes) -> _core.LogHead | None:
    """Raise VerificationError unless this is a document, or a log that Starfish wrote as one, whose data has
    the stated hash. Returns the head of a log with chunks, on which its hash depends."""
    try:
        document = _core.read_document(stored)
    except DocumentCorrupt:
        raise VerificationError("it is not a document, or not the one that was stored") from None
    if not document.verify():
        raise VerificationError("its hash does not match its data")
    if _core.is_document(stored):
        return None
    try:
        head = _core.LogHead.read(stored, _FIELD)
    except DocumentCorrupt:
        return None  # a document
    return head if head.is_chunked else None


def check_chunks(head: _core.LogHead, chunks: list[bytes]) -> None:
    """Raise VerificationError unless these are all chunks of the log with this head."""
    try:
        head.gather(chunks, whole=True)
    except DocumentCorrupt:
        raise VerificationError("its chunks do not match its head, or some are missing") from None


def check_chunk(stored: bytes) -> None:
    """Raise VerificationError unless this is a chunk of a log of Starfish's."""
    empty = _core.LogHead.read(b'{"data":{},"seg":true}', _FIELD)
    try:
        empty.gather([stored])
    except DocumentCorrupt:
        raise VerificationError("it is not a valid chunk of a log") from None


def is_damaged(key: str, stored: bytes) -> bool:
    """Return True if the object at the target key is damaged, so that a sound one may replace it."""
    if key.startswith(log_prefix("")):
        return True  # the objects of a log never change
    try:
        check_object(key, stored)
    except VerificationError:
        return True
    return False


async def verified_chunks(file: OpenFile, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of the file. Raises VerificationError at the end if their hash is another."""
    digest = hashlib.sha256()
    async for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise VerificationError(HASH_MISMATCH)


STARFISH_CONFIG: Final = "__sync__/config.json"
_EXCLUDED: Final = (log_prefix(""), "_pysync/probe/", VERIFY_KEY, STARFISH_CONFIG)
"""Objects that are not verified by themselves: those of logs, which are verified with their heads; leftovers
of probes; the record of the last verification; and the configuration that Starfish stores."""


class Damage(NamedTuple):
    """An object that is damaged, lost or cannot be read. A part of a log has the key of its head, too."""

    key: str
    kind: Kind
    why: str
    head_key: str = ""


@dataclass(slots=True)
class VerificationReport:
    """The number of objects that were read (a log counts once), of damaged ones among them, and of bytes."""

    objects: int = 0
    damaged: int = 0
    bytes: int = 0

    async def record(self, store: Store, key: str, finished_ms: int) -> None:
        """Store the numbers and the time of the end at `key`. Raises StoreUnavailable."""
        members = {"finishedMs": finished_ms, **asdict(self)}
        await store.put(key, orjson.dumps(members))

    @staticmethod
    async def recorded(store: ReadableStore, key: str) -> dict[str, int] | None:
        """Return what `record` stored at `key`; None if that is nothing, or not readable. Raises
        StoreUnavailable."""
        found = await store.get(key)
        with suppress(ValueError, LookupError, TypeError):
            members = orjson.loads(found.body) if isinstance(found, StoredObject) else {}
            return {name: int(members[name]) for name in ("finishedMs", "objects", "damaged", "bytes")}
        return None


class Verifier:
    """Verifies the objects of `store`, which may be written meanwhile. `on_damage` is called for each damaged
    object, and `pace` awaited with the number of bytes read. The store stops serving damaged files."""

    def __init__(
        self,
        store: Store,
        on_damage: Callable[[Damage], None],
        pace: Pace = no_pace,
        report: VerificationReport | None = None,
    ) -> None:
        self.report = report or VerificationReport()
        self._store = store
        self._reader = Reader(store)
        self._on_damage = on_damage
        self._pace = pace
        self._chunked = asyncio.Lock()
        """Serialises logs in chunks of Starfish's: each is in memory as a whole while it is verified."""

    async def run(self) -> None:
        """Verify all objects. Raises StoreUnavailable if the store is unreachable."""
        await for_each_key(self._store, CONCURRENT, self.verify)

    async def verify(self, key: str) -> None:
        """Verify an object, and of a log everything that its head names. Raises StoreUnavailable."""
        if key.startswith(_EXCLUDED):
            return
        self.report.objects += 1
        found = [damage async for damage in self._damages(key)]
        if found:
            # Check again: an object that was replaced or deleted meanwhile does not show the same damage.
            again = [damage async for damage in self._damages(key)]
            found = [damage for damage in again if damage in found]
        self.report.damaged += len(found)
        for damage in found:
            self._on_damage(damage)

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
            head = await check_stored(key, found.body)
        except (VerificationError, Unreadable, ValueError) as error:
            yield Damage(key, kind, str(error))
            return
        if head is not None and head.is_chunked:
            async for damage in self._damages_of_chunks(key, head):
                yield damage
        elif head is not None:
            async for damage in self._damages_of_nodes(key, head):
                yield damage

    async def _verify_file(self, key: str) -> None:
        """Raise VerificationError if the file at `key` is damaged."""
        try:
            with error_context(f"reading {key}"):
                await self._store.verify(key, self._count)
        except DamagedFile as error:
            raise VerificationError(error.detail) from None

    async def _damages_of_nodes(self, key: str, head: _core.LogHead) -> AsyncIterator[Damage]:
        """Yield the damaged segments and index blocks of a log."""
        waiting = deque(head.nodes())
        while waiting:
            node = waiting.popleft()
            at = object_key(head.id, node.name)
            try:
                waiting.extendleft(reversed(expand_node(head, node, await self._get(at))))
            except (VerificationError, Unreadable) as error:
                yield Damage(at, "log", f"{error}; it is a part of the log at {key}", key)

    async def _damages_of_chunks(self, key: str, head: _core.LogHead) -> AsyncIterator[Damage]:
        """Yield the damage of a log in chunks of Starfish's. Each chunk is also verified by itself."""
        async with self._chunked:
            try:
                with error_context(f"listing the chunks of {key}"):
                    keys = await chunk_keys(self._store, key)
                check_chunks(head, [await self._get(chunk) for chunk in keys])
            except (VerificationError, Unreadable) as error:
                yield Damage(key, "log", str(error))

    async def _get(self, key: str) -> bytes:
        found = await self._reader.get(key)
        if found is None:
            raise VerificationError("it is missing")
        await self._count(len(found.body))
        return found.body

    async def _count(self, size: int) -> None:
        self.report.bytes += size
        await self._pace(size)


async def check_stored(key: str, body: bytes) -> _core.LogHead | None:
    """Do what `check_body` does, in a thread for a large object."""
    if len(body) > PYTHON_IN_THREAD_ABOVE:
        return await asyncio.to_thread(check_body, key, body)
    return check_body(key, body)


def check_body(key: str, body: bytes) -> _core.LogHead | None:
    """Check any stored object, also the objects of logs and the server's own JSON objects below `_pysync/`.
    Returns the head of a log, whose objects are still to be checked. Raises VerificationError."""
    if key.startswith(log_prefix("")):
        if not _core.is_intact_log_object(body):
            raise VerificationError("its checksum does not match its contents")
        return None
    if key.startswith("_pysync/") and not key.startswith((f"{REVOCATIONS}/", VERSIONS, f"{HISTORY}/")):
        try:
            orjson.loads(body)
        except ValueError:
            raise VerificationError("it is not JSON") from None
        return None
    return None if key == STARFISH_CONFIG else check_object(key, body)
