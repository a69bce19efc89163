"""Every refusal of pysync: the class is the code, the status and the text.

    PysyncError
    ├── BadRequest 400            ├── Unauthorized 401         ├── Conflict 409 (hash_mismatch)
    │   ├── InvalidPathParameter  ├── Forbidden 403            ├── KeyConflict 409
    │   ├── InvalidJson           │   ├── BadSignature         ├── StaleGeneration 409
    │   ├── BodyTooDeep           │   └── TooManyIssuers       ├── NonMonotonicTimestamp 409
    │   ├── BodyNotObject         ├── NotFound 404             ├── AppendLimitExceeded 409
    │   ├── InvalidData           ├── MethodNotAllowed 405     ├── PayloadTooLarge 413
    │   ├── InvalidBaseHash       ├── RequestTimeout 408       ├── UnsupportedMediaType 415
    │   │                                                      ├── RangeNotSatisfiable 416
    │   │                                                      ├── Misdirected 421, RateLimited 429
    │   │                                                      └── IdempotencyKeyReused 422
    │   ├── AuthorProofMissing    ├── DocumentCorrupt 500
    │   ├── SchemaViolation       ├── AuthorizationError 500
    │   ├── InvalidLimit          ├── InternalError 500
    │   ├── InvalidAfter          └── Unavailable 503
    │   ├── InvalidRevocation         ├── StoreUnavailable, CoordinatorUnavailable
    │   ├── MissingCollections        └── RolesUnavailable
    │   ├── UnknownCollection
    │   ├── InvalidParams
    │   ├── InvalidAppendParams
    │   ├── TooManyCollections
    │   ├── BatchAppendBudgetExceeded
    │   ├── BatchKeyDenied
    │   ├── AppendParamsNotSupported
    │   ├── AppendProofMissing, InvalidTs, TsTooFarAhead
    │   ├── InvalidCheckpoint, InvalidLast, CheckpointTooOld
    │   ├── InvalidEvents
    │   └── PullBoundRequired, FullWithBounds, FullNotAllowed

One middleware turns them into answers (`wire.error_body`), and the client raises the same classes from
those answers (`from_response`). Foreign exceptions are translated where they enter.
"""

from collections.abc import Mapping
from typing import ClassVar


class PysyncError(Exception):
    """Base of every refusal. `text` is what clients match on, `code` is stable, `extras` join the body."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    default_message: ClassVar[str] = "Internal error"
    reason: str = ""
    """The check that failed: for the operator's log, never for the caller."""

    def __init__(
        self,
        message: str | None = None,
        *,
        extras: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str = "",
    ) -> None:
        self.message = self.default_message if message is None else message
        self.extras: Mapping[str, object] = extras or {}
        self.headers: Mapping[str, str] = headers or {}
        self.reason = reason
        super().__init__(self.message)


class BadRequest(PysyncError):
    status, code, default_message = 400, "bad_request", "Bad request"


class InvalidPathParameter(BadRequest):
    code, default_message = "invalid_path_parameter", "Invalid path parameter"


class InvalidJson(BadRequest):
    code, default_message = "invalid_json", "Invalid JSON body"


class BodyTooDeep(BadRequest):
    code, default_message = "body_too_deep", "Body nesting too deep"


class BodyNotObject(BadRequest):
    code, default_message = "body_not_object", "Body must be a JSON object"


class InvalidData(BadRequest):
    code, default_message = "invalid_data", "Missing or invalid data"


class InvalidBaseHash(BadRequest):
    code, default_message = "invalid_base_hash", "baseHash must be a string or null"


class AuthorProofMissing(BadRequest):
    code, default_message = "author_proof_missing", "author proof requires authorPubkey and authorSignature"


class SchemaViolation(BadRequest):
    code, default_message = "schema_violation", "Schema validation failed"


class InvalidLimit(BadRequest):
    code, default_message = "invalid_limit", "Invalid limit parameter"


class InvalidAfter(BadRequest):
    code, default_message = "invalid_after", "Invalid after parameter"


class InvalidRevocation(BadRequest):
    code, default_message = "invalid_revocation", "Invalid revocation list"


class MissingCollections(BadRequest):
    code, default_message = "missing_collections", "Missing required query parameter: collections"


class UnknownCollection(BadRequest):
    code, default_message = "unknown_collection", "Collection not found"


class InvalidParams(BadRequest):
    code, default_message = "invalid_params", "Invalid params parameter"


