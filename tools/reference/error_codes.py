"""`docs/reference/errors.md`, from the classes of `pysync.errors`: a docstring is what an error means."""

import inspect
from itertools import groupby

from pysync import errors

HEAD = """\
# Errors

Generated from `pysync/errors.py` by `make reference`.

Every error body is `{"error": text, "code": code}`, with further members where its section says so.
[The protocol](protocol.md#errors) describes what all errors have in common. Match on `code`; Python programs
catch the class: `from pysync.errors import Conflict`. The text below is the usual one. Of `bad_request`,
`forbidden`, `schema_violation`, `unsupported_media_type` and `unavailable` it may say more.

"""

REMEDIES = {
    "bad_request": "Correct the request; the text says what is wrong.",
    "invalid_path_parameter": (
        "Use 1 to 255 of `A-Z a-z 0-9 . _ : @ -` per parameter, without `..`, and at most 1000 bytes per key."
    ),
    "invalid_json": "Send UTF-8 JSON.",
    "body_too_deep": "Flatten the data, or store the inner part as a document of its own.",
    "body_not_object": "Send an object with a member `data`.",
    "invalid_data": 'Send `{"data": {…}}`.',
    "invalid_base_hash": "Send the hash that was pulled, or `null` to create the document.",
    "author_proof_missing": "Send both members, or neither.",
    "schema_violation": (
        "Correct the value at `path`, a JSON pointer; `validator` names the keyword that failed."
    ),
    "invalid_written": "Send the number of milliseconds since 1970, or leave it out.",
    "invalid_limit": "Send a canonical decimal number; for a list it is greater than 0.",
    "invalid_after": "Send the last item of the page before.",
    "invalid_since": "Send a `cursor` or the id of an event as the server gave it, or leave `since` out.",
    "hashes_not_available": "List without `hashes`, and compare in batches, with `known`.",
    "invalid_revocation": "Create the list with `pysync cap revoke`.",
    "missing_collections": "Add the query parameter `collections`.",
    "unknown_collection": "Check the names against `GET /config`.",
    "invalid_params": "Send URL-encoded JSON as the protocol describes it.",
    "invalid_append_params": "Send one element for each param-set, with `since`, `last` or `limit`.",
    "invalid_known": "Send the first 16 digits of a hash, or `null`, for each param-set.",
    "too_many_collections": "Split the batch.",
    "batch_append_budget_exceeded": "Ask for fewer elements, or split the batch.",
    "batch_too_large": "Ask for fewer documents at a time.",
    "batch_key_denied": "Read it with a pull of its own.",
    "not_sealed": "Encrypt the data before you push it.",
    "append_proof_missing": "Sign the element (`pysync append --key FILE`).",
    "invalid_ts": "Send milliseconds since the epoch, or leave `ts` out.",
    "ts_too_far_ahead": "Check the client's clock, or leave `ts` out.",
    "invalid_checkpoint": "Send the `ts` of the last element that was read.",
    "invalid_last": "Send the number of elements.",
    "checkpoint_too_old": "Read the newest elements with `last`, and treat earlier ones as lost.",
    "pull_bound_required": "Add `last`, `checkpoint` or `full`.",
    "full_with_bounds": "Leave one of them out.",
    "full_not_allowed": "Read it by `checkpoint` or `last`.",
    "invalid_events": 'Send `{"data": {"events": [{…}]}}`.',
    "append_params_not_supported": "Leave `appendParams` out for that collection.",
    "unauthorized": (
        "Sign the request anew. The server logs the reason, at level `debug` or with `server.logRefusals`."
    ),
    "forbidden": "Ask the collection's operator for a role, or the issuer for a wider certificate.",
    "foreign_origin": "Add the origin to `server.cors.origins` if the page is yours.",
    "bad_signature": "Sign the list with the issuer's key.",
    "too_many_issuers": "Add the issuer to `auth.trustedIssuers`.",
    "not_found": "Check the path, the namespace and the mount path; `GET /openapi.json` lists all routes.",
    "version_not_found": "Choose a version that `GET {ns}/history/<key>` lists.",
    "method_not_allowed": "Use a method from `Allow`.",
    "request_timeout": "Send the request again on a new connection.",
    "hash_mismatch": "Pull, merge, and push again with `currentHash` as the base.",
    "non_monotonic_timestamp": "Leave `ts` out, or send a later one.",
    "append_limit_exceeded": "Continue in a new log.",
    "key_conflict": "Choose another key.",
    "stale_generation": "Fetch the published list, add to it, and publish the next generation.",
    "reload_refused": "Correct what the text names, or restart the server.",
    "erased": "Forget this version. To write something new at the key, push without `written`.",
    "payload_too_large": "Send less, or raise the limit.",
    "uri_too_long": "Ask for fewer documents at a time.",
    "unsupported_media_type": "Use a type that the text names.",
    "range_not_satisfiable": "Use the size in `Content-Range`.",
    "misdirected_request": "Use a configured host name, or add this one.",
    "idempotency_key_reused": "Use a new key for every write.",
    "outcome_unknown": "Pull, and send the write with a new key if it is still wanted.",
    "rate_limited": "Wait for `Retry-After`, and send the same request again.",
    "authorization_error": "Repair the document; the server's log names it.",
    "internal_error": "Report it with `requestId`; the server's log has the cause.",
    "document_corrupt": 'Push the document with `baseHash: ""`, push the file again, or restore a backup.',
    "unavailable": "Wait for `Retry-After`, and send the request again.",
    "overloaded": "Wait for `Retry-After`, and send the request again.",
    "store_unavailable": "Wait for `Retry-After`, and send the request again.",
    "coordinator_unavailable": "Wait for `Retry-After`, and sign the request again.",
    "roles_unavailable": "Wait for `Retry-After`, and send the request again.",
    "quota_exceeded": "Delete something, or make it smaller; the operator can [raise the quota]"
    "(../how-to/limit-storage.md).",
}
"""What to do about an error, by its code."""

