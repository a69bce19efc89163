"""Reads a snapshot back into an empty store."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple

import orjson

from pysync import _core
from pysync.backup.claim import read_claims
from pysync.backup.format import BackupEntry, Snapshot, iso_time, parse_snapshot_name
from pysync.backup.pack import PackReader
from pysync.backup.rebuild import count_lost, recover
from pysync.backup.snapshot import BackupDamaged, Repository
from pysync.changelog import ChangeLog
from pysync.clock import wall_clock_ms
from pysync.concurrency import gather_bounded
from pysync.engine.append_log import log_prefix, object_key
from pysync.engine.restored import mark_restored
from pysync.errors import DocumentCorrupt, KeyConflict
from pysync.migrate.reading import as_object
from pysync.store import ABSENT, ERASED_KEY, RESTORE_KEY, RESTORED_KEY, EtagMismatch, Store

LOST: Final = b"The backup could not supply this object, so whoever reads it is told that it is damaged."
"""Stands in the store for an object that the backup lost. It is no document, no log and no file."""
_CONCURRENT_PUTS: Final = 64
_LARGE_BYTES: Final = 1_048_576
"""Objects that are longer are written one at a time."""


@dataclass(slots=True)
class RestoreReport:
    """The number of objects that were restored, of those that could not be, and the bytes of the former."""

    objects: int = 0
    damaged: int = 0
    bytes: int = 0


class BackedUpVersion(NamedTuple):
    """An entry of a key, and the first snapshot that has it."""

    snapshot: Snapshot
    entry: BackupEntry


async def find_versions(repository: Repository, keys: Collection[str]) -> dict[str, list[BackedUpVersion]]:
    """Return what the snapshots have at these keys, as far as they can be read, the newest version first. A
    list appears first in the snapshot that it was written for, so there no later one replaces its entries."""
    found: dict[str, list[BackedUpVersion]] = defaultdict(list)
    seen: set[str] = set()
    for snapshot in await repository.snapshots(lambda *_: None):
        for page in [page for one in snapshot.lists for page in one.pages if page not in seen]:
            seen.add(page)
            try:
                entries = await repository.read_page(page)
            except BackupDamaged:
                continue
            for entry in entries:
                if entry.key in keys and entry.etag and not entry.reason:
                    found[entry.key].insert(0, BackedUpVersion(snapshot, entry))
    return found


async def parts_of_log(store: Store, key: str) -> AsyncIterator[tuple[str, _core.LogHead, _core.LogNode]]:
    """Yield the keys of all objects that the head of the log at `key` names, as far as the index is there,
    with the head and their nodes. Raises DocumentCorrupt if the head or the index is damaged."""
    stored = as_object(await store.get(key))
    if stored is not None:
        head = _core.LogHead.read(stored.body, "")
        waiting = head.nodes()
        while waiting:
            node = waiting.pop()
            at = object_key(head.id, node.name)
            yield at, head, node
            block = as_object(await store.get(at)) if node.level else None
            waiting += [] if block is None else head.expand(block.body, node)


class RestoreClock:
    """The clock of a store that is restored: in the task that writes an object it stands at the time at which
    the object was last written, so that the object keeps its age."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._written_ms: ContextVar[int | None] = ContextVar("written_ms", default=None)

    def __call__(self) -> int:
        """Return the time in milliseconds."""
        written_ms = self._written_ms.get()
        return self._now_ms() if written_ms is None else written_ms

    @contextmanager
    def at(self, written_ms: int) -> Iterator[None]:
        """Stand at a time."""
        token = self._written_ms.set(written_ms)
        try:
            yield
        finally:
            self._written_ms.reset(token)


