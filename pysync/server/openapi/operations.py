"""What an action's operations are in the OpenAPI document: `ACTIONS` has a row for each action of a route."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pysync.auth.policy import AccessPolicy
from pysync.config import Collection, Config
from pysync.engine.files import FileSettings
from pysync.server.handlers.service import media_type
from pysync.server.openapi.components import Json, array, component, json_content, map_of, object_of, response
from pysync.server.router import Route

_STORE = frozenset({503})
_PUSH = frozenset({403, 409, 413, 415, 503})
_ONCE = frozenset({422})
"""Further errors of a write that takes an Idempotency-Key."""
_FILE: Json = {"schema": {"type": "string", "format": "binary"}}
_PROOF = ("authorPubkey", "authorSignature")


class Operation(NamedTuple):
    """What one action has of its own. `responses` are those that are no refusal, by status; `error_statuses`
    are the statuses that it may refuse with beyond those of its rule and of every operation; `body` is what
    it takes, by media type."""

    summary: str
    responses: Json
    error_statuses: frozenset[int] = frozenset()
    parameters: tuple[Json, ...] = ()
    body: Json | None = None
    security: list[Json] | None = None


class Service(NamedTuple):
    """What an operation is described by, beside its route."""

    config: Config
    routes: list[Route]


def credentials(config: Config) -> list[Json]:
    """The ways to present oneself with a signed request, or as the operator."""
    signed: Json = {"capability": [], "signature": [], "timestamp": [], "nonce": []}
    ways = [signed, signed | {"presenter": []}]
    return [*ways, {"admin": []}] if config.auth.admin_token is not None else ways


def _pull(service: Service, route: Route) -> Operation:
    log = _collection(route).append_only
    if log is not None:
        return _pull_log(route, log.field or "items")
    if route.files is not None:
        return _pull_file(route, route.files)
    return Operation(
        f"Read a document of {_display_name(route)}",
        _cacheable_responses(component("schemas", "Document")),
        _STORE,
        (component("parameters", "withKeyring"), component("parameters", "ifNoneMatch")),
    )


def _pull_log(route: Route, field: str) -> Operation:
    elements = object_of({field: array(component("schemas", "Element"))})
    members = {
        "data": elements,
        "hash": component("schemas", "Hash"),
        "timestamp": component("schemas", "Timestamp"),
    }
    has_more = {"hasMore": component("schemas", "HasMore")}
    bounds = ("checkpoint", "since", "newest", "last", "full", "ifNoneMatch")
    return Operation(
        f"Read the elements of a log of {_display_name(route)} that are within the bounds",
        _cacheable_responses(object_of(members | has_more, required=list(members))),
        _STORE,
        tuple(component("parameters", name) for name in bounds),
    )


def _pull_file(route: Route, files: FileSettings) -> Operation:
    """A file, or where there is none what a document is answered as."""
    pulled = _cacheable_responses(component("schemas", "Document"))
    types = [files.content_type] if files.content_type else [*files.types] or ["*/*"]
    content = dict.fromkeys(types, _FILE)
    pulled["200"]["content"] = content | pulled["200"]["content"]
    part = {"headers": pulled["200"]["headers"] | {"Content-Range": component("headers", "ContentRange")}}
    pulled["206"] = {"description": "The part that Range asks for.", "content": content} | part
    what = "a document or a file" if files.documents else "a file"
    names = ("ifNoneMatch", "range", "ifRange", *(("withKeyring",) if files.documents else ()))
    return Operation(
        f"Read {what} of {_display_name(route)}",
        pulled,
        _STORE | {416},
        tuple(component("parameters", name) for name in names),
    )


def _push(service: Service, route: Route) -> Operation:
    if route.files is not None and route.files.types:
        return _push_file(route, route.files)
    return Operation(
        f"Write a document of {_display_name(route)}, at most {_collection(route).max_body_bytes} bytes",
        {"200": response("Written.", component("schemas", "Written"))},
        _PUSH | _ONCE,
        (component("parameters", "idempotencyKey"),),
        json_content(_document(route)),
    )


def _push_file(route: Route, files: FileSettings) -> Operation:
    content = dict.fromkeys(files.types, _FILE)
    if files.documents:
        content |= json_content(_document(route))
    what = "a document or a file" if files.documents else "a file"
    return Operation(
        f"Write {what} of {_display_name(route)}, at most {_collection(route).max_body_bytes} bytes",
        {"200": response("Written.", component("schemas", "Written"))},
        _PUSH | _ONCE if files.documents else _PUSH,
        (component("parameters", "idempotencyKey"),) if files.documents else (),
        content,
    )


def _document(route: Route) -> Json:
    """The body of a push of a document."""
    body = object_of(
        {
            "data": _data_schema(route),
            "baseHash": {
                "type": ["string", "null"],
                "description": 'The hash that this write replaces; null: nothing is stored; "": nothing, or '
                "bytes that do not read as a document.",
            },
        }
        | {name: {"type": "string"} for name in _PROOF},
        required=["data"],
    )
    return body | {"dependentRequired": {_PROOF[0]: [_PROOF[1]], _PROOF[1]: [_PROOF[0]]}}


def _append(service: Service, route: Route) -> Operation:
    collection = _collection(route)
    log = collection.append_only
    needs_proof = log is None or log.require_author_signature is not False
    body = object_of(
        {
            "data": _data_schema(route),
            "ts": {
                "type": ["integer", "null"],
                "minimum": 0,
                "description": "The element's time, greater than the last one's, at most 300 s ahead; absent "
                "or null: the server's.",
            },
        }
        | {name: {"type": "string"} for name in _PROOF},
        required=["data", *_PROOF] if needs_proof else ["data"],
    )
    return Operation(
        f"Append an element to a log of {_display_name(route)}, at most {collection.max_body_bytes} bytes",
        {"200": response("Appended.", component("schemas", "Written"))},
        _PUSH | _ONCE,
        (component("parameters", "idempotencyKey"),),
        json_content(body),
    )


def _data_schema(route: Route) -> Json:
    """The `data` that a write sends."""
    data: Json = {"type": "object"}
    if route.validator is None:
        return data
    return {"allOf": [data, component("schemas", schema_name(route))]}


def _bundle(service: Service, route: Route) -> Operation:
    bundle, space = _collection(route).bundle, _namespace(service, route)
    members = [
        AccessPolicy.from_config(service.config, space, collection, "pull")
        for collection in _collections(service, space)
        if collection.bundle == bundle and not collection.push_only
    ]
    found = map_of(component("schemas", "Member"), [rule.collection.name for rule in members])
    document = object_of({"collections": found, "timestamp": component("schemas", "Timestamp")})
    return Operation(
        f"Read the bundle {_display_name(route)}, as far as the caller may",
        _cacheable_responses(document),
        _STORE | metered(members),
        (component("parameters", "ifNoneMatch"),),
    )


def _batch(service: Service, route: Route) -> Operation:
    """Bad credentials are nobody's here, so that they are no reason to refuse."""
    config, space = service.config, _namespace(service, route)
    rules = [
        other.policy
        for other in service.routes
        if other.action == "pull" and other.policy is not None and other.policy.namespace == space
    ]
    most = config.max_collections_per_batch
    sets = {rule.collection.name: array(_param_set(rule.collection), most) for rule in rules}
    names = array({"type": "string", "enum": list(sets)} if sets else {"type": "string"}, most)
    examined = any(rule.needs_credentials for rule in rules)
    return Operation(
        "Read many documents and logs",
        _cacheable_responses(object_of({"collections": map_of(array(component("schemas", "BatchEntry")))})),
        (_STORE if examined else frozenset()) | metered(rules),
        (
            {
                "name": "collections",
                "in": "query",
                "required": True,
                "style": "form",
                "explode": False,
                "schema": names | {"minItems": 1},
            },
            {
                "name": "params",
                "in": "query",
                "description": "Which documents, by collection; absent: one each, the caller's own.",
                "content": json_content(object_of(sets, [])),
            },
            component("parameters", "appendParams"),
            component("parameters", "ifNoneMatch"),
        ),
        security=[{}, *credentials(config)] if examined else None,
    )


