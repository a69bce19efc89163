"""Marks: what tells one write from every other, also from one of the same bytes.

A mark is 64 random bits as 16 hex digits. It goes where no reader of JSON sees it, as white space after the
text: a line feed and 64 of space and tab.
"""

import re
import secrets
from typing import Final

_DIGITS: Final = str.maketrans("01", " \t")
_WRITE_ID_BYTES: Final = 65
_is_write_id = re.compile(rb"\n[ \t]{64}").fullmatch


def new_write_id() -> str:
    return secrets.token_hex(8)


def with_write_id(body: bytes, write_id: str) -> bytes:
    """`body`, and the mark after it."""
    return body + as_whitespace(write_id)


def has_write_id(body: bytes, write_id: str) -> bool:
    """Whether `with_write_id` made `body` with this mark."""
    return body.endswith(as_whitespace(write_id))


def strip_write_id(body: bytes) -> bytes:
    """What `with_write_id` got; any other body as it is."""
    return body[:-_WRITE_ID_BYTES] if _is_write_id(body[-_WRITE_ID_BYTES:]) else body


def as_whitespace(write_id: str) -> bytes:
    """The number of bytes that `with_write_id` adds."""
    return f"\n{int(write_id, 16):064b}".translate(_DIGITS).encode()
