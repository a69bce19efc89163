"""Which routes a configuration makes: collections, bundles, batches and manifests, each at its place."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from pysync.auth.policy import AccessPolicy
from pysync.config import Action, Collection, Config
from pysync.config.derived import accepts_json
from pysync.config.key_templates import KeyTemplate, params
from pysync.engine.append_log import LogSettings
from pysync.engine.files import FileSettings
from pysync.errors import NotFound, PysyncError
from pysync.plugins.hooks import Hooks
from pysync.server.handlers.append_log import LogHandlers
from pysync.server.handlers.batch import BatchHandler
from pysync.server.handlers.bundle import Bundle, BundleHandler
from pysync.server.handlers.config import Manifest
from pysync.server.handlers.documents import DocumentHandlers
from pysync.server.handlers.events import EventStreamHandler
from pysync.server.handlers.files import FileHandlers
from pysync.server.handlers.listing import ListHandler, PluginFileListHandler
from pysync.server.handlers.projection_wait import ProjectionWaiter
from pysync.server.handlers.service import Examples, ServiceHandlers
from pysync.server.json_schema import compile_schema
from pysync.server.openapi import OpenApi
from pysync.server.responses import Response
from pysync.server.router import Handler, Match, Route, Router
from pysync.server.service import Service
from pysync.server.sse import SSEHub
from pysync.server.stream_authorization import StreamAuthorizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBuilder:
    """What the routes of one service are made of."""

    service: Service
    routes: Router
    projection_waiter: ProjectionWaiter
    stream_authorizer: StreamAuthorizer
    sse_hub: SSEHub
    ops: ServiceHandlers

    @property
    def config(self) -> Config:
        return self.service.config

    def add_all(self) -> None:
        """Fill the table."""
        documents, files = DocumentHandlers(self.service), FileHandlers(self.service)
        for namespace, collections in _namespaces(self.config):
            for collection in collections:
                self._add_collection(namespace, collection, documents, files)
            self._add_bundles(namespace, collections)
            self._add_batch(namespace)
            self._add_stream(namespace, collections)
        self._add_manifests()
        self._add_examples()
        self._add_service(documents)

    def _add_collection(
        self,
        namespace: str | None,
        collection: Collection,
        documents: DocumentHandlers,
        file_handlers: FileHandlers,
    ) -> None:
        path = collection.storage_path
        key = collection.key_template.text
        pull, push, pushes = documents.pull, documents.push, "push"
        files, listed = FileSettings.from_collection(collection), ListHandler(self.service).list
        stored = self.service.hooks.stored_files.get(collection.name)
        if collection.append_only is not None:
            logs = LogHandlers(self.service, LogSettings.from_collection(collection))
            pull, push, pushes = logs.pull, logs.append, "append"
        if files is not None:
            pull, push = file_handlers.pull, file_handlers.push
        if stored is not None:
            files = FileSettings(template=KeyTemplate.of(stored.template), suffix=stored.suffix)
            pull, push = file_handlers.pull, documents.push
            listed = PluginFileListHandler(self.service, stored).list
        if not collection.push_only and collection.bundle is None:
            self._add_action("pull", "GET", pull, namespace, collection, key, files=files)
        if not collection.pull_only:
            answering = self.projection_waiter.wrap_push(collection, push)
            self._add_action("push", "POST", answering, namespace, collection, key, named=pushes, files=files)
        if collection.listable:
            prefix = path.rpartition("/")[0]
            self._add_action("list", "GET", listed, namespace, collection, prefix)

    def _policy(self, namespace: str | None, collection: Collection, action: Action) -> AccessPolicy:
        return AccessPolicy.from_config(
            self.config,
            namespace,
            collection,
            action,
            uses_plugin_roles=self.service.hooks.has_authorize_hooks,
        )

    def _add_action(
        self,
        action: Action,
        method: str,
        handler: Handler,
        namespace: str | None,
        collection: Collection,
        path: str,
        named: str = "",
        files: FileSettings | None = None,
    ) -> None:
        """Serve `action` on `collection` at `path`, a template below the action. The route is `named`
        otherwise where it does something else than the action does to a document."""
        rule = self._policy(namespace, collection, action)
        schema = collection.object_schema
        check = None if schema is None else compile_schema(schema)
        for prefix in _prefixes(self.config, namespace):
            head = segments(f"{prefix}/{action}")
            route = Route(
                handler,
                head + (tuple(path.split("/")) if path else ()),
                params(path),
                named or action,
                _qualified(namespace, collection.name),
                rule,
                len(head),
                _read_headers([rule]),
                check,
                self._keyrings() if collection.enforce_sealed else None,
                files=files,
                alias=prefix != _prefix(self.config, namespace),
            )
            self.routes.add([method], route)

    def _keyrings(self) -> tuple[KeyTemplate, ...]:
        """The templates of keyrings that do not lie below what they open."""
        everything = (found for _, _, collections in self.config.each_namespace() for found in collections)
        return tuple(KeyTemplate.of(one.keyring_path) for one in everything if one.keyring_path is not None)

    def _add_bundles(self, namespace: str | None, collections: Sequence[Collection]) -> None:
        bundles: dict[str, list[AccessPolicy]] = {}
        for collection in collections:
            if collection.bundle is not None and not collection.push_only:
                rule = self._policy(namespace, collection, "pull")
                bundles.setdefault(collection.bundle, []).append(rule)
        for name, rules in bundles.items():
            bundle = Bundle(rules)
            path = rules[0].collection.storage_path
            for prefix in _prefixes(self.config, namespace):
                head = segments(f"{prefix}/pull")
                route = Route(
                    BundleHandler(self.service, bundle).pull,
                    head + tuple(path.split("/")),
                    params(path),
                    "bundle",
                    _qualified(namespace, name),
                    bundle.policy,
                    len(head),
                    _read_headers(rules),
                    alias=prefix != _prefix(self.config, namespace),
                    members=bundle.policies,
                )
                self.routes.add(["GET"], route)

    def _add_batch(self, namespace: str | None) -> None:
        """The batch route of a namespace. Of what batches do not serve it knows the names alone."""
        config = self.config
        collections = config.collections if namespace is None else config.namespaces[namespace].collections
        batched = {
            id(found)
            for found in collections
            if accepts_json(found)
            and not (found.bundle or found.push_only or found.name in self.service.hooks.stored_files)
        }
        rules = [
            (self._policy(namespace, collection, "pull"), id(collection) in batched)
            for collection in collections
        ]
        batch = BatchHandler(self.service, namespace, rules)
        for prefix in _prefixes(config, namespace):
            template = segments(f"{prefix}/batch/pull")
            alias = prefix != _prefix(config, namespace)
            self.routes.add(["GET"], Route(batch.pull, template, (), "batch", namespace or "", alias=alias))

    def _add_stream(self, namespace: str | None, collections: Sequence[Collection]) -> None:
        """The change stream of a namespace that has something to tell of."""
        if not collections:
            return
        rules = [self._policy(namespace, collection, "pull") for collection in collections]
        stream = EventStreamHandler(self.service, rules, self.stream_authorizer, self.sse_hub)
        for prefix in _prefixes(self.config, namespace):
            alias = prefix != _prefix(self.config, namespace)
            route = Route(
                stream.open, segments(f"{prefix}/events"), (), "events", namespace or "", alias=alias
            )
            self.routes.add(["GET"], route)

    def _add_manifests(self) -> None:
        """The routes that tell clients the configuration; `/sync/config` is where a published client asks."""
        if self.config.config_endpoint is None:
            return
        root = Manifest(self.config, self.service.authenticator)
        mount = self.config.server.mount_path
        self._add_manifest(root, f"{mount}/config", alias=False)
        self._add_manifest(root, f"{mount}/sync/config", alias=False)
        for namespace in self.config.namespaces:
            own = Manifest(self.config, self.service.authenticator, namespace)
            for prefix in _prefixes(self.config, namespace):
                alias = prefix != _prefix(self.config, namespace)
                self._add_manifest(own, f"{prefix}/config", alias=alias)

    def _add_manifest(self, manifest: Manifest, path: str, *, alias: bool) -> None:
        route = Route(manifest.serve, segments(path), action="config", alias=alias)
        self.routes.add(["GET"], route)

    def _add_examples(self) -> None:
        """A route for each file, so that there is no other path to ask for."""
        server = self.config.server
        if server.examples is None:
            return
        examples = Examples(server.examples)
        for path in examples.paths:
            template = segments(f"{server.mount_path}/examples/{path}")
            self.routes.add(["GET"], Route(examples.serve, template, action="example"))

    def _add_service(self, documents: DocumentHandlers) -> None:
        mount = self.config.server.mount_path
        for path, handler, action in (
            ("/health", self.ops.health, "health"),
            ("/health/ready", self.ops.ready, "ready"),
            ("/metrics", self.ops.metrics, "metrics"),
            ("/version", self.ops.version, "version"),
            ("/openapi.json", OpenApi(self.config, self.routes).serve, "openapi"),
        ):
            for prefix in {"", mount}:
                self.routes.add(["GET"], Route(handler, segments(prefix + path), action=action))
        revoke = Route(documents.revoke, segments(f"{mount}/revocations"), action="revoke")
        self.routes.add(["POST"], revoke)
        template = segments(f"{mount}/revocations/{{issuer}}")
        issuer = Route(
            documents.revocations, template, ("issuer",), "revocations", key_from=len(template) - 1
        )
        self.routes.add(["GET"], issuer)


def pull_policies(config: Config, hooks: Hooks) -> Iterator[AccessPolicy]:
    """The rule of pulling each collection that is served."""
    for namespace, collections in _namespaces(config):
        for collection in collections:
            yield AccessPolicy.from_config(
                config, namespace, collection, "pull", uses_plugin_roles=hooks.has_authorize_hooks
            )


def key_owner_tables(config: Config, hooks: Hooks) -> list[Router]:
    """For each namespace a table that says which collection a key belongs to, by its rule for pulls."""
    tables = []
    for name, _, collections in config.each_namespace():
        table = Router()
        for collection in collections:
            key = collection.key_template
            rule = AccessPolicy.from_config(
                config, name or None, collection, "pull", uses_plugin_roles=hooks.has_authorize_hooks
            )
            table.add(["GET"], Route(_never_called, key.segments, key.params, policy=rule))
        tables.append(table)
    return tables


def owning_collections(tables: Iterable[Router], key: str) -> list[str]:
    """The collections that a key belongs to, by the tables of `key_owner_tables`."""
    found = []
    for table in tables:
        with suppress(PysyncError):
            rule = table.match("GET", f"/{key}").policy
            found.append(_qualified(rule.namespace, rule.collection.name))
    return found


def segments(path: str) -> tuple[str, ...]:
    """The segments of an absolute path."""
    return tuple(path.split("/")[1:])


def _namespaces(config: Config) -> Iterator[tuple[str | None, tuple[Collection, ...]]]:
    for name, _, collections in config.each_namespace():
        yield name or None, collections


def _prefix(config: Config, namespace: str | None) -> str:
    """The path before an action."""
    mount = config.server.mount_path
    return mount if namespace is None else f"{mount}/{namespace}"


def _prefixes(config: Config, namespace: str | None) -> list[str]:
    """Every path before an action. Published clients ask for a namespace under `/v1`, so it is also there
    where the configuration mounts nothing."""
    own = _prefix(config, namespace)
    return [own] if namespace is None or config.server.mount_path else [own, f"/v1{own}"]


def _qualified(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}/{name}"


def _read_headers(rules: Sequence[AccessPolicy]) -> str:
    """How an answer may be cached that these rules open. What depends on who asks is never
    for everybody.

    See docs/reference/protocol.md#caching.
    """
    public = all("public" in rule.roles and not rule.needs_credentials for rule in rules)
    known_ms = [
        rule.collection.cache_duration_ms for rule in rules if rule.collection.cache_duration_ms is not None
    ]
    if len(known_ms) == len(rules):
        control = f"{'public' if public else 'private'}, max-age={min(known_ms) // 1000}"
    else:
        control = "no-cache" if public else "private, no-cache"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"


async def _never_called(request: web.BaseRequest, match: Match) -> Response:
    """The handler of tables that only say whose a key is."""
    raise NotFound
