"""Verifies a backup without restoring it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pysync.backup.encoding import BackupEntry, Part
from pysync.backup.repository import (
    EXPIRED,
    FORMAT_FILE,
    MAX_CONCURRENT,
    PACKS,
    PAGES,
    SNAPSHOTS,
    BackupDamaged,
    PageFacts,
    Repository,
    Snapshot,
    check_run,
    path_of,
)
from pysync.backup.restoring import PackReader, verify_part
from pysync.concurrency import gather_bounded

_is_file = re.compile(
    rf"({PACKS}|{PAGES})/([0-9a-f]{{2}})/\2[0-9a-f]{{62}}"
    rf"|({SNAPSHOTS}|{EXPIRED})/[0-9]{{8}}T[0-9]{{9}}Z-[0-9a-f]{{64}}"
).fullmatch


@dataclass(slots=True)
class BackupVerification:
    """The number of snapshots, objects and files of a backup that were read, their bytes, and those damaged
    or missing. Nothing refers to the unreferenced files, which `prune` removes."""

    snapshots: int = 0
    objects: int = 0
    files: int = 0
    bytes: int = 0
    damaged: int = 0
    unreferenced: int = 0


class BackupVerifier:
    """Reads back everything in a backup. `on_problem` is called with each file, or key of an object, that is
    damaged or missing, and the reason. With the private key, or without encryption, the hash of every object
    is compared as well."""

    def __init__(self, repository: Repository, on_problem: Callable[[str, str], None]) -> None:
        self.report = BackupVerification()
        self._repository = repository
        self._packs = PackReader(repository)
        self._on_problem = on_problem
        self._is_readable = repository.key is None or repository.key.private is not None

    async def run(self) -> None:
        """Verify everything. Raises StoreUnavailable."""
        names = {*await self._repository.target.names("")} - {FORMAT_FILE}
        for name in sorted(name for name in names if not _is_file(name)):
            self._damaged(name, "it is no file of a backup")
            names.remove(name)
        pages: set[str] = set()
        snapshots: list[Snapshot] = []
        for name in sorted(name for name in names if name.startswith(SNAPSHOTS)):
            try:
                snapshot = await self._repository.find_snapshot(name)
            except BackupDamaged as error:
                self._damaged(name, str(error))
                continue
            if snapshot is None:
                names.remove(name)
                continue
            self.report.snapshots += 1
            snapshots.append(snapshot)
            pages.update(page for run in snapshot.runs for page in run.pages)
        parts: dict[str, set[Part]] = defaultdict(set)
        long_files: list[BackupEntry] = []
        facts: dict[str, PageFacts] = {}
        for page in sorted(pages):
            try:
                entries = await self._repository.read_page(page)
            except BackupDamaged as error:
                self._damaged(path_of(PAGES, page), str(error))
                continue
            facts[page] = PageFacts.of(entries)
            self._collect(entries, parts, long_files)
        for snapshot in snapshots:
            self._verify_runs(snapshot, facts)
        await gather_bounded(MAX_CONCURRENT, sorted(parts.items()), self._verify_pack)
        for entry in long_files if self._is_readable else ():
            await self._verify_file(entry)
        used = {path_of(PAGES, page) for page in pages} | {path_of(PACKS, pack) for pack in parts}
        rest = sorted(name for name in names - used if not name.startswith(SNAPSHOTS))
        self.report.unreferenced = len(rest)
        await gather_bounded(MAX_CONCURRENT, rest, self._verify_rest)
        self.report.files = len(names)

    def _verify_runs(self, snapshot: Snapshot, facts: Mapping[str, PageFacts]) -> None:
        """Compare what a snapshot says of its pages with those that could be read."""
        try:
            for run in snapshot.runs:
                if facts.keys() >= {*run.pages}:
                    check_run(run, facts)
        except BackupDamaged as error:
            self._damaged(snapshot.name, str(error))

    def _collect(
        self, entries: Iterable[BackupEntry], parts: dict[str, set[Part]], long_files: list[BackupEntry]
    ) -> None:
        for entry in entries:
            self.report.objects += 1
            for part in entry.parts:
                parts[part.pack].add(part)
            if len(entry.parts) > 1:
                long_files.append(entry)

    async def _verify_pack(self, pack: tuple[str, set[Part]]) -> None:
        """Compare a pack with its name and, if it can be opened, its parts with their hashes."""
        name, parts = pack
        path = path_of(PACKS, name)
        try:
            if not self._is_readable:
                self.report.bytes += len(await self._repository.read_file(path))
                return
            most = max(part.offset + part.length for part in parts)
            content = await self._repository.read_pack(name, most)
            self.report.bytes += len(content)
            for part in parts:
                verify_part(content, part)
        except BackupDamaged as error:
            self._damaged(path, str(error))

    async def _verify_file(self, entry: BackupEntry) -> None:
        try:
            async for _ in self._packs.chunks(entry):
                pass
        except BackupDamaged as error:
            self._damaged(entry.key, str(error))

    async def _verify_rest(self, path: str) -> None:
        try:
            self.report.bytes += len(await self._repository.read_file(path))
        except BackupDamaged as error:
            self._damaged(path, str(error))

    def _damaged(self, name: str, why: str) -> None:
        self.report.damaged += 1
        self._on_problem(name, why)
