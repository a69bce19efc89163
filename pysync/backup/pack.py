"""Packs: the bytes of many objects in one file of the backup, each bytes only once, and what they are."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Final, NamedTuple

from pysync._core import split_key
from pysync.backup.format import (
    PACK_BYTES,
    PAGE_BYTES,
    PART_BYTES,
    BackupEntry,
    IndexedEntry,
    PackIndex,
    Part,
    index_part,
    is_compressible,
    pack,
    pages_of,
)
from pysync.backup.snapshot import MAX_CONCURRENT, BackupDamaged, Repository
from pysync.cache import BoundedCache
from pysync.store.local.capture import CapturedRow

MAX_KNOWN: Final = 100_000
"""Bodies that are recognised when they occur again, and as many before: 250 bytes of memory each."""
_CACHED_BYTES: Final = 33_554_432


class _OpenPack:
    """A pack that is being filled. Its name is known once it is stored."""

    def __init__(self, *, is_raw: bool = False, name: str = "") -> None:
        self.is_raw = is_raw
        self.bodies: list[bytes] = []
        self.size = 0
        self.weight = 0
        self.rows: list[_Row] = []
        self.parts: list[tuple[int, int, str]] = []
        self.name = name

    def add(self, body: bytes) -> int:
        """Add bytes, and return the offset at which they are."""
        self.bodies.append(body)
        self.size += len(body)
        return self.size - len(body)


Place = tuple[_OpenPack, int, int, str]
"""Where some bytes are: their pack, offset, length and SHA-256."""


class _Row(NamedTuple):
    """An entry whose parts have their packs, in which they may not be stored yet."""

    number: int
    step: int
    entry: BackupEntry
    places: tuple[Place, ...]

    def indexed(self, own: _OpenPack | None = None) -> IndexedEntry:
        """Return the row as the index of a pack has it."""
        entry = self.entry
        if self.places:
            parts = [
                Part._make(("" if place[0] is own else place[0].name, *place[1:])) for place in self.places
            ]
            entry = BackupEntry._make((*entry[:7], tuple(parts), entry.reason))
        return IndexedEntry(self.number, self.step, entry)


class Packer:
    """Stores bodies in packs, together with the entries of the snapshot `number`. `flush` ends what was added
    so far."""

    def __init__(self, repository: Repository) -> None:
        self.number = self.taken_ms = 0
        self.store_id = ""
        self._repository = repository
        self._known: dict[bytes, Place] = {}
        self._known_before: dict[bytes, Place] = {}
        self._files: dict[str, tuple[Place, ...]] = {}
        self._named: dict[str, _OpenPack] = {}
        self._compressible, self._raw = _OpenPack(), _OpenPack(is_raw=True)
        self._rows: dict[str, _Row] = {}
        """The newest row of each key."""
        self._apart: list[_Row] = []
        """Rows that are not in the index of the pack with their bytes."""
        self._step = 0
        self._full: list[_OpenPack] = []
        self._storing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def remember(self, entry: BackupEntry) -> None:
        """Recognise the bytes of this object when they occur again."""
        places = tuple(
            (self._stored(pack), offset, length, sha256)
            for pack, offset, length, sha256 in entry.parts
            if length
        )
        for place in places:
            self._remember(bytes.fromhex(place[3]), place)
        if len(places) > 1:
            self._files[entry.sha256] = places

    def forget(self, *, keeps_own: bool = False) -> None:
        """Recognise no bytes any more, or with `keeps_own` only those that this packer has stored."""
        known, remembered = self._known_before | self._known, {*self._named.values()}
        own = {digest: place for digest, place in known.items() if place[0] not in remembered}
        self._known, self._known_before, self._files, self._named = own if keeps_own else {}, {}, {}, {}

    def find(self, sha256: str, size: int | None) -> tuple[Place, ...] | None:
        """Return where an object of this size is stored, None if that is not known."""
        if not size:
            return ()
        place = self._find(bytes.fromhex(sha256))
        return self._files.get(sha256) if place is None else (place,)

    def add_entry(self, entry: BackupEntry, places: tuple[Place, ...] = ()) -> None:
        """Add an object whose bytes are at these places; one without places was removed, or has a reason."""
        self._step += 1
        row = _Row(self.number, self._step, entry, places)
        self._rows[entry.key] = row
        if len(places) == 1 and (own := places[0][0]) in (self._compressible, self._raw):
            own.rows.append(row)
            own.weight += entry.weight
        else:
            self._apart.append(row)
        if len(places) > 1:
            self._files[entry.sha256] = places

    def add_document(self, row: CapturedRow) -> int:
        """Add a document and its bytes, and return their number."""
        body, etag = row.body, row.etag
        assert body is not None, "a document has a body"
        assert etag is not None, "a document has an etag"
        if len(body) <= PART_BYTES:
            places: tuple[Place, ...] = (self.add(body, row.content_type, is_part=False),)
            sha256 = places[0][3]
        else:
            sha256 = hashlib.sha256(body).hexdigest()
            chunks = (body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES))
            places = tuple(self.add(chunk, row.content_type) for chunk in chunks)
        facts = (row.key, etag, row.content_type, row.modified_ms, len(body), sha256)
        self.add_entry(BackupEntry(*facts), places)
        return len(body)

    def add(self, body: bytes, content_type: str, *, is_part: bool = True) -> Place:
        """Add bytes, unless they are stored already. `is_part` says that no entry has these bytes alone."""
        hash_ = hashlib.sha256(body)
        digest = hash_.digest()
        place = self._find(digest)
        if place is None:
            own = self._compressible if is_compressible(content_type, body) else self._raw
            if own.size >= PACK_BYTES or own.weight >= PAGE_BYTES:
                own = self._end_pack(own)
            place = own, own.add(body), len(body), hash_.hexdigest()
            own.weight += 110
            if is_part:
                own.parts.append(place[1:])
            self._remember(digest, place)
        return place

    def add_parts(self, places: Iterable[Place]) -> None:
        """Let the index name these bytes, which were just added, although no entry has them."""
        for own, offset, length, sha256 in places:
            own.parts.append((offset, length, sha256))

    async def store_full(self) -> None:
        """Begin to store the packs that are full. Waits if too many are under way. Raises StoreUnavailable if
        one could not be stored."""
        while self._full:
            while len(self._storing) >= MAX_CONCURRENT:
                await self._wait()
            self._storing.add(asyncio.create_task(self._store(self._full.pop(0))))

    async def flush(self) -> list[BackupEntry]:
        """Store all packs, and return the entries that were added since the last call, sorted, the newest one
        of each key. Raises StoreUnavailable."""
        for own in (self._compressible, self._raw):
            if own.bodies:
                self._end_pack(own)
        await self._finish()
        apart, self._apart = self._apart, []
        names = await self.put_index([row.indexed() for row in apart])
        packs = {row.step: name for row, name in zip(apart, names, strict=True)}
        added, self._rows = self._rows, {}
        return await asyncio.to_thread(_sorted_entries, added, packs)

    async def put_index(self, entries: Sequence[IndexedEntry]) -> list[str]:
        """Store entries whose bytes are stored in packs that have only an index. Return the pack of each."""
        names: list[str] = []
        for page in pages_of(entries):
            name = await self._put([], PackIndex(self.taken_ms, self.store_id, page), is_raw=True)
            names += [name] * len(page)
        return names

    async def close(self) -> None:
        """Stop storing."""
        for task in self._storing:
            task.cancel()
        await asyncio.gather(*self._storing, return_exceptions=True)

    async def _finish(self) -> None:
        await self.store_full()
        while self._storing:
            await self._wait()

    async def _wait(self) -> None:
        done, self._storing = await asyncio.wait(self._storing, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _store(self, own: _OpenPack) -> None:
        rows = [row.indexed(own) for row in own.rows]
        index = PackIndex(self.taken_ms, self.store_id, rows, own.parts)
        bodies, own.bodies, own.rows, own.parts = own.bodies, [], [], []
        own.name = await self._put(bodies, index, is_raw=own.is_raw)

    async def _put(self, bodies: Sequence[bytes], index: PackIndex, *, is_raw: bool) -> str:
        packed = await asyncio.to_thread(pack, bodies, index, is_raw=is_raw)
        return await self._repository.put_pack(packed, sum(map(len, bodies)))

    def _end_pack(self, own: _OpenPack) -> _OpenPack:
        """Let a pack be stored, and return the one that is filled from now on."""
        self._full.append(own)
        fresh = _OpenPack(is_raw=own.is_raw)
        if own.is_raw:
            self._raw = fresh
        else:
            self._compressible = fresh
        return fresh

    def _stored(self, name: str) -> _OpenPack:
        own = self._named.get(name)
        if own is None:
            own = self._named[name] = _OpenPack(name=name)
        return own

    def _find(self, digest: bytes) -> Place | None:
        return self._known.get(digest) or self._known_before.get(digest)

    def _remember(self, digest: bytes, place: Place) -> None:
        self._known[digest] = place
        if len(self._known) > MAX_KNOWN:
            self._known_before, self._known = self._known, {}


def _sorted_entries(rows: dict[str, _Row], names: dict[int, str]) -> list[BackupEntry]:
    """Return the entries, sorted by their keys, with the names of their packs. `names` has the packs of those
    that are apart from their bytes, by their steps."""
    entries = []
    for key in sorted(rows, key=split_key):
        _, step, entry = rows[key].indexed()
        if (name := names.get(step)) is not None:
            entry = entry._replace(parts=(*entry.parts, index_part(name)))
        entries.append(entry)
    return entries


class PackReader:
    """Reads parts of packs, and caches the packs that were read last."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._packs = BoundedCache[str, bytes](_CACHED_BYTES, len)
        self._lock = asyncio.Lock()

    async def read(self, part: Part) -> bytes:
        """Return the bytes of a part. Raises BackupDamaged if they are missing or do not match its hash."""
        bodies = self._packs.get(part.pack)
        if bodies is None:
            async with self._lock:
                bodies = self._packs.get(part.pack)
                if bodies is None:
                    bodies, _ = await self._repository.read_pack(part.pack)
                    self._packs.put(part.pack, bodies)
        return part_of(bodies, part)

    async def chunks(self, entry: BackupEntry) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an object. Raises BackupDamaged, at the end if its hash is another."""
        if entry.reason:
            raise BackupDamaged(f"it could not be read when it was backed up: {entry.reason}")
        digest = hashlib.sha256()
        for part in entry.parts:
            if part.length:
                body = await self.read(part)
                digest.update(body)
                yield body
        if digest.hexdigest() != entry.sha256:
            raise BackupDamaged(f"the parts of {entry.key} do not have its hash")

    async def body(self, entry: BackupEntry) -> bytes:
        """Return the bytes of a document. Raises BackupDamaged."""
        return b"".join([chunk async for chunk in self.chunks(entry)])


def part_of(bodies: bytes, part: Part) -> bytes:
    """Return the bytes of a part of a pack. Raises BackupDamaged if they do not match its hash."""
    body = bodies[part.offset : part.offset + part.length]
    if hashlib.sha256(body).hexdigest() != part.sha256:
        raise BackupDamaged(f"the pack {part.pack} does not hold what it should")
    return body