class Restorer:
    """Writes a snapshot into `store`, which must be empty. `on_problem` is called with each key that the
    backup does not have, because it is damaged or could not be read, that the store cannot hold, or that was
    written meanwhile, and the reason. In the place of the first of these the store gets an object that nobody
    can read. With `clock`, which is that of the store, objects keep the times at which they were written. In
    the end the change log of the store, or else `change_log`, begins anew, so that all who followed the old
    store pull everything again. With `accepts_newer` the store is marked, so that devices send back what they
    received after the snapshot, and knows what was erased up to the newest snapshot."""

    def __init__(
        self,
        repository: Repository,
        store: Store,
        on_problem: Callable[[str, str], None],
        change_log: ChangeLog | None = None,
        clock: RestoreClock | None = None,
        *,
        accepts_newer: bool = False,
    ) -> None:
        self.report = RestoreReport()
        self._accepts_newer = accepts_newer
        self._repository = repository
        self._packs = PackReader(repository)
        self._store = store
        self._on_problem = on_problem
        self._clock = clock or RestoreClock(wall_clock_ms)
        own = store.transactional
        self._change_log = change_log if own is None else own.change_log
        self._large = asyncio.Lock()
        self._heads: list[str] = []
        self._log_objects: set[str] = set()
        self._lost: dict[str, tuple[BackupEntry, str]] = {}

    async def restore(self, snapshot: Snapshot) -> None:
        """Write everything. A restore that was interrupted continues if it is called again with the same
        snapshot. Raises ValueError if the store holds anything else, and StoreUnavailable."""
        repository = self._repository
        repository.check_readable()
        present = await self._begin(snapshot)
        gaps = await repository.gaps(snapshot.lists)
        for gap in gaps:
            self._on_problem("", str(gap))
        recovered = await recover(repository, snapshot.store_id, gaps, self._on_problem)
        async for page in repository.merged(snapshot.lists, recovered=recovered):
            # In the order in which their packs were written, so that each pack is read about once.
            page.sort(key=lambda entry: entry.parts[:1])
            await gather_bounded(_CONCURRENT_PUTS, [one for one in page if one.key not in present], self._put)
            for one in page if present else ():
                if one.key in present and not one.is_file:
                    found = as_object(await self._store.get(one.key))
                    self._note(one.key, b"" if found is None else found.body)
            if len(self._lost) > len(page):
                await self._restore_lost()
        await self._restore_lost()
        for key in self._heads:
            await self._check_log(key)
        if lost := await count_lost(repository, snapshot, recovered):
            self.report.damaged += lost
            self._on_problem(
                "", f"{lost} objects that damaged lists name are missing, or in an older version"
            )
        if self._change_log is not None:
            await self._change_log.begin_epoch()
            await self._mark(snapshot, self._change_log)
        await self._store.delete(RESTORE_KEY)

    async def _mark(self, snapshot: Snapshot, change_log: ChangeLog) -> None:
        """Mark the store for devices that have newer versions, or remove the mark of an earlier run."""
        if not self._accepts_newer:
            await self._store.delete(RESTORED_KEY)
            return
        found = await find_versions(self._repository, {ERASED_KEY})
        for version in found.get(ERASED_KEY, ()):
            with suppress(BackupDamaged):
                await self._store.put(ERASED_KEY, await self._packs.body(version.entry))
                break
        await mark_restored(self._store, snapshot.taken_ms, await change_log.last_id())

    async def _begin(self, snapshot: Snapshot) -> set[str]:
        """Return the keys that an earlier run has restored."""
        note = orjson.dumps({"snapshot": snapshot.name, "at": iso_time(snapshot.taken_ms)})
        listed = {entry.key: entry.size async for entry in self._store.walk("")}
        if not listed:
            await self._store.put(RESTORE_KEY, note)
            return set()
        noted = as_object(await self._store.get(RESTORE_KEY))
        if noted is None:
            raise ValueError("the store to restore into is not empty: name a new one")
        try:
            members = orjson.loads(noted.body)
            begun, at = parse_snapshot_name(members["snapshot"]), f"continue with --at {members['at']}, or "
        except (ValueError, LookupError, TypeError):
            begun, at = None, ""
        if begun is None or begun[:2] != (snapshot.number, snapshot.id):
            raise ValueError(f"another snapshot was being restored into this store: {at}name a new store")
        for key in [
            key for key, size in listed.items() if size in (None, len(LOST) + self._store.added_bytes)
        ]:
            found = as_object(await self._store.get(key))
            if found is not None and found.body == LOST:  # so that it is restored now, or named again
                await self._store.delete(key)
                del listed[key]
        return set(listed)

    async def _put(self, entry: BackupEntry) -> None:
        """Write an object, or note that the backup does not have it."""
        try:
            await self._write(entry)
        except BackupDamaged as error:
            self._lost[entry.key] = entry, str(error)

    async def _write(self, entry: BackupEntry) -> None:
        """Write an object, unless something has been written at its key, or the store cannot hold it. Raises
        BackupDamaged."""
        if entry.size <= _LARGE_BYTES:
            await self._write_bytes(entry)
        else:
            async with self._large:
                await self._write_bytes(entry)

    async def _write_bytes(self, entry: BackupEntry) -> None:
        key, content_type = entry.key, entry.content_type

        async def check(sha256: str) -> None:
            if await self._store.stat(key) is not None or await self._store.get(key) is not None:
                raise EtagMismatch

        try:
            with self._clock.at(entry.modified_ms):
                if entry.is_file:
                    await self._store.write(key, self._packs.chunks(entry), content_type, check)
                else:
                    body = await self._packs.body(entry)
                    await self._store.put(key, body, content_type, ABSENT)
                    self._note(key, body)
        except BackupDamaged:
            raise
        except EtagMismatch:
            self._damaged(key, "it was written meanwhile: stop the servers of the store")
        except KeyConflict:
            self._damaged(key, "the store keeps folders, and another file has a key above or below this one")
        except ValueError as error:  # a key that is too long for the store
            self._damaged(key, str(error))
        else:
            self.report.objects += 1
            self.report.bytes += entry.size

    def _note(self, key: str, body: bytes) -> None:
        """Note what heads of logs name, and which of it there is."""
        if key.startswith(log_prefix("")):
            self._log_objects.add(key)
        elif _core.is_log(body):
            self._heads.append(key)

    async def _restore_lost(self) -> None:
        """Write what a damaged pack held, if the backup has the same bytes elsewhere: it stores anew what it
        has lost. In the place of the rest write what nobody can read."""
        lost, self._lost = self._lost, {}
        versions = await find_versions(self._repository, lost) if lost else {}
        for key, (entry, why) in lost.items():
            for version in versions.get(key, ()):
                if version.entry.sha256 == entry.sha256 and version.entry.parts != entry.parts:
                    try:
                        await self._write(entry._replace(parts=version.entry.parts))
                        break
                    except BackupDamaged:
                        continue
            else:
                others = [one.snapshot for one in versions.get(key, ()) if one.entry.sha256 != entry.sha256]
                if others:
                    why = f"{why}; the snapshot of {iso_time(others[0].taken_ms)} has another version"
                self._damaged(key, why)
                with self._clock.at(entry.modified_ms):
                    await self._store.put(key, LOST, entry.content_type, ABSENT)

    async def _check_log(self, key: str) -> None:
        """Report a log if something that its head names was not restored."""
        try:
            async for at, _, _ in parts_of_log(self._store, key):
                if at not in self._log_objects:
                    self._damaged(key, f"its log lacks the part {at}")
        except DocumentCorrupt:
            self._damaged(key, "the index of its log is damaged")

    def _damaged(self, key: str, why: str) -> None:
        self.report.damaged += 1
        self._on_problem(key, why)


