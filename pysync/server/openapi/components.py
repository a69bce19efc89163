"""The parts that the operations of the OpenAPI document share: schemas, parameters, headers, refusals."""

from http import HTTPStatus
from typing import Any

from pysync import errors, protocol
from pysync.store import JSON_TYPE

Json = dict[str, Any]


def component(kind: str, name: str) -> Json:
    """A reference to a shared part."""
    return {"$ref": f"#/components/{kind}/{name}"}


def json_content(schema: Json) -> Json:
    """A JSON body of that schema."""
    return {JSON_TYPE: {"schema": schema}}


def response(description: str, schema: Json) -> Json:
    """An answer with a JSON body."""
    return {"description": description, "content": json_content(schema)}


def array(items: Json, max_items: int | None = None) -> Json:
    """An array of `items`."""
    array = {"type": "array", "items": items}
    return array if max_items is None else array | {"maxItems": max_items}


def map_of(values: Json, names: list[str] | None = None) -> Json:
    """An object with any members, or some of those named, each of them one of `values`."""
    map_ = {"type": "object", "additionalProperties": values}
    return map_ if names is None else map_ | {"propertyNames": {"enum": names}}


def object_of(members: Json, required: list[str] | None = None) -> Json:
    """An object with these members, all of them required unless `required` names those that are."""
    return {
        "type": "object",
        "properties": members,
        "required": list(members) if required is None else required,
    }


def error_responses() -> Json:
    """An answer for every status that the table of errors knows, with the codes that it may carry."""
    codes: dict[int, list[str]] = {}
    for code, kind in errors.errors_by_code().items():
        codes.setdefault(kind.status, []).append(code)
    return {f"Refused{status}": _error_response(status, found) for status, found in sorted(codes.items())}


def _error_response(status: int, codes: list[str]) -> Json:
    body = {"allOf": [component("schemas", "Error"), {"properties": {"code": {"enum": codes}}}]}
    refusal = response(HTTPStatus(status).phrase, body)
    headers = {name: component("headers", name.replace("-", "")) for name in _ERROR_HEADERS.get(status, ())}
    return refusal | {"headers": headers} if headers else refusal


_ERROR_HEADERS = {
    401: ("WWW-Authenticate",),
    405: ("Allow",),
    416: ("Content-Range",),
    429: ("Retry-After", "RateLimit", "RateLimit-Policy"),
    503: ("Retry-After",),
}


def _header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}


HEADERS: Json = {
    "ETag": _header("The version of what is answered, in quotes; absent where nothing is stored."),
    "CacheControl": _header("How long, and by whom, the answer may be kept."),
    "ContentRange": _header("Which bytes of the file are answered, and how many it has."),
    "RetryAfter": _header("Seconds to wait before the request may be repeated."),
    "RateLimit": _header("What is left of the limit."),
    "RateLimitPolicy": _header("The limit."),
    "WWWAuthenticate": _header("How to present oneself."),
    "Allow": _header("The methods that the path has."),
}

_COUNT: Json = {"type": "integer", "minimum": 0}
_BOUNDS = ("since", "last", "limit")


def _bound(name: str, description: str) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": _COUNT}


