"""The service, wired: start here. `create_app` builds everything from its arguments and holds it together.

A request goes: aiohttp -> `connection` -> `middleware` -> `routes` -> a handler in `handlers` or `ops`
-> `access` -> `documents` -> the store.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

from aiohttp import web

from pysync import __version__
from pysync.access import Access, Rule
from pysync.bundles import Bundle
from pysync.clock import wall_clock_ms
from pysync.config import Action, Collection, Config, effective_coordinator
from pysync.coordinator import Coordinator, open_coordinator
from pysync.documents import Documents
from pysync.revocation import Revocations
from pysync.schema import compile_schema
from pysync.server.answer import Answer
from pysync.server.batch import BatchPull
from pysync.server.bundles import BundlePull
from pysync.server.callers import Callers
from pysync.server.expiry import Expiry
from pysync.server.handlers import Handlers
from pysync.server.keyrings import Keyrings
from pysync.server.listing import Lists
from pysync.server.manifest import Manifest
from pysync.server.metrics import Metrics
from pysync.server.middleware import Middleware
from pysync.server.openapi import OpenApi
from pysync.server.ops import Ops
from pysync.server.routes import Handler, Route, RouteTable
from pysync.spaces import Spaces
from pysync.store import JSON_TYPE, Store, open_store


class App:
    """A running service without a socket: `handle` answers requests, `close` ends it."""

    def __init__(
        self, config: Config, store: Store, coordinator: Coordinator, now_ms: Callable[[], int]
    ) -> None:
        self.config = config
        self.store = store
        self._coordinator = coordinator
        self._documents = Documents(store, coordinator, now_ms)
        self._revocations = Revocations(store, now_ms)
        self._routes = RouteTable()
        metrics = Metrics(__version__)
        self.ops = Ops(store, metrics, now_ms)
        self._access = Access(config.auth, coordinator, self._revocations, now_ms)
        server = config.server
        self._callers = Callers(self._access, server.mount_path, server.trusted_proxy_hops)
        self._spaces = Spaces(config.auth.spaces, store)
        self._handlers = self._make_handlers()
        self._lists = Lists(store, self._callers, self._spaces, self._routes)
        self._add_routes(now_ms)
        self._middleware = Middleware(
            self._routes, metrics, config.server.cors.origins, config.server.public_hosts
        )
        self.expiry = Expiry(self._documents, self._routes)

    async def handle(self, request: web.BaseRequest) -> Answer:
        """Answer one request."""
        return await self._middleware.handle(request)

    async def close(self) -> None:
        """Finish the writes under way and let go of store and coordinator."""
        self.expiry.close()
        await self._coordinator.close()
        await self.store.close()

    async def __aenter__(self) -> "App":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _make_handlers(self) -> Handlers:
        config = self.config
        prefixes = [self._prefix(namespace) for namespace in (None, *config.namespaces)]
        return Handlers(
            self._documents,
            self._access,
            self._callers,
            self._revocations,
            self._spaces,
            Keyrings(self._documents, self._spaces, self._routes, prefixes),
        )

    def _add_routes(self, now_ms: Callable[[], int]) -> None:
        for namespace, collection in self._collections():
            if is_served(collection):
                self._add_collection_routes(namespace, collection)
        self._add_bundles()
        self._add_manifests()
        self._add_batches(now_ms)
        mount = self.config.server.mount_path
        ops = self.ops
        for path, handler, action in (
            ("/health", ops.health, "health"),
            ("/health/ready", ops.ready, "ready"),
            ("/metrics", ops.metrics, "metrics"),
            ("/version", ops.version, "version"),
            ("/openapi.json", OpenApi(self.config, self._routes).serve, "openapi"),
        ):
            for prefix in {"", mount}:
                self._routes.add(["GET"], Route(handler, _segments(prefix + path), action=action))
        revoke = Route(self._handlers.revoke, _segments(mount + "/revocations"), action="revoke")
        self._routes.add(["POST"], revoke)

    def _add_collection_routes(self, namespace: str | None, collection: Collection) -> None:
        path = collection.storage_path
        key = path if collection.bundle is None else f"{path}/{collection.name}"
        if not collection.push_only and collection.bundle is None:
            self._add_route("pull", "GET", self._handlers.pull, namespace, collection, key)
        if not collection.pull_only:
            self._add_route("push", "POST", self._handlers.push, namespace, collection, key)
        if collection.listable:
            prefix = path.rpartition("/")[0]
            self._add_route("list", "GET", self._lists.list, namespace, collection, prefix)

    def _add_route(
        self,
        action: Action,
        method: str,
        handler: Handler,
        namespace: str | None,
        collection: Collection,
        path: str,
    ) -> None:
        """Serve `action` on `collection` at `path`, a template below the action."""
        template, names, key_from = self._placed(namespace, action, path)
        route = Route(
            handler,
            template,
            names,
            action,
            _qualified(namespace, collection.name),
            Rule.of(self.config, namespace, collection, action),
            key_from,
            _read_headers(collection),
            None if collection.object_schema is None else compile_schema(collection.object_schema),
        )
        self._routes.add([method], route)

    def _add_bundles(self) -> None:
        bundles: dict[tuple[str | None, str], list[Collection]] = {}
        for namespace, collection in self._collections():
            if collection.bundle is not None and is_served(collection) and not collection.push_only:
                bundles.setdefault((namespace, collection.bundle), []).append(collection)
        for (namespace, name), members in bundles.items():
            bundle = Bundle([Rule.of(self.config, namespace, member, "pull") for member in members])
            template, names, key_from = self._placed(namespace, "pull", members[0].storage_path)
            route = Route(
                BundlePull(bundle, self._documents, self._callers, self._spaces).pull,
                template,
                names,
                "bundle",
                _qualified(namespace, name),
                bundle.gate,
                key_from,
                _read_headers(*members),
                members=bundle.rules,
            )
            self._routes.add(["GET"], route)

    def _add_batches(self, now_ms: Callable[[], int]) -> None:
        for namespace in (None, *self.config.namespaces):
            rules = [
                (Rule.of(self.config, namespace, collection, "pull"), _is_batched(collection))
                for place, collection in self._collections()
                if place == namespace
            ]
            batch = BatchPull(self.config, rules, self.store, self._callers, self._spaces, now_ms)
            template = _segments(self._prefix(namespace) + "/batch/pull")
            self._routes.add(["GET"], Route(batch.pull, template, (), "batch", namespace or ""))

    def _add_manifests(self) -> None:
        """The routes that tell clients the configuration; `/sync/config` is where a published client asks."""
        if self.config.config_endpoint is None:
            return
        root = Manifest(self.config, self._access)
        manifests = {"config": root, "sync/config": root}
        for namespace in self.config.namespaces:
            manifests[f"{namespace}/config"] = Manifest(self.config, self._access, namespace)
        mount = self.config.server.mount_path
        for path, manifest in manifests.items():
            self._routes.add(["GET"], Route(manifest.serve, _segments(f"{mount}/{path}"), action="config"))

    def _placed(
        self, namespace: str | None, action: str, path: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """Where a route lies that serves `action` at `path`: its template, the names of its parameters, and
        how many segments come before the key."""
        head = _segments(f"{self._prefix(namespace)}/{action}")
        below = tuple(path.split("/")) if path else ()
        return head + below, tuple(part[1:-1] for part in below if part.startswith("{")), len(head)

    def _collections(self) -> list[tuple[str | None, Collection]]:
        spaces = self.config.namespaces.items()
        found: list[tuple[str | None, Collection]] = [(None, root) for root in self.config.collections]
        return found + [(name, collection) for name, space in spaces for collection in space.collections]

    def _prefix(self, namespace: str | None) -> str:
        mount = self.config.server.mount_path
        return mount if namespace is None else f"{mount}/{namespace}"


async def create_app(
    config: Config,
    store: Store | None = None,
    coordinator: Coordinator | None = None,
    plugins: Sequence[object] = (),
    *,
    now_ms: Callable[[], int] = wall_clock_ms,
) -> App:
    """The service of `config`, with the store and coordinator that it names unless others are given.

    Raises ValueError for a store or coordinator that does not exist, StoreUnavailable for one that does not
    open.
    """
    if plugins or config.plugins:
        raise ValueError("plugins: this version loads none")
    url = config.store.url
    store = store or await open_store(url, now_ms)
    if coordinator is None:
        folder = url.removeprefix("file:") if url.startswith("file:") else None
        coordinator = await open_coordinator(effective_coordinator(config), folder, now_ms)
    return App(config, store, coordinator, now_ms)


def is_served(collection: Collection) -> bool:
    """Whether this version serves the collection: JSON documents, each replaced as a whole."""
    return collection.append_only is None and JSON_TYPE in collection.allowed_mime_types


def _is_batched(collection: Collection) -> bool:
    return is_served(collection) and collection.bundle is None and not collection.push_only


def _segments(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[1:])


def _qualified(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}/{name}"


def _read_headers(*collections: Collection) -> str:
    """How an answer may be cached that holds documents of these collections (wire section 4)."""
    public = all("public" in collection.read_roles for collection in collections)
    known_ms = [found.cache_duration_ms for found in collections if found.cache_duration_ms is not None]
    if len(known_ms) == len(collections):
        control = f"{'public' if public else 'private'}, max-age={min(known_ms) // 1000}"
    else:
        control = "no-cache" if public else "private, no-cache"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"