class InvalidAppendParams(BadRequest):
    code, default_message = "invalid_append_params", "Invalid appendParams parameter"


class TooManyCollections(BadRequest):
    code, default_message = "too_many_collections", "Too many collections"


class BatchAppendBudgetExceeded(BadRequest):
    code, default_message = "batch_append_budget_exceeded", "Batch append element budget exceeded"


class BatchTooLarge(BadRequest):
    code, default_message = "batch_too_large", "Batch answer too large"


class BatchKeyDenied(BadRequest):
    code, default_message = "batch_key_denied", "batch_key_denied"


class DataNotSealed(BadRequest):
    code, default_message = "not_sealed", "Data is not sealed"


class AppendProofMissing(BadRequest):
    code, default_message = "append_proof_missing", "append requires authorPubkey and authorSignature"


class InvalidTs(BadRequest):
    code, default_message = "invalid_ts", "ts must be a non-negative integer"


class TsTooFarAhead(BadRequest):
    code, default_message = "ts_too_far_ahead", "ts is too far in the future"


class InvalidCheckpoint(BadRequest):
    code, default_message = "invalid_checkpoint", "Invalid checkpoint"


class InvalidLast(BadRequest):
    code, default_message = "invalid_last", "Invalid last"


class CheckpointTooOld(BadRequest):
    code, default_message = "checkpoint_too_old", "checkpoint_too_old"


class PullBoundRequired(BadRequest):
    code, default_message = "pull_bound_required", "pull_bound_required"


class FullWithBounds(BadRequest):
    code, default_message = "full_with_bounds", "full_with_bounds"


class FullNotAllowed(BadRequest):
    code, default_message = "full_not_allowed", "full_not_allowed"


class InvalidEvents(BadRequest):
    """A push to a collection of events is no batch of them."""

    code, default_message = "invalid_events", "Missing or invalid events"


class AppendParamsNotSupported(BadRequest):
    """An entry of a batch names append bounds for what is no log."""

    code, default_message = "append_params_not_supported", "append_params_not_supported"


class Unauthorized(PysyncError):
    status, code, default_message = 401, "unauthorized", "Unauthorized"

    def __init__(self, reason: str = "") -> None:
        super().__init__(headers={"WWW-Authenticate": "Cap"}, reason=reason)


class Forbidden(PysyncError):
    status, code, default_message = 403, "forbidden", "Forbidden"


class ForeignOrigin(Forbidden):
    """A page of another site sent a request that browsers send without a preflight."""

    code = "foreign_origin"


class BadSignature(Forbidden):
    code, default_message = "bad_signature", "bad-signature"


class TooManyIssuers(Forbidden):
    code, default_message = "too_many_issuers", "too-many-issuers"


class NotFound(PysyncError):
    status, code, default_message = 404, "not_found", "Not found"


class MethodNotAllowed(PysyncError):
    status, code, default_message = 405, "method_not_allowed", "Method not allowed"


class RequestTimeout(PysyncError):
    status, code, default_message = 408, "request_timeout", "Request timeout"


class Conflict(PysyncError):
    """The document is not at the base that the push names. `current_hash`, and when that was written: `""`
    and 0 where nothing is stored."""

    status, code, default_message = 409, "hash_mismatch", "hash_mismatch"

    def __init__(self, current_hash: str, written_ms: int = 0) -> None:
        super().__init__(extras={"currentHash": current_hash})
        self.current_hash = current_hash
        self.written_ms = written_ms


class NonMonotonicTimestamp(PysyncError):
    """The `ts` of an append is not greater than the last element's."""

    status, code, default_message = 409, "non_monotonic_timestamp", "non_monotonic_timestamp"


class AppendLimitExceeded(PysyncError):
    """The log holds as many elements as it may (`limit`)."""

    status, code, default_message = 409, "append_limit_exceeded", "append_limit_exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(extras={"limit": limit})


class KeyConflict(PysyncError):
    """A file would lie below, or above, another file's key on a store of folders."""

    status, code, default_message = 409, "key_conflict", "key_conflict"


class StaleGeneration(PysyncError):
    status, code, default_message = 409, "stale_generation", "stale-generation"


class PayloadTooLarge(PysyncError):
    status, code, default_message = 413, "payload_too_large", "Payload too large"


class UnsupportedMediaType(PysyncError):
    status, code, default_message = 415, "unsupported_media_type", "Unsupported media type"


