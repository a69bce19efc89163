"""Names on the wire, and the bodies that client and server both know."""

from typing import Final

import orjson

from pysync.errors import PysyncError

SIGNATURE: Final = "X-Starfish-Sig"
TIMESTAMP: Final = "X-Starfish-Ts"
NONCE: Final = "X-Starfish-Nonce"
PRESENTER: Final = "X-Starfish-Pub"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
REQUEST_ID: Final = "X-Request-Id"


def error_body(error: PysyncError) -> bytes:
    """The body of a refusal: `{"error": text, "code": code}` and its extras (wire section 2).
    `errors.from_answer` is the way back."""
    return orjson.dumps({"error": error.message, "code": error.code, **error.extras})
