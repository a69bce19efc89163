"""Sealed data. The server has no keys, so it recognises it by its form.

See docs/reference/protocol.md#sealed-data.
"""

from typing import Any, Final

import orjson

from pysync.auth.certificates import decode_base64
from pysync.errors import DataNotSealed
from pysync.server.http.request_body import validate
from pysync.server.http.router import Match

KEYRING: Final = "_keyring"
_OVERHEAD_BYTES: Final = 28
"""Bytes of the iv and the tag of AES-256-GCM."""
_ENTRY_KEYS: Final = ("subKem", "ephKem", "addedBy")
"""Members of an envelope's entry that hold a key, 32 bytes in hex digits."""


async def check_sealed(match: Match, data: bytes) -> None:
    """Raise DataNotSealed if the collection accepts only sealed data or keyrings, and this is neither."""
    keyrings = match.route.keyrings
    if keyrings is None or match.key.rpartition("/")[2] == KEYRING:
        return
    if not any(keyring.matches(match.key) for keyring in keyrings):
        await validate(_check_sealed_form, data)


def _check_sealed_form(data: bytes) -> None:
    """Raise DataNotSealed unless `data` (JSON text) is sealed by its form: a document or log element under a
    keyring, or an envelope for one recipient, without any other members."""
    value = orjson.loads(data)
    if not (_is_document(value) or _is_envelope(value)):
        raise DataNotSealed


def _is_document(value: dict[str, Any]) -> bool:
    """Return True for `{"_encrypted", "_epoch"?}`."""
    epoch = value.get("_epoch", 1)
    return (
        value.keys() <= {"_encrypted", "_epoch"}
        and type(epoch) is int
        and epoch >= 0
        and _is_ciphertext(value.get("_encrypted"))
    )


def _is_envelope(value: dict[str, Any]) -> bool:
    """Return True for `{"entry", "ct", "v"?}`. The spaces library writes its ciphertext in hex."""
    entry, text = value.get("entry"), value.get("ct")
    return (
        value.keys() <= {"entry", "ct", "v"}
        and value.get("v", 1) == 1
        and isinstance(entry, dict)
        and entry.keys() == {*_ENTRY_KEYS, "ct", "addedSig", "addedAt"}
        and all(_is_hex(entry[name], 32) for name in _ENTRY_KEYS)
        and _is_ciphertext(entry["ct"])
        and isinstance(entry["addedSig"], str)
        and len(decode_base64(entry["addedSig"]) or b"") == 64
        and type(entry["addedAt"]) is int
        and (_is_ciphertext(text) or _is_hex(text))
    )


def _is_ciphertext(text: object) -> bool:
    return isinstance(text, str) and len(decode_base64(text) or b"") >= _OVERHEAD_BYTES


def _is_hex(text: object, size: int | None = None) -> bool:
    """Return True if the text is hex digits of `size` bytes, or by default of any ciphertext."""
    try:
        found = len(bytes.fromhex(text)) if isinstance(text, str) and text.isalnum() else 0
    except ValueError:
        return False
    return found == size if size is not None else found >= _OVERHEAD_BYTES
