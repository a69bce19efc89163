"""The routes that a configuration makes. The server and `pysync check` both use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pysync import __version__
from pysync.config.collection import Collection, collection_for_key
from pysync.config.key_templates import KeyTemplate
from pysync.config.schema import Config

Method = Literal["GET", "POST", "DELETE"]


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """A route. `action` is an `Action` of a collection, `append` for pushes to a log, `bundle`, `batch`,
    `events`, `changes`, `usage`, `config`, or the name of a route of the whole service."""

    method: Method
    action: str
    path: str
    """The documented path, with `{param}` segments."""
    namespace: str | None = None
    collections: tuple[Collection, ...] = ()
    """The collections that it reads or writes: several for a bundle, a batch or a change stream."""
    key: KeyTemplate | None = None
    """The end of the path, which names a document, the prefix of a list, or an issuer; None for a route
    without a key."""
    aliases: tuple[str, ...] = ()
    """Further paths of the same route."""


def routes_of(config: Config) -> Iterator[RouteSpec]:
    """Yield every route except those of example files: for each namespace its collections in the order of the
    file, then its bundles, batch, change stream and manifest; last those of the whole service. If two routes
    have one path, the later one is served."""
    mount = config.server.mount_path
    if config.config_endpoint is not None:
        # Published clients request this path. A namespace named sync comes later and replaces it.
        yield RouteSpec("GET", "config", f"{mount}/sync/config")
    for name, _, collections in config.each_namespace():
        yield from _namespace_routes(config, name or None, collections)
    for name in ("pysync.js", f"{__version__}/pysync.js", "pysync.d.ts"):
        yield RouteSpec("GET", "client", f"{mount}/client/{name}")
    yield RouteSpec("POST", "revoke", f"{mount}/revocations")
    issuer = KeyTemplate("{issuer}")
    yield RouteSpec("GET", "revocations", f"{mount}/revocations/{issuer.text}", key=issuer)
    for prefix in dict.fromkeys((mount, "")):
        yield RouteSpec("GET", "index", f"{prefix}/", aliases=(prefix,) if prefix else ())
        yield RouteSpec("GET", "health", f"{prefix}/health")
        if config.server.admin is not None:
            continue
        yield RouteSpec("GET", "openapi", f"{prefix}/openapi.json")
        yield RouteSpec("GET", "ready", f"{prefix}/health/ready")
        yield RouteSpec("GET", "metrics", f"{prefix}/metrics")
        yield RouteSpec("GET", "version", f"{prefix}/version")


def _namespace_routes(
    config: Config, namespace: str | None, collections: tuple[Collection, ...]
) -> Iterator[RouteSpec]:
    mount = config.server.mount_path
    own = mount if namespace is None else f"{mount}/{namespace}"
    # Published clients request namespaces under /v1, so they are also served there if no path is mounted.
    aliases = () if namespace is None or mount else (f"/v1{own}",)

    def route(
        method: Method, action: str, below: str, *read: Collection, key: KeyTemplate | None = None
    ) -> RouteSpec:
        path = f"/{below}" if key is None else f"/{below}/{key.text}".rstrip("/")
        others = tuple(prefix + path for prefix in aliases)
        return RouteSpec(method, action, own + path, namespace, read, key, others)

    bundles: dict[str, list[Collection]] = {}
    for one in collections:
        if one.bundle is None and "pull" in one.actions:
            yield route("GET", "pull", "pull", one, key=one.key_template)
            if one.history is not None:
                yield route("GET", "history", "history", one, key=one.key_template)
        elif "pull" in one.actions:
            bundles.setdefault(one.bundle or "", []).append(one)
        if "push" in one.actions:
            action = "push" if one.append_only is None else "append"
            yield route("POST", action, "push", one, key=one.key_template)
            if one.deletable:
                yield route("DELETE", "delete", "push", one, key=one.key_template)
        if "list" in one.actions:
            folder = KeyTemplate.of(one.storage_path.rpartition("/")[0])
            yield route("GET", "list", "list", one, key=folder)
    for members in bundles.values():
        yield route("GET", "bundle", "pull", *members, key=members[0].path_template)
    yield route("GET", "batch", "batch/pull", *collections)
    if collections:
        yield route("GET", "events", "events", *collections)
        yield route("GET", "changes", "changes", *collections)
    if config.quotas is not None and collections:
        yield route("GET", "usage", "usage", *collections)
    if config.config_endpoint is not None:
        yield route("GET", "config", "config")


def history_roles(config: Config, namespace: str | None, collection: Collection) -> tuple[str, ...]:
    """Return the roles that may read earlier versions of the collection's documents. Those of access
    documents name former members, and are for the owner of the space by default."""
    if collection.history_roles is not None:
        return collection.history_roles
    if _has_access_documents(config, namespace, collection):
        return ("space:owner",)
    return collection.read_roles


def _has_access_documents(config: Config, namespace: str | None, collection: Collection) -> bool:
    """Return True if access documents of spaces can be pulled from the collection."""
    if config.auth.spaces is None:
        return False
    keys, own = KeyTemplate.of(config.auth.spaces.access_path), collection.key_template
    collections = config.namespaces[namespace].collections if namespace else config.collections
    owner = collection_for_key([one for one in collections if not one.push_only], keys.text)
    is_reached = owner is None or own.open_segments <= owner.key_template.open_segments
    return is_reached and own.overlaps(keys)
