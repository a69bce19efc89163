"""All errors of pysync. A class defines the code, the status and the default message.

A middleware turns errors into responses (`protocol.error_body`), and the client raises the same classes from
those responses (`from_response`). Errors of other libraries are translated where they enter pysync.
docs/reference/errors.md is generated from these docstrings: the first paragraph says what an error means.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

CHECKS: Final = {
    "admin token", "audience", "certificate", "clock", "expired", "host", "no credentials", "not valid yet",
    "no timestamp or nonce of the right form", "origin", "plugins without before_delete", "replay", "revoked",
    "restrictions", "roles", "scope", "signature", "the key belongs to another collection", "usage",
}  # fmt: skip
"""The checks that a request may fail: the beginnings of `PysyncError.reason`, up to a colon."""


class PysyncError(Exception):
    """Base class of all errors. `message` is the text that clients match on, `code` is stable, and `extras`
    are further members of the response body."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    default_message: ClassVar[str] = "Internal error"
    reason: str = ""
    """The check that failed. It goes to the operator's log and never to the caller."""

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, message: str | None = None
    ) -> None:
        if status is not None:
            cls.status = status
        if code is not None:
            cls.code = code
        if message is not None:
            cls.default_message = message

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

    @property
    def check(self) -> str:
        """The check that failed, if it is one of `CHECKS`, else the code: one of a bounded number."""
        check = self.reason.partition(":")[0]
        return check if check in CHECKS else self.code


class BadRequest(PysyncError, status=400, code="bad_request", message="Bad request"):
    """The request is malformed: its body is incomplete or cannot be decoded, or a header is unusable."""


class InvalidPathParameter(BadRequest, code="invalid_path_parameter", message="Invalid path parameter"):
    """A path parameter, or the whole key, is not one that a path may have."""


class InvalidJson(BadRequest, code="invalid_json", message="Invalid JSON body"):
    """The body is not JSON, or contains `NaN`, a lone surrogate or a number beyond a double."""


class BodyTooDeep(BadRequest, code="body_too_deep", message="Body nesting too deep"):
    """Objects and arrays in the body nest more than 64 deep."""


class BodyNotObject(BadRequest, code="body_not_object", message="Body must be a JSON object"):
    """The body is JSON, but not an object."""


class InvalidData(BadRequest, code="invalid_data", message="Missing or invalid data"):
    """`data` is missing, or not an object."""


class InvalidBaseHash(BadRequest, code="invalid_base_hash", message="baseHash must be a string or null"):
    """`baseHash` is neither a string nor null."""


class AuthorProofMissing(
    BadRequest, code="author_proof_missing", message="author proof requires authorPubkey and authorSignature"
):
    """A document carries only one of `authorPubkey` and `authorSignature`."""


class SchemaViolation(BadRequest, code="schema_violation", message="Schema validation failed"):
    """`data` does not satisfy the collection's `objectSchema`."""


class InvalidWritten(BadRequest, code="invalid_written", message="Invalid written parameter"):
    """`written` of a push is not a time in milliseconds."""


class InvalidLimit(BadRequest, code="invalid_limit", message="Invalid limit parameter"):
    """`limit` is not a number that a list or a log accepts."""


class InvalidAfter(BadRequest, code="invalid_after", message="Invalid after parameter"):
    """`after` of a list is not a name that a path parameter may have."""


class InvalidSince(BadRequest, code="invalid_since", message="Invalid since parameter"):
    """`since` of changes is not a cursor of the form that a server gives."""


class HashesNotAvailable(BadRequest, code="hashes_not_available", message="hashes_not_available"):
    """A list has no hashes in a bucket, where a plugin gives roles, and for callers who may not pull what it
    names, or from whom `fieldPermissions` hide members."""


class InvalidRevocation(BadRequest, code="invalid_revocation", message="Invalid revocation list"):
    """The body is not a revocation list, or it revokes nothing that is still valid and its issuer is neither
    named in the configuration nor the owner of stored data."""


