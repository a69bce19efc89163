"""Makes a backup: a snapshot of a store as of one moment, which stores only what has changed since the last
one. What the backup has lost meanwhile is stored anew."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

from pysync._core import split_key
from pysync.backup.claim import BackupClaim, Outdated, read_claims
from pysync.backup.format import (
    MAX_DOCUMENT_BYTES,
    MAX_PARTS,
    PART_BYTES,
    BackupEntry,
    EntryList,
    Snapshot,
    new_id,
)
from pysync.backup.pack import Packer, Place
from pysync.backup.snapshot import BackupDamaged, Repository
from pysync.backup.source import EXCLUDED, FileParts, PositionLost, SnapshotSource
from pysync.clock import elapsed_of
from pysync.errors import StoreUnavailable
from pysync.migrate.reading import Unreadable
from pysync.migrate.verify import VerificationError, check_body
from pysync.store import ERASURE_KEY
from pysync.store.local.capture import CapturedRow

CHECKPOINT_ENTRIES: Final = 50_000
CHECKPOINT_BYTES: Final = 268_435_456
"""Objects and bytes after which a long backup records what it has stored. A killed one continues from
there."""
RENEW_MS: Final = 60_000
"""Time after which a claim is renewed. Until then it also protects what only older snapshots needed."""
LIST_MS: Final = 60 * RENEW_MS
"""Time after which the files of the backup are listed again."""
_ROUNDS: Final = 4
"""Attempts to read all files of one moment. Nobody can replace files while the last one opens them."""
_MAX_OPEN: Final = 256
"""Files of one moment that are held open. Those beyond are read before the moment ends."""


@dataclass(slots=True)
class BackupReport:
    """The number of objects that a backup read or found removed, of those in the snapshot that could not be
    read, the bytes that it read, and the bytes and files that it wrote."""

    objects: int = 0
    unreadable: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    files_written: int = 0


class _Unread(NamedTuple):
    """The row of an object that could not be read, and why."""

    row: CapturedRow
    why: str


class BackupMaker:
    """Makes backups of `source`, the store `store_id` at the URL `store`, in `repository`. `on_problem` is
    called with a key that cannot be read, and the reason. After an error make a new one, which continues from
    what is stored."""

    def __init__(
        self,
        source: SnapshotSource,
        repository: Repository,
        now_ms: Callable[[], int],
        on_problem: Callable[[str, str], None],
        store: str = "",
        store_id: str = "",
    ) -> None:
        self.report = BackupReport()
        self.moment_ms = 0
        """Everything that was written before this moment is in the backup."""
        self._source = source
        self._repository = repository
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._on_problem = on_problem
        self._store = store
        self._store_id = store_id
        self._packer = Packer(repository)
        self._packer.store_id = store_id
        self._claim = BackupClaim(repository, now_ms)
        self._claimed_ms = self._listed_ms = 0
        self._is_listed = False
        self._number = 0
        self._lists: list[EntryList] = []
        self._bases: list[str] = []
        """The files of the snapshot, or of the claim, that this maker continues."""
        self._lost: dict[str, list[BackupEntry]] | None = None
        """What stands in the place of damaged pages, if the lists refer to something that is not whole."""
        self._names: set[str] = set()
        """The packs and pages that the last snapshot refers to, and some of earlier ones."""
        self._unreadable: set[str] = set()
        self._again: dict[str, _Unread] = {}
        self._has_erasure = False
        self._progress: Snapshot | None = None
        self._checkpoint_at = 0

    async def make(self, *, only_changes: bool = False) -> Snapshot | None:
        """Make a backup and return its snapshot. The first call compares everything that is stored with the
        newest backup, later ones read what has changed since. With `only_changes`, return None if nothing
        has. Raises StoreUnavailable."""
        continues_claims = True
        while True:
            try:
                return await self._make(only_changes, continues_claims)
            except Outdated:
                self._is_listed = continues_claims = False

    async def _make(self, only_changes: bool, continues_claims: bool) -> Snapshot | None:
        await self._check_files()
        is_new = not self._is_listed
        try:
            if is_new:
                await self._list(continues_claims)
            self._packer.number, self._packer.taken_ms = self._number, self._now_ms()
            try:
                moment_ms = await self._read_moment()
            except PositionLost:
                await self._list(continues_claims)
                moment_ms = await self._read_moment()
        except PositionLost:
            raise StoreUnavailable("the store changes faster than it can be listed") from None
        changes = await self._put_changes()
        self.report.unreadable = len(self._unreadable)
        if changes is None and only_changes and not is_new:
            self.moment_ms = moment_ms
            return None
        snapshot = await self._publish(changes, moment_ms)
        self.moment_ms = moment_ms
        return snapshot

    async def close(self) -> None:
        """Stop what is under way."""
        await self._packer.close()
        try:
            await self._claim.release()
        except StoreUnavailable:
            return  # a `prune` removes it a day later

    async def _publish(self, changes: EntryList | None, moment_ms: int) -> Snapshot:
        """Store the snapshot that has these changes."""
        lists = [*self._lists, *([] if changes is None else [changes])]
        try:
            lists = await self._repository.fold(lists, self._lost)
        except BackupDamaged:
            await self._claim.check(*self._bases)  # if a `prune` deleted the lists, these are outdated
            raise
        self._number = max(self._number, await self._repository.last_number() + 1)  # others make some, too
        snapshot = Snapshot(
            self._number,
            new_id(),
            moment_ms,
            tuple(lists),
            self._source.change,
            self._store,
            self._store_id,
            len(self._unreadable),
            self._has_erasure,
        )
        written = await self._claim.publish(snapshot, *self._bases)
        self._names.update(page for one in lists for page in one.pages)
        self._lists, self._bases, self._lost = lists, [written.name], None
        self._number += 1
        self._packer.forget()
        self.report.bytes_written = self._repository.bytes_written
        self.report.files_written = self._repository.files_written
        return written

    async def _check_files(self) -> None:
        """Renew the claim now and then. Once an hour, look whether the backup still has all files of the last
        snapshot. If not, or if an object could not be read, everything is listed again."""
        if self._is_listed and self._elapsed_ms() - self._claimed_ms >= RENEW_MS:
            await self._claim.renew(is_published=True)
            self._claimed_ms = self._elapsed_ms()
        if self._is_listed and self._elapsed_ms() - self._listed_ms >= LIST_MS:
            self._listed_ms = self._elapsed_ms()
            self._is_listed = not self._unreadable and self._names <= await self._repository.whole()

    async def _list(self, continues_claims: bool) -> None:
        """Read what differs from the newest backup, and what the backup has lost of it."""
        repository = self._repository
        await repository.target.delete_leftovers()
        await self._source.follow()
        await self._claim.release()
        self._progress = None
        await self._claim.renew()
        self._claimed_ms = self._listed_ms = self._elapsed_ms()
        await self._packer.close()
        self._packer = Packer(repository)
        self._packer.store_id = self._store_id
        self._names, self._unreadable, self._has_erasure = set(), set(), False
        base = await self._find_base(continues_claims)
        self._lists = [] if base is None else [*base.lists]
        self._number = max(await repository.last_number(), 0 if base is None else base.number) + 1
        self._packer.number, self._packer.taken_ms = self._number, self._now_ms()
        whole = await repository.whole()
        self._lost = None
        packs = set[str]()
        try:
            await self._compare(repository.merged([*self._lists], packs=packs), whole)
            self._lost = None if packs <= whole else {}
        except BackupDamaged as error:
            self._on_problem("", f"{error}; what it lists is compared and listed anew")
            self._lost = {gap.page: [] for gap in await repository.gaps(self._lists)}
            await self._compare(repository.merged([*self._lists], recovered=self._lost), whole)
        self._is_listed = True

    async def _find_base(self, continues_claims: bool) -> Snapshot | None:
        """Return the snapshot that this one continues: the newest one, or what a backup that was interrupted
        after it has stored."""
        repository = self._repository
        base = await repository.newest(self._store_id, lambda _, why: self._on_problem("", why))
        self._bases = [] if base is None else [base.name]
        for name, claim in (await read_claims(repository)).items() if continues_claims else ():
            found = claim.progress
            if (
                found is not None
                and found.store_id == self._store_id
                and (base is None or (found.number, found.taken_ms) > (base.number, base.taken_ms))
            ):
                base, self._bases = found, [name]
        return base

    async def _compare(self, pages: AsyncIterator[list[BackupEntry]], whole: set[str]) -> None:
        """Add what is stored and is not in the backup, and what is in the backup and not stored any more.
        Raises BackupDamaged if the list of the latter is."""
        known = (entry async for page in pages for entry in page)
        previous = await anext(known, None)
        async for page in self._source.list_pages():
            changed: list[str] = []
            for key, etag in page:
                if key.startswith(EXCLUDED):
                    continue
                order = split_key(key)
                while previous is not None and previous.order < order:
                    self._remove(previous.key)
                    previous = await anext(known, None)
                if previous is not None and previous.order == order:
                    entry, previous = previous, await anext(known, None)
                    if not entry.reason and all(part.pack in whole for part in entry.parts):
                        self._packer.remember(entry)
                        self._names.update(part.pack for part in entry.parts)
                        if entry.etag == etag:
                            self._has_erasure |= key == ERASURE_KEY
                            continue
                changed.append(key)
            async for rows in self._source.load(changed):
                for row in await self._add(rows):
                    if (file := await self._open(row)) is not None:
                        await self._read_file(row, file)
            await self._record_progress()
        while previous is not None:
            self._remove(previous.key)
            previous = await anext(known, None)

    def _remove(self, key: str) -> None:
        self._packer.add_entry(BackupEntry(key))
        self._note(key, is_stored=False)

    def _note(self, key: str, *, is_stored: bool = True, is_unreadable: bool = False) -> None:
        """Count an object, and note what the snapshot says of it."""
        self.report.objects += 1
        if key == ERASURE_KEY:
            self._has_erasure = is_stored
        if is_unreadable:
            self._unreadable.add(key)
        else:
            self._unreadable.discard(key)

    async def _read_moment(self) -> int:
        """Read what changed, until all of it is of one moment. Returns that moment, in milliseconds."""
        for left in reversed(range(_ROUNDS)):
            again, self._again = self._again, {}
            moment_ms = self._now_ms()
            changes = self._source.changes(exclusive=left == 0, also=sorted(again))
            opened: list[tuple[CapturedRow, FileParts]] = []
            try:
                async with aclosing(changes):
                    async for rows in changes:
                        for row in await self._add(rows):
                            if len(opened) == _MAX_OPEN:
                                await self._read_file(*opened.pop())
                            if (file := await self._open(row)) is not None:
                                opened.append((row, file))
                while opened:
                    await self._read_file(*opened.pop())
            except BaseException:
                self._again |= again
                raise
            finally:
                for _, file in opened:
                    file.close()
            if not self._again:
                break
        for row, why in self._again.values():
            self._add_unreadable(row, why)
        self._again = {}
        return moment_ms

    async def _add(self, rows: list[CapturedRow]) -> list[CapturedRow]:
        """Add documents, and return the rows of files."""
        files, unread = await asyncio.to_thread(self._add_documents, rows)
        for row, why in unread:
            self._add_unreadable(row, why)
        await self._packer.store_full()
        return files

    def _add_documents(self, rows: Iterable[CapturedRow]) -> tuple[list[CapturedRow], list[_Unread]]:
        """Add sound documents, and the keys of removed objects. Return the rows of files and of what cannot
        be read."""
        files: list[CapturedRow] = []
        unread: list[_Unread] = []
        for row in rows:
            if row.key.startswith(EXCLUDED):
                continue
            if row.why:
                unread.append(_Unread(row, row.why))
            elif row.etag is None:
                self._remove(row.key)
            elif row.sha256 is not None:
                files.append(row)
            else:
                try:
                    _check(row)
                except VerificationError as error:
                    unread.append(_Unread(row, str(error)))
                    continue
                self.report.bytes_read += self._packer.add_document(row)
                self._note(row.key)
        return files, unread

    def _add_unreadable(self, row: CapturedRow, why: str) -> None:
        """Add an object that cannot be read, so that a restore neither forgets it nor takes an older one."""
        facts = (row.key, row.etag or "?", row.content_type, row.modified_ms, row.size or 0, row.sha256 or "")
        self._packer.add_entry(BackupEntry(*facts, is_file=row.sha256 is not None, reason=why))
        self._note(row.key, is_unreadable=True)
        self._on_problem(row.key, why)

    async def _open(self, row: CapturedRow) -> FileParts | None:
        """Open a file. Add it and return None if its bytes are stored; None, too, if it is lost or too
        long."""
        assert row.sha256 is not None, "only files are opened"
        if (places := self._packer.find(row.sha256, row.size)) is not None:
            self._add_file(row, places, row.size or 0)
            return None
        if (row.size or 0) > MAX_PARTS * PART_BYTES:
            most = MAX_PARTS * PART_BYTES
            why = f"the file has {row.size} bytes, and a backup takes no more than {most}"
            self._again[row.key] = _Unread(row, why)
            return None
        file = await self._source.open(row)
        if file is None:
            self._again[row.key] = _Unread(row, "the file is lost")
        return file

    async def _read_file(self, row: CapturedRow, file: FileParts) -> None:
        """Store the bytes of a file, if they are those of the row. Otherwise the file is read again."""
        digest = hashlib.sha256()
        places: list[Place] = []
        size, why = 0, ""
        is_part = (row.size or 0) > PART_BYTES
        try:
            async with aclosing(file.read()) as parts:
                async for part in parts:
                    await asyncio.to_thread(digest.update, part)
                    place = await asyncio.to_thread(self._packer.add, part, row.content_type, is_part=is_part)
                    places.append(place)
                    size += len(part)
                    await self._packer.store_full()
                    await self._keep_claim()
        except Unreadable as error:
            why = str(error)
        finally:
            file.close()
            self.report.bytes_read += size
        if not why and digest.hexdigest() != row.sha256:
            why = f"its sha256 is {digest.hexdigest()} and should be {row.sha256}"
        if why:
            self._packer.add_parts(places)
            self._again[row.key] = _Unread(row, why)
        else:
            self._add_file(row, tuple(places), size)

    def _add_file(self, row: CapturedRow, places: tuple[Place, ...], size: int) -> None:
        facts = (row.key, row.etag or "", row.content_type, row.modified_ms, size, row.sha256 or "", True)
        self._packer.add_entry(BackupEntry(*facts), places)
        self._note(row.key)

    async def _put_changes(self) -> EntryList | None:
        """Store what was added since the last call, and the list of it."""
        entries = await self._packer.flush()
        self._names.update(part.pack for entry in entries for part in entry.parts)
        return await self._repository.put_list(self._number, _once(entries))

    async def _record_progress(self) -> None:
        """Let the claim say what has been stored, if that is much, so that a killed backup is continued."""
        is_due = self.report.bytes_read - self._checkpoint_at >= CHECKPOINT_BYTES
        if is_due or len(self._packer) >= CHECKPOINT_ENTRIES:
            self._checkpoint_at = self.report.bytes_read
            changes = await self._put_changes()
            if changes is not None:
                if self._lists and self._lists[-1].number == self._number and self._lost is None:
                    # Keys are compared in their order, so these come behind those of the last time.
                    last = self._lists.pop()
                    entries, pages = last.entries + changes.entries, last.pages + changes.pages
                    changes = EntryList(self._number, entries, pages)
                self._lists.append(changes)
            self._progress = Snapshot(
                self._number, new_id(), self._now_ms(), tuple(self._lists), store_id=self._store_id
            )
            await self._renew_claim()
            await self._claim.check(*self._bases)
            self._bases = []
            self._packer.forget(keeps_own=True)
        await self._keep_claim()

    async def _keep_claim(self) -> None:
        """Renew the claim before it counts as that of a dead process."""
        if self._elapsed_ms() - self._claimed_ms >= RENEW_MS:
            await self._renew_claim()

    async def _renew_claim(self) -> None:
        self._claimed_ms = self._elapsed_ms()
        await self._claim.renew(self._progress)


def _check(row: CapturedRow) -> None:
    """Raise VerificationError if a document is damaged, or too long."""
    assert row.body is not None, "a document has a body"
    if len(row.body) > MAX_DOCUMENT_BYTES:
        raise VerificationError(
            f"it has {len(row.body)} bytes, and a backup takes no more than {MAX_DOCUMENT_BYTES}"
        )
    check_body(row.key, row.body)


async def _once(entries: list[BackupEntry]) -> AsyncIterator[list[BackupEntry]]:
    yield entries
