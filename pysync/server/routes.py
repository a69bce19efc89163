"""The routes of a configuration: collections, bundles, batches, manifests and service endpoints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from pysync.auth.policy import AccessPolicy, PolicyTable, Use
from pysync.config.key_templates import KeyTemplate
from pysync.config.routes import RouteSpec, routes_of
from pysync.engine.append_log import LogSettings
from pysync.engine.files import FileSettings
from pysync.errors import NotFound, SchemaViolation
from pysync.quotas.accounts import Accounts, qualified_name
from pysync.server.api import Service, owners_of
from pysync.server.api.append_log import LogHandlers
from pysync.server.api.batch import BatchHandler, make_plans
from pysync.server.api.browser_client import serve_client
from pysync.server.api.bundle import BundleHandler
from pysync.server.api.changes import ChangesHandler
from pysync.server.api.delete import DeleteHandler
from pysync.server.api.documents import DocumentHandlers, HistoryHandlers
from pysync.server.api.events import EventStreamHandler
from pysync.server.api.examples import Examples
from pysync.server.api.files import FileHandlers
from pysync.server.api.health import ServiceHandlers
from pysync.server.api.index import Index, add_slash
from pysync.server.api.listing import ListHandler, PluginFileListHandler
from pysync.server.api.manifest import CallerResolver, Manifest
from pysync.server.api.plugin_hooks import ProjectionWaiter
from pysync.server.api.topics import TopicRequests
from pysync.server.api.usage import UsageHandler
from pysync.server.http.responses import Response, cache_headers
from pysync.server.http.router import Handler, Match, Route, Router, Validator
from pysync.server.openapi import OpenApi
from pysync.server.sse import SSEHub, StreamSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBuilder:
    """Builds the routes of one service, with a handler for each `RouteSpec` of its configuration."""

    service: Service
    policies: PolicyTable
    routes: Router
    projection_waiter: ProjectionWaiter
    stream_source: StreamSource
    sse_hub: SSEHub
    ops: ServiceHandlers
    openapi: OpenApi
    accounts: Accounts | None

    def add_all(self) -> None:
        """Add all routes to the router."""
        service, examples = self.service, self._add_examples()
        documents, files = DocumentHandlers(service), FileHandlers(service)
        admin, mount = service.config.server.admin, service.config.server.mount_path
        index = Index(None if admin else f"{mount}/openapi.json", examples, is_version_public=admin is None)
        whole_service: dict[str, Handler] = {
            "index": index.serve,
            "client": serve_client,
            "revoke": documents.revoke,
            "revocations": documents.revocations,
            "health": self.ops.health,
            "ready": self.ops.ready,
            "metrics": self.ops.metrics,
            "version": self.ops.version,
            "openapi": self.openapi.serve,
        }
        plans = make_plans()
        callers = CallerResolver(service.config, service.authenticator)
        for spec in routes_of(service.config):
            name, namespace = spec.namespace or "", spec.namespace
            if spec.action in whole_service:
                self._add(spec, Route(whole_service[spec.action]))
            elif spec.action == "config":
                self._add(spec, Route(Manifest(service.config, callers, namespace).serve))
            elif spec.action == "batch":
                batch = BatchHandler(service, namespace, self._batched(spec), plans)
                self._add(spec, Route(batch.pull, collection=name))
            elif spec.action in ("events", "changes"):
                pulls, source = self._pulls(spec), self.stream_source
                requests = TopicRequests(service, pulls, source.authorizer)
                handler = EventStreamHandler(service, requests, source, self.sse_hub).open
                if spec.action == "changes":
                    handler = ChangesHandler(service, pulls, requests, source).page
                self._add(spec, Route(handler, collection=name))
            elif spec.action == "usage":
                usage = UsageHandler(service, self._pulls(spec))
                self._add(spec, Route(usage.serve, collection=name))
            elif spec.action == "bundle":
                self._add_bundle(spec)
            else:
                self._add_collection(spec, documents, files)

    def _add(self, spec: RouteSpec, route: Route) -> None:
        """Add the route at the paths of `spec`."""
        key = spec.key
        for path in (spec.path, *spec.aliases):
            template = segments(path)
            below = 0 if key is None else len(template) - (len(key.segments) if key.text else 0)
            at_path = replace(
                route,
                template=template,
                param_names=() if key is None else key.params,
                action=spec.action,
                key_from=below,
                alias=path != spec.path,
            )
            self.routes.add([spec.method], at_path)

    def _add_collection(
        self, spec: RouteSpec, documents: DocumentHandlers, file_handlers: FileHandlers
    ) -> None:
        service, (collection,) = self.service, spec.collections
        pull, push = documents.pull, documents.push
        pulls = self.policies.of(spec.namespace, collection, "pull")
        files, listed = FileSettings.from_collection(collection), ListHandler(service, pulls).list
        stored = service.hooks.stored_files.get(collection.name)
        settings = None if collection.append_only is None else LogSettings.from_collection(collection)
        if settings is not None:
            logs = LogHandlers(service, settings)
            pull, push = logs.pull, logs.append
        if files is not None:
            pull, push = file_handlers.pull, file_handlers.push
        if stored is not None:
            files = FileSettings(template=KeyTemplate.of(stored.template), suffix=stored.suffix)
            pull, push = file_handlers.pull, documents.push
            listed = PluginFileListHandler(service, pulls, stored).list
        if collection.history is not None:
            policy = self.policies.of(spec.namespace, collection, "history")
            history = HistoryHandlers(service, collection.history, policy, _read_headers([policy]))
            pull = history.list if spec.action == "history" else history.pull
        handler: Handler = pull
        use: Use = "pull"
        if spec.action == "history":
            use = "history"
        elif spec.action == "list":
            handler, use, files = listed, "list", None
        elif spec.action == "delete":
            delete = DeleteHandler(service, settings).delete
            handler, use = self.projection_waiter.wrap_push(collection, delete), "delete"
        elif spec.action != "pull":
            handler, use = self.projection_waiter.wrap_push(collection, push), "push"
        policy = self.policies.of(spec.namespace, collection, use)
        schema = collection.object_schema
        route = Route(
            handler,
            collection=qualified_name(spec.namespace, collection.name),
            policy=policy,
            read_headers=_read_headers([policy]),
            validator=None if schema is None else compile_schema(schema),
            keyrings=self._keyrings() if collection.enforce_sealed else None,
            files=files,
            charge_of=None if self.accounts is None else self.accounts.of_route(spec.namespace, collection),
        )
        self._add(spec, route)

    def _keyrings(self) -> tuple[KeyTemplate, ...]:
        """Return the templates of keyrings that have a path of their own."""
        paths = (found.keyring_path for _, _, found in self.service.config.each_collection())
        return tuple(KeyTemplate.of(path) for path in paths if path is not None)

    def _add_bundle(self, spec: RouteSpec) -> None:
        policies = self._pulls(spec)
        bundle = BundleHandler(self.service, policies)
        route = Route(
            bundle.pull,
            collection=qualified_name(spec.namespace, spec.collections[0].bundle or ""),
            policy=bundle.policy,
            read_headers=_read_headers(policies),
            members=bundle.policies,
        )
        self._add(spec, route)

    def _pulls(self, spec: RouteSpec) -> list[AccessPolicy]:
        """Return the policies for pulls of the route's collections."""
        return [self.policies.of(spec.namespace, found, "pull") for found in spec.collections]

    def _batched(self, spec: RouteSpec) -> list[tuple[AccessPolicy, bool]]:
        """Return the policy for pulls of each collection, and True if batches serve it. Batches only need the
        names of the others."""
        stored = self.service.hooks.stored_files
        return [
            (policy, found.accepts_json and not (found.bundle or found.push_only or found.name in stored))
            for policy, found in zip(self._pulls(spec), spec.collections, strict=True)
        ]

    def _add_examples(self) -> list[str]:
        """Add a route for each example file, so that no other path is reachable. Return the paths of the
        pages, or that of their index."""
        server = self.service.config.server
        if server.examples is None:
            return []
        examples = Examples(server.examples)
        folder = f"{server.mount_path}/examples"
        for path in examples.paths:
            self.routes.add(["GET"], Route(examples.serve, segments(f"{folder}/{path}"), action="example"))
        if "" not in examples.paths:
            return [f"{folder}/{path}" for path in examples.paths if path.endswith(".html")]
        self.routes.add(["GET"], Route(add_slash, segments(folder), action="example", alias=True))
        return [f"{folder}/"]


