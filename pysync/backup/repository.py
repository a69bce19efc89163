"""The snapshots in a backup, and how they share what they have in common.

A snapshot is a list of runs, oldest first. A run is a sorted list of entries in pages; an entry of a later
run replaces that of the same key in an earlier one. A backup adds a run with what has changed. Runs are
merged when there are many of a size, so that all of this costs little beside the objects themselves."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

import orjson

from pysync._core import split_key
from pysync.backup.encoding import (
    BackupEntry,
    Row,
    compress_text,
    decode_page,
    decompress,
    decompress_text,
    encode_page,
    entry_of,
    renamed,
    take_page,
)
from pysync.backup.runs import SortedRun, merged
from pysync.backup.target import BackupTarget, FileTooLong
from pysync.concurrency import gather_bounded

if TYPE_CHECKING:
    from pysync.backup.encryption import BackupKey

FORMAT: Final = 1
FORMAT_FILE: Final = "format.json"
PACKS, PAGES, SNAPSHOTS, EXPIRED = "packs", "pages", "snapshots", "expired"
MAX_CONCURRENT: Final = 4
"""Number of packs or pages that are read or written concurrently."""
MAX_TIME_MS: Final = 253_402_300_800_000
"""The end of the year 9999."""
_TIME: Final = "%Y%m%dT%H%M%S"
T = TypeVar("T")


class BackupDamaged(ValueError):
    """A file of the backup is missing or damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything in a store as of the moment `taken_ms`, at which `change` was the newest id of the change
    log (`""` if unknown). One that is not complete only says what an interrupted backup has stored
    already. Of complete ones with the same time the latest `generation` replaces the others."""

    taken_ms: int
    runs: list[SortedRun]
    change: str = ""
    is_complete: bool = True
    store: str = ""
    unreadable: int = 0
    generation: int = 0
    name: str = field(default="", compare=False)

    def encode(self) -> bytes:
        """Return the text of the snapshot."""
        members = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        return orjson.dumps({"format": FORMAT, **members})

    @classmethod
    def decode(cls, name: str, text: bytes) -> "Snapshot":
        """Return the snapshot with this text. Raises ValueError unless `encode` can have returned it."""
        members = orjson.loads(text)
        try:
            if members.pop("format") != FORMAT:
                raise ValueError("it was written by a newer version of pysync")
            runs = [SortedRun(**run) for run in members.pop("runs")]
            snapshot = cls(**members, runs=runs, name=name)
        except (LookupError, TypeError, AttributeError):
            raise ValueError("it is no snapshot") from None
        if not snapshot._is_sound():
            raise ValueError("it is no snapshot")
        if time_text(snapshot.taken_ms) != time_in(name):
            raise ValueError("its name has another time than its text")
        return snapshot

    def _is_sound(self) -> bool:
        """Return True if every member has its type."""
        facts = (self.taken_ms, self.change, self.is_complete, self.store, self.unreadable, self.generation)
        return (
            tuple(map(type, facts)) == (int, str, bool, str, int, int)
            and 0 <= self.taken_ms < MAX_TIME_MS
            and all(run.is_sound() for run in self.runs)
        )


class PageFacts(NamedTuple):
    """The number of entries of a page, and its first and last one."""

    entries: int
    first: BackupEntry
    last: BackupEntry

    @classmethod
    def of(cls, entries: Sequence[BackupEntry]) -> Self:
        """Return the facts of a page, which is never empty."""
        return cls(len(entries), entries[0], entries[-1])


def check_run(run: SortedRun, facts: Mapping[str, PageFacts]) -> None:
    """Raise BackupDamaged unless these are the pages of a run."""
    pages = [facts[name] for name in run.pages]
    if (
        not pages
        or sum(page.entries for page in pages) != run.entries
        or (pages[0].first.key, pages[-1].last.key) != (run.first, run.last)
        or any(left.last.order >= right.first.order for left, right in pairwise(pages))
    ):
        raise BackupDamaged(
            f"{path_of(PAGES, (run.pages or [''])[0])} and those after it are no list of objects"
        )


class _SealedPage(NamedTuple):
    """A page as it is stored, its name, the number of its entries, and the keys of its first and last one."""

    sealed: bytes
    name: str
    entries: int
    first: str
    last: str


class Repository:
    """The files of one backup, encrypted if there is a key. Methods raise BackupDamaged for a file that is
    missing or damaged, and StoreUnavailable if the backup cannot be reached."""

    def __init__(self, target: BackupTarget, key: "BackupKey | None") -> None:
        self.target = target
        self.key = key
        self.expired: set[str] = set()
        """Files that a `prune` may delete at any time, so a new file must not have the name of one."""
        self.bytes_written = 0
        self.files_written = 0

    @classmethod
    async def open(
        cls, target: BackupTarget, key: "BackupKey | None" = None, *, create: bool = False
    ) -> "Repository":
        """Open the backup at `target`, or begin one if `create` is set and nothing lies there. Raises
        ValueError if there is none, if something else lies there, or if it needs another key."""
        public = None if key is None else key.public.hex()
        text = await target.get(FORMAT_FILE)
        if text is None:
            if not create:
                raise ValueError("there is no backup")
            if names := await target.names(""):
                raise ValueError(f"something else lies there: {names[0]}")
            text = orjson.dumps({"format": FORMAT, "publicKey": public})
            await target.put(FORMAT_FILE, text)
        try:
            members = orjson.loads(text)
            written, expected = members["format"], members["publicKey"]
        except (ValueError, KeyError, TypeError):
            raise BackupDamaged(f"{FORMAT_FILE} is damaged") from None
        if written != FORMAT:
            raise ValueError("the backup was written by a newer version of pysync")
        if expected != public:
            raise ValueError(
                "the backup is not encrypted: leave the key out"
                if expected is None
                else "the backup is encrypted: name its key"
                if public is None
                else "the backup is encrypted for another key"
            )
        return cls(target, key)

    def check_readable(self) -> None:
        """Raise ValueError unless the key opens packs."""
        if self.key is not None:
            self.key.check_private()

    async def put_pack(self, packed: bytes, size: int) -> str:
        """Store a pack of `size` bytes, which is compressed already, and return its name."""
        sealed, hash_ = await asyncio.to_thread(self._seal, packed, PACKS)
        await self._put(path_of(PACKS, hash_), sealed)
        return f"{size}-{hash_}"

    async def read_pack(self, name: str, most: int) -> bytes:
        """Return the content of a pack, but of a longer one only the first `most` bytes."""

        def open_pack(stored: bytes) -> bytes:
            return decompress(stored if self.key is None else self.key.open_pack(stored), most)

        return await self._read(path_of(PACKS, name), open_pack)

    async def read_page(self, name: str) -> list[BackupEntry]:
        """Return the entries of a page."""
        return await self._read(path_of(PAGES, name), lambda stored: decode_page(self._open_text(stored)))

    async def put_run(self, rows: Iterable[Row]) -> SortedRun | None:
        """Store rows, which are sorted and then used up, as a run; None if there are none."""
        pages: list[str] = []
        remaining = iter(rows)
        count, first, last = 0, "", ""
        while page := await asyncio.to_thread(self._seal_page, remaining):
            first, last = first or page.first, page.last
            count += page.entries
            await self._put(path_of(PAGES, page.name), page.sealed)
            pages.append(page.name)
        return SortedRun(pages, count, first, last) if pages else None

    def _seal_page(self, remaining: Iterator[Row]) -> "_SealedPage | None":
        """Return a page of the next rows; None if there are none."""
        rows = take_page(remaining)
        if not rows:
            return None
        sealed, name = self._seal(compress_text(encode_page(rows)), PAGES)
        return _SealedPage(sealed, name, len(rows), rows[0][0], rows[-1][0])

    async def put_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """Store a snapshot, which makes it visible."""
        sealed, hash_ = self._seal(compress_text(snapshot.encode()), SNAPSHOTS)
        name = f"{SNAPSHOTS}/{time_text(snapshot.taken_ms)}-{hash_}"
        await self._put(name, sealed)
        return replace(snapshot, name=name)

    async def snapshot_names(self) -> list[str]:
        """Return the names of all snapshots, oldest first."""
        return await self.target.names(SNAPSHOTS)

    async def read_snapshot(self, name: str) -> Snapshot:
        """Return the snapshot of this name."""
        return await self._read(name, lambda stored: Snapshot.decode(name, self._open_text(stored)))

    async def find_snapshot(self, name: str) -> Snapshot | None:
        """Return the snapshot of this name; None if it is gone: followers and `prune` remove snapshots."""
        try:
            return await self.read_snapshot(name)
        except BackupDamaged:
            if await self.target.get(name) is None:
                return None
            raise

    async def find_snapshots(self, names: Iterable[str]) -> list[Snapshot]:
        """Return the snapshots of these names that are not gone."""
        found = [await self.find_snapshot(name) for name in names]
        return [snapshot for snapshot in found if snapshot is not None]

    async def newest(self, on_damaged: Callable[[BackupDamaged], None] | None = None) -> Snapshot | None:
        """Return the newest snapshot, complete or not; None if there is none. With `on_damaged`, call it for
        each damaged one, and return the newest that is not."""
        for name in reversed(await self.snapshot_names()):
            try:
                found = await self.find_snapshot(name)
            except BackupDamaged as error:
                if on_damaged is None:
                    raise
                on_damaged(error)
            else:
                return found or await self.newest(on_damaged)  # a `prune` may have replaced it
        return None

    async def entries(self, snapshot: Snapshot) -> Iterator[BackupEntry]:
        """Return the entries of a snapshot, sorted."""

        def open_page(stored: bytes) -> tuple[PageFacts, bytes]:
            return PageFacts.of(decode_page(self._open_text(stored))), self._open_metadata(stored)

        loaded = await self._load_pages(snapshot.runs, open_page)
        facts = {name: found for name, (found, _) in loaded.items()}
        for run in snapshot.runs:
            check_run(run, facts)
        pages = {name: text for name, (_, text) in loaded.items()}
        return map(entry_of, merged(snapshot.runs, pages, keeps_removed=False))

    async def _load_pages(self, runs: Sequence[SortedRun], open_page: Callable[[bytes], T]) -> dict[str, T]:
        """Return what a function, called in a thread, makes of each page of these runs."""
        names = [page for run in runs for page in run.pages]

        async def load(name: str) -> T:
            return await self._read(path_of(PAGES, name), open_page)

        return dict(zip(names, await gather_bounded(MAX_CONCURRENT, names, load), strict=True))

    async def packs_of(self, page: str) -> set[str]:
        """Return the names of the packs that a page refers to."""
        return {part.pack for entry in await self.read_page(page) for part in entry.parts}

    async def stored(self) -> set[str]:
        """Return the paths of all packs and pages that are there."""
        return {*await self.target.names(PACKS), *await self.target.names(PAGES)}

    async def put_note(self, at_ms: int, files: Sequence[str]) -> None:
        """Store the names of files that may be deleted."""
        text = orjson.dumps({"atMs": at_ms, "files": files})
        sealed, hash_ = self._seal(compress_text(text), EXPIRED)
        await self._put(f"{EXPIRED}/{time_text(at_ms)}-{hash_}", sealed)

    async def read_note(self, name: str) -> tuple[int, set[str]]:
        """Return the time of such a note, and the names."""
        return await self._read(name, lambda stored: _decode_note(name, self._open_text(stored)))

    async def merge(self, runs: Sequence[SortedRun], *, is_all: bool) -> list[SortedRun]:
        """Return one run with the newest entry of each key in these, or none. With `is_all` there are no
        earlier ones, so nothing needs to say what was removed. Pages that this process did not write have
        been validated by `entries`."""
        if all(split_key(left.last) < split_key(right.first) for left, right in pairwise(runs)):
            pages = [page for run in runs for page in run.pages]
            return [SortedRun(pages, sum(run.entries for run in runs), runs[0].first, runs[-1].last)]
        loaded = await self._load_pages(runs, self._open_metadata)
        run = await self.put_run(merged(runs, loaded, keeps_removed=not is_all))
        return [] if run is None else [run]

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file, which its name has the hash of."""
        try:
            stored = await self.target.get(path)
        except FileTooLong as error:
            raise BackupDamaged(f"{path}: {error}") from None
        if stored is None:
            raise BackupDamaged(f"{path} is missing")
        if (await asyncio.to_thread(hashlib.sha256, stored)).hexdigest() != path[-64:]:
            raise BackupDamaged(f"{path} is damaged")
        return stored

    async def _read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Return what a file holds, decoded in a thread by a function that raises ValueError."""
        stored = await self.read_file(path)
        try:
            return await asyncio.to_thread(decode, stored)
        except ValueError as error:
            raise BackupDamaged(f"{path}: {error}") from None

    def _open_text(self, stored: bytes) -> bytes:
        """Return the text of a page, a snapshot or a note. Raises ValueError."""
        return decompress_text(self._open_metadata(stored))

    def _open_metadata(self, stored: bytes) -> bytes:
        """Return what `_open_text` decompresses. Raises ValueError."""
        return stored if self.key is None else self.key.open_metadata(stored)

    def _seal(self, body: bytes, folder: str) -> tuple[bytes, str]:
        """Return the bytes to store in a folder, and the name that their hash gives."""
        if self.key is not None:
            body = self.key.seal_pack(body) if folder == PACKS else self.key.seal_metadata(body)
        name = hashlib.sha256(body).hexdigest()
        if path_of(folder, name) in self.expired:  # without a key, equal bodies have equal names
            body = renamed(body)
            name = hashlib.sha256(body).hexdigest()
        return body, name

    async def _put(self, path: str, body: bytes) -> None:
        await self.target.put(path, body)
        self.bytes_written += len(body)
        self.files_written += 1


def _decode_note(name: str, text: bytes) -> tuple[int, set[str]]:
    """Raises ValueError unless `put_note` can have written this."""
    members = orjson.loads(text)
    try:
        at_ms, files = members["atMs"], {*members["files"]}
    except (LookupError, TypeError):
        raise ValueError("it is no note of expired files") from None
    if not all(type(file) is str for file in files):
        raise ValueError("a file that it names is none")
    if type(at_ms) is not int or not 0 <= at_ms < MAX_TIME_MS or time_text(at_ms) != time_in(name):
        raise ValueError("its name has another time than its text")
    return at_ms, files


def time_text(ms: int) -> str:
    """Return a time as it stands in the names of snapshots: UTC, to the millisecond, in the order of time."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC):{_TIME}}{ms % 1000:03d}Z"


def iso_time(ms: int) -> str:
    """Return a time for people: ISO 8601, UTC, to the millisecond."""
    whole = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def time_of(name: str) -> int:
    """Return the time in the name of a snapshot, in milliseconds."""
    text = time_in(name)
    whole = datetime.strptime(text[:15], _TIME).replace(tzinfo=UTC)
    return int(whole.timestamp()) * 1000 + int(text[15:18])


def time_in(name: str) -> str:
    """Return the time in the name of a snapshot, as `time_text` writes it."""
    return name.rpartition("/")[2].partition("-")[0]


def path_of(folder: str, name: str) -> str:
    """Return the path of a pack or a page. It has the hash at the end of the name."""
    return f"{folder}/{name[-64:-62]}/{name[-64:]}"
