"""Marks: what tells one write from every other, also from one of the same bytes.

A mark is 64 random bits as 16 hex digits. It goes where no reader of JSON sees it, as white space after the
text: a line feed and 64 of space and tab.
"""

import re
import secrets
from typing import Final

_DIGITS: Final = str.maketrans("01", " \t")
_BLANK_BYTES: Final = 65
_is_blank = re.compile(rb"\n[ \t]{64}").fullmatch


def new_mark() -> str:
    return secrets.token_hex(8)


def marked(body: bytes, mark: str) -> bytes:
    """`body`, and the mark after it."""
    return body + blank(mark)


def bears(body: bytes, mark: str) -> bool:
    """Whether `marked` made `body` with this mark."""
    return body.endswith(blank(mark))


def unmarked(body: bytes) -> bytes:
    """What `marked` got; any other body as it is."""
    return body[:-_BLANK_BYTES] if _is_blank(body[-_BLANK_BYTES:]) else body


def blank(mark: str) -> bytes:
    """The number of bytes that `marked` adds."""
    return f"\n{int(mark, 16):064b}".translate(_DIGITS).encode()
