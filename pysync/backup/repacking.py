"""Stores what is live in sparse packs in new packs, so that a later `prune` can delete the old ones.

A pack never changes, and it stays as long as a list names it. Lists also name objects that later lists have
replaced. So `repack` writes new packs, then lists without these objects, then snapshots that refer to both,
and removes the snapshots that these replace last. A new snapshot has the time of the old one and the next
generation. Wherever `repack` is killed, each snapshot is there once or twice.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final, NamedTuple

from pysync.backup.encoding import BackupEntry, Part, row_of
from pysync.backup.notes import expired_files
from pysync.backup.packing import Packer, Place
from pysync.backup.repository import PACKS, PAGES, BackupDamaged, Repository, Snapshot, path_of
from pysync.backup.restoring import verify_part
from pysync.backup.runs import SortedRun

MAX_PARTS: Final = 200_000
"""Live parts that one call stores anew: some 500 bytes of memory each."""
_SPARSE: Final = 5
"""A pack is sparse if more than one byte in so many is dead."""
_WORTHWHILE: Final = 20
"""One byte in so many must be saved: most lists are written anew."""
_ATTEMPTS: Final = 5
"""Attempts to replace the snapshots that are made meanwhile, too."""


class RepackOutcome(NamedTuple):
    """The number of packs that the snapshots do not need any more, because what is live in them was stored
    anew, and of sparse packs that are left because they cannot be read."""

    repacked: int = 0
    unreadable: int = 0


class Repacker:
    """Repacks what `snapshots` refer to, which name `packs`. Backups, restores and other prunes may run
    meanwhile."""

    def __init__(self, repository: Repository, snapshots: Sequence[Snapshot], packs: Iterable[str]) -> None:
        self._repository = repository
        self._snapshots = snapshots
        self._packs = packs
        self._live: dict[str, dict[int, int]] = defaultdict(dict)
        """The live parts of each pack: their lengths by their offsets."""
        self._emptied: set[str] = set()
        self._places: dict[Part, Place] = {}
        self._runs: dict[str, SortedRun | None] = {}
        """What stands in the place of each page."""

    async def run(self) -> RepackOutcome:
        """Repack if that is worthwhile. Raises BackupDamaged if a page cannot be read, and StoreUnavailable;
        both leave every snapshot as it is."""
        for snapshot in self._snapshots:
            for entry in await self._repository.entries(snapshot):
                for part in entry.parts:
                    self._live[part.pack][part.offset] = part.length
        sparse = self._sparse_packs()
        if not sparse:
            return RepackOutcome()
        key = self._repository.key
        if key is not None and key.private is None:
            return RepackOutcome(unreadable=len(sparse))
        await self._store_live_parts(sparse)
        waiting = [*self._snapshots]
        seen: set[str] = set()
        for _ in range(_ATTEMPTS):
            await self._replace(waiting)
            seen |= {one.name for one in waiting}
            names = [name for name in await self._repository.snapshot_names() if name not in seen]
            newer = await self._repository.find_snapshots(names)
            waiting = [one for one in newer if one.is_complete and not one.generation]
            if not waiting:
                break
        return RepackOutcome(len(self._emptied), len(sparse) - len(self._emptied))

    def _sparse_packs(self) -> list[str]:
        """Return the packs to repack; none if that saves little."""
        live = {pack: sum(self._live[pack].values()) for pack in self._packs}
        sizes = {pack: int(pack.partition("-")[0]) for pack in self._packs}
        sparse: list[str] = []
        parts = saved = 0
        for pack in sorted(live, key=lambda one: (live[one] / (sizes[one] or 1), one)):
            dead = sizes[pack] - live[pack]
            if _SPARSE * dead <= sizes[pack] or parts + len(self._live[pack]) > MAX_PARTS:
                break
            sparse.append(pack)
            parts += len(self._live[pack])
            saved += dead
        return sparse if _WORTHWHILE * saved >= sum(sizes.values()) else []

    async def _store_live_parts(self, sparse: Iterable[str]) -> None:
        """Store what is live in sparse packs in new ones. A pack that is damaged is left."""
        parts: dict[str, dict[Part, str]] = {pack: {} for pack in sparse}
        for page in dict.fromkeys(page for one in self._snapshots for run in one.runs for page in run.pages):
            for entry in await self._repository.read_page(page):
                for part in entry.parts:
                    if part.pack in parts and self._live[part.pack].get(part.offset) == part.length:
                        parts[part.pack][part] = entry.content_type
        packer = Packer(self._repository)

        def add(content: bytes, parts: dict[Part, str]) -> None:
            bodies = [(part, verify_part(content, part)) for part in parts]
            for part, body in bodies:
                self._places[part] = packer.add(body, parts[part])

        try:
            for pack, live in parts.items():
                try:
                    if live:
                        most = max(part.offset + part.length for part in live)
                        await asyncio.to_thread(add, await self._repository.read_pack(pack, most), live)
                except BackupDamaged:
                    continue
                self._emptied.add(pack)
                await packer.store_full()
            await packer.flush()
        finally:
            await packer.close()

    async def _replace(self, snapshots: Iterable[Snapshot]) -> None:
        """Replace snapshots by ones that do not refer to the emptied packs."""
        found = [(one, await self._replacement(one)) for one in snapshots]
        replaced = [(old, new) for old, new in found if new is not None]
        if not replaced or not await self._are_stored():
            return
        for old, new in replaced:
            if await self._repository.target.get(old.name) is not None:
                await self._repository.put_snapshot(new)
        if await self._are_stored():
            for old, _ in replaced:
                await self._repository.target.delete(old.name)

    async def _replacement(self, snapshot: Snapshot) -> Snapshot | None:
        """Return what replaces a snapshot, once its lists are read back and have the same objects; None if
        nothing does."""
        runs = [await self._run(run.pages) for run in snapshot.runs]
        new = replace(
            snapshot, runs=[run for run in runs if run is not None], generation=snapshot.generation + 1
        )
        if new.runs == snapshot.runs:
            return None
        before, after = await self._repository.entries(snapshot), await self._repository.entries(new)
        pairs = zip_longest(before, after)
        return new if all(old and found and self._moved(old) == found for old, found in pairs) else None

    async def _run(self, pages: Iterable[str]) -> SortedRun | None:
        """Return the run that these pages become; None if nothing is left of it."""
        for page in pages:
            if page not in self._runs:
                self._runs[page] = await self._replace_page(page)
        runs = [run for run in map(self._runs.__getitem__, pages) if run is not None]
        if not runs:
            return None
        names = [page for run in runs for page in run.pages]
        return SortedRun(names, sum(run.entries for run in runs), runs[0].first, runs[-1].last)

    async def _replace_page(self, page: str) -> SortedRun | None:
        """Store a page anew if it refers to emptied packs, without what is dead in them."""
        entries = await self._repository.read_page(page)
        if self._emptied.isdisjoint(part.pack for entry in entries for part in entry.parts):
            return SortedRun([page], len(entries), entries[0].key, entries[-1].key)
        moved = map(self._moved, entries)
        return await self._repository.put_run(row_of(entry) for entry in moved if entry is not None)

    def _moved(self, entry: BackupEntry) -> BackupEntry | None:
        """Return an entry as it is in the new lists; None if its bytes were dead."""
        if self._emptied.isdisjoint(part.pack for part in entry.parts):
            return entry
        parts = []
        for part in entry.parts:
            if part.pack in self._emptied:
                if part not in self._places:
                    return None
                pack, offset, length, sha256 = self._places[part]
                part = Part(pack.name, offset, length, sha256)
            parts.append(part)
        return entry._replace(parts=tuple(parts))

    async def _are_stored(self) -> bool:
        """Return True if all new files are there, and no `prune` that runs meanwhile may delete one."""
        added = {path_of(PACKS, pack.name) for pack, *_ in self._places.values()}
        for page, run in self._runs.items():
            added |= {path_of(PAGES, name) for name in (run.pages if run else ()) if name != page}
        expired = {name for note in await expired_files(self._repository) for name in note.files}
        return expired.isdisjoint(added) and added <= await self._repository.stored()