class RangeNotSatisfiable(PysyncError):
    """The file has none of the bytes that are asked for: it has `size`."""

    status, code, default_message = 416, "range_not_satisfiable", "Range not satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(headers={"Content-Range": f"bytes */{size}"})


class MisdirectedRequest(PysyncError):
    status, code, default_message = 421, "misdirected_request", "Misdirected request"


class IdempotencyKeyReused(PysyncError):
    """The `Idempotency-Key` was used before for a write of other data."""

    status, code, default_message = 422, "idempotency_key_reused", "Idempotency-Key was used for other data"


class RateLimited(PysyncError):
    status, code, default_message = 429, "rate_limited", "Rate limit exceeded"


class AuthorizationError(PysyncError):
    """What decides on the caller's roles could not be read."""

    status, code, default_message = 500, "authorization_error", "Authorization error"


class InternalError(PysyncError):
    status, code, default_message = 500, "internal_error", "Internal error"


class DocumentCorrupt(PysyncError):
    """The bytes stored under the key are not a document or log that was stored. `key` is None until the error
    has been reported; `detail` is for the log."""

    status, code, default_message = 500, "document_corrupt", "document_corrupt"
    key: str | None = None
    detail: str = "its bytes do not verify: restore it from a backup, or push it again"


class Unavailable(PysyncError):
    """Something the server needs does not answer now; the request may be repeated after `Retry-After`."""

    status, code, default_message = 503, "unavailable", "Service unavailable"

    def __init__(self, message: str | None = None, *, retry_after_s: int = 1) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after_s)})

    @property
    def detail(self) -> str:
        """What whoever runs the service should know of it: a text of its own, else the cause."""
        if self.message != self.default_message:
            return self.message
        return str(self.__cause__ or "it does not answer")


class StoreUnavailable(Unavailable):
    code, default_message = "store_unavailable", "store_unavailable"


class CoordinatorUnavailable(Unavailable):
    """Replay memory is full or out of reach: a signed request cannot be admitted safely."""

    code, default_message = "coordinator_unavailable", "Service unavailable"


class RolesUnavailable(Unavailable):
    code, default_message = "roles_unavailable", "Unauthorized"


def errors_by_code() -> dict[str, type[PysyncError]]:
    """Every refusal by its code, in the order of this file."""

    def below(parent: type[PysyncError]) -> list[type[PysyncError]]:
        return [found for child in parent.__subclasses__() for found in (child, *below(child))]

    return {kind.code: kind for kind in below(PysyncError) if "code" in vars(kind)}


def from_response(status: int, body: Mapping[str, object], headers: Mapping[str, str]) -> PysyncError:
    """The refusal that an error answer of a server stands for, unknown codes by their status alone."""
    code = str(body.get("code", ""))
    text = str(body.get("error", "")) or f"HTTP {status}"
    known = errors_by_code()
    kind = known.get(code) or known.get(text) or _BY_STATUS.get(status, PysyncError)
    if kind is Conflict:
        return Conflict(str(body.get("currentHash", "")))
    error = kind.__new__(kind)
    extras = {name: value for name, value in body.items() if name not in ("error", "code")}
    PysyncError.__init__(error, text, extras=extras, headers=headers)
    return error


def from_batch_error(text: str) -> PysyncError:
    """The refusal that an entry's error in a batch stands for, with that text; `PysyncError` for others."""
    kind = _BY_BATCH_ERROR.get(text, PysyncError)
    error = kind.__new__(kind)
    PysyncError.__init__(error, text)
    return error


_BY_BATCH_ERROR: dict[str, type[PysyncError]] = {
    **{
        kind.default_message: kind
        for kind in (
            InvalidPathParameter, Forbidden, AuthorizationError, DocumentCorrupt, StoreUnavailable,
            PullBoundRequired, CheckpointTooOld, AppendParamsNotSupported,
        )
    },
    "Collection not found": NotFound,
    "Missing required path parameter": BadRequest,
}  # fmt: skip
_BY_STATUS: dict[int, type[PysyncError]] = {
    kind.status: kind
    for kind in (
        BadRequest, Unauthorized, Forbidden, NotFound, MethodNotAllowed, RequestTimeout, PayloadTooLarge,
        UnsupportedMediaType, RangeNotSatisfiable, MisdirectedRequest, RateLimited, InternalError,
        Unavailable,
    )
}  # fmt: skip