def key_owner_tables(policies: PolicyTable) -> list[Router]:
    """Return a table for each namespace that maps a key to the collection that owns it, by its policy for
    pulls."""
    tables: dict[str | None, Router] = {}
    for policy in policies.pulls():
        key = policy.collection.key_template
        route = Route(_never_called, key.segments, key.params, policy=policy)
        tables.setdefault(policy.namespace, Router()).add(["GET"], route)
    return list(tables.values())


def owning_collections(tables: Iterable[Router], key: str) -> list[str]:
    """Return the names of the collections that own a key, by the tables of `key_owner_tables`."""
    policies = [owner.policy for owner in owners_of(tables, key)]
    return [qualified_name(policy.namespace, policy.collection.name) for policy in policies]


def segments(path: str) -> tuple[str, ...]:
    """Return the segments of an absolute path."""
    return tuple(path.split("/")[1:])


def _read_headers(policies: Sequence[AccessPolicy]) -> str:
    """Return the caching headers of a response that these policies allow. A response that depends on the
    caller is never public."""
    is_public = all("public" in policy.roles and not policy.needs_credentials for policy in policies)
    return cache_headers([policy.collection.cache_duration_ms for policy in policies], is_public=is_public)


def compile_schema(schema: Mapping[str, Any] | bool) -> Validator:
    """Return a check of `data` (JSON text) that raises SchemaViolation with the `path` (a JSON pointer) and
    the `validator` (the schema keyword) of the first error. Raises ValueError if this is not a JSON
    Schema."""
    import jsonschema_rs

    # Masked: a message must not quote data that its reader may not be allowed to see.
    validator = jsonschema_rs.validator_for(
        schema if isinstance(schema, bool) else dict(schema), offline=True, mask="value"
    )

    def check(data: bytes) -> None:
        try:
            validator.validate(orjson.loads(data))
        except jsonschema_rs.ValidationError as error:
            keyword = str(error.schema_path[-1]) if error.schema_path else "schema"
            raise SchemaViolation(
                f"Schema validation failed: {error.message}",
                extras={"path": _pointer(error.instance_path), "validator": keyword},
            ) from None

    return check


def _pointer(path: list[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


async def _never_called(request: web.BaseRequest, match: Match) -> Response:
    """Serve as the handler in tables that only map keys to collections."""
    raise NotFound