def _events(service: Service, route: Route) -> Operation:
    config, space = service.config, _namespace(service, route)
    rules = [
        AccessPolicy.from_config(config, space, collection, "pull")
        for collection in _collections(service, space)
    ]
    readable = [rule for rule in rules if not rule.collection.push_only]
    is_open = bool(readable) and not any(rule.needs_credentials for rule in rules)
    names = [rule.collection.name for rule in rules]
    value = {"anyOf": [component("schemas", "PathParameter"), {"type": "number"}]}
    sets = {
        rule.collection.name: object_of(dict.fromkeys(rule.collection.path_template.params, value), [])
        for rule in rules
    }
    return Operation(
        "Hear of writes as they happen",
        {
            "200": {
                "description": "A stream without an end: `id` and `data` of each change, comments in "
                "between, and `event: reset` where changes are lost.",
                "content": {"text/event-stream": {"schema": component("schemas", "StreamEvent")}},
            }
        },
        frozenset({503} if is_open else {401, 403, 503}) | metered(readable),
        (
            {
                "name": "collections",
                "in": "query",
                "description": "Absent: all that the caller may read.",
                "style": "form",
                "explode": False,
                "schema": array({"type": "string", "enum": names}) | {"minItems": 1},
            },
            {
                "name": "params",
                "in": "query",
                "description": "The values that parameters must have, by collection; absent: any.",
                "content": json_content(object_of(sets, [])),
            },
            component("parameters", "lastEventId"),
            component("parameters", "lastEventIdInQuery"),
        ),
        security=None if is_open else [{}, *credentials(config)],
    )


def _param_set(collection: Collection) -> Json:
    """What names one document of a batch: all parameters, but an `{identity}` that is the caller's."""
    value = {"anyOf": [component("schemas", "PathParameter"), {"type": "number"}]}
    names = collection.path_template.params
    return object_of(dict.fromkeys(names, value), [name for name in names if name != "identity"])