class MissingCollections(
    BadRequest, code="missing_collections", message="Missing required query parameter: collections"
):
    """A batch pull names no collection."""


class UnknownCollection(BadRequest, code="unknown_collection", message="Collection not found"):
    """A change stream names a collection that does not exist in this namespace."""


class InvalidParams(BadRequest, code="invalid_params", message="Invalid params parameter"):
    """`params` of a batch or a change stream is malformed."""


class InvalidAppendParams(BadRequest, code="invalid_append_params", message="Invalid appendParams parameter"):
    """`appendParams` of a batch is malformed, or does not fit `params`."""


class InvalidKnown(BadRequest, code="invalid_known", message="Invalid known parameter"):
    """`known` of a batch is malformed, or does not fit `params`."""


class TooManyCollections(BadRequest, code="too_many_collections", message="Too many collections"):
    """A batch names more collections, or reads more documents, than `maxCollectionsPerBatch`."""


class BatchAppendBudgetExceeded(
    BadRequest, code="batch_append_budget_exceeded", message="Batch append element budget exceeded"
):
    """A batch may return more log elements than `maxBatchAppendElements`."""


class BatchTooLarge(BadRequest, code="batch_too_large", message="Batch answer too large"):
    """The response to a batch would be larger than `maxBatchBytes`."""


class BatchKeyDenied(BadRequest, code="batch_key_denied", message="batch_key_denied"):
    """A batch names a collection that ends in one of `batchKeyDenySuffixes`, or a key whose last segment is
    one."""


class DataNotSealed(BadRequest, code="not_sealed", message="Data is not sealed"):
    """The collection has `enforceSealed`, and the data is not sealed."""


class AppendProofMissing(
    BadRequest, code="append_proof_missing", message="append requires authorPubkey and authorSignature"
):
    """The log requires an author proof, and the append has none."""


class InvalidTs(BadRequest, code="invalid_ts", message="ts must be a non-negative integer"):
    """`ts` of an append is not an integer from 0."""


class TsTooFarAhead(BadRequest, code="ts_too_far_ahead", message="ts is too far in the future"):
    """`ts` of an append is more than 300 s in the future."""


class InvalidCheckpoint(BadRequest, code="invalid_checkpoint", message="Invalid checkpoint"):
    """`checkpoint` of a log is not a canonical decimal number."""


class InvalidLast(BadRequest, code="invalid_last", message="Invalid last"):
    """`last` of a log is not a canonical decimal number."""


class CheckpointTooOld(BadRequest, code="checkpoint_too_old", message="checkpoint_too_old"):
    """The checkpoint is older than the log's `maxCheckpointAgeMs` allows, or elements after it have left the
    log (`keepElements`, `keepMs`). `earliest` is then the smallest checkpoint after which none have left."""

    @property
    def earliest_ms(self) -> int | None:
        """The smallest checkpoint after which no element has left the log; None if the error is about age."""
        earliest = self.extras.get("earliest")
        return earliest if isinstance(earliest, int) else None


class PullBoundRequired(BadRequest, code="pull_bound_required", message="pull_bound_required"):
    """The pull of a log names no bound."""


class FullWithBounds(BadRequest, code="full_with_bounds", message="full_with_bounds"):
    """The pull of a log asks for `full` and another bound."""


class FullNotAllowed(BadRequest, code="full_not_allowed", message="full_not_allowed"):
    """The log has `allowFull: false`."""


class InvalidEvents(BadRequest, code="invalid_events", message="Missing or invalid events"):
    """A push to a collection of events has no events, or one that is not an object."""


class AppendParamsNotSupported(
    BadRequest, code="append_params_not_supported", message="append_params_not_supported"
):
    """An entry of a batch names log bounds for a collection that is not a log."""