EXTRAS = {
    "append_limit_exceeded": "`limit`: the number of elements that the log may hold",
    "hash_mismatch": '`currentHash`: the hash of the stored document, `""` if there is none that can be read',
    "internal_error": "`requestId`: the id of the request in the server's log",
    "method_not_allowed": "header `Allow`: the methods of this path",
    "range_not_satisfiable": "header `Content-Range: bytes */<size>`",
    "rate_limited": "headers `Retry-After`, `RateLimit` and `RateLimit-Policy`",
    "schema_violation": "`path`: a JSON pointer to the value; `validator`: the keyword that failed",
    "unauthorized": "header `WWW-Authenticate: Cap`",
}
"""Members of the body and headers that an error has beside `error` and `code`."""

CLIENT_SIDE = {"unreachable"}
"""Codes of errors that only the client library raises."""


def page() -> str:
    """The page about every error, with a final line break."""
    kinds = [kind for code, kind in errors.errors_by_code().items() if code not in CLIENT_SIDE]
    kinds.sort(key=lambda kind: kind.status)
    rows = "".join(
        f"| {kind.status} | [`{kind.code}`](#{kind.code}) | `{kind.default_message}` |\n" for kind in kinds
    )
    text = f"{HEAD}| Status | Code | `error` |\n|---|---|---|\n{rows}"
    for status, group in groupby(kinds, lambda kind: kind.status):
        text += f"\n## Status {status}\n"
        text += "".join(map(_section, group))
    return text


def _section(kind: type[errors.PysyncError]) -> str:
    extras = EXTRAS.get(kind.code)
    if issubclass(kind, errors.Unavailable):
        extras = "header `Retry-After`"
    meaning = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    text = f"\n### {kind.code}\n\n`{kind.__name__}`, `{kind.default_message}`. {meaning}\n"
    if extras:
        text += f"\nAlso: {extras}.\n"
    return f"{text}\nWhat to do: {REMEDIES[kind.code]}\n"
