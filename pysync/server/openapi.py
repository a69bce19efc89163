"""The description of the service: an OpenAPI 3.1 document, built from the routes that it serves.

`openapi.json` beside this module contains everything that does not depend on the configuration. `document`
has the components. `operations` has an operation for each kind of route; its `errors` are the statuses of its
errors beyond those of its policy and of every operation. `parts` has what several of them share. A `<name>`
in it stands for a part, or for a fact of the configuration that this module inserts: names, limits, media
types and schemas.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from pysync import __version__
from pysync.auth.authentication import ADMIN_CALLER
from pysync.auth.policy import AccessPolicy, PolicyTable
from pysync.cache import CACHED_BYTES, BoundedCache
from pysync.config import Collection, Config
from pysync.engine.files import FileSettings
from pysync.errors import errors_by_code
from pysync.protocol import JSON_TYPE
from pysync.server.api.browser_client import TYPES
from pysync.server.api.examples import media_type
from pysync.server.api.manifest import CallerResolver
from pysync.server.http.responses import Response
from pysync.server.http.router import Match, Route, Router

Json = dict[str, Any]
_Name = tuple[str | None, str]
"""The namespace and the name of a collection."""

REVALIDATED = "Cache-Control: no-cache\r\n"
_VARY: Final = "Vary: Authorization\r\n"
_NAME: Final = re.compile("<([a-z ]+)>")
_ALWAYS: Final = frozenset({400, 408, 414, 500})
"""Statuses that any request may receive: malformed, too slow, too long, or an unexpected error."""
_OPEN: Final[list[Json]] = [{}]
"""The security requirement of an operation that needs no credentials."""


class _Facts(NamedTuple):
    """The facts that a route adds to the operation of its kind: the values of names in it, the statuses of
    further errors, and the accepted credentials."""

    values: Mapping[str, Any] = {}
    statuses: frozenset[int] = frozenset()
    security: list[Json] = _OPEN


class OpenApi:
    """`GET /openapi.json`: a description of exactly these `routes`, built at the first request. Unless the
    manifest is open to everyone, it leaves out the collections that the manifest would not show to the
    caller."""

    def __init__(
        self, config: Config, routes: Router, policies: PolicyTable, callers: CallerResolver
    ) -> None:
        endpoint = config.config_endpoint
        self._is_open = endpoint is not None and endpoint.auth == "public"
        self._config = config
        self._router = routes
        self._policies = policies
        self._callers = callers
        self._pulls = policies.pulls()
        self._all = frozenset(map(_name, self._pulls))
        self._texts = BoundedCache[frozenset[_Name], bytes](CACHED_BYTES, len)

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Return the document as JSON."""
        caller = await self._callers.resolve(request)
        shown = self._all
        if not (self._is_open or caller is ADMIN_CALLER):
            shown = frozenset(_name(policy) for policy in self._pulls if policy.is_visible(caller))
        return Response(200, self._text(shown), REVALIDATED + ("" if self._is_open else _VARY))

    def complete(self) -> bytes:
        """Return the description of all routes. Any thread may call it."""
        return self._describe(self._all)

    def _text(self, shown: frozenset[_Name]) -> bytes:
        text = self._texts.get(shown)
        if text is None:
            text = self._describe(shown)
            self._texts.put(shown, text)
        return text

    def _describe(self, shown: frozenset[_Name]) -> bytes:
        description = _Description(self._config, self._router, self._policies, shown)
        return orjson.dumps(description.describe())


