"""Writes packs and lists anew, without what no snapshot refers to any more, or is recorded as erased.

First the live bodies of old packs go into new ones, then come lists that refer to both, then snapshots with
the next revision, and last the old snapshots go. Wherever this is killed, each snapshot is there once or
twice.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Self

from pysync.backup.claim import BackupClaim
from pysync.backup.encryption import WrongKey
from pysync.backup.format import (
    BackupEntry,
    EntryList,
    IndexedEntry,
    Part,
    Snapshot,
    index_part,
    parse_snapshot_name,
)
from pysync.backup.pack import Packer, PackReader, Place, part_of
from pysync.backup.snapshot import SNAPSHOTS, BackupDamaged, Repository
from pysync.erase.record import ErasureRecord
from pysync.store import ERASED_KEY


async def read_erased(repository: Repository, snapshot: Snapshot) -> ErasureRecord | None:
    """Return what the store had recorded as erased when this snapshot was made; None if nothing. Raises
    BackupDamaged if it cannot be read, and WrongKey without the private key."""
    async for entry in repository.entries(snapshot):
        if entry.key == ERASED_KEY:
            repository.check_readable()
            try:
                return ErasureRecord.decode(await PackReader(repository).body(entry))
            except ValueError as error:
                why = f"{error}; `pysync verify --repair-from` repairs it in the store for the next backup"
                raise BackupDamaged(f"the record of what was erased cannot be read: {why}") from None
    return None


class Rewriter:
    """Writes the snapshots of one store anew, without the objects that `erased` records."""

    def __init__(
        self,
        repository: Repository,
        snapshots: Sequence[Snapshot],
        now_ms: Callable[[], int],
        erased: ErasureRecord | None = None,
    ) -> None:
        self.rewritten = 0
        self.erased = 0
        self.unreadable: dict[str, str] = {}
        """Packs that hold something dead and could not be written anew, and why."""
        self._repository = repository
        self._snapshots = snapshots
        self._claim = BackupClaim(repository, now_ms)
        self._packer = Packer(repository)
        self._packer.taken_ms, self._packer.store_id = now_ms(), snapshots[-1].store_id
        self._erased = erased
        self._kept: set[int] = set()
        """Hashes of the keys and etags that the newest snapshot has, in which nothing is erased."""
        self._live: dict[str, set[int]] = defaultdict(set)
        """The offsets of live parts, by their packs."""
        self._versions: set[int] = set()
        """Hashes of the keys and etags of live objects."""
        self._moved: dict[str, dict[int, Place]] = {}
        self._indexed: dict[int, str] = {}
        """The packs whose index has the entries of packs that were written anew, by the hashes of these."""

    async def __aenter__(self) -> Self:
        await self._claim.renew()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._packer.close()
        await self._claim.release()

    async def live_bytes(self) -> dict[str, int]:
        """Return how much of each pack the snapshots refer to. Call it first. Raises BackupDamaged."""
        sizes: Counter[str] = Counter()
        if self._erased is not None:
            newest = self._repository.entries(self._snapshots[-1])
            self._kept = {hash((entry.key, entry.etag)) async for entry in newest}
        for snapshot in self._snapshots:
            async for page in self._pages(snapshot):
                for entry in page:
                    self._versions.add(hash((entry.key, entry.etag)))
                    for part in entry.parts:
                        sizes[part.pack] += 0
                        if part.length and part.offset not in self._live[part.pack]:
                            self._live[part.pack].add(part.offset)
                            sizes[part.pack] += part.length
        return sizes

    async def rewrite(self, packs: Collection[str], *, checks_names: bool) -> set[str]:
        """Write these packs anew as far as they are live, with `checks_names` only those in which something
        is not, and then all lists. Return the names of the new snapshots. Raises BackupDamaged, Outdated and
        StoreUnavailable; each leaves every snapshot as it is, or in its place one that restores the same."""
        indexed: list[tuple[str, IndexedEntry]] = []
        for pack in packs:
            try:
                bodies, index = await self._repository.read_pack(pack)
                parts = {part.offset: part for part in index.bodies()}
                live = [
                    one for one in index.entries if hash((one.entry.key, one.entry.etag)) in self._versions
                ]
                if checks_names and len(live) == len(index.entries) and parts.keys() == self._live[pack]:
                    continue
                found = [part_of(bodies, parts[offset]) for offset in sorted(self._live[pack])]
            except (BackupDamaged, WrongKey, KeyError) as error:
                self.unreadable[pack] = str(error)
                continue
            places = [self._packer.add(body, "") for body in found]
            self._moved[pack] = dict(zip(sorted(self._live[pack]), places, strict=True))
            indexed += [(pack, one) for one in live]
            self.rewritten += 1
            await self._packer.store_full()
        await self._packer.flush()
        rows = [one._replace(entry=self._in_new_packs(one.entry, pack)) for pack, one in indexed]
        names = await self._packer.put_index(rows)
        self._indexed = {
            hash((one.entry.key, one.entry.etag)): name for one, name in zip(rows, names, strict=True)
        }
        return await self._replace()

    def _is_live(self, entry: BackupEntry, pack: str) -> bool:
        """Return True if a snapshot has this entry of the index of a pack, with these bytes."""
        return hash((entry.key, entry.etag)) in self._versions and all(
            part.offset in self._live[part.pack or pack] for part in entry.parts if part.length
        )

    async def _replace(self) -> set[str]:
        """Replace the snapshots by ones with new lists."""
        repository = self._repository
        lists: list[EntryList] = []
        names: set[str] = set()
        before = [*await repository.target.list_files(SNAPSHOTS)]
        for snapshot in self._snapshots:
            added = await repository.put_list(snapshot.number, self._changes(lists, snapshot))
            lists = await repository.fold([*lists, *([] if added is None else [added])])
            new, old = repository.merged(lists), self._pages(snapshot)
            if [hash(one) async for page in new for one in page] != [
                hash(one) async for page in old for one in page
            ]:
                raise BackupDamaged(f"{snapshot.name}: its new lists have other objects; it stays as it is")
            written = dataclasses.replace(snapshot, lists=tuple(lists), revision=snapshot.revision + 1)
            names.add((await self._claim.publish(written, snapshot.name, *names)).name)
            for name in before:  # of a rewriting that was killed, too
                if (parse_snapshot_name(name) or ())[:2] == (snapshot.number, snapshot.id):
                    await repository.target.delete(name)
        return names

    async def _pages(self, snapshot: Snapshot) -> AsyncIterator[list[BackupEntry]]:
        """Yield the entries of a snapshot, as they are after the rewriting."""
        async for page in self._repository.merged(snapshot.lists):
            kept = [entry for entry in page if not self._is_erased(entry)]
            self.erased += len(page) - len(kept)
            yield [self._in_new_packs(entry) for entry in kept]

    def _is_erased(self, entry: BackupEntry) -> bool:
        return (
            self._erased is not None
            and hash((entry.key, entry.etag)) not in self._kept
            and self._erased.has(entry.key, entry.modified_ms)
        )

    async def _changes(
        self, lists: Sequence[EntryList], snapshot: Snapshot
    ) -> AsyncIterator[list[BackupEntry]]:
        """Yield the entries in which a snapshot differs from these lists."""
        known = (entry async for page in self._repository.merged(lists) for entry in page)
        previous = await anext(known, None)
        async for page in self._pages(snapshot):
            changes: list[BackupEntry] = []
            for entry in page:
                while previous is not None and previous.order < entry.order:
                    changes.append(BackupEntry(previous.key))
                    previous = await anext(known, None)
                if previous is not None and previous.key == entry.key:
                    is_same, previous = previous == entry, await anext(known, None)
                    if is_same:
                        continue
                changes.append(entry)
            yield changes
        removed = [] if previous is None else [BackupEntry(previous.key)]
        yield [*removed, *[BackupEntry(entry.key) async for entry in known]]

    def _in_new_packs(self, entry: BackupEntry, own: str = "") -> BackupEntry:
        """Return an entry with the packs in which its parts and itself are now. If it comes from the index of
        the pack `own`, it names no index."""
        parts = [self._new_part(part, part.pack or own) for part in entry.parts]
        name = self._indexed.get(hash((entry.key, entry.etag)))
        if name is not None and not own:
            parts = [*(part for part in parts if part.length), index_part(name)]
        return entry._replace(parts=tuple(parts))

    def _new_part(self, part: Part, pack: str) -> Part:
        place = self._moved.get(pack, {}).get(part.offset) if part.length else None
        if place is None:
            return part._replace(pack=pack)
        return Part(place[0].name, place[1], part.length, part.sha256)
