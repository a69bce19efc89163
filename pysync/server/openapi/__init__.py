"""The service's own description: an OpenAPI 3.1 document, made from the routes that it serves.

An operation is its route's action (`operations`), with the parameters, refusals and credentials that the
route and its rule bring. What operations share lies in `components`.
"""

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from pysync import __version__
from pysync.auth.policy import AccessPolicy
from pysync.config import Config
from pysync.server.openapi.components import (
    HEADERS,
    PARAMETERS,
    SCHEMAS,
    Json,
    component,
    error_responses,
    security_schemes,
)
from pysync.server.openapi.operations import ACTIONS, Service, credentials, metered, schema_name
from pysync.server.responses import Response
from pysync.server.router import Match, Route, Router

REVALIDATED = "Cache-Control: no-cache\r\n"
_ALWAYS = frozenset({400, 408, 500})
"""What any request may be answered: it is malformed, or too slow, or met something unforeseen."""


class OpenApi:
    """`GET /openapi.json`. The document is made and encoded when it is first asked for."""

    def __init__(self, config: Config, routes: Router) -> None:
        self._config = config
        self._routes = routes
        self._text = b""

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """The document as JSON."""
        self._text = self._text or orjson.dumps(describe(self._config, self._routes))
        return Response(200, self._text, REVALIDATED)


def describe(config: Config, routes: Router) -> Json:
    """The OpenAPI 3.1 document of a service with these `routes`: every one of them, and nothing else.

    HEAD is left out, which is answered wherever GET is, and so are aliases.
    """
    paths: dict[str, Json] = {}
    own = [(method, route) for method, route in routes if not route.alias]
    ordered = sorted(own, key=lambda each: each[1].template)
    service = Service(config, [route for _, route in ordered])
    for method, route in ordered:
        paths.setdefault("/" + "/".join(route.template), {})[method.lower()] = _operation(service, route)
    schemas = {
        schema_name(route): _rebased(route.policy.collection.object_schema, schema_name(route))
        for route in service.routes
        if route.policy is not None and route.validator is not None
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
            "responses": error_responses(),
            "securitySchemes": security_schemes(config.auth.admin_token is not None),
        },
    }


def _operation(service: Service, route: Route) -> Json:
    """The operation object of a route."""
    config = service.config
    described = ACTIONS[route.action](service, route)
    refused = _ALWAYS | described.error_statuses
    if config.server.public_hosts:
        refused |= {421}
    security = described.security or [{}]
    if route.policy is not None:
        refused |= _error_statuses(route.policy)
        security = _security(config, route.policy)
    answers = described.responses | {
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
        operation["requestBody"] = {"required": True, "content": described.body}
    return operation


def _operation_id(route: Route) -> str:
    """A name of its own for each operation: the path, with the collection in place of the key."""
    if route.policy is None:
        return "/".join(route.template)
    bundle = route.policy.collection.bundle
    name = f"bundle:{bundle}" if route.action == "bundle" else route.policy.collection.name
    return "/".join((*route.template[: route.key_from], name))


def _error_statuses(rule: AccessPolicy) -> frozenset[int]:
    refused = {401, 403, 503} if rule.needs_credentials else set()
    return frozenset(refused) | metered([rule])


def _security(config: Config, rule: AccessPolicy) -> list[Json]:
    """The ways to present oneself, any one of which will do; the empty one is not to."""
    ways: list[Json] = [{}] if rule.allows_anonymous else []
    return ways + credentials(config) if rule.needs_credentials else [{}]


def _rebased(schema: Any, name: str) -> Any:
    """An objectSchema whose references within itself lead to where it stands here. Below an `$id` they are
    relative to that, here as there."""
    if isinstance(schema, Mapping):
        if "$id" in schema:
            return schema
        return {
            key: f"#/components/schemas/{name}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else _rebased(value, name)
            for key, value in schema.items()
        }
    return [_rebased(item, name) for item in schema] if isinstance(schema, list | tuple) else schema