class _Description:
    """The description of the routes that read or write the collections `shown`, and of those that belong to
    no collection."""

    def __init__(
        self, config: Config, routes: Router, policies: PolicyTable, shown: frozenset[_Name]
    ) -> None:
        self._config = config
        self._router = routes
        self._policies = policies
        self._shown = shown
        self._facts: Mapping[str, Callable[[Route], _Facts]] = {
            "batch": self._batch,
            "events": self._events,
            "changes": self._events,
            "config": self._manifest,
            "usage": lambda route: _Facts(security=_part("signed")),
            "example": lambda route: _Facts({"type": media_type(route.template[-1])}),
            "client": lambda route: _Facts({"type": TYPES[route.template[-1]]}),
        }

    def describe(self) -> Json:
        """Return the document, which leaves out aliases, and HEAD, which is served wherever GET is."""
        ordered = self._routes()
        paths: dict[str, Json] = {}
        for method, route in ordered:
            paths.setdefault("/" + "/".join(route.template), {})[method.lower()] = self._operation(route)
        values = {"version": __version__, "codes": list(errors_by_code()), "refusals": _refusals()}
        document: Json = _splice(_skeleton()["document"], values) | {"paths": paths}
        components = document["components"]
        if not self._config.auth.admin_token:
            del components["securitySchemes"]["admin"]
        for _, route in ordered:
            if route.policy is not None and route.validator is not None:
                name = _schema_name(route)
                components["schemas"][name] = _rebased(route.policy.collection.object_schema, name)
        return document

    def _routes(self) -> list[tuple[str, Route]]:
        """Return the routes by their paths, except aliases, with their methods."""
        own = [
            (method, replace(route, members=tuple(filter(self._shows, route.members))))
            for method, route in self._router
            if not route.alias and self._shows_route(route)
        ]
        return sorted(own, key=lambda each: each[1].template)

    def _shows(self, policy: AccessPolicy) -> bool:
        return _name(policy) in self._shown

    def _shows_route(self, route: Route) -> bool:
        if route.policy is not None:
            return any(map(self._shows, route.members or (route.policy,)))
        if route.action not in ("batch", "events", "changes", "usage"):
            return True
        space = self._namespace(route)
        return space is None or any(shown == space for shown, _ in self._shown)

    def _operation(self, route: Route) -> Json:
        """Return the operation object of a route."""
        facts = self._facts.get(route.action, self._of_policy)(route)
        operation: Json = _splice(_skeleton()["operations"][_kind(route)], facts.values)
        errors = _ALWAYS | facts.statuses | set(operation.pop("errors"))
        if self._config.server.public_hosts:
            errors |= {421}
        responses = operation["responses"] | {
            str(status): _component("responses", f"Refused{status}") for status in errors
        }
        names = [part[1:-1] for part in route.template if part.startswith("{")]
        at_path = [_splice(_part("path parameter"), {"name": name}) for name in names]
        return operation | {
            "operationId": _operation_id(route),
            "tags": [route.collection or "service"],
            "parameters": at_path + operation["parameters"],
            "responses": dict(sorted(responses.items())),
            "security": facts.security,
        }

    def _of_policy(self, route: Route) -> _Facts:
        """Return the facts of a collection's or a bundle's route; empty ones for any other."""
        policy = route.policy
        if policy is None:
            return _Facts()
        statuses = _metered([policy, *route.members])
        if policy.action == "push" and self._config.quotas is not None:
            statuses |= {507}
        if not policy.needs_credentials:
            return _Facts(_values(route, policy.collection), statuses)
        ways = self._credentials(anonymous=policy.allows_anonymous)
        return _Facts(_values(route, policy.collection), statuses | {401, 403, 503}, ways)

    def _batch(self, route: Route) -> _Facts:
        """Return the facts of a batch route. A batch with invalid credentials is served as anonymous, so they
        cause no error."""
        space, most = self._namespace(route), self._config.max_collections_per_batch
        pulls = [one.policy for _, one in self._routes() if one.action == "pull" and one.policy is not None]
        policies = [policy for policy in pulls if policy.namespace == space]
        sets = {
            policy.collection.name: {
                "type": "array",
                "items": _param_set(policy.collection),
                "maxItems": most,
            }
            for policy in policies
        }
        one = {"type": "string", "enum": list(sets)} if sets else {"type": "string"}
        choice = {"type": "array", "items": one, "maxItems": most, "minItems": 1}
        values, statuses = {"sets": sets, "choice": choice}, _metered(policies)
        if not any(policy.needs_credentials for policy in policies):
            return _Facts(values, statuses)
        return _Facts(values, statuses | {503}, self._credentials(anonymous=True))

    def _events(self, route: Route) -> _Facts:
        config, space = self._config, self._namespace(route)
        every = config.collections if space is None else config.namespaces[space].collections
        found = [one for one in every if (space, one.name) in self._shown]
        policies = [self._policies.of(space, one, "pull") for one in found]
        readable = [policy for policy in policies if not policy.collection.push_only]
        sets = {one.name: _param_set(one) | {"required": []} for one in found}
        values, statuses = {"names": [one.name for one in found], "sets": sets}, _metered(readable)
        if readable and not any(policy.needs_credentials for policy in policies):
            return _Facts(values, statuses)
        return _Facts(values, statuses | {401, 403}, self._credentials(anonymous=True))

    def _manifest(self, route: Route) -> _Facts:
        """Return the facts of the manifest. Here a certificate needs no signature, because it only filters
        what is shown."""
        config = self._config
        manifest = _part("manifest")
        if config.namespaces and self._namespace(route) is None:
            manifest = _splice(_part("manifest of namespaces"), {"names": list(config.namespaces)})
        if config.config_endpoint is None or config.config_endpoint.auth != "role-filtered":
            return _Facts({"for whom": "", "manifest": manifest})
        ways = _part("shown") + self._admin()
        return _Facts({"for whom": " for the caller", "manifest": manifest}, security=ways)

    def _namespace(self, route: Route) -> str | None:
        """Return the namespace of a route; None for the root."""
        head = route.template[self._config.server.mount_path.count("/")]
        return head if head in self._config.namespaces else None

    def _credentials(self, *, anonymous: bool) -> list[Json]:
        """Return the accepted kinds of credentials, any one of which suffices. An empty one stands for no
        credentials."""
        return [*(_OPEN if anonymous else []), *_part("signed"), *self._admin()]

    def _admin(self) -> list[Json]:
        return [{"admin": []}] if self._config.auth.admin_token else []


def _name(policy: AccessPolicy) -> _Name:
    return policy.namespace, policy.collection.name


