"""The format of a backup: entries of objects, pages that list them, packs with their index, snapshots.

Texts are JSON. A file ends before it is longer than `MAX_FILE_BYTES`, and nothing in it is inflated further
than a backup can have written it, so a hostile file costs no more than an honest one.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from pysync._core import split_key

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FORMAT: Final = 2
PACK_BYTES: Final = 8_388_608
"""A pack that is as long as this takes no further body."""
PART_BYTES: Final = 4_194_304
"""Bodies are stored in parts of this size."""
MAX_PARTS: Final = 20_000
"""Parts of a file: 84 GB. No longer one is backed up."""
MAX_DOCUMENT_BYTES: Final = 67_108_864
"""A document is in memory as a whole. No longer one is backed up."""
PAGE_BYTES: Final = 2_097_152
"""A page, or the index of a pack, ends before the entry that makes it longer, unless it has one alone."""
MAX_TEXT_BYTES: Final = 4_718_592
"""JSON of this length takes 100 MB of memory, whatever it says."""
MAX_FILE_BYTES: Final = PACK_BYTES + PART_BYTES + 2 * MAX_TEXT_BYTES
MAX_TIME_MS: Final = 253_402_300_800_000
"""The end of the year 9999."""
MAX_INTEGER: Final = (1 << 53) - 1
LEVEL: Final = 1
"""Compresses JSON to a tenth more than level 3 does, in a third of the time."""
_RAW, _ZSTD = b"R", b"Z"
_LENGTH_BYTES: Final = 4
_SAMPLE_BYTES: Final = 16_384
_match_sha256: Final = re.compile("[0-9a-f]{64}").fullmatch
_match_name: Final = re.compile("[0-9a-f]{32}-[0-9a-f]{8}-[0-9]{1,8}-[0-9]{1,8}").fullmatch
_match_snapshot: Final = re.compile(
    "snapshots/([0-9]{12})-([0-9a-f]{8})-([0-9]{4})-[0-9a-f]{32}-[0-9]{1,8}"
).fullmatch
_COMPRESSED_TYPES: Final = (
    "image/", "video/", "audio/", "font/woff", "application/zip", "application/gzip", "application/zstd",
    "application/x-7z", "application/x-xz", "application/x-bzip", "application/vnd.apache.parquet",
)  # fmt: skip
_EMPTY: Final = hashlib.sha256().hexdigest()
Order = tuple[str, str]
"""Entries are sorted by it: `split_key` of their keys."""


class Part(NamedTuple):
    """Some bytes in a pack: `length` from `offset` on, in the bodies that the pack holds once it is inflated.
    In the index of a pack `""` names this pack. A part of no bytes names the pack whose index has the entry,
    if that is none with bytes of it."""

    pack: str
    offset: int
    length: int
    sha256: str


def index_part(pack: str) -> Part:
    """Return the part of an entry that is in the index of this pack."""
    return Part(pack, 0, 0, _EMPTY)


class BackupEntry(NamedTuple):
    """An object of a snapshot, with the SHA-256 of all its bytes. Without an `etag` it was removed. With a
    `reason` it could not be read when it was backed up. Neither has bytes."""

    key: str
    etag: str = ""
    content_type: str = ""
    modified_ms: int = 0
    size: int = 0
    sha256: str = ""
    is_file: bool = False
    parts: tuple[Part, ...] = ()
    reason: str = ""

    @property
    def order(self) -> Order:
        """What the entries of a list are sorted by."""
        parent, name = split_key(self.key)
        return parent, name

    @property
    def weight(self) -> int:
        """The bytes of the entry in a page, rather too many than too few."""
        return 250 + 2 * len(self.key) + len(self.content_type) + len(self.reason) + 110 * len(self.parts)


class IndexedEntry(NamedTuple):
    """An entry in the index of a pack. Of one key that with the greatest `number` of a snapshot, and then
    that with the greatest `step`, is the newest."""

    number: int
    step: int
    entry: BackupEntry

    @property
    def weight(self) -> int:
        """The bytes of the row in an index, rather too many than too few."""
        return self.entry.weight + 20


@dataclass(slots=True)
class PackIndex:
    """What a pack says of itself: the objects whose bytes it holds, or whose bytes other packs hold, and the
    parts of bodies in it that no entry of its own names, as offset, length and SHA-256."""

    taken_ms: int
    store_id: str
    entries: list[IndexedEntry]
    parts: list[tuple[int, int, str]] = field(default_factory=list)

    def bodies(self) -> Iterator[Part]:
        """Yield what the pack holds. A part may come twice."""
        for _, _, entry in self.entries:
            for part in entry.parts:
                if not part.pack and part.length:
                    yield part
        for own in self.parts:
            yield Part("", *own)


@dataclass(frozen=True, slots=True)
class EntryList:
    """A sorted list in pages. It has the changes since the list before it, up to the snapshot `number`."""

    number: int
    entries: int
    pages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything in a store as of one moment. `number` orders snapshots; `taken_ms` is the moment by the
    clock of the machine that made it, and `change` the newest id of the change log at it (`""` if unknown).
    `id` and `number` name a snapshot; of several revisions the last one counts. An entry of a later list
    replaces that of the same key in earlier ones. `has_erasure` says that the store was being erased from."""

    number: int
    id: str
    taken_ms: int
    lists: tuple[EntryList, ...] = ()
    change: str = ""
    store: str = ""
    store_id: str = ""
    unreadable: int = 0
    has_erasure: bool = False
    revision: int = 0
    name: str = field(default="", compare=False)

    def encode(self) -> bytes:
        """Return the text of the snapshot."""
        members = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("lists", "name")
        }
        lists = [[one.number, one.entries, one.pages] for one in self.lists]
        return orjson.dumps({"format": FORMAT, **members, "lists": lists})

    @classmethod
    def decode(cls, text: bytes, name: str = "") -> "Snapshot":
        """Return the snapshot with this text. Raises ValueError unless `encode` can have returned it."""
        members = orjson.loads(text)
        try:
            if members.pop("format") != FORMAT:
                raise ValueError("it was written by a newer version of pysync")
            lists = tuple(
                EntryList(number, entries, tuple(pages)) for number, entries, pages in members.pop("lists")
            )
            snapshot = cls(**members, lists=lists, name=name)
            pages = [page for one in lists for page in one.pages]
            facts = [type(getattr(snapshot, one.name)) for one in fields(cls)]
            is_sound = facts == [int, str, int, tuple, str, str, str, int, bool, int, str] and all(
                type(one.number) is type(one.entries) is int and one.pages for one in lists
            )
            is_sound = is_sound and all(map(is_name, pages)) and len({*pages}) == len(pages)
        except (LookupError, TypeError, AttributeError):
            is_sound = False
        if not is_sound or not 0 <= snapshot.taken_ms < MAX_TIME_MS:
            raise ValueError("it is no snapshot")
        if name and parse_snapshot_name(name) != (snapshot.number, snapshot.id, snapshot.revision):
            raise ValueError("its name has another number than its text")
        return snapshot


