"""The files of a backup: its snapshots, and the lists that these consist of.

A snapshot is a base list in key order, and lists of what has changed since, each of which replaces entries of
those before it. The changes are folded into one list when there are many, and into a new base when they are
half as long as it, so that all of this costs little beside the objects themselves.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import orjson

from pysync import config
from pysync.backup.format import (
    FORMAT,
    BackupEntry,
    EntryList,
    Order,
    PackIndex,
    Snapshot,
    compress_text,
    decode_page,
    encode_page,
    hash_name,
    inflate,
    is_name,
    pages_of,
    parse_snapshot_name,
    unpack,
)
from pysync.backup.target import FORMAT_FILE, BackupTarget, FileTooLong, open_backup_target
from pysync.concurrency import closing

if TYPE_CHECKING:
    from pysync.backup.encryption import BackupKey

PACKS, LISTS, SNAPSHOTS, CLAIMS, DAMAGED = "packs", "lists", "snapshots", "claims", "damaged"
MAX_CONCURRENT: Final = 4
"""Number of packs that are read or written concurrently."""
MAX_LISTS: Final = 300
MAX_CHANGES: Final = 50_000
"""Lists of changes, and entries in them, from which they are folded into one."""
T = TypeVar("T")


class BackupDamaged(ValueError):
    """A file of the backup is missing or damaged; the text names it."""


class Gap(NamedTuple):
    """A damaged page, and which entries are lost with it: those of snapshots after `number`, up to
    `last_number`, with keys between those of the pages around it, as far as these are known."""

    page: str
    why: str
    number: int
    last_number: int
    after: Order | None
    before: Order | None

    def has(self, number: int, order: Order) -> bool:
        """Return True if the entry with this key that was stored for this snapshot is lost."""
        return (
            self.number < number <= self.last_number
            and (self.after is None or self.after < order)
            and (self.before is None or order < self.before)
        )

    def __str__(self) -> str:
        between = [f"{word} {'/'.join(filter(None, order))}" for word, order in
                   (("after", self.after), ("before", self.before)) if order is not None]  # fmt: skip
        return f"{self.why}; it lists objects{''.join(f' {text}' for text in between)}"


class Repository:
    """The files of one backup, encrypted if there is a key. Methods raise BackupDamaged for a file that is
    missing or damaged, and StoreUnavailable if the backup cannot be reached."""

    def __init__(self, target: BackupTarget, key: "BackupKey | None") -> None:
        self.target = target
        self.key = key
        self.claim_id = ""
        """Stands in the names of all files that are written."""
        self.bytes_written = 0
        self.files_written = 0

    @classmethod
    async def open(
        cls, target: BackupTarget, key: "BackupKey | None" = None, *, create: bool = False
    ) -> "Repository":
        """Open the backup at `target`, or begin one if `create` is set and nothing lies there. Raises
        ValueError if there is none, if something else lies there, or if it needs another key."""
        public = None if key is None else key.public.hex()
        fresh = orjson.dumps({"format": FORMAT, "publicKey": public})
        text = await target.get(FORMAT_FILE)
        if text is None:
            if not create:
                raise ValueError("there is no backup")
            if names := await target.list_files(""):
                raise ValueError(
                    f"something else lies there: {next(iter(names))}; if it is a backup that has lost its "
                    f"{FORMAT_FILE}, write this into it: {fresh.decode()}"
                )
            text = fresh
            await target.put(FORMAT_FILE, text)
        try:
            members = orjson.loads(text)
            written, expected = members["format"], members["publicKey"]
        except (ValueError, KeyError, TypeError):
            raise BackupDamaged(f"{FORMAT_FILE} is damaged: write this into it: {fresh.decode()}") from None
        if written != FORMAT:
            raise ValueError(f"the backup has format {written}, and this version of pysync knows {FORMAT}")
        if expected != public:
            raise ValueError(
                "the backup is not encrypted: leave the key out"
                if expected is None
                else "the backup is encrypted: name its key"
                if public is None
                else "the backup is encrypted for another key"
            )
        return cls(target, key)

    @property
    def is_readable(self) -> bool:
        """True if the key opens packs."""
        return self.key is None or self.key.private is not None

    def check_readable(self) -> None:
        """Raise ValueError unless the key opens packs."""
        if self.key is not None:
            self.key.check_private()

    async def put_pack(self, packed: bytes, size: int) -> str:
        """Store a pack with bodies of `size` bytes, and return its name."""
        sealed = packed if self.key is None else await asyncio.to_thread(self.key.seal_pack, packed)
        return await self._put(PACKS, sealed, size)

    async def read_pack(self, name: str) -> tuple[bytes, PackIndex]:
        """Return the bodies in a pack, and its index. Raises WrongKey without the private key."""

        def open_pack(stored: bytes) -> tuple[bytes, PackIndex]:
            return unpack(stored if self.key is None else self.key.open_pack(stored))

        self.check_readable()
        return await self.read(path_of(PACKS, name), open_pack)

    async def put_list(self, number: int, pages: AsyncIterator[list[BackupEntry]]) -> EntryList | None:
        """Store the entries, in pages of any length, as a list; None if there are none."""
        names: list[str] = []
        count = 0
        left: list[BackupEntry] = []

        async def put(page: list[BackupEntry]) -> None:
            nonlocal count
            text = await asyncio.to_thread(encode_page, page)
            names.append(await self._put(LISTS, self.seal(compress_text(text)), len(text)))
            count += len(page)

        async for entries in pages:
            *full, left = [*pages_of(left + entries)] or [[]]
            for page in full:
                await put(page)
        for page in pages_of(left):
            await put(page)
        return EntryList(number, count, tuple(names)) if names else None

    async def read_page(self, name: str) -> list[BackupEntry]:
        """Return the entries of a page."""
        return await self.read(path_of(LISTS, name), lambda stored: decode_page(inflate(self.unseal(stored))))

    async def merged(
        self,
        lists: Sequence[EntryList],
        *,
        keeps_removed: bool = False,
        recovered: Mapping[str, list[BackupEntry]] | None = None,
        packs: set[str] | None = None,
    ) -> AsyncIterator[list[BackupEntry]]:
        """Yield the newest entry of each key, sorted, in pages. `recovered` has what stands in the place of
        damaged pages; without it the first one raises BackupDamaged. The names of the packs to which the
        lists refer are added to `packs`, those of replaced entries, too."""
        readers = [_ListReader(self, one, recovered, packs) for one in lists]
        while readers := [reader for reader in readers if await reader.load()]:
            last = min(reader.last for reader in readers)
            newest: dict[Order, BackupEntry] = {}
            for reader in readers:
                newest.update(reader.take(last))
            entries = map(newest.__getitem__, sorted(newest))
            yield [*entries] if keeps_removed else [entry for entry in entries if entry.etag]

    async def entries(self, snapshot: Snapshot) -> AsyncIterator[BackupEntry]:
        """Yield the entries of a snapshot, without those in damaged pages."""
        recovered = {gap.page: list[BackupEntry]() for gap in await self.gaps(snapshot.lists)}
        async for page in self.merged(snapshot.lists, recovered=recovered):
            for entry in page:
                yield entry

    async def gaps(self, lists: Sequence[EntryList]) -> list[Gap]:
        """Return the damaged pages of these lists."""
        gaps: list[Gap] = []
        number, last_number = -1, -1
        for one in lists:
            if one.number > last_number:  # a backup that was interrupted has left a list of the same number
                number, last_number = last_number, one.number
            after: Order | None = None
            damaged: list[tuple[str, str]] = []
            for page in (*one.pages, ""):
                before = None
                try:
                    if page:
                        entries = await self.read_page(page)
                        before, last = entries[0].order, entries[-1].order
                except BackupDamaged as error:
                    damaged.append((page, str(error)))
                    continue
                gaps += [Gap(name, why, number, one.number, after, before) for name, why in damaged]
                damaged = []
                after = last if page else None
        return gaps

    async def fold(
        self, lists: Sequence[EntryList], lost: Mapping[str, list[BackupEntry]] | None = None
    ) -> list[EntryList]:
        """Return lists with the same entries: fewer, if there are many. With `lost`, which stands in the
        place of damaged pages, all become one."""
        start = _first_to_fold(lists) if lost is None else 0
        if start is None:
            return [*lists]
        folded = lists[start:]
        merged = self.merged(folded, keeps_removed=start > 0, recovered=lost)
        one = await self.put_list(folded[-1].number, merged)
        return [*lists[:start], *([] if one is None else [one])]

    async def read_snapshot(self, name: str) -> Snapshot:
        """Return the snapshot of this name."""
        return await self.read(name, lambda stored: Snapshot.decode(inflate(self.unseal(stored)), name))

    async def snapshots(self, on_damaged: Callable[[str, str], None]) -> list[Snapshot]:
        """Return all snapshots in their order, of each the last revision. See `revisions`."""
        return [*{(one.number, one.id): one for one in await self.revisions(on_damaged)}.values()]

    async def revisions(self, on_damaged: Callable[[str, str], None]) -> list[Snapshot]:
        """Return all revisions of all snapshots in their order. `on_damaged` is called with the name of each
        damaged one, and the reason."""
        found: list[Snapshot] = []
        for name in await self.names(SNAPSHOTS):
            try:
                snapshot = await self.read_snapshot(name)
            except BackupDamaged as error:
                if await self.find(name) is None:  # a `prune` may have replaced it
                    return await self.revisions(on_damaged)
                on_damaged(name, str(error))
                continue
            found.append(snapshot)
        return found

    async def newest(self, store_id: str, on_damaged: Callable[[str, str], None]) -> Snapshot | None:
        """Return the newest snapshot of a store (`""`: of any) that can be read; None if there is none."""
        for name in reversed(await self.target.list_files(SNAPSHOTS)):
            try:
                snapshot = await self.read_snapshot(name)
            except BackupDamaged as error:
                if await self.find(name) is None:  # a `prune` may have replaced it
                    return await self.newest(store_id, on_damaged)
                on_damaged(name, str(error))
                continue
            if store_id in ("", snapshot.store_id):
                return snapshot
        return None

    async def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder. If one is written before another one is deleted, as a
        claim that is renewed, a listing may show neither; the next one shows it."""
        return sorted({*await self.target.list_files(folder), *await self.target.list_files(folder)})

    async def last_number(self) -> int:
        """Return the greatest number of a snapshot; 0 if there is none."""
        found = [parse_snapshot_name(name) for name in await self.target.list_files(SNAPSHOTS)]
        return max((one[0] for one in found if one is not None), default=0)

    async def whole(self) -> set[str]:
        """Return the names of the packs and pages that are there, have their size and are not marked."""
        files = {**await self.target.list_files(PACKS), **await self.target.list_files(LISTS)}
        marked = {mark.partition("/")[2] for mark in await self.target.list_files(DAMAGED)}
        names = {path.rpartition("/")[2]: size for path, size in files.items()}
        return {
            name
            for name, size in names.items()
            if is_name(name) and name not in marked and name.endswith(f"-{size}")
        }

    async def mark(self, path: str) -> None:
        """Mark a file as damaged, so that the next backup stores anew what it held."""
        await self.target.put(f"{DAMAGED}/{path.rpartition('/')[2]}", b"{}")

    async def find(self, path: str) -> bytes | None:
        """Return the bytes of a file, `b""` if it is longer than any that a backup writes, and None if there
        is no file."""
        try:
            return await self.target.get(path)
        except FileTooLong:
            return b""

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file, of which its name has the hash."""
        stored = await self.find(path)
        if stored is None:
            raise BackupDamaged(f"{path} is missing")
        if not stored:
            raise BackupDamaged(f"{path} is damaged: its length is not that of any file of a backup")
        name = path.rpartition("/")[2].split("-")
        if await asyncio.to_thread(hash_name, stored) not in name:
            raise BackupDamaged(f"{path} is damaged: its bytes do not match its name")
        return stored

    async def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Return what `decode`, called in a thread, makes of a file."""
        stored = await self.read_file(path)
        try:
            return await asyncio.to_thread(decode, stored)
        except ValueError as error:
            raise BackupDamaged(f"{path} is damaged: {error}") from None

    def seal(self, text: bytes) -> bytes:
        """Return a text that is no pack as the backup stores it."""
        return text if self.key is None else self.key.seal_metadata(text)

    def unseal(self, stored: bytes) -> bytes:
        """Return what `seal` was given. Raises ValueError."""
        return stored if self.key is None else self.key.open_metadata(stored)

    async def _put(self, folder: str, stored: bytes, size: int) -> str:
        """Store a pack or a page of `size` bytes before compression, and return its name."""
        name = f"{await asyncio.to_thread(hash_name, stored)}-{self.claim_id}-{size}-{len(stored)}"
        await self.put_file(path_of(folder, name), stored)
        return name

    async def put_file(self, path: str, stored: bytes) -> None:
        """Store the bytes of a file."""
        await self.target.put(path, stored)
        self.bytes_written += len(stored)
        self.files_written += 1


