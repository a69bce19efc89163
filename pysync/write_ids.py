"""Write ids, which distinguish a write from every other, even from one of the same bytes.

A write id is 64 random bits as 16 hex digits. It is stored as white space after the JSON text, where no
parser sees it: a line feed and 64 spaces or tabs, one for each bit.
"""

import re
import secrets
from typing import Final

_DIGITS: Final = str.maketrans("01", " \t")
WRITE_ID_BYTES: Final = 65
"""Number of bytes that `with_write_id` appends."""
_is_write_id = re.compile(rb"\n[ \t]{64}").fullmatch


def new_write_id() -> str:
    """Return a random write id."""
    return secrets.token_hex(8)


def with_write_id(body: bytes, write_id: str) -> bytes:
    """Return `body` with the write id after it."""
    return body + as_whitespace(write_id)


def has_write_id(body: bytes, write_id: str) -> bool:
    """Return True if `body` ends with this write id."""
    return body.endswith(as_whitespace(write_id))


def strip_write_id(body: bytes) -> bytes:
    """Return `body` without its write id, if it has one."""
    return body[:-WRITE_ID_BYTES] if _is_write_id(body[-WRITE_ID_BYTES:]) else body


def as_whitespace(write_id: str) -> bytes:
    """Return the bytes that `with_write_id` appends."""
    return f"\n{int(write_id, 16):064b}".translate(_DIGITS).encode()
