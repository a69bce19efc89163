"""Names on the wire, and the bodies that client and server both know."""

from typing import Final

import orjson

from pysync.errors import PysyncError

HEADER_SIGNATURE: Final = "X-Starfish-Sig"
HEADER_TIMESTAMP: Final = "X-Starfish-Ts"
HEADER_NONCE: Final = "X-Starfish-Nonce"
HEADER_PUB: Final = "X-Starfish-Pub"
HEADER_IDEMPOTENCY_KEY: Final = "Idempotency-Key"
HEADER_REQUEST_ID: Final = "X-Request-Id"


def error_body(error: PysyncError) -> bytes:
    """The body of a refusal: `{"error": text, "code": code}` and its extras (wire section 2).
    `errors.from_answer` is the way back."""
    return orjson.dumps({"error": error.message, "code": error.code, **error.extras})


def written_body(hash_: str, timestamp_ms: int) -> bytes:
    """The answer to a push or an append: `{"hash", "timestamp"}`."""
    return b'{"hash":"%b","timestamp":%d}' % (hash_.encode(), timestamp_ms)