async def find_snapshot_at(
    repository: Repository, at_ms: int, on_problem: Callable[[str, str], None]
) -> Snapshot:
    """Return the newest snapshot that was made at a time or before it, and can be read. Damaged ones that may
    be newer are reported. Raises ValueError if there is none, and StoreUnavailable."""
    damaged: dict[str, str] = {}
    snapshots = await repository.snapshots(damaged.__setitem__)
    found = [one for one in snapshots if one.taken_ms <= at_ms]
    for name, why in damaged.items():
        if not found or name > found[-1].name:
            on_problem(
                "", f"{why}: an earlier snapshot is taken, unless `pysync backup rebuild` makes it anew"
            )
    if found:
        return found[-1]
    if snapshots:
        first = iso_time(min(one.taken_ms for one in snapshots))
        why = f"snapshot of that time or before it: the first is of {first}; see `pysync backup list`"
    elif begun := [claim.progress for claim in (await read_claims(repository)).values() if claim.progress]:
        at = iso_time(begun[-1].taken_ms)
        why = f"finished snapshot yet, only an unfinished one of {at}: `pysync backup` continues it"
    elif damaged:
        why = "snapshot that can be read: `pysync backup rebuild` makes one anew from packs"
    else:
        why = "snapshot yet: make one with `pysync backup`"
    raise ValueError(f"the backup has no {why}")
