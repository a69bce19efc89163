"""Header names, media types and error bodies that the client and the server share."""

from typing import Final

import orjson
from multidict import istr

from pysync.errors import CoordinatorUnavailable, PysyncError, StoreUnavailable

# istr computes its case-insensitive form once, which halves the time of a header lookup.
HEADER_AUTHORIZATION: Final = istr("Authorization")
HEADER_SIGNATURE: Final = istr("X-Starfish-Sig")
HEADER_TIMESTAMP: Final = istr("X-Starfish-Ts")
HEADER_NONCE: Final = istr("X-Starfish-Nonce")
HEADER_PUB: Final = istr("X-Starfish-Pub")
HEADER_IDEMPOTENCY_KEY: Final = istr("Idempotency-Key")
HEADER_IF_NONE_MATCH: Final = istr("If-None-Match")
HEADER_RANGE: Final = istr("Range")
HEADER_IF_RANGE: Final = istr("If-Range")
HEADER_LAST_EVENT_ID: Final = istr("Last-Event-ID")
HEADER_REQUEST_ID: Final = istr("X-Request-Id")


def path_of(target: str) -> str:
    """Return the path of a request target, even of one that begins with a scheme and host."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]


def error_body(error: PysyncError) -> bytes:
    """Return the body of an error response: `{"error": text, "code": code}` and the extras of the error. The
    reason why a store or coordinator is unavailable is left out, because it is for operators.
    `errors.from_response` is the inverse.

    See docs/reference/protocol.md#errors.
    """
    is_ours = isinstance(error, StoreUnavailable | CoordinatorUnavailable)
    text = error.default_message if is_ours else error.message
    return orjson.dumps({"error": text, "code": error.code, **error.extras})


MAX_INT: Final = 2**53 - 1
"""The largest integer that every JSON reader represents exactly. No time, number or offset exceeds it."""
CHUNK_BYTES: Final = 256 * 1024
"""Bytes that are read, inflated or written at once of what is not held as a whole."""
MAX_PAGE_SIZE: Final = 1000
"""Maximum number of names in a page of a list."""
MAX_BATCH_ENTRIES: Final = 100
"""Maximum number of entries of a batch, unless the configuration has another one."""
MAX_HASHED_PAGE_SIZE: Final = 5_000
"""Maximum number of names in a page of a list with hashes."""
HASH_DIGITS: Final = 16
"""The first digits of a hash, by which lists and batches name it."""

JSON_TYPE: Final = "application/json"
OCTET_STREAM: Final = "application/octet-stream"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
PARQUET_MIME_TYPES: Final = (PARQUET_TYPE, "application/x-parquet", OCTET_STREAM)
"""Media types that a Parquet file may be pushed with (docs/reference/protocol.md#parquet-files)."""


def clamped_int(digits: str, most: int = MAX_INT) -> int:
    """Return the number, at most `most`. `int` converts at most 4,300 digits."""
    return most if len(digits) > len(str(most)) else min(int(digits), most)
