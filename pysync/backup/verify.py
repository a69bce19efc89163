"""Verifies a backup without restoring it, and marks what is damaged: the next backup stores it anew."""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from pysync.backup.format import Order, Snapshot
from pysync.backup.pack import part_of
from pysync.backup.snapshot import (
    CLAIMS,
    DAMAGED,
    LISTS,
    PACKS,
    SNAPSHOTS,
    BackupDamaged,
    Repository,
    path_of,
)
from pysync.backup.target import FORMAT_FILE
from pysync.concurrency import gather_bounded
from pysync.errors import StoreUnavailable

_CONCURRENT: Final = 2
"""Packs in memory at once: up to 60 MB each, whatever they hold."""
_is_file = re.compile(
    rf"({PACKS}|{LISTS})/([0-9a-f]{{2}})/\2[0-9a-f]{{30}}-[0-9a-f]{{8}}-[0-9]{{1,8}}-[0-9]{{1,8}}"
    rf"|{SNAPSHOTS}/[0-9]{{12}}-[0-9a-f]{{8}}-[0-9]{{4}}-[0-9a-f]{{32}}-[0-9]{{1,8}}"
    rf"|{CLAIMS}/[0-9a-f]{{8}}|{DAMAGED}/[0-9a-f-]+"
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
    """Reads back everything in a backup. `on_problem` is called with each file that is damaged or missing,
    and the reason. With the private key, or without encryption, the hash of every object is compared as well.
    """

    def __init__(self, repository: Repository, on_problem: Callable[[str, str], None]) -> None:
        self.report = BackupVerification()
        self.unmarked: StoreUnavailable | None = None
        """The reason why damaged files could not be marked; None if they could."""
        self._repository = repository
        self._on_problem = on_problem
        self._parts: dict[str, array[int]] = defaultdict(lambda: array("q"))
        """Hashes of the parts of each pack that lists name."""
        self._marks: set[str] = set()

    async def run(self) -> None:
        """Verify everything. Raises StoreUnavailable."""
        repository, report = self._repository, self.report
        names = [name for name in await repository.target.list_files("") if name != FORMAT_FILE]
        self._marks = {name for name in names if name.startswith(DAMAGED)}
        for name in names:
            if not _is_file(name):
                await self._damaged(name, "it is no file of a backup: remove it")
        damaged: list[tuple[str, str]] = []
        snapshots = await repository.snapshots(lambda *problem: damaged.append(problem))
        for name, why in damaged:
            await self._damaged(name, why)
        report.snapshots = len(snapshots)
        bounds: dict[str, tuple[int, Order, Order] | None] = {}
        for page in sorted({page for one in snapshots for own in one.lists for page in own.pages}):
            bounds[page] = await self._read_page(page)
        for snapshot in snapshots:
            self._check_lists(snapshot, bounds)
        await gather_bounded(_CONCURRENT, sorted(self._parts), self._verify_pack)
        used = {path_of(LISTS, page) for page in bounds} | {path_of(PACKS, pack) for pack in self._parts}
        rest = [
            name for name in names if name.startswith((PACKS, LISTS)) and name not in used and _is_file(name)
        ]
        report.unreferenced = len(rest)
        await gather_bounded(_CONCURRENT, rest, self._verify_rest)
        report.files = len(names)

    async def _read_page(self, page: str) -> tuple[int, Order, Order] | None:
        """Return the number of entries of a page, and the order of the first and last one; None if it is
        damaged."""
        try:
            entries = await self._repository.read_page(page)
        except BackupDamaged as error:
            await self._damaged(path_of(LISTS, page), str(error))
            return None
        await self._sound(page)
        self.report.objects += len(entries)
        for entry in entries:
            for part in entry.parts:
                self._parts[part.pack].extend([hash(part[1:])] if part.length else [])
        return len(entries), entries[0].order, entries[-1].order

    def _check_lists(self, snapshot: Snapshot, bounds: dict[str, tuple[int, Order, Order] | None]) -> None:
        """Compare what a snapshot says of its lists with their pages, as far as these could be read."""
        for one in snapshot.lists:
            pages = [bounds[page] for page in one.pages]
            found = [page for page in pages if page is not None]
            is_sorted = all(left[2] < right[1] for left, right in pairwise(found))
            if not is_sorted or (len(found) == len(pages) and sum(page[0] for page in found) != one.entries):
                self.report.damaged += 1
                self._on_problem(
                    snapshot.name, f"{one.pages[0]} and the pages after it are no list of objects"
                )

    async def _verify_pack(self, pack: str) -> None:
        """Compare a pack with its name and, if it can be opened, its parts with their hashes."""
        path = path_of(PACKS, pack)
        try:
            if self._repository.is_readable:
                bodies, index = await self._repository.read_pack(pack)
                self.report.bytes += len(bodies)
                held = set[int]()
                for part in index.bodies():
                    part_of(bodies, part)
                    held.add(hash(part[1:]))
                if not held.issuperset(self._parts[pack]):
                    raise BackupDamaged(f"{path} does not hold what lists name")
            else:
                self.report.bytes += len(await self._repository.read_file(path))
        except BackupDamaged as error:
            await self._damaged(path, str(error))
        else:
            await self._sound(pack)

    async def _verify_rest(self, path: str) -> None:
        try:
            self.report.bytes += len(await self._repository.read_file(path))
        except BackupDamaged as error:
            await self._damaged(path, str(error))

    async def _damaged(self, path: str, why: str) -> None:
        """Report a file, and mark it if lists may refer to it."""
        self.report.damaged += 1
        self._on_problem(path, why)
        if path.startswith((PACKS, LISTS)) and self.unmarked is None:
            try:
                await self._repository.mark(path)
            except StoreUnavailable as error:
                self.unmarked = error

    async def _sound(self, name: str) -> None:
        """Remove the mark of a file that is not damaged any more."""
        if f"{DAMAGED}/{name}" in self._marks:
            with suppress(StoreUnavailable):
                await self._repository.target.delete(f"{DAMAGED}/{name}")