class _ListReader:
    """Reads the entries of a list, a page at a time."""

    def __init__(
        self,
        repository: Repository,
        one: EntryList,
        recovered: Mapping[str, list[BackupEntry]] | None,
        packs: set[str] | None,
    ) -> None:
        self._repository = repository
        self._names = iter(one.pages)
        self._recovered = {} if recovered is None else recovered
        self._packs = packs
        self._entries: list[BackupEntry] = []
        self._orders: list[Order] = []
        self._at = 0

    async def load(self) -> bool:
        """Read the next page if no entry is left. Returns False at the end."""
        while self._at == len(self._entries):
            name = next(self._names, None)
            if name is None:
                return False
            found = self._recovered.get(name)
            self._entries = await self._repository.read_page(name) if found is None else found
            self._orders = [entry.order for entry in self._entries]
            self._at = 0
            if self._packs is not None:
                self._packs.update(part.pack for entry in self._entries for part in entry.parts)
        return True

    @property
    def last(self) -> Order:
        """The order of the last entry of the page."""
        return self._orders[-1]

    def take(self, last: Order) -> Iterable[tuple[Order, BackupEntry]]:
        """Return the entries up to this one, with their order."""
        start, self._at = self._at, bisect_right(self._orders, last, self._at)
        return zip(self._orders[start : self._at], self._entries[start : self._at], strict=True)