def parse_snapshot_name(name: str) -> tuple[int, str, int] | None:
    """Return the number, the id and the revision in the name of a snapshot; None if it is no such name."""
    found = _match_snapshot(name)
    return None if found is None else (int(found[1]), found[2], int(found[3]))


def hash_name(stored: bytes) -> str:
    """Return the part of a file's name that shows whether its bytes are those that were written."""
    return f"{hashlib.sha256(stored).hexdigest()[:32]}"


def is_name(value: Any) -> bool:
    """Return True for the name of a pack or a page."""
    return type(value) is str and _match_name(value) is not None


def inflated_size(name: str) -> int:
    """Return the bytes of the bodies in the pack of this name."""
    return int(name.split("-")[2])


def new_id() -> str:
    """Return a random id of a snapshot or a claim."""
    return os.urandom(4).hex()


E = TypeVar("E", BackupEntry, IndexedEntry)


def pages_of(entries: Iterable[E]) -> Iterator[list[E]]:
    """Yield the entries in pages."""
    page: list[E] = []
    size = 0
    for entry in entries:
        size += entry.weight
        if page and size > PAGE_BYTES:
            yield page
            page, size = [], entry.weight
        page.append(entry)
    if page:
        yield page


class _PackTable:
    """The names of packs, each once, in the order in which they occur."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}

    def row_of(self, entry: BackupEntry) -> list[Any]:
        named = [self._part_of(part, entry.sha256) for part in entry.parts]
        if not entry.etag:
            return [entry.key, named]
        *facts, _, reason = entry
        return [*facts, named, reason] if reason else [*facts, named]

    def _part_of(self, part: Part, sha256: str) -> list[Any]:
        pack, offset, length, own = part
        position = self.positions.setdefault(pack, len(self.positions))
        if not length:
            return [position]
        return [position, offset, length] if own == sha256 else [position, offset, length, own]


def encode_page(entries: Iterable[BackupEntry]) -> bytes:
    """Return the text of a page."""
    table = _PackTable()
    rows = [table.row_of(entry) for entry in entries]
    return orjson.dumps({"packs": [*table.positions], "rows": rows})


def decode_page(text: bytes) -> list[BackupEntry]:
    """Return the entries of a page. Raises ValueError unless `encode_page` can have returned this text."""
    members = orjson.loads(text)
    try:
        packs = [_checked_pack(pack) for pack in members["packs"]]
        entries = [_decode_entry(row, packs) for row in members["rows"]]
        orders = [entry.order for entry in entries]
    except (LookupError, TypeError, AttributeError):
        raise ValueError("it is no page") from None
    if not entries or any(left >= right for left, right in pairwise(orders)):
        raise ValueError("its entries are not sorted")
    return entries


def encode_index(index: PackIndex) -> bytes:
    """Return the text of an index."""
    table = _PackTable()
    rows = [[number, step, table.row_of(entry)] for number, step, entry in index.entries]
    members = {"takenMs": index.taken_ms, "store": index.store_id, "packs": [*table.positions]}
    return orjson.dumps({**members, "rows": rows, "parts": index.parts})


def decode_index(text: bytes) -> PackIndex:
    """Return the index of a pack. Raises ValueError unless `encode_index` can have returned this text."""
    members = orjson.loads(text)
    try:
        packs = [pack and _checked_pack(pack) for pack in members["packs"]]
        rows = [
            IndexedEntry(_integer(number), _integer(step), _decode_entry(row, packs))
            for number, step, row in members["rows"]
        ]
        for row in rows:
            split_key(row.entry.key)  # raises
        parts = [(_integer(at), _integer(length), _sha256(own)) for at, length, own in members["parts"]]
        taken_ms = min(_integer(members["takenMs"]), MAX_TIME_MS - 1)
        return PackIndex(taken_ms, str(members["store"]), rows, parts)
    except (LookupError, TypeError, AttributeError):
        raise ValueError("it is no index of a pack") from None


def _decode_entry(row: list[Any], packs: list[str]) -> BackupEntry:
    """Raises ValueError, LookupError and TypeError."""
    if len(row) == 2:
        return BackupEntry(
            row[0], parts=tuple(index_part(packs[_integer(position)]) for (position,) in row[1])
        )
    key, etag, content_type, modified_ms, size, sha256, is_file, parts, *reason = row
    if not (
        type(key) is type(etag) is type(content_type) is str
        and etag
        and type(modified_ms) is type(size) is int
        and abs(modified_ms) <= MAX_INTEGER
        and type(is_file) is bool
        and len(parts) <= MAX_PARTS + 1
        and all(type(why) is str for why in reason)
    ):
        raise ValueError("an entry has wrong members")
    if not reason:
        _sha256(sha256)
    named = tuple(_decode_part(part, packs, sha256) for part in parts)
    total = sum(part.length for part in named)
    if total != (0 if reason else size) or (not is_file and total > MAX_DOCUMENT_BYTES):
        raise ValueError("the parts of an entry are not as long as it is")
    return BackupEntry(key, etag, content_type, modified_ms, size, sha256, is_file, named, *reason)


def _decode_part(row: list[Any], packs: list[str], sha256: str) -> Part:
    position, *place = row
    pack = packs[_integer(position)]
    if not place:
        return index_part(pack)
    offset, length, *own = place
    if not 0 < _integer(length) <= PART_BYTES or _integer(offset) >= PACK_BYTES:
        raise ValueError("a part of an entry is nowhere")
    return Part(pack, offset, length, _sha256(own[0]) if own else sha256)


def _checked_pack(value: Any) -> str:
    if not is_name(value):
        raise ValueError("the name of a pack is none")
    return str(value)


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError("a number is none")
    return value


def _sha256(value: Any) -> str:
    if type(value) is not str or _match_sha256(value) is None:
        raise ValueError("a hash is none")
    return value


def pack(bodies: Sequence[bytes], index: PackIndex, *, is_raw: bool) -> bytes:
    """Return a pack: the bodies, compressed unless they are raw, and behind them their index."""
    joined = b"".join(bodies)
    text = compress_text(encode_index(index))
    return b"".join(
        (
            (_RAW + joined) if is_raw else _ZSTD + zstd.compress(joined, LEVEL),
            text,
            len(text).to_bytes(_LENGTH_BYTES),
        )
    )


def unpack(stored: bytes) -> tuple[bytes, PackIndex]:
    """Return the bodies of a pack, and its index. Raises ValueError."""
    length = int.from_bytes(stored[-_LENGTH_BYTES:])
    end = len(stored) - _LENGTH_BYTES - length
    if end < 1:
        raise ValueError("it is no pack")
    view = memoryview(stored)
    index = decode_index(inflate(view[end:-_LENGTH_BYTES], MAX_TEXT_BYTES))
    if stored[:1] == _RAW:
        return bytes(view[1:end]), index
    if stored[:1] != _ZSTD:
        raise ValueError("it was written by a newer version of pysync")
    return inflate(view[1:end], PACK_BYTES + PART_BYTES), index


def compress_text(text: bytes) -> bytes:
    """Return a text compressed. Raises ValueError if nobody could read it again."""
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"a list of the backup is longer than {MAX_TEXT_BYTES} bytes")
    return bytes(zstd.compress(text, LEVEL))


def inflate(stored: bytes | memoryview, most: int = MAX_TEXT_BYTES) -> bytes:
    """Return what was compressed. Raises ValueError, also if it is longer than `most` bytes."""
    decompressor = zstd.ZstdDecompressor()
    try:
        body = bytes(decompressor.decompress(stored, max_length=most + 1))
    except zstd.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if len(body) > most:
        raise ValueError(f"it is longer than {most} bytes, and no backup writes such a file")
    if not decompressor.eof:
        raise ValueError("it cannot be decompressed: the end is missing")
    return body


def is_compressible(content_type: str, body: bytes) -> bool:
    """Return True unless the body is compressed or encrypted already, by its type or by a sample of it."""
    if content_type.startswith(_COMPRESSED_TYPES):
        return False
    if len(body) < _SAMPLE_BYTES or body[:1] in (b"{", b"["):
        return True
    sample = body[-_SAMPLE_BYTES:]
    return len(zstd.compress(sample, LEVEL)) < 0.95 * len(sample)


def iso_time(ms: int) -> str:
    """Return a time for people: ISO 8601, UTC, to the millisecond."""
    whole = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def parse_time(text: str) -> int:
    """Return the milliseconds of a time: ISO 8601, UTC unless it says otherwise; `now` is later than all.
    Raises ValueError."""
    if text == "now":
        return MAX_TIME_MS
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text}: write a time as 2026-11-23T12:00:00Z") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return round(time.timestamp() * 1000)