class Unauthorized(PysyncError, status=401, code="unauthorized", message="Unauthorized"):
    """Credentials are missing, invalid, expired, revoked or replayed."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(headers={"WWW-Authenticate": "Cap"}, reason=reason)


class Forbidden(PysyncError, status=403, code="forbidden", message="Forbidden"):
    """The caller may not do this: a role, the certificate's scope, a restriction or a plugin denies it."""


class ForeignOrigin(Forbidden, code="foreign_origin"):
    """A page of another site sent a request that browsers send without a preflight."""


class BadSignature(Forbidden, code="bad_signature", message="bad-signature"):
    """The issuer's signature of a revocation list is not valid."""


class TooManyIssuers(Forbidden, code="too_many_issuers", message="too-many-issuers"):
    """10,000 issuers have revocation lists, and this issuer has none, is not named in the configuration, and
    owns no stored data."""


class NotFound(PysyncError, status=404, code="not_found", message="Not found"):
    """No route has this path."""


class VersionNotFound(PysyncError, status=404, code="version_not_found", message="version_not_found"):
    """The history of the document does not have this version, or does not keep it any more."""


class MethodNotAllowed(PysyncError, status=405, code="method_not_allowed", message="Method not allowed"):
    """The path exists, but not with this method."""


class RequestTimeout(PysyncError, status=408, code="request_timeout", message="Request timeout"):
    """The head or the body of the request did not arrive in time."""


class Conflict(PysyncError, status=409, code="hash_mismatch", message="hash_mismatch"):
    """The document is not at the version that the push names as its base.

    `current_hash` is the stored hash, and `written_ms` when it was written: `""` and 0 if nothing is stored.
    """

    def __init__(self, current_hash: str, written_ms: int = 0) -> None:
        super().__init__(extras={"currentHash": current_hash})
        self.current_hash = current_hash
        self.written_ms = written_ms


class NonMonotonicTimestamp(
    PysyncError, status=409, code="non_monotonic_timestamp", message="non_monotonic_timestamp"
):
    """`ts` of an append is not greater than the time of the last element."""


class AppendLimitExceeded(
    PysyncError, status=409, code="append_limit_exceeded", message="append_limit_exceeded"
):
    """The log already has `limit` elements."""

    def __init__(self, limit: int) -> None:
        super().__init__(extras={"limit": limit})


class KeyConflict(PysyncError, status=409, code="key_conflict", message="key_conflict"):
    """A file would be stored below, or above, the key of another file in a store of folders."""


class StaleGeneration(PysyncError, status=409, code="stale_generation", message="stale-generation"):
    """The issuer has published this generation of its revocation list, or a later one."""


class ReloadRefused(PysyncError, status=409, code="reload_refused", message="Configuration refused"):
    """The configuration was not reloaded; the text says why. The one in force stays."""


class Erased(PysyncError, status=410, code="erased", message="erased"):
    """The versions of this key up to the time `written` of the push were erased, and may not come back."""


class PayloadTooLarge(PysyncError, status=413, code="payload_too_large", message="Payload too large"):
    """The body is larger than the collection's `maxBodyBytes`, as declared, received or inflated."""


class UriTooLong(PysyncError, status=414, code="uri_too_long", message="Request target too long"):
    """The request line is longer than 16 KB."""


class UnsupportedMediaType(
    PysyncError, status=415, code="unsupported_media_type", message="Unsupported media type"
):
    """The collection does not accept this `Content-Type`, or the server this `Content-Encoding`."""


class RangeNotSatisfiable(
    PysyncError, status=416, code="range_not_satisfiable", message="Range not satisfiable"
):
    """The file has none of the bytes that `Range` asks for."""

    def __init__(self, size: int) -> None:
        super().__init__(headers={"Content-Range": f"bytes */{size}"})


class MisdirectedRequest(PysyncError, status=421, code="misdirected_request", message="Misdirected request"):
    """The request names a host that is not in `server.publicHosts`; at the operators' address, one that is
    not in `server.admin.hosts`."""