def _first_to_fold(lists: Sequence[EntryList]) -> int | None:
    """Return the position from which on lists should become one; None if they are few. The first one is the
    base, the second one has the changes that were folded."""
    if len(lists) < 2:
        return None
    if 2 * sum(one.entries for one in lists[1:]) > lists[0].entries:
        return 0
    recent = lists[2:]
    is_long = len(recent) >= MAX_LISTS or sum(one.entries for one in recent) > MAX_CHANGES
    return 1 if is_long else None


def path_of(folder: str, name: str) -> str:
    """Return the path of a pack or a page."""
    return f"{folder}/{name[:2]}/{name}"


@asynccontextmanager
async def open_backup(url: str, key_file: str | None, *, create: bool = False) -> AsyncIterator[Repository]:
    """Yield the backup at `url`, with the key in a file if it is encrypted. `create` begins one if nothing
    lies there. Raises ValueError and StoreUnavailable."""
    key = None if key_file is None else await asyncio.to_thread(_read_key, key_file)
    if url.partition(":")[0] not in ("file", "s3"):
        raise ValueError(f"{url}: a backup lies in file:DIR or s3://BUCKET/PREFIX")
    place = config.parse({"version": 1, "store": url}).store
    async with closing(open_backup_target(place, create=create)) as target:
        try:
            repository = await Repository.open(target, key, create=create)
        except ValueError as error:
            raise type(error)(f"{url}: {error}") from None
        yield repository


def _read_key(name: str) -> "BackupKey":
    from pysync.backup.encryption import BackupKey

    try:
        return BackupKey.parse(Path(name).read_bytes())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
