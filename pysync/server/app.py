"""The service, wired: start here. `create_app` builds everything from its arguments and holds it together.

A request goes: aiohttp -> `connection` -> `middleware` -> `routes` -> a handler in `handlers` or `ops`
-> `access` -> `documents` -> the store.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType

from aiohttp import web

from pysync import __version__
from pysync.access import Access, Rule
from pysync.clock import wall_clock_ms
from pysync.config import Action, Collection, Config, effective_coordinator
from pysync.config.support import served
from pysync.config.template import params
from pysync.coordinator import Coordinator, open_coordinator
from pysync.documents import Documents
from pysync.errors import NotFound
from pysync.revocation import Revocations
from pysync.schema import compile_schema
from pysync.server.answer import Answer
from pysync.server.expiry import Expiry
from pysync.server.handlers import Handlers
from pysync.server.keyrings import Keyrings
from pysync.server.metrics import Metrics
from pysync.server.middleware import Middleware
from pysync.server.ops import Ops
from pysync.server.routes import Handler, Match, Route, RouteTable
from pysync.store import Store, open_store


class App:
    """A running service without a socket: `handle` answers requests, `close` ends it."""

    def __init__(
        self, config: Config, store: Store, coordinator: Coordinator, now_ms: Callable[[], int]
    ) -> None:
        self.config = config
        self.store = store
        self._coordinator = coordinator
        self._documents = Documents(store, coordinator, now_ms)
        self._revocations = Revocations(store, now_ms, config.auth.trusted_issuers or ())
        self._routes = RouteTable()
        metrics = Metrics(__version__)
        self.ops = Ops(store, metrics, now_ms)
        self._handlers = self._make_handlers(now_ms)
        self._add_routes()
        self._middleware = Middleware(
            self._routes, metrics, config.server.cors.origins, config.server.public_hosts
        )
        self.expiry = Expiry(self._documents, self._routes)

    async def handle(self, request: web.BaseRequest) -> Answer:
        """Answer one request."""
        return await self._middleware.handle(request)

    def drain(self) -> None:
        """Be ready no longer, and make every answer a connection's last: the service is about to stop."""
        self.ops.draining = True
        self._middleware.draining = True

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

    def _make_handlers(self, now_ms: Callable[[], int]) -> Handlers:
        config = self.config
        return Handlers(
            self._documents,
            Access(config, self._coordinator, self._revocations, now_ms),
            self._revocations,
            Keyrings(self._documents, self._owners()),
            config.server.mount_path,
            config.server.trusted_proxy_hops,
        )

    def _add_routes(self) -> None:
        for name, _, collections in self.config.each_namespace():
            for collection in served(self.config, collections):
                self._add_document_routes(name or None, collection)
        mount = self.config.server.mount_path
        ops = self.ops
        for path, handler, action in (
            ("/health", ops.health, "health"),
            ("/health/ready", ops.ready, "ready"),
            ("/metrics", ops.metrics, "metrics"),
            ("/version", ops.version, "version"),
        ):
            for prefix in {"", mount}:
                self._routes.add(["GET"], Route(handler, _segments(prefix + path), action=action))
        revoke = Route(self._handlers.revoke, _segments(mount + "/revocations"), action="revoke")
        self._routes.add(["POST"], revoke)

    def _add_document_routes(self, namespace: str | None, collection: Collection) -> None:
        actions: tuple[tuple[Action, str, Handler, bool], ...] = (
            ("pull", "GET", self._handlers.pull, collection.push_only),
            ("push", "POST", self._handlers.push, collection.pull_only),
        )
        for action, method, handler, absent in actions:
            for prefix in () if absent else self._prefixes(namespace):
                rule = Rule.of(self.config, namespace, collection, action)
                head = _segments(f"{prefix}/{action}")
                route = Route(
                    handler,
                    head + tuple(collection.storage_path.split("/")),
                    params(collection.storage_path),
                    action,
                    collection.name if namespace is None else f"{namespace}/{collection.name}",
                    rule,
                    len(head),
                    _read_headers(rule),
                    None if collection.object_schema is None else compile_schema(collection.object_schema),
                )
                self._routes.add([method], route)

    def _prefixes(self, namespace: str | None) -> list[str]:
        """The paths before `/pull`. Published clients ask for a namespace under `/v1`, so it is also there
        where the configuration mounts nothing."""
        mount = self.config.server.mount_path
        if namespace is None:
            return [mount]
        return [f"{mount}/{namespace}"] if mount else [f"/{namespace}", f"/v1/{namespace}"]

    def _owners(self) -> list[RouteTable]:
        """For each namespace, which collection a key belongs to."""
        tables = []
        for name, _, collections in self.config.each_namespace():
            table = RouteTable()
            for collection in collections:
                rule = Rule.of(self.config, name or None, collection, "pull")
                template = tuple(collection.storage_path.split("/"))
                table.add(["GET"], Route(_unserved, template, params(collection.storage_path), rule=rule))
            tables.append(table)
        return tables


async def create_app(
    config: Config,
    store: Store | None = None,
    coordinator: Coordinator | None = None,
    *,
    now_ms: Callable[[], int] = wall_clock_ms,
) -> App:
    """The service of `config`, with the store and coordinator that it names unless others are given.

    Raises ValueError for a store or coordinator that does not exist, StoreUnavailable or
    CoordinatorUnavailable for one that does not open.
    """
    if config.plugins:
        raise ValueError("plugins: this version loads none")
    async with AsyncExitStack() as opened:
        url = config.store.url
        if store is None:
            store = await open_store(url, now_ms)
            opened.push_async_callback(store.close)
        if coordinator is None:
            folder = url.removeprefix("file:") if url.startswith("file:") else None
            coordinator = await open_coordinator(effective_coordinator(config), folder, now_ms)
            opened.push_async_callback(coordinator.close)
        app = App(config, store, coordinator, now_ms)
        opened.pop_all()
        return app


def _segments(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[1:])


def _read_headers(rule: Rule) -> str:
    """How reads may be cached. What depends on who asks is never for everybody."""
    collection = rule.collection
    public = "public" in rule.roles and not rule.examines
    if collection.cache_duration_ms is not None:
        scope = "public" if public else "private"
        control = f"{scope}, max-age={collection.cache_duration_ms // 1000}"
    else:
        control = "no-cache" if public else "private, no-cache"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"


async def _unserved(request: web.BaseRequest, match: Match) -> Answer:
    """The handler of tables that only say whose a key is."""
    raise NotFound
