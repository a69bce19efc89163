"""Reads a snapshot back into an empty store."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import orjson

from pysync.backup.encoding import PACK_BYTES, BackupEntry, Part
from pysync.backup.repository import (
    FORMAT_FILE,
    MAX_TIME_MS,
    BackupDamaged,
    Repository,
    Snapshot,
    iso_time,
    time_in,
    time_of,
    time_text,
)
from pysync.cache import BoundedCache
from pysync.changelog import ChangeLog
from pysync.clock import wall_clock_ms
from pysync.concurrency import gather_bounded
from pysync.store import ABSENT, RESTORE_KEY, EtagMismatch, Store

_CACHED_PACK_BYTES: Final = 67_108_864
_BATCH: Final = 2_000
_CONCURRENT_PUTS: Final = 64


@dataclass(slots=True)
class RestoreReport:
    """The number of objects that were restored, of those that could not be, and the bytes of the former."""

    objects: int = 0
    damaged: int = 0
    bytes: int = 0


class PackReader:
    """Reads parts of packs, and caches the packs that were read last."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._packs = BoundedCache[str, bytes](_CACHED_PACK_BYTES, len)
        self._lock = asyncio.Lock()

    async def read(self, part: Part) -> bytes:
        """Return the bytes of a part. Raises BackupDamaged if they are missing or do not match its hash."""
        end = part.offset + part.length
        pack = self._packs.get(part.pack)
        if pack is None or len(pack) < end:
            async with self._lock:
                pack = self._packs.get(part.pack)
                if pack is None or len(pack) < end:
                    pack = await self._repository.read_pack(part.pack, max(end, 2 * PACK_BYTES))
                    self._packs.put(part.pack, pack)
        return verify_part(pack, part)

    async def chunks(self, entry: BackupEntry) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an object. Raises BackupDamaged, at the end if its hash is another."""
        digest = hashlib.sha256()
        for part in entry.parts:
            body = await self.read(part)
            digest.update(body)
            yield body
        if digest.hexdigest() != entry.sha256:
            raise BackupDamaged(f"the parts of {entry.key} do not have its hash")

    async def body(self, entry: BackupEntry) -> bytes:
        """Return the bytes of a document. Raises BackupDamaged."""
        return b"".join([chunk async for chunk in self.chunks(entry)])


def verify_part(pack: bytes, part: Part) -> bytes:
    """Return the bytes of a part of a pack. Raises BackupDamaged if they do not match its hash."""
    body = pack[part.offset : part.offset + part.length]
    if hashlib.sha256(body).hexdigest() != part.sha256:
        raise BackupDamaged(f"the pack {part.pack} does not hold what it should")
    return body


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
    backup does not have, because it is damaged, or that was written meanwhile, and the reason. With `clock`,
    which is that of the store, objects keep the times at which they were written. In the end the change log
    of the store, or else `change_log`, begins anew, so that all who followed the old store pull everything
    again."""

    def __init__(
        self,
        repository: Repository,
        store: Store,
        on_problem: Callable[[str, str], None],
        change_log: ChangeLog | None = None,
        clock: RestoreClock | None = None,
    ) -> None:
        self.report = RestoreReport()
        self._repository = repository
        self._packs = PackReader(repository)
        self._store = store
        self._on_problem = on_problem
        self._clock = clock or RestoreClock(wall_clock_ms)
        own = store.transactional
        self._change_log = change_log if own is None else own.change_log

    async def restore(self, snapshot: Snapshot) -> None:
        """Write everything. A restore that was interrupted continues if it is called again with the same
        snapshot. Raises ValueError if the store holds anything else, BackupDamaged, and StoreUnavailable."""
        self._repository.check_readable()
        present = await self._begin(snapshot)
        entries = await self._repository.entries(snapshot)
        while batch := [*islice(entries, _BATCH)]:
            # In the order in which their packs were written, so that each pack is read about once.
            batch.sort(key=lambda entry: entry.parts[:1])
            await gather_bounded(
                _CONCURRENT_PUTS, [one for one in batch if one.key not in present], self._put
            )
        if self._change_log is not None:
            await self._change_log.begin_epoch(snapshot.change)
        await self._store.delete(RESTORE_KEY)

    async def _begin(self, snapshot: Snapshot) -> set[str]:
        """Return the keys that an earlier run has restored."""
        note = orjson.dumps({"snapshot": snapshot.name})
        present = {entry.key: entry async for entry in self._store.walk("")}
        if not present:
            await self._store.put(RESTORE_KEY, note)
            return set()
        found = await self._store.get_many([RESTORE_KEY])
        noted = found[RESTORE_KEY]
        if noted is None:
            raise ValueError("the store to restore into is not empty: name a new one")
        if not _names_same(noted.body, snapshot):
            raise ValueError(
                f"another snapshot was being restored into this store: {_advice(noted.body)}name a new store"
            )
        return set(present)

    async def _put(self, entry: BackupEntry) -> None:
        """Write an object, unless something has been written at its key."""
        key, content_type = entry.key, entry.content_type

        async def check(sha256: str) -> None:
            if await self._store.stat(key) is not None or await self._store.get(key) is not None:
                raise EtagMismatch

        try:
            with self._clock.at(entry.modified_ms):
                if entry.is_file:
                    await self._store.write(key, self._packs.chunks(entry), content_type, check)
                else:
                    await self._store.put(key, await self._packs.body(entry), content_type, ABSENT)
        except EtagMismatch:
            why = "it was written meanwhile: stop the servers of the store"
        except ValueError as error:  # damage, or a key that is too long for the store
            why = str(error)
        else:
            self.report.objects += 1
            self.report.bytes += entry.size
            return
        self.report.damaged += 1
        self._on_problem(key, why)


