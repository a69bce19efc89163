"""Backups in memory, and what tests do with them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pysync.backup.encryption import BackupKey
from pysync.backup.format import Snapshot
from pysync.backup.make import BackupMaker, BackupReport
from pysync.backup.prune import KeepRules, Pruner, PruneReport
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import Repository
from pysync.backup.source import FolderSnapshotSource, ListedSnapshotSource, SnapshotSource
from pysync.backup.target import BackupTarget
from pysync.backup.verify import BackupVerification, BackupVerifier
from pysync.clock import wall_clock_ms
from pysync.errors import StoreUnavailable
from pysync.store import Store
from pysync.store.local.capture import FolderCapture
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock
from support.store_samples import contents

Reports = list[tuple[str, str]]


async def nothing(name: str) -> None:
    """What others do between two calls of a target, unless a test says more."""


class MemoryTarget:
    """A backup in memory. After `fails_after` more operations every one fails, as if the place were away.
    `before_delete`, `before_put`, `after_put` and `after_files` are awaited around these calls, with the name
    of the file or folder, as if others came in between."""

    before_delete: Callable[[str], Awaitable[None]] = staticmethod(nothing)
    before_put: Callable[[str], Awaitable[None]] = staticmethod(nothing)
    after_put: Callable[[str], Awaitable[None]] = staticmethod(nothing)
    after_files: Callable[[str], Awaitable[None]] = staticmethod(nothing)

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fails_after = 1 << 60
        self.calls = 0

    async def put(self, name: str, body: bytes) -> None:
        await self.before_put(name)
        self._count()
        self.files[name] = body
        await self.after_put(name)

    async def get(self, name: str) -> bytes | None:
        self._count()
        return self.files.get(name)

    async def list_files(self, folder: str) -> dict[str, int]:
        self._count()
        names = sorted(name for name in self.files if not folder or name.startswith(folder + "/"))
        found = {name: len(self.files[name]) for name in names}
        await self.after_files(folder)
        return found

    async def delete(self, name: str) -> None:
        await self.before_delete(name)
        self._count()
        self.files.pop(name, None)

    async def delete_leftovers(self) -> None:
        self._count()

    async def close(self) -> None:
        return

    def _count(self) -> None:
        self.calls += 1
        self.fails_after -= 1
        if self.fails_after < 0:
            raise StoreUnavailable("the backup is away")


def source_of(store: Store, folder: Path | None = None) -> SnapshotSource:
    """The source of a store, which is in `folder` unless it is listed."""
    if folder is None:
        return ListedSnapshotSource(store)
    return FolderSnapshotSource(FolderCapture(folder, wall_clock_ms))


@asynccontextmanager
async def maker_of(
    source: SnapshotSource,
    target: BackupTarget,
    clock: FakeClock | None = None,
    reports: Reports | None = None,
    repository: Repository | None = None,
) -> AsyncIterator[BackupMaker]:
    """A maker of backups, which leaves the source open."""
    repository = repository or await Repository.open(target, create=True)
    problems: Reports = [] if reports is None else reports
    maker = BackupMaker(
        source, repository, clock or FakeClock(), lambda key, why: problems.append((key, why))
    )
    try:
        yield maker
    finally:
        await maker.close()
        assert reports is not None or problems == []


async def back_up(
    source: SnapshotSource, target: BackupTarget, clock: FakeClock | None = None
) -> BackupReport:
    """Make one backup of a source, which reads everything without a problem."""
    async with maker_of(source, target, clock) as maker:
        assert await maker.make() is not None
        return maker.report


async def restored(
    target: BackupTarget,
    snapshot: Snapshot | None = None,
    key: BackupKey | None = None,
    reports: Reports | None = None,
) -> dict[str, tuple[str, bytes]]:
    """What a store holds into which a snapshot (default: the newest) was restored. Without `reports` all of
    it must be restored."""
    repository = await Repository.open(target, key)
    snapshot = snapshot or await newest(repository)
    store, problems = MemoryStore(), [] if reports is None else reports
    await Restorer(repository, store, lambda key, why: problems.append((key, why))).restore(snapshot)
    assert reports is not None or problems == []
    return await contents(store)


async def newest(repository: Repository) -> Snapshot:
    """The newest snapshot of any store."""
    found = await repository.newest("", lambda *_: None)
    assert found is not None
    return found


async def snapshots_of(target: BackupTarget, key: BackupKey | None = None) -> list[Snapshot]:
    """All snapshots, oldest first, none of which is damaged."""
    reports: Reports = []
    found = await (await Repository.open(target, key)).snapshots(lambda *one: reports.append(one))
    assert reports == []
    return found


async def verified(target: BackupTarget, key: BackupKey | None = None) -> BackupVerification:
    """The counts of a verification."""
    verifier = BackupVerifier(await Repository.open(target, key), lambda name, why: None)
    await verifier.run()
    return verifier.report


async def pruned(
    target: BackupTarget, rules: KeepRules, now_ms: Callable[[], int], key: BackupKey | None = None
) -> PruneReport:
    """The counts of a prune, which says at most that it keeps the two newest snapshots."""
    reports: list[str] = []
    pruner = Pruner(await Repository.open(target, key), rules, now_ms, reports.append)
    await pruner.run()
    assert all("two newest snapshots are kept" in why for why in reports)
    return pruner.report