class OutcomeUnknown(
    PysyncError, status=409, code="outcome_unknown", message="The outcome of an earlier attempt is unknown"
):
    """An earlier attempt with this `Idempotency-Key` ended without an outcome, and what is stored does not
    say whether it took effect. Nothing is written. Pull, decide, and use a new key."""


class IdempotencyKeyReused(
    PysyncError, status=422, code="idempotency_key_reused", message="Idempotency-Key was used for other data"
):
    """The caller used this `Idempotency-Key` for other data at the same key."""


class RateLimited(PysyncError, status=429, code="rate_limited", message="Rate limit exceeded"):
    """The caller made more requests than the limit of this collection."""


class AuthorizationError(PysyncError, status=500, code="authorization_error", message="Authorization error"):
    """The document or plugin that decides on the caller's roles failed."""


class InternalError(PysyncError, status=500, code="internal_error", message="Internal error"):
    """The server met an error that it does not know."""


class DocumentCorrupt(PysyncError, status=500, code="document_corrupt", message="document_corrupt"):
    """The stored bytes are damaged: they do not verify against their hash, or a file is lost.

    `key` is None until the error has been reported. `detail` is for the log.
    """

    key: str | None = None
    detail: str = "its bytes do not verify: restore it from a backup, or push it again"


class Unavailable(PysyncError, status=503, code="unavailable", message="Service unavailable"):
    """Something that the server needs does not answer, or the server is shutting down."""

    def __init__(self, message: str | None = None, *, retry_after_s: int = 1) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after_s)})

    @property
    def detail(self) -> str:
        """The cause, for the operator: the error's own message, otherwise the underlying error."""
        if self.message != self.default_message:
            return self.message
        return str(self.__cause__ or "it does not answer")


class Overloaded(Unavailable, code="overloaded", message="overloaded"):
    """The server has more to do than it can, and left this request undone. It may be sent again."""


class StoreUnavailable(Unavailable, code="store_unavailable", message="store_unavailable"):
    """The store does not answer, so nothing is known about what is stored. A write may have been made, or may
    be made later."""


class CoordinatorUnavailable(Unavailable, code="coordinator_unavailable", message="Service unavailable"):
    """The coordinator is out of reach, or its memory for nonces is full."""


class RolesUnavailable(Unavailable, code="roles_unavailable", message="Unauthorized"):
    """The caller's roles could not be determined within 5 s."""


class QuotaExceeded(PysyncError, status=507, code="quota_exceeded", message="quota_exceeded"):
    """With this write more would be stored than a quota allows. `quota` names it, such as `identity.bytes`;
    `used` is what is stored now, `allowed` the limit. A write that makes a document smaller is always
    accepted."""

    def __init__(self, kind: str, amount: str, used: int, allowed: int) -> None:
        super().__init__(extras={"quota": f"{kind}.{amount}", "used": used, "allowed": allowed})

    @property
    def is_of_bytes(self) -> bool:
        """True if the quota limits bytes."""
        return str(self.extras.get("quota")).endswith(".bytes")


def errors_by_code() -> dict[str, type[PysyncError]]:
    """Return all error classes by code, in the order of this file."""

    def below(parent: type[PysyncError]) -> list[type[PysyncError]]:
        return [found for child in parent.__subclasses__() for found in (child, *below(child))]

    return {kind.code: kind for kind in below(PysyncError) if "code" in vars(kind)}


def from_response(status: int, body: Mapping[str, object], headers: Mapping[str, str]) -> PysyncError:
    """Return the error of a server's error response. An unknown code is resolved by its status."""
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
    """Return the error that the text of a batch entry stands for; a `PysyncError` if it is unknown."""
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
        UriTooLong, UnsupportedMediaType, RangeNotSatisfiable, MisdirectedRequest, RateLimited, InternalError,
        Unavailable, QuotaExceeded,
    )
}  # fmt: skip
