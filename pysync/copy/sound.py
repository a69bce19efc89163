"""Whether a stored object is what it should be: the hash that it carries is that of what it holds."""

import re
from typing import Final

from pysync import _core
from pysync.auth.certificates import read_revocation_list
from pysync.auth.revocation import PREFIX as REVOCATIONS
from pysync.errors import BadRequest, BadSignature, DocumentCorrupt

_CHUNK: Final = re.compile(r"(.+)__seg/[0-9]{16}")
_FIELD: Final = "items"
"""Any name would do: elements in chunks have none."""


class Corrupt(Exception):
    """What is stored is not what it should be; the text says why."""


def check_object(key: str, stored: bytes) -> _core.LogHead | None:
    """Raise Corrupt unless the object at `key` is sound, as far as it can be told from itself. The head of a
    log is returned: what it names is still to be checked."""
    if _core.is_log(stored):
        try:
            return _core.LogHead.read(stored, "")
        except DocumentCorrupt:
            raise Corrupt("its checksum does not match its contents") from None
    if key.startswith(f"{REVOCATIONS}/"):
        check_revocations(key, stored)
    elif log_of_chunk(key, stored) is not None:
        check_chunk(stored)
    else:
        return check_document(stored)
    return None


def expanded(head: _core.LogHead, node: _core.LogNode, stored: bytes) -> list[_core.LogNode]:
    """The nodes below a segment (none) or a block of the index of a log. Raises Corrupt unless `stored` is
    what the head, or the block above it, names."""
    try:
        if node.level:
            return head.expand(stored, node)
        head.slice([(node, stored)], False)
    except DocumentCorrupt:
        raise Corrupt("it is not what the head of its log names") from None
    return []


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
        raise Corrupt("it is not a document, or not the one that was stored") from None
    if not document.verify():
        raise Corrupt("its hash does not match its data")
    if _core.is_document(stored):
        return None
    try:
        head = _core.LogHead.read(stored, _FIELD)
    except DocumentCorrupt:
        return None  # a document
    return head if head.is_chunked else None


def check_chunks(head: _core.LogHead, chunks: list[bytes]) -> None:
    """Raise Corrupt unless these are all chunks of the log with this head."""
    try:
        head.gather(chunks, whole=True)
    except DocumentCorrupt:
        raise Corrupt("its chunks are not the elements that it names, or some are missing") from None


def check_chunk(stored: bytes) -> None:
    """Raise Corrupt unless it is a chunk of a log of Starfish's."""
    empty = _core.LogHead.read(b'{"data":{},"seg":true}', _FIELD)
    try:
        empty.gather([stored])
    except DocumentCorrupt:
        raise Corrupt("it does not read as a chunk of a log") from None