def _names_same(note: bytes, snapshot: Snapshot) -> bool:
    """Return True if a note of a restore names this snapshot, or one that a `prune` has replaced by it."""
    try:
        return time_of(orjson.loads(note)["snapshot"]) == snapshot.taken_ms
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _advice(note: bytes) -> str:
    """Return how to continue the restore that left a note; `""` if the note is damaged."""
    try:
        return f"continue with --at {iso_time(time_of(orjson.loads(note)['snapshot']))}, or "
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


async def find_snapshot_at(
    repository: Repository, at_ms: int, on_problem: Callable[[str, str], None]
) -> Snapshot:
    """Return the newest complete snapshot that is not later than a time. Each damaged one is reported.
    Raises BackupDamaged if one of these is the newest, ValueError if there is none, and StoreUnavailable."""
    limit = time_text(min(max(at_ms, 0), MAX_TIME_MS - 1))
    newest: Snapshot | BackupDamaged | None = None
    begun = first = ""
    is_gone = False
    for name in await repository.snapshot_names():
        try:
            found: Snapshot | BackupDamaged | None = await repository.find_snapshot(name)
        except BackupDamaged as error:
            on_problem("", str(error))
            found = error
        if isinstance(found, Snapshot) and not found.is_complete:
            begun = begun or iso_time(time_of(name))
        elif found is not None:
            first = first or iso_time(time_of(name))
        if time_in(name) > limit:
            continue
        if found is None:
            is_gone = True
        elif isinstance(found, BackupDamaged) or found.is_complete:
            newest, is_gone = found, False
    if is_gone:
        return await find_snapshot_at(repository, at_ms, on_problem)  # a `prune` may have replaced it
    if newest is None:
        raise ValueError(f"the backup has no {_missing_snapshot(begun, first)}")
    if isinstance(newest, BackupDamaged):
        raise BackupDamaged(f"{newest}: choose an earlier snapshot with --at, see `pysync backup list`")
    return newest


def _missing_snapshot(begun: str, first: str) -> str:
    """Return what a backup lacks whose first unfinished snapshot is of the time `begun`, and whose first
    other one is of the time `first`, each empty if there is none."""
    if first:
        return f"snapshot of that time or before it: the first is of {first}; see `pysync backup list`"
    if begun:
        return f"finished snapshot yet, only an unfinished one of {begun}: `pysync backup` continues it"
    return "snapshot yet: make one with `pysync backup`"


def check_restore_target(url: str) -> None:
    """Raise ValueError if no snapshot can be restored into the store at `url`: one in memory, or in the
    folder of a backup."""
    kind, _, folder = url.partition(":")
    if kind == "memory":
        raise ValueError(
            "a memory: store ends with this command: restore into file:DIR or s3://BUCKET/PREFIX"
        )
    root = Path(os.path.realpath(folder))
    for place in (root, *root.parents) if kind == "file" else ():
        if (place / FORMAT_FILE).exists():
            raise ValueError(f"{url}: a backup lies in {place}: name another folder")


def parse_time(text: str) -> int:
    """Return the milliseconds of a time: ISO 8601, UTC unless it says otherwise; `now` is the newest
    snapshot. Raises ValueError."""
    if text == "now":
        return 1 << 62
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text}: write a time as 2026-11-23T12:00:00Z") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return round(time.timestamp() * 1000)