def _config(service: Service, route: Route) -> Operation:
    """Here a certificate need not sign: it only filters what is shown."""
    config = service.config
    manifest = {"collections": array(component("schemas", "CollectionInfo"))}
    if config.namespaces and _namespace(service, route) is None:
        manifest["namespaces"] = map_of(object_of(manifest.copy()), list(config.namespaces))
    filtered = config.config_endpoint is not None and config.config_endpoint.auth == "role-filtered"
    ways: list[Json] = [{}, {"capability": []}, {"capability": [], "presenter": []}]
    if config.auth.admin_token is not None:
        ways.append({"admin": []})
    return Operation(
        "Tell which collections there are" + (" for the caller" if filtered else ""),
        _cacheable_responses(object_of(manifest)),
        parameters=(component("parameters", "ifNoneMatch"),),
        security=ways if filtered else None,
    )


def _list(service: Service, route: Route) -> Operation:
    page = object_of({"items": array(component("schemas", "PathParameter")), "hasMore": {"type": "boolean"}})
    return Operation(
        f"List {_display_name(route)}: the values of `{_collection(route).storage_path.rpartition('/')[2]}`",
        {"200": response("A page, in code-point order.", page)},
        _STORE,
        (component("parameters", "limit"), component("parameters", "after")),
    )


def _example(service: Service, route: Route) -> Operation:
    content = {media_type(route.template[-1]): {"schema": {"type": "string"}}}
    headers = {"ETag": component("headers", "ETag"), "Cache-Control": component("headers", "CacheControl")}
    return Operation(
        "A file of the examples",
        {
            "200": {"description": "The file.", "content": content, "headers": headers},
            "304": {
                "description": "Unchanged since the version that If-None-Match names.",
                "headers": headers,
            },
        },
        frozenset({404}),
        (component("parameters", "ifNoneMatch"),),
    )


def _revoke(service: Service, route: Route) -> Operation:
    published = object_of({"ok": {"const": True}, "generation": {"type": "integer", "minimum": 0}})
    return Operation(
        "Publish a revocation list",
        {"200": response("Published.", published)},
        frozenset({403, 409, 413, 429, 503}),
        body=json_content(component("schemas", "RevocationList")),
    )


def _revocations(service: Service, route: Route) -> Operation:
    return Operation(
        "The revocation list that an issuer, by its user id, has published",
        {"200": response("The list.", component("schemas", "RevocationList"))},
        _STORE | {404},
    )


def _health(service: Service, route: Route) -> Operation:
    state = object_of({"ok": {"const": True}, "ts": component("schemas", "Timestamp")})
    if route.action == "health":
        return Operation("Whether the process answers", {"200": response("It does.", state)})
    return Operation(
        "Whether documents can be read and written", {"200": response("They can.", state)}, _STORE
    )


def _metrics(service: Service, route: Route) -> Operation:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return Operation(
        "Metrics in the text format of Prometheus", {"200": {"description": "Metrics.", "content": content}}
    )


def _version(service: Service, route: Route) -> Operation:
    version = object_of({name: {"type": "string"} for name in ("name", "version", "protocol")})
    return Operation("Name and version of the service", {"200": response("The version.", version)})


def _openapi(service: Service, route: Route) -> Operation:
    return Operation("This document", {"200": response("The document.", {"type": "object"})})


def _cacheable_responses(schema: Json) -> Json:
    """The answers of a read that clients may keep."""
    headers = {"ETag": component("headers", "ETag"), "Cache-Control": component("headers", "CacheControl")}
    return {
        "200": response("Found, or nothing is stored.", schema) | {"headers": headers},
        "304": {"description": "Unchanged since the version that If-None-Match names.", "headers": headers},
    }


def _collection(route: Route) -> Collection:
    assert route.policy is not None, "only routes of a collection ask for it"
    return route.policy.collection


def _namespace(service: Service, route: Route) -> str | None:
    """The namespace that a route lies in."""
    mount = service.config.server.mount_path.split("/")[1:]
    head = route.template[len(mount)]
    return head if head in service.config.namespaces else None


def _collections(service: Service, space: str | None) -> tuple[Collection, ...]:
    return service.config.collections if space is None else service.config.namespaces[space].collections


def metered(rules: list[AccessPolicy]) -> frozenset[int]:
    """What limits on requests lead to: too many of them, or nobody to count them."""
    return frozenset({429, 503} if any(rule.limit is not None for rule in rules) else ())


def _display_name(route: Route) -> str:
    return f"`{route.collection}`"


def schema_name(route: Route) -> str:
    """The component that holds a collection's objectSchema: its name, in the signs that are allowed."""
    plain = "".join(
        c if c.isascii() and (c.isalnum() or c in ".-") else f"_{ord(c):x}_" for c in route.collection
    )
    return f"Data.{plain}"


ACTIONS: Mapping[str, Callable[[Service, Route], Operation]] = {
    "pull": _pull,
    "push": _push,
    "append": _append,
    "list": _list,
    "bundle": _bundle,
    "batch": _batch,
    "events": _events,
    "config": _config,
    "example": _example,
    "revoke": _revoke,
    "revocations": _revocations,
    "health": _health,
    "ready": _health,
    "metrics": _metrics,
    "version": _version,
    "openapi": _openapi,
}
