"""The objects of an image, the pages that list them, and the compression of what a backup holds."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import orjson

from pysync._core import split_key

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL: Final = 1
"""Compresses JSON to a tenth more than level 3 does, in a third of the time."""
_RAW, _ZSTD = b"R", b"Z"
_SKIPPED: Final = (0x184D2A50).to_bytes(4, "little") + (16).to_bytes(4, "little")
"""Begins a frame of 16 bytes that zstd skips. Nothing refers to what is behind a raw body."""
_SAMPLE_BYTES: Final = 16_384
_COMPRESSED_TYPES: Final = (
    "image/", "video/", "audio/", "font/woff", "application/zip", "application/gzip", "application/zstd",
    "application/x-7z", "application/x-xz", "application/x-bzip", "application/vnd.apache.parquet",
)  # fmt: skip


class Part(NamedTuple):
    """Some bytes in a pack: `length` from `offset` on, in what the pack holds once it is decompressed."""

    pack: str
    offset: int
    length: int
    sha256: str


class BackupEntry(NamedTuple):
    """An object of an image. A document has a body, a file may have many `parts`; both have the SHA-256 of
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


def encode_page(entries: Iterable[BackupEntry]) -> bytes:
    """Return the text of a page. Packs are named once."""
    packs: dict[str, int] = {}
    rows: list[list[Any]] = []
    for entry in entries:
        if not entry.etag:
            rows.append([entry.key])
            continue
        parts = [
            [packs.setdefault(pack, len(packs)), offset, length, "" if sha256 == entry.sha256 else sha256]
            for pack, offset, length, sha256 in entry.parts
        ]
        rows.append([*entry[:-1], parts])
    return orjson.dumps({"packs": [*packs], "entries": rows})


def decode_page(text: bytes) -> Iterator[BackupEntry]:
    """Yield the entries of a page."""
    members = orjson.loads(text)
    packs = members["packs"]
    for key, *columns in members["entries"]:
        if not columns:
            yield BackupEntry(key)
            continue
        *facts, parts = columns
        sha256 = facts[4]
        named = tuple(Part(packs[pack], offset, length, own or sha256) for pack, offset, length, own in parts)
        yield BackupEntry._make((key, *facts, named))


def packs_of_page(text: bytes) -> list[str]:
    """Return the names of the packs that a page refers to."""
    packs: list[str] = orjson.loads(text)["packs"]
    return packs


def compress(body: bytes) -> bytes:
    """Return the body compressed, with a mark of how."""
    return _ZSTD + bytes(zstd.compress(body, LEVEL))


def store_raw(body: bytes) -> bytes:
    """Return the body as it is, marked so."""
    return _RAW + body


def renamed(stored: bytes) -> bytes:
    """Return bytes with the same body, and with a hash that no others have."""
    return stored + _SKIPPED + os.urandom(16)


def decompress(stored: bytes) -> bytes:
    """Return the body that `compress` or `store_raw` was given. Raises ValueError."""
    if stored[:1] == _RAW:
        return stored[1:]
    if stored[:1] != _ZSTD:
        raise ValueError("it was written by a newer version of pysync")
    try:
        return bytes(zstd.decompress(memoryview(stored)[1:]))
    except zstd.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None


def is_compressible(content_type: str, body: bytes) -> bool:
    """Return True unless the body is compressed or encrypted already, by its type or by a sample of it."""
    if content_type.startswith(_COMPRESSED_TYPES):
        return False
    if len(body) < _SAMPLE_BYTES or body[:1] in (b"{", b"["):
        return True
    sample = body[-_SAMPLE_BYTES:]
    return len(zstd.compress(sample, LEVEL)) < 0.95 * len(sample)