def _kind(route: Route) -> str:
    """Return the name of the route's operation in `openapi.json`."""
    action, files = route.action, route.files
    if action == "pull" and route.policy is not None and route.policy.collection.append_only is not None:
        return "pull_log"
    if action == "pull" and route.policy is not None and route.policy.collection.history is not None:
        return "pull_kept"
    if action == "pull" and files is not None:
        return "pull_mixed" if files.documents else "pull_file"
    return "push_file" if action == "push" and files is not None and _is_file_push(files) else action


def _is_file_push(files: FileSettings) -> bool:
    """Return True if a collection with these files accepts no documents."""
    return bool(files.types) and not files.documents


def _values(route: Route, collection: Collection) -> Json:
    """Return the values of names in the operations on a collection."""
    files, log = route.files or FileSettings(documents=True), collection.append_only
    what = "a document or a file" if files.documents else "a file"
    if route.files is None or (route.action == "push" and not files.types):
        what = "a document"
    needs_proof = log is None or log.require_author_signature is not False
    data: Json = {"type": "object"}
    if route.validator is not None:
        data = {"allOf": [data, _component("schemas", _schema_name(route))]}
    types = [files.content_type] if files.content_type else files.types or ["*/*"]
    pulled = dict.fromkeys(types, _part("file"))
    pushed: Json = dict.fromkeys(files.types, _part("file"))
    if not _is_file_push(files):
        pushed[JSON_TYPE] = {"schema": _splice(_part("document"), {"data": data})}
    return {
        "collection": route.collection,
        "names": [policy.collection.name for policy in route.members],
        "bytes": collection.max_body_bytes,
        "data": data,
        "required": ["data", *(["authorPubkey", "authorSignature"] if needs_proof else [])],
        "field": "" if log is None else log.field or "items",
        "last": collection.path_template.segments[-1],
        "pulled": pulled,
        "pulled or document": pulled | {JSON_TYPE: {"schema": _component("schemas", "Document")}},
        "pushed": pushed,
        "what": what,
    }


def _metered(policies: Iterable[AccessPolicy]) -> frozenset[int]:
    """Return the statuses that rate limits can cause: too many requests, or unavailable counters."""
    return frozenset({429, 503} if any(policy.limit is not None for policy in policies) else ())


def _param_set(collection: Collection) -> Json:
    """Return the schema of the parameters that name one document of a batch. All are required except
    `{identity}`, which defaults to the caller's."""
    names = collection.path_template.params
    return {
        "type": "object",
        "properties": dict.fromkeys(names, _part("parameter value")),
        "required": [name for name in names if name != "identity"],
    }


def _refusals() -> Json:
    """Return a response for every status in the table of errors, with the codes that it may carry."""
    codes: dict[int, list[str]] = {}
    for code, kind in errors_by_code().items():
        codes.setdefault(kind.status, []).append(code)
    headers = _part("refusal headers")
    return {
        f"Refused{status}": _splice(_part("refusal"), {"phrase": HTTPStatus(status).phrase, "codes": found})
        | ({"headers": headers[str(status)]} if str(status) in headers else {})
        for status, found in sorted(codes.items())
    }


def _operation_id(route: Route) -> str:
    """Return the unique id of an operation: the path, with the name of the collection in place of the key."""
    if route.policy is None:
        return "/".join(route.template)
    bundle = route.policy.collection.bundle
    name = f"bundle:{bundle}" if route.action == "bundle" else route.policy.collection.name
    path = "/".join((*route.template[: route.key_from], name))
    return f"{path}#delete" if route.action == "delete" else path


def _schema_name(route: Route) -> str:
    """Return the name of the component with a collection's objectSchema: its name, in characters that OpenAPI
    allows."""
    plain = "".join(
        c if c.isascii() and (c.isalnum() or c in ".-") else f"_{ord(c):x}_" for c in route.collection
    )
    return f"Data.{plain}"


def _rebased(schema: Any, name: str) -> Any:
    """Return an objectSchema whose internal references point to its place in the document. References below
    an `$id` are relative to that and stay as they are."""
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


def _component(kind: str, name: str) -> Json:
    """Return a reference to a shared component."""
    return {"$ref": f"#/components/{kind}/{name}"}


@cache
def _skeleton() -> Json:
    """Return the content of `openapi.json`."""
    skeleton: Json = orjson.loads(Path(__file__).with_suffix(".json").read_bytes())
    return skeleton


def _part(name: str) -> Any:
    return _skeleton()["parts"][name]


def _splice(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the part in which each `<name>` is replaced by the value of that name, or by the part
    of that name. Within a longer text the value is inserted as text."""
    if isinstance(part, Mapping):
        return {_splice(name, values): _splice(value, values) for name, value in part.items()}
    if isinstance(part, list):
        return [_splice(item, values) for item in part]
    if not isinstance(part, str):
        return part
    whole = _NAME.fullmatch(part)
    if whole is None:
        return _NAME.sub(lambda found: str(values[found[1]]), part)
    return values[whole[1]] if whole[1] in values else _splice(_part(whole[1]), values)