PARAMETERS: Json = {
    "limit": {
        "name": "limit",
        "in": "query",
        "description": "Names in a page; above 1000 it means 1000.",
        "schema": {"type": "integer", "minimum": 1, "default": 100},
    },
    "after": {
        "name": "after",
        "in": "query",
        "description": "Only names after this one.",
        "schema": component("schemas", "PathParameter"),
    },
    "checkpoint": _bound("checkpoint", "Only elements with a greater time, in ms."),
    "since": _bound("since", "The same; `checkpoint` wins."),
    "newest": _bound("limit", "Only that many, the newest."),
    "last": _bound("last", "The same; `limit` wins."),
    "full": {
        "name": "full",
        "in": "query",
        "description": "The whole log, in place of the bounds above.",
        "schema": {"enum": ["1", "true"]},
    },
    "withKeyring": {
        "name": "withKeyring",
        "in": "query",
        "description": "Adds the document's keyring to the answer, where the caller may read it.",
        "schema": {"enum": ["1", "true"]},
    },
    "appendParams": {
        "name": "appendParams",
        "in": "query",
        "description": "Bounds of reads from append-only logs, by collection, one for each param-set.",
        "content": json_content(
            map_of(array({"type": ["object", "null"], "properties": dict.fromkeys(_BOUNDS, _COUNT)}))
        ),
    },
    "ifNoneMatch": {
        "name": protocol.HEADER_IF_NONE_MATCH,
        "in": "header",
        "description": "Versions that the caller has: the answer is 304 where one of them is current.",
        "schema": {"type": "string"},
    },
    "range": {
        "name": protocol.HEADER_RANGE,
        "in": "header",
        "description": "One range of bytes of a file; anything else gets all of it.",
        "schema": {"type": "string"},
    },
    "ifRange": {
        "name": protocol.HEADER_IF_RANGE,
        "in": "header",
        "description": "The version that Range is of: all of the file where another is current.",
        "schema": {"type": "string"},
    },
    "lastEventId": {
        "name": protocol.HEADER_LAST_EVENT_ID,
        "in": "header",
        "description": "The id of the last event that the caller has: what came since is told first.",
        "schema": {"type": "string"},
    },
    "lastEventIdInQuery": {
        "name": "lastEventId",
        "in": "query",
        "description": "The same; the header wins.",
        "schema": {"type": "string"},
    },
    "idempotencyKey": {
        "name": protocol.HEADER_IDEMPOTENCY_KEY,
        "in": "header",
        "description": "Makes the write safe to repeat for ten minutes, with the same data.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    },
}

_TEXT: Json = {"type": "string"}
_PROOF: Json = {"authorPubkey": _TEXT, "authorSignature": _TEXT}
_ENTRY: Json = {
    "data": {"type": "object"},
    "hash": {"$ref": "#/components/schemas/Hash"},
    "timestamp": {"$ref": "#/components/schemas/Timestamp"},
}

SCHEMAS: Json = {
    "Error": object_of(
        {
            "error": _TEXT,
            "code": {"enum": list(errors.errors_by_code())},
            "currentHash": {"type": "string", "description": "Of 409 hash_mismatch."},
            "limit": {"type": "integer", "description": "Of 409 append_limit_exceeded."},
            "path": {"type": "string", "description": "Of 400 schema_violation: a JSON pointer into data."},
            "validator": {"type": "string", "description": "Of 400 schema_violation: the keyword."},
            "requestId": {"type": "string", "description": "Of 500 internal_error."},
        },
        required=["error", "code"],
    ),
    "PathParameter": {
        "type": "string",
        "pattern": r"^(?!\.$)(?!.*\.\.)[A-Za-z0-9._:@-]+$",
        "minLength": 1,
        "maxLength": 255,
    },
    "Hash": {
        "type": "string",
        "description": "SHA-256 of the canonical data; empty where nothing is stored.",
        "pattern": "^([0-9a-f]{64})?$",
    },
    "Timestamp": {"type": "integer", "description": "Milliseconds since the epoch."},
    "HasMore": {
        "const": True,
        "description": "Present if newer elements of the log than those in data were left out.",
    },
    "Entry": object_of(_ENTRY | _PROOF, required=list(_ENTRY)),
    "Document": object_of(
        _ENTRY | _PROOF | {"keyring": {"anyOf": [component("schemas", "Entry"), {"type": "null"}]}},
        required=list(_ENTRY),
    ),
    "Element": object_of(
        {"ts": component("schemas", "Timestamp"), "data": {"type": "object"}} | _PROOF, ["ts", "data"]
    ),
    "BatchEntry": {
        "anyOf": [
            object_of(
                _ENTRY | _PROOF | {"hasMore": component("schemas", "HasMore")},
                required=list(_ENTRY),
            ),
            object_of({"error": _TEXT}),
        ]
    },
    "Member": object_of({"data": {"type": "object"}, "hash": component("schemas", "Hash")}),
    "StreamEvent": object_of(
        {
            "id": {"type": "string", "description": "Where to resume: Last-Event-ID."},
            "event": {"type": "string", "description": "reset: changes are lost; absent: a change."},
            "data": {
                "type": "string",
                "contentMediaType": JSON_TYPE,
                "description": 'Of a change: {"collection","params","hash","timestamp","namespace"?}.',
            },
            "retry": {"type": "integer", "description": "When to come back, in ms: the service has stopped."},
        },
        required=[],
    ),
    "CollectionInfo": object_of(
        {
            "name": _TEXT,
            "maxBodyBytes": {"type": "integer"},
            "encryption": {"enum": ["none", "delegated"]},
            "allowedMimeTypes": array(_TEXT),
            "pullOnly": {"type": "boolean"},
            "pushOnly": {"type": "boolean"},
            "appendOnly": {"type": "object"},
            "ttlMs": {"type": "integer"},
            "forceFullFetch": {"type": "boolean"},
        },
        required=["name", "maxBodyBytes", "encryption", "allowedMimeTypes"],
    ),
    "Written": object_of(
        {
            "hash": component("schemas", "Hash"),
            "timestamp": component("schemas", "Timestamp"),
            "projected": {"const": False, "description": "Lists that the push waited for are behind."},
        },
        required=["hash", "timestamp"],
    ),
    "RevocationList": object_of(
        {
            "iss": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "issUserId": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
            "generation": {"type": "integer", "minimum": 0},
            "revoked": array(object_of({"sub": _TEXT, "nonce": _TEXT})),
            "revokedSubjects": array(object_of({"sub": _TEXT})),
            "sig": _TEXT,
        },
        required=["iss", "issUserId", "generation", "revoked", "sig"],
    ),
}


def security_schemes(admin: bool) -> Json:
    """The ways to present oneself. The four headers of a signed request go together; the fifth names the
    presenter of an audience certificate."""
    schemes = {
        "capability": _in_header(protocol.HEADER_AUTHORIZATION, "`Cap `, then the certificate in base64."),
        "signature": _in_header(protocol.HEADER_SIGNATURE, "Ed25519 signature of the request, in base64."),
        "timestamp": _in_header(protocol.HEADER_TIMESTAMP, "When it was signed, in ms; at most 300 s off."),
        "nonce": _in_header(protocol.HEADER_NONCE, "16 random bytes in base64, good for one request."),
        "presenter": _in_header(protocol.HEADER_PUB, "The presenter's key, for audience certificates."),
    }
    return schemes | {"admin": {"type": "http", "scheme": "bearer"}} if admin else schemes


def _in_header(name: str, description: str) -> Json:
    return {"type": "apiKey", "in": "header", "name": name, "description": description}
