"""The objects of a snapshot, the pages that list them, and the compression of what a backup holds."""

import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import orjson

from pysync._core import split_key

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK_BYTES: Final = 8_388_608
"""A pack that is as long as this takes no further body."""
PART_BYTES: Final = 4_194_304
"""Files are stored in parts of this size."""
MAX_DOCUMENT_BYTES: Final = 1 << 30
"""SQLite stores no longer document, and nobody pushes one to a bucket."""
MAX_FILE_BYTES: Final = 5 << 40
"""A part of a file takes some 130 bytes of a page, so one that lists such a file fits in the next line."""
MAX_TEXT_BYTES: Final = 1 << 28
PAGE_ENTRIES: Final = 20_000
PAGE_PARTS: Final = 150_000
"""A page has so many entries at most, and ends with the one that brings it to so many parts of files."""
MAX_INTEGER: Final = (1 << 53) - 1
LEVEL: Final = 1
"""Compresses JSON to a tenth more than level 3 does, in a third of the time."""
_RAW, _ZSTD = b"R", b"Z"
_SKIPPED: Final = (0x184D2A50).to_bytes(4, "little") + (16).to_bytes(4, "little")
"""Begins a frame of 16 bytes that zstd skips. Nothing refers to what is behind a raw body."""
_SAMPLE_BYTES: Final = 16_384
_FACTS: Final = (str, str, str, int, int, bool)
_match_sha256: Final = re.compile("[0-9a-f]{64}").fullmatch
_match_pack: Final = re.compile("[0-9]{1,10}-[0-9a-f]{64}").fullmatch
_COMPRESSED_TYPES: Final = (
    "image/", "video/", "audio/", "font/woff", "application/zip", "application/gzip", "application/zstd",
    "application/x-7z", "application/x-xz", "application/x-bzip", "application/vnd.apache.parquet",
)  # fmt: skip


class Part(NamedTuple):
    """Some bytes in a pack: `length` from `offset` on, in what the pack holds once it is decompressed. The
    name of a pack begins with the number of these bytes: `SIZE-SHA256`."""

    pack: str
    offset: int
    length: int
    sha256: str


Row = list[Any]
"""The members of an entry in a list, as a page holds them; the key alone if the object was removed. A part
is `[pack, offset, length, sha256]`, with `""` for the hash of the whole object. In a page the pack is its
position in a list of names."""


class BackupEntry(NamedTuple):
    """An object of a snapshot. A document has a body, a file may have many `parts`; both have the SHA-256 of
    all their bytes. An entry with an empty `etag` says that the object was removed."""

    key: str
    etag: str = ""
    content_type: str = ""
    modified_ms: int = 0
    size: int = 0
    sha256: str = ""
    is_file: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def order(self) -> tuple[str, str]:
        """What the entries of a page are sorted by."""
        parent, name = split_key(self.key)
        return parent, name


def take_page(remaining: Iterator[Row]) -> list[Row]:
    """Return the next rows for one page; none at the end."""
    rows: list[Row] = []
    parts = 0
    while len(rows) < PAGE_ENTRIES and parts < PAGE_PARTS and (row := next(remaining, None)) is not None:
        rows.append(row)
        parts += len(row[7]) if len(row) > 1 else 0
    return rows


def encode_page(rows: list[Row]) -> bytes:
    """Return the text of a page. Packs are named once: in `rows`, their names are replaced."""
    packs: dict[str, int] = {}
    for row in rows:
        for part in row[7] if len(row) > 1 else ():
            part[0] = packs.setdefault(part[0], len(packs))
    return orjson.dumps({"packs": [*packs], "entries": rows})


def decode_rows(text: bytes) -> list[Row]:
    """Return the rows of a page that is known to be valid, with the names of packs."""
    members = orjson.loads(text)
    packs = members["packs"]
    rows: list[Row] = members["entries"]
    for row in rows:
        for part in row[7] if len(row) > 1 else ():
            part[0] = packs[part[0]]
    return rows


def entry_of(row: Row) -> BackupEntry:
    """Return the entry that a row of `decode_rows` describes."""
    if len(row) == 1:
        return BackupEntry(row[0])
    *facts, parts = row
    sha256 = facts[5]
    named = tuple(Part(pack, offset, length, own or sha256) for pack, offset, length, own in parts)
    return BackupEntry._make((*facts, named))


def row_of(entry: BackupEntry) -> Row:
    """Return the row that `entry_of` makes this entry of."""
    if not entry.etag:
        return [entry.key]
    *facts, sha256, is_file, parts = entry
    named = [[pack, offset, length, "" if own == sha256 else own] for pack, offset, length, own in parts]
    return [*facts, sha256, is_file, named]


