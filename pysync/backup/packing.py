"""Packs: the bytes of many objects in one file of the backup, each bytes only once."""

import asyncio
import hashlib
from collections.abc import Iterable
from itertools import chain
from typing import Final

from pysync._core import split_key
from pysync.backup.encoding import PACK_BYTES, BackupEntry, Part, Row, compress, is_compressible, store_raw
from pysync.backup.repository import MAX_CONCURRENT, PACKS, Repository, path_of
from pysync.store.local.capture import CapturedRow

MAX_KNOWN: Final = 500_000
"""The number of bodies that are recognised when they occur again: some 200 bytes of memory each."""


class _OpenPack:
    """A pack that is being filled. Its name is known once it is stored."""

    def __init__(self, *, is_raw: bool = False) -> None:
        self.is_raw = is_raw
        self.bodies: list[bytes] = []
        self.size = 0
        self.name = ""

    def add(self, body: bytes) -> int:
        """Add bytes, and return the offset at which they are."""
        self.bodies.append(body)
        self.size += len(body)
        return self.size - len(body)


Place = tuple[_OpenPack, int, int, str]
"""Where some bytes are: their pack, offset, length and SHA-256."""


class Packer:
    """Stores bodies in packs. `flush` ends what was added so far."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._known: dict[bytes, Place] = {}
        self._files: dict[str, tuple[Place, ...]] = {}
        self._named: dict[str, _OpenPack] = {}
        self._compressible, self._raw = _OpenPack(), _OpenPack(is_raw=True)
        self._rows: dict[str, Row] = {}
        """The newest row of each key. A part has its pack until `flush`, which knows its name."""
        self.written: set[str] = set()
        """The names of the packs that were stored since the last snapshot."""
        self._full: list[_OpenPack] = []
        self._storing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def remember(self, entry: BackupEntry) -> None:
        """Recognise the bytes of this object when they occur again, unless a `prune` may delete them."""
        if not self._repository.expired.isdisjoint(path_of(PACKS, part.pack) for part in entry.parts):
            return
        places = tuple(self._place(part) for part in entry.parts)
        for place in places:
            self._remember(bytes.fromhex(place[3]), place)
        if len(places) > 1:
            self._files[entry.sha256] = places

    def forget(self, paths: set[str]) -> None:
        """Do not refer to what is in packs with these paths any more."""
        packs = {pack for pack in self.known_packs() if path_of(PACKS, pack) in paths} if paths else set()
        if packs:
            self._known = {key: one for key, one in self._known.items() if one[0].name not in packs}
            self._files = {
                key: places
                for key, places in self._files.items()
                if not any(one[0].name in packs for one in places)
            }

    def known_packs(self) -> set[str]:
        """Return the names of the packs in which bytes are recognised."""
        places = chain(self._known.values(), *self._files.values())
        return {place[0].name for place in places if place[0].name}

    def find(self, sha256: str, size: int | None) -> tuple[Place, ...] | None:
        """Return where a file of this size is stored, None if that is not known."""
        if not size:
            return ()
        place = self._known.get(bytes.fromhex(sha256))
        return self._files.get(sha256) if place is None else (place,)

    def add_removed(self, key: str) -> None:
        """Add a key at which nothing is stored any more."""
        self._rows[key] = [key]

    def add_documents(self, rows: Iterable[CapturedRow]) -> list[CapturedRow]:
        """Add documents, and the keys of removed objects. Return the rows of files."""
        files = []
        for row in rows:
            key, etag, content_type, modified_ms, file_sha256, _, body = row
            if etag is None:
                self.add_removed(key)
            elif file_sha256 is not None:
                files.append(row)
            else:
                assert body is not None, "a document has a body"
                pack, offset, length, sha256 = self.add(body, content_type)
                part = [pack, offset, length, ""]
                self._rows[key] = [key, etag, content_type, modified_ms, length, sha256, False, [part]]
        return files

    def add(self, body: bytes, content_type: str) -> Place:
        """Add bytes, unless they are stored already."""
        hash_ = hashlib.sha256(body)
        digest = hash_.digest()
        place = self._known.get(digest)
        if place is None:
            pack = self._compressible if is_compressible(content_type, body) else self._raw
            place = pack, pack.add(body), len(body), hash_.hexdigest()
            self._remember(digest, place)
            if pack.size >= PACK_BYTES:
                self._end_pack(pack)
        return place

    def add_file(self, row: CapturedRow, places: tuple[Place, ...]) -> None:
        """Add a file whose bytes are at these places."""
        sha256 = row.sha256
        assert sha256 is not None, "documents are added with their bytes"
        parts = [[pack, offset, length, "" if own == sha256 else own] for pack, offset, length, own in places]
        size = sum(length for _, _, length, _ in places)
        facts = (row.key, row.etag, row.content_type, row.modified_ms, size, sha256, True)
        self._rows[row.key] = [*facts, parts]
        if len(places) > 1:
            self._files[sha256] = places

    async def store_full(self) -> None:
        """Begin to store the packs that are full. Waits if too many are under way. Raises StoreUnavailable if
        one could not be stored."""
        while self._full:
            while len(self._storing) >= MAX_CONCURRENT:
                await self._wait()
            self._storing.add(asyncio.create_task(self._store(self._full.pop(0))))

    async def flush(self) -> list[Row]:
        """Store all packs, and return the rows that were added since the last call, sorted, the newest one of
        each key. Raises StoreUnavailable."""
        for pack in (self._compressible, self._raw):
            if pack.bodies:
                self._end_pack(pack)
        await self.store_full()
        while self._storing:
            await self._wait()
        added, self._rows = self._rows, {}
        return await asyncio.to_thread(_sorted_rows, added)

    async def close(self) -> None:
        """Stop storing."""
        for task in self._storing:
            task.cancel()
        await asyncio.gather(*self._storing, return_exceptions=True)

    async def _wait(self) -> None:
        done, self._storing = await asyncio.wait(self._storing, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _store(self, pack: _OpenPack) -> None:
        encode = store_raw if pack.is_raw else compress
        packed = await asyncio.to_thread(lambda: encode(b"".join(pack.bodies)))
        pack.bodies = []
        pack.name = await self._repository.put_pack(packed, pack.size)
        self.written.add(pack.name)

    def _end_pack(self, pack: _OpenPack) -> None:
        self._full.append(pack)
        if pack.is_raw:
            self._raw = _OpenPack(is_raw=True)
        else:
            self._compressible = _OpenPack()

    def _place(self, part: Part) -> Place:
        pack = self._named.get(part.pack)
        if pack is None:
            pack = self._named[part.pack] = _OpenPack()
            pack.name = part.pack
        return pack, part.offset, part.length, part.sha256

    def _remember(self, digest: bytes, place: Place) -> None:
        self._known[digest] = place
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _sorted_rows(rows: dict[str, Row]) -> list[Row]:
    """Return the rows, sorted by their keys, with the names of their packs."""
    for row in rows.values():
        for part in row[7] if len(row) > 1 else ():
            part[0] = part[0].name
    return [rows[key] for key in sorted(rows, key=split_key)]
