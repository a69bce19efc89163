"""Whether a stored object is what it should be: the hash that it carries is that of what it holds."""

import hashlib
import re
from collections.abc import Iterator
from typing import Final

import orjson

from pysync import _core
from pysync.caps import read_revocation_list
from pysync.errors import BadRequest, BadSignature, DocumentCorrupt, PysyncError
from pysync.revocation import PREFIX as REVOCATIONS

_MISMATCH: Final = "its hash is not that of its data"
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[-0-9][-+.e0-9]*', re.S)
"""A string or a number of a canonical text."""
_WHOLE: Final = re.compile(rb"-?[0-9]{17,}")
"""Below 17 digits all of them are there."""
_CHUNK: Final = re.compile(r"(.+)__seg/[0-9]{16}")
_FIELD: Final = "items"
"""Any name would do: where it matters, the names in `data` are tried."""


class Corrupt(Exception):
    """What is stored is not what it should be; the text says why."""


def check_object(key: str, stored: bytes) -> _core.LogHead | None:
    """Raise Corrupt unless the object at `key` is sound, as far as it can be told from itself. The head of a
    log is returned: what it names is still to be checked."""
    if _core.is_log(stored):
        try:
            return _core.LogHead.read(stored, "")
        except DocumentCorrupt:
            raise Corrupt("its checksum is not that of what it holds") from None
    if key.startswith(f"{REVOCATIONS}/"):
        check_revocations(key, stored)
    elif log_of_chunk(key, stored) is not None:
        check_chunk(stored)
    else:
        return check_document(stored)
    return None


def log_of_chunk(key: str, stored: bytes) -> str | None:
    """The key of the log of Starfish's that this object is a chunk of; None where it is none."""
    found = _CHUNK.fullmatch(key)
    return found[1] if found is not None and stored.startswith(b"[") else None


def check_revocations(key: str, stored: bytes) -> int:
    """The generation of a revocation list. Raises Corrupt unless the issuer whose user id ends the key has
    signed it."""
    try:
        found = read_revocation_list(stored)
    except (BadRequest, BadSignature) as error:
        raise Corrupt(str(error)) from None
    if found.iss_user_id != key.rpartition("/")[2]:
        raise Corrupt("it is the revocation list of another issuer")
    return found.generation


def check_document(stored: bytes) -> _core.LogHead | None:
    """Raise Corrupt unless it is a document, or a log that Starfish wrote as one, with the hash that it
    names. Where Starfish keeps the elements in chunks its head is returned: they decide on its hash."""
    try:
        document = _core.read_document(stored)
    except DocumentCorrupt:
        raise Corrupt("it does not read as a document") from None
    if document.hash in _hashes(document.data):
        return None
    head = _log(stored, _FIELD)
    if head is not None and head.is_chunked:
        return head
    if document.hash not in _log_hashes(document.data):
        raise Corrupt(_MISMATCH)
    return None


def check_chunks(stored: bytes, head: _core.LogHead, chunks: list[bytes]) -> None:
    """Raise Corrupt unless these are all chunks of the log whose head is `stored`."""
    try:
        log = head.gather(chunks, whole=True)
    except DocumentCorrupt:
        raise Corrupt("its chunks do not read as its elements, or some are missing") from None
    members = orjson.loads(stored)
    # A crash may have kept the head from knowing the newest elements: then it is no hash of theirs.
    if members.get("n") == log.count and members.get("hash") not in _hashes_after(log):
        raise Corrupt(_MISMATCH)


def check_chunk(stored: bytes) -> None:
    """Raise Corrupt unless it is a chunk of a log of Starfish's."""
    empty = _core.LogHead.read(b'{"data":{},"seg":true}', _FIELD)
    try:
        empty.gather([stored])
    except DocumentCorrupt:
        raise Corrupt("it does not read as a chunk of a log") from None


def _hashes(text: bytes) -> Iterator[str]:
    """What may stand as the hash of a JSON text: that of the text as it is, or of the canonical one, or of
    that with all digits of its whole numbers, as Starfish's Python server has them."""
    yield _sha256(text)
    try:
        canonical = _core.canonicalize(text)
    except PysyncError:
        return
    yield _sha256(canonical)
    yield _sha256(_TOKEN.sub(_with_all_digits, canonical))


def _log_hashes(data: bytes) -> Iterator[str]:
    """The hashes of the logs that `data` may hold, each under a member of its own."""
    members = orjson.loads(data)
    for field in (name for name, value in members.items() if isinstance(value, list)):
        # Without the hash that it names the core makes that of its elements.
        log = _log(b'{"data":%b}' % data, field)
        if log is not None and log.count:
            yield from _hashes_after(log)


def _hashes_after(log: _core.LogHead) -> Iterator[str]:
    """What may stand as the hash of a log after its last element."""
    if log.count:
        last = orjson.loads(log.slice([], True, newest=1))["data"]
        yield from _hashes(orjson.dumps({"last": last, "n": log.count}))


def _with_all_digits(token: re.Match[bytes]) -> bytes:
    return str(int(float(token[0]))).encode() if _WHOLE.fullmatch(token[0]) else token[0]


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _log(stored: bytes, field: str) -> _core.LogHead | None:
    try:
        return _core.LogHead.read(stored, field)
    except DocumentCorrupt:
        return None