def decode_page(text: bytes) -> list[BackupEntry]:
    """Return the entries of a page. Raises ValueError unless `encode_page` can have returned this text."""
    members = orjson.loads(text)
    try:
        packs = [_pack_name(pack) for pack in members["packs"]]
        entries = [_decode_entry(row, packs) for row in members["entries"]]
        orders = [entry.order for entry in entries]
    except (LookupError, TypeError, AttributeError):
        raise ValueError("it is no page") from None
    if not entries or any(left >= right for left, right in pairwise(orders)):
        raise ValueError("its entries are not sorted")
    return entries


def _decode_entry(row: list[Any], packs: list[str]) -> BackupEntry:
    """Raises ValueError, LookupError and TypeError."""
    if len(row) == 1:
        return BackupEntry(row[0])
    key, etag, content_type, modified_ms, size, sha256, is_file, parts = row
    facts = (type(key), type(etag), type(content_type), type(modified_ms), type(size), type(is_file))
    if facts != _FACTS or not etag or abs(modified_ms) > MAX_INTEGER or not 0 <= size <= MAX_INTEGER:
        raise ValueError("an entry has wrong members")
    _sha256(sha256)
    total = 0
    named = []
    for pack, offset, length, own in parts:
        if type(pack) is not int or type(offset) is not int or type(length) is not int:
            raise ValueError("a part of an entry has wrong members")
        if pack < 0 or length < 0 or not 0 <= offset < PACK_BYTES:
            raise ValueError("a part of an entry is nowhere")
        total += length
        named.append(Part(packs[pack], offset, length, _sha256(own) if own else sha256))
    if total != size or (not is_file and (len(named) != 1 or size > MAX_DOCUMENT_BYTES)):
        raise ValueError("the parts of an entry are not as long as it is")
    if is_file and any(part.length > PART_BYTES for part in named):
        raise ValueError("a part of a file is too long")
    return BackupEntry(key, etag, content_type, modified_ms, size, sha256, is_file, tuple(named))


def is_sha256(value: Any) -> bool:
    """Return True for a SHA-256 in hexadecimal digits."""
    return type(value) is str and _match_sha256(value) is not None


def _pack_name(value: Any) -> str:
    if type(value) is not str or _match_pack(value) is None:
        raise ValueError("the name of a pack is none")
    return value


def _sha256(value: Any) -> str:
    if not is_sha256(value):
        raise ValueError("a hash is none")
    return str(value)


def compress(body: bytes) -> bytes:
    """Return the body compressed, with a mark of how."""
    return _ZSTD + bytes(zstd.compress(body, LEVEL))


def store_raw(body: bytes) -> bytes:
    """Return the body as it is, marked so."""
    return _RAW + body


def renamed(stored: bytes) -> bytes:
    """Return bytes with the same body, and with a hash that no others have."""
    return stored + _SKIPPED + os.urandom(16)


def decompress(stored: bytes, most: int) -> bytes:
    """Return the body that `compress` or `store_raw` was given, but of a longer one only the first `most`
    bytes. Raises ValueError."""
    if stored[:1] == _RAW:
        return stored[1 : most + 1]
    if stored[:1] != _ZSTD:
        raise ValueError("it was written by a newer version of pysync")
    decompressor = zstd.ZstdDecompressor()
    try:
        body = bytes(decompressor.decompress(memoryview(stored)[1:], max_length=most))
    except zstd.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if not decompressor.eof and len(body) < most:
        raise ValueError("it cannot be decompressed: the end is missing")
    return body


def compress_text(text: bytes) -> bytes:
    """Return the text of a page or a snapshot compressed. Raises ValueError if nobody could read it again."""
    _check_length(text)
    return compress(text)


def decompress_text(stored: bytes) -> bytes:
    """Return the text of a page or a snapshot. Raises ValueError."""
    text = decompress(stored, MAX_TEXT_BYTES + 1)
    _check_length(text)
    return text


def _check_length(text: bytes) -> None:
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"a list of the backup is longer than {MAX_TEXT_BYTES} bytes")


def is_compressible(content_type: str, body: bytes) -> bool:
    """Return True unless the body is compressed or encrypted already, by its type or by a sample of it."""
    if content_type.startswith(_COMPRESSED_TYPES):
        return False
    if len(body) < _SAMPLE_BYTES or body[:1] in (b"{", b"["):
        return True
    sample = body[-_SAMPLE_BYTES:]
    return len(zstd.compress(sample, LEVEL)) < 0.95 * len(sample)
