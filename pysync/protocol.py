"""Names on the wire, and the bodies that client and server both know.

Names of media types that client and server both know.
"""

from typing import Final

import orjson
from multidict import istr

from pysync.errors import CoordinatorUnavailable, PysyncError, StoreUnavailable

# istr: text whose case-insensitive form is computed once; a header is found with it in half the time.
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
    """The body of a refusal: `{"error": text, "code": code}` and its extras.
    `errors.from_response` is the way back. Why a store or coordinator cannot be used, operators are told.

    See docs/reference/protocol.md#errors.
    """
    is_ours = isinstance(error, StoreUnavailable | CoordinatorUnavailable)
    text = error.default_message if is_ours else error.message
    return orjson.dumps({"error": text, "code": error.code, **error.extras})


MAX_PAGE_SIZE: Final = 1000
"""Number of names in a page of a list, at most."""

JSON_TYPE: Final = "application/json"
OCTET_STREAM: Final = "application/octet-stream"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
PARQUET_MIME_TYPES: Final = (PARQUET_TYPE, "application/x-parquet", OCTET_STREAM)
"""What Parquet may be pushed as (docs/reference/protocol.md#parquet-files)."""
