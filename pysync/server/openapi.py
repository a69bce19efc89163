"""The service's own description: an OpenAPI 3.1 document, made from the routes that it serves.

An operation is described by the route's action: `_ACTIONS` has a row for each. What they have in common lies
in `openapi_parts`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from pysync import __version__
from pysync.access import Rule
from pysync.config import Collection, Config
from pysync.server.answer import Answer
from pysync.server.openapi_parts import (
    HEADERS,
    PARAMETERS,
    SCHEMAS,
    Json,
    answer,
    array,
    component,
    json_content,
    object_of,
    refusals,
    security_schemes,
)
from pysync.server.routes import Match, Route, RouteTable

REVALIDATED = "Cache-Control: no-cache\r\n"
_ALWAYS = frozenset({400, 408, 500})
"""What any request may be answered: it is malformed, or too slow, or met something unforeseen."""
_STORE = frozenset({503})
_PUSH = frozenset({403, 409, 413, 415, 503})


class Operation(NamedTuple):
    """What one action has of its own. `answers` are those that are no refusal, by status; `refused` are the
    statuses that it may refuse with beyond those of its rule and of every operation."""

    summary: str
    answers: Json
    refused: frozenset[int] = frozenset()
    parameters: tuple[Json, ...] = ()
    body: Json | None = None
    security: list[Json] | None = None


class OpenApi:
    """`GET /openapi.json`. The document is made and encoded when it is first asked for."""

    def __init__(self, config: Config, routes: RouteTable) -> None:
        self._config = config
        self._routes = routes
        self._text = b""

    async def serve(self, request: web.BaseRequest, match: Match) -> Answer:
        """The document as JSON."""
        self._text = self._text or orjson.dumps(describe(self._config, self._routes))
        return Answer(200, self._text, REVALIDATED)


def describe(config: Config, routes: RouteTable) -> Json:
    """The OpenAPI 3.1 document of a service with these `routes`: every one of them, and nothing else.

    HEAD is left out: it is answered wherever GET is.
    """
    paths: dict[str, Json] = {}
    for method, route in sorted(routes, key=lambda each: each[1].template):
        paths.setdefault("/" + "/".join(route.template), {})[method.lower()] = _operation(config, route)
    schemas = {
        _schema_name(route): _rebased(route.rule.collection.object_schema, _schema_name(route))
        for _, route in routes
        if route.rule is not None and route.check is not None
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pysync",
            "version": __version__,
            "description": "Documents kept in sync. HEAD is answered wherever GET is; request bodies may be "
            "sent with Content-Encoding: gzip; every answer carries X-Request-Id.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS | schemas,
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": refusals(),
            "securitySchemes": security_schemes(config.auth.admin_token is not None),
        },
    }


def _operation(config: Config, route: Route) -> Json:
    """The operation object of a route."""
    described = _ACTIONS[route.action](config, route)
    refused = _ALWAYS | described.refused
    if config.server.public_hosts:
        refused |= {421}
    security = described.security or [{}]
    if route.rule is not None:
        refused |= _refused_by(route.rule)
        security = _security(config, route.rule)
    answers = described.answers | {
        str(status): component("responses", f"Refused{status}") for status in refused
    }
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": component("schemas", "PathParameter")}
        for part in route.template
        if part.startswith("{")
    ]
    operation = {
        "operationId": _operation_id(route),
        "tags": [route.collection or "service"],
        "summary": described.summary,
        "parameters": [*parameters, *described.parameters],
        "responses": dict(sorted(answers.items())),
        "security": security,
    }
    if described.body is not None:
        operation["requestBody"] = {"required": True, "content": json_content(described.body)}
    return operation


def _operation_id(route: Route) -> str:
    """A name of its own for each operation: the path, with the collection in place of the key."""
    if route.rule is None:
        return "/".join(route.template)
    return "/".join((*route.template[: route.key_from], route.rule.collection.name))


def _refused_by(rule: Rule) -> frozenset[int]:
    refused = {401, 403, 503} if rule.examines else set()
    return frozenset(refused | {429} if rule.limit is not None else refused)


def _security(config: Config, rule: Rule) -> list[Json]:
    """The ways to present oneself, any one of which will do; the empty one is not to."""
    ways: list[Json] = [{}] if rule.admits_anonymous else []
    return ways + _credentials(config) if rule.examines else [{}]


def _credentials(config: Config) -> list[Json]:
    signed: Json = {"capability": [], "signature": [], "timestamp": [], "nonce": []}
    ways = [signed, signed | {"presenter": []}]
    return [*ways, {"admin": []}] if config.auth.admin_token is not None else ways


def _pull(config: Config, route: Route) -> Operation:
    return Operation(
        f"Read a document of {_named(route)}",
        _cached(component("schemas", "Document")),
        _STORE,
        (component("parameters", "withKeyring"), component("parameters", "ifNoneMatch")),
    )


def _push(config: Config, route: Route) -> Operation:
    data: Json = {"type": "object"}
    if route.check is not None:
        data = {"allOf": [data, component("schemas", _schema_name(route))]}
    proof = ("authorPubkey", "authorSignature")
    body = object_of(
        {
            "data": data,
            "baseHash": {
                "type": ["string", "null"],
                "description": 'The hash that this write replaces; null: nothing is stored; "": nothing, or '
                "bytes that do not read as a document.",
            },
        }
        | {name: {"type": "string"} for name in proof},
        required=["data"],
    )
    body["dependentRequired"] = {proof[0]: [proof[1]], proof[1]: [proof[0]]}
    return Operation(
        f"Write a document of {_named(route)}, at most {_collection(route).max_body_bytes} bytes",
        {"200": answer("Written.", component("schemas", "Written"))},
        _PUSH,
        (component("parameters", "idempotencyKey"),),
        body,
    )


def _list(config: Config, route: Route) -> Operation:
    page = object_of({"items": array(component("schemas", "PathParameter")), "hasMore": {"type": "boolean"}})
    return Operation(
        f"List {_named(route)}: the values of `{_collection(route).storage_path.rpartition('/')[2]}`",
        {"200": answer("A page, in code-point order.", page)},
        _STORE,
        (component("parameters", "limit"), component("parameters", "after")),
    )


def _revoke(config: Config, route: Route) -> Operation:
    published = object_of({"ok": {"const": True}, "generation": {"type": "integer", "minimum": 0}})
    return Operation(
        "Publish a revocation list",
        {"200": answer("Published.", published)},
        frozenset({403, 409, 503}),
        body=component("schemas", "RevocationList"),
    )


def _alive(config: Config, route: Route) -> Operation:
    state = object_of({"ok": {"const": True}, "ts": component("schemas", "Timestamp")})
    if route.action == "health":
        return Operation("Whether the process answers", {"200": answer("It does.", state)})
    return Operation("Whether documents can be read and written", {"200": answer("They can.", state)}, _STORE)


def _metrics(config: Config, route: Route) -> Operation:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return Operation(
        "Metrics in the text format of Prometheus", {"200": {"description": "Metrics.", "content": content}}
    )


def _version(config: Config, route: Route) -> Operation:
    version = object_of({name: {"type": "string"} for name in ("name", "version", "protocol")})
    return Operation("Name and version of the service", {"200": answer("The version.", version)})


def _openapi(config: Config, route: Route) -> Operation:
    return Operation("This document", {"200": answer("The document.", {"type": "object"})})


_ACTIONS: Mapping[str, Callable[[Config, Route], Operation]] = {
    "pull": _pull,
    "push": _push,
    "list": _list,
    "revoke": _revoke,
    "health": _alive,
    "ready": _alive,
    "metrics": _metrics,
    "version": _version,
    "openapi": _openapi,
}


def _cached(schema: Json) -> Json:
    """The answers of a read that clients may keep."""
    headers = {"ETag": component("headers", "ETag"), "Cache-Control": component("headers", "CacheControl")}
    return {
        "200": answer("Found, or nothing is stored.", schema) | {"headers": headers},
        "304": {"description": "Unchanged since the version that If-None-Match names.", "headers": headers},
    }


def _collection(route: Route) -> Collection:
    assert route.rule is not None, "only routes of a collection ask for it"
    return route.rule.collection


def _named(route: Route) -> str:
    return f"`{route.collection}`"


def _schema_name(route: Route) -> str:
    """The component that holds a collection's objectSchema: its name, spelled with the signs that are allowed."""
    plain = "".join(
        c if c.isascii() and (c.isalnum() or c in ".-") else f"_{ord(c):x}_" for c in route.collection
    )
    return f"Data.{plain}"


def _rebased(schema: Any, name: str) -> Any:
    """An objectSchema whose references within itself lead to where it stands here."""
    if isinstance(schema, Mapping):
        return {
            key: f"#/components/schemas/{name}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else _rebased(value, name)
            for key, value in schema.items()
        }
    return [_rebased(item, name) for item in schema] if isinstance(schema, list | tuple) else schema
