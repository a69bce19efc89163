"""The members of a configuration: one tree of frozen values (docs/reference/configuration.md).

Attributes are the file's members in snake_case: `max_body_bytes` is `maxBodyBytes`. `doc` of each field is
the source of `docs/reference/configuration.md`.

"""
# ruff: noqa: RUF009 (`option` is `dataclasses.field`)

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from pysync.config.collection import (
    ISSUERS_HERE,
    ROLES_HERE,
    Action,
    Collection,
    QuotasConfig,
    RateLimit,
    RateRule,
    Restriction,
    option,
    resolve_limit,
)
from pysync.config.webhooks import WebhookConfig

LogLevel = Literal["debug", "info", "warning", "error"]
LOOPBACK: Final = frozenset(("127.0.0.1", "::1", "localhost"))
"""Addresses that only programs of this machine reach."""
LOOPBACK_HOSTS: Final = frozenset(("127.0.0.1", "[::1]", "localhost"))
"""The same in a `Host` header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Collections under a prefix of their own."""

    collections: tuple[Collection, ...] = option("Collections served under `/<namespace>`.")
    restrictions: tuple[Restriction, ...] = option("Identities denied or allowed in it, likewise.", ())
    trusted_issuers: tuple[str, ...] | None = option(ISSUERS_HERE.format(""), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = option(ROLES_HERE.format(""), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Cross-origin access."""

    origins: tuple[str, ...] = option('Origins whose pages may call; `"*"` for any.', ())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAddress:
    """The operators' listener."""

    host: str = option("Address to listen on; only operators and their tools should reach it.", "127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", 8081, at_least=0, at_most=65535)
    hosts: tuple[str, ...] = option(
        "Host names, without a port, under which `/admin` and the pages below it are served; addresses and "
        "`localhost` always are.",
        (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Address, limits and logging of the server."""

    host: str = option("Address to listen on.", "127.0.0.1", restart=True)
    port: int = option(
        "Port to listen on; 0 takes a free one.", 8080, at_least=0, at_most=65535, restart=True
    )
    mount_path: str = option("Prefix of every route, e.g. `/v1`.", "", may_be_empty=True)
    public_hosts: tuple[str, ...] = option(
        "Host names that requests may use; empty: any. `localhost`, `127.0.0.1` and `[::1]` match with any "
        "port.",
        (),
    )
    trusted_proxy_hops: int = option(
        "Number of proxies in front whose `X-Forwarded-For` is trusted.", 0, at_least=0
    )
    cors: Cors = option("Cross-origin callers.", Cors)
    admin: AdminAddress | None = option(
        "Address of its own for metrics, readiness, `/admin`, `/version` and `/openapi.json`, which the "
        "public address then no longer serves; absent: there is none.",
        None,
        restart=True,
    )
    examples: str | None = option(
        "Folder whose files (HTML and what belongs to it) are served below `/examples/`, relative to this "
        "file; absent: no such route.",
        None,
        is_path=True,
    )
    workers: int = option("Processes that serve.", 1, restart=True)
    drain_timeout_ms: int = option("How long running requests may take on shutdown, in milliseconds.", 10_000)
    max_queue_ms: int = option(
        "How long a request may wait for its turn, in milliseconds; one that has waited longer is rejected "
        "(503 `overloaded`).",
        1_000,
    )
    max_connections: int = option(
        "Open connections of one process. Beyond them, one of the address that has most gives way: the one "
        "that has been idle for longest. Never more than the limit of open files allows.",
        10_000,
    )
    max_streams: int = option(
        "Open change streams of one process; another is refused (503 `overloaded`). With `maxConnections` "
        "never more than the limit of open files allows.",
        10_000,
    )
    max_streams_per_caller: int = option(
        "Open change streams of one identity in one process, or of one address (IPv6: of one /64) without "
        "credentials; another is refused (503 `overloaded`).",
        2_000,
    )
    write_timeout_ms: int = option(
        "How long a write may take once it has arrived, in milliseconds. Then it is answered 503, and may "
        "still succeed.",
        10_000,
    )
    max_bytes_in_flight: int = option(
        "Number of bytes of request bodies and responses that a process may hold at once; with more, large "
        "requests are rejected (503 `overloaded`).",
        67_108_864,
    )
    log_level: LogLevel = option("Lowest level that is logged.", "info")
    log_refusals: bool = option(
        "Logs which check failed, for each 401, 403 and 421; otherwise they are logged at the level `debug`.",
        False,
    )
    access_log: bool = option("Logs a line for each request, with the caller and the response.", False)
    quick_check_max_bytes: int = option(
        "Before it serves, the server checks SQLite databases up to this size in bytes (`quick_check`, which "
        "reads the whole database); 0: none.",
        268_435_456,
        at_least=0,
        restart=True,
    )


is_store_url = re.compile(r"memory:|file:[^\0]+|s3://[a-z0-9][a-z0-9.-]+(/[^\s?#]*)?(\?[^\s#]*)?").fullmatch
"""Matches a text that has the form of a store's URL."""
_URL_MEMBERS = ("endpoint", "region", "path_style")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and a prefix in it. `prefix` has no slash at its ends. `endpoint` is None for AWS, `region` is
    None if the environment decides."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    path_style: bool


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc  # a user or password would be shown and logged
        and not (parts.query or parts.fragment)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The location of the stored data."""

    url: str = option(
        "`memory:`, `file:DIR` or `s3://bucket/prefix`; `?endpoint=…&region=…&path_style=true` stand for the "
        "members below.",
        "file:./data",
    )
    endpoint: str | None = option("URL of the S3 service; absent: AWS.", None)
    region: str | None = option("S3 region; absent: from the environment, else `us-east-1`.", None)
    force_path_style: bool = option(
        "Puts the bucket into the path instead of the host name; always so for numeric hosts.", False
    )
    access_key_id: str | None = option(
        "S3 credentials; absent: from the environment, the shared files, or the machine's role.", None
    )
    secret_access_key: str | None = option("Belongs to `accessKeyId`.", None, secret=True)
    max_connections: int = option("Largest number of connections to S3 per process.", 128, at_most=4096)
    timeout_ms: int = option(
        "How long one request to S3 may take before it is repeated, in milliseconds.", 10_000
    )

    def s3_location(self) -> S3Location:
        """Return the location of a store whose URL begins with `s3://`. The URL's query overrides the other
        members. Raises ValueError for an invalid URL or endpoint; the message quotes no value, except the
        name of an unknown query parameter."""
        parts = urlsplit(self.url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in query:
            if name not in _URL_MEMBERS:
                raise ValueError(
                    f"the URL's query may hold {', '.join(_URL_MEMBERS)}, and not {ascii(name)[:60]}"
                )
        path_style = query.get("path_style")
        if path_style not in (None, "true", "false"):
            raise ValueError("the URL's path_style must be true or false")
        prefix = parts.path.strip("/")
        if not {"", ".", ".."}.isdisjoint(prefix.split("/")) and prefix:
            raise ValueError("the prefix may not hold //, /./ or /../")
        endpoint = query.get("endpoint") or self.endpoint
        if endpoint is not None and not _is_server(endpoint):
            raise ValueError("the endpoint must be http://host:port or https://host")
        region = query.get("region") or self.region
        is_path_style = self.force_path_style if path_style is None else path_style == "true"
        return S3Location(parts.netloc, prefix, endpoint, region, is_path_style)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacesConfig:
    """The access documents that assign the roles of spaces."""

    access_path: str = option("Key template of a space's access document.", "spaces/{spaceId}/_access")
    param: str = option("Path parameter that names the space.", "spaceId")
    trust_on_first_use: bool = option(
        "`true`: anyone is owner of a space without an access document. Only `false` is safe.", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """Admin token, trusted issuers, and roles."""

    admin_token: str | tuple[str, ...] | None = option(
        "Bearer token that gives the role `admin`, or a list of them: 16 or more characters of printable "
        "ASCII, without spaces.",
        None,
        secret=True,
    )
    trusted_issuers: tuple[str, ...] | None = option(
        "Public keys (hex) of issuers whose certificates yield `cap:` and `delegated:` roles; absent: all.",
        None,
    )
    identity_roles: Mapping[str, tuple[str, ...]] = option("Extra roles per user id.", dict)
    spaces: SpacesConfig | None = option("Roles from a space's access document.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEndpoint:
    """The manifest that `GET /config` returns."""

    auth: Literal["public", "role-filtered"] = option(
        "`public`: everyone sees every collection; `role-filtered`: callers see those that they can use."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRetention:
    """Limits of the change log, which decide how far back change streams can resume."""

    max_count: int = option("Smallest number of changes that the change log keeps.", 100_000)
    max_resumed: int = option(
        "Changes in its collections that a stream may miss before it resumes; with more it gets a reset.",
        20_000,
    )
    max_age_ms: int = option("Greatest age of a change, in milliseconds.", 86_400_000)
    removals_ms: int = option(
        "Time for which the feed of changes keeps a removal, in milliseconds.",
        7_776_000_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """The background check of stored objects against their hashes."""

    every_ms: int = option(
        "Time from the end of one scrub to the beginning of the next, in milliseconds.", 86_400_000
    )
    max_bytes_per_second: int = option(
        "Largest number of bytes read per second; an object counts as at least 16 KiB.", 8_388_608
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupConfig:
    """The backup that the service makes of its own store, by one of all processes."""

    to: str = option("Where the backup lies: `file:DIR` or `s3://BUCKET/PREFIX`.")
    every_ms: int = option("Time from one snapshot to the next, in milliseconds.", 5_000)
    key_file: str | None = option(
        "File of the key that encrypts it, as `pysync backup keygen` makes it; `FILE.pub` suffices.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionConfig:
    """A list that the server maintains from the writes to its sources."""

    name: str | None = option("Name for `pysync project rebuild` and metrics; absent: its `target`.", None)
    source: tuple[str, ...] = option(
        "Collections whose writes are projected: a name or a list of names. `notes` means every "
        "namespace, `acme/notes` one, `/notes` the root alone."
    )
    target: str = option("Key template of the list, or `module:function`.")
    id: str | None = option("Template of the entry's id.", None)
    value: Mapping[str, str] = option("Members of the value, as JSON pointers into `data`.", dict)
    remove_when: Mapping[str, Any] = option("JSON pointers and the values that mark a removal.", dict)
    project: str | None = option("`module:function` in place of `id`, `value`, `removeWhen`.", None)
    max_items: int | None = option("Largest number of entries in a list.", None)
    max_retries: int = option("Retries of a list write.", 8, at_least=0)
    wait: bool = option(
        "Answers a push to a source when the list contains it, at the latest after 5 s.", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """Batches of events that are stored as Parquet files."""

    collection: str = option("Collection whose pushes become Parquet files.")
    storage_path: str = option("Key template whose last segment is a path parameter: the id of the batch.")
    compact_every_ms: int | None = option(
        "Milliseconds between merges of small files; absent: only by `pysync events compact`.", None
    )
    compact_older_than_ms: int = option(
        "Smallest age of files that are merged, in milliseconds.", 600_000, at_least=0
    )
    compact_to_bytes: int = option("Approximate size of merged files, in bytes.", 134_217_728)


class Trust(NamedTuple):
    """The trust of a collection: the issuers whose certificates yield roles (None: all issuers), and the
    extra roles of user ids."""

    issuers: frozenset[str] | None
    identity_roles: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    version: Literal[1] = option("Always 1.", 1)
    collections: tuple[Collection, ...] = option("Root collections.", ())
    namespaces: Mapping[str, Namespace] = option("Collections under a prefix of their own.", dict)
    server: Server = option("Address, limits and logging of the server.", Server)
    store: StoreConfig = option("Where data is stored; a string is its `url`.", StoreConfig, restart=True)
    coordinator: str | None = option(
        "`memory:`, `file:`, `file:DIR` or `redis://…`; absent: what suits the store.",
        None,
        secret=True,
        restart=True,
    )
    auth: Auth = option("Admin token, trusted issuers, and roles.", Auth)
    config_endpoint: ConfigEndpoint | None = option("`GET /config`; absent: 404.", None)
    max_collections_per_batch: int = option("Largest number of names, and of reads, in one batch.", 100)
    max_batch_append_elements: int = option("Largest number of log elements in one batch.", 5000)
    max_batch_bytes: int = option(
        "Largest number of bytes of documents and logs in the response to a batch.", 33_554_432
    )
    batch_key_deny_suffixes: tuple[str, ...] = option(
        "Ends of the names of collections, and whole last segments of keys, that batches reject.",
        ("_keyring", "_members"),
    )
    rate_limit: RateLimit | None = option(
        "The numbers for members that collections leave out of their `rateLimit`. By itself it meters "
        "nothing. `true`, `false`, `none` or absent: no numbers.",
        None,
    )
    restrictions: tuple[Restriction, ...] = option(
        "Identities denied or allowed everywhere: an object or a list of them.", ()
    )
    changes: ChangeRetention = option(
        "How far back change streams can resume without a gap.", ChangeRetention, restart=True
    )
    scrub: ScrubConfig | Literal[False] = option(
        "Background check of everything stored against its hashes, by one of all processes; `false`: off.",
        ScrubConfig,
    )
    quotas: QuotasConfig | None = option(
        "How much may be stored for whom; absent: nothing is counted, and nothing is limited.",
        None,
        restart=True,
    )
    backup: BackupConfig | None = option(
        "Backup of the store, while the service runs; absent: none.", None, restart=True
    )
    projections: tuple[ProjectionConfig, ...] = option("Lists that the server maintains.", (), restart=True)
    events: tuple[EventsConfig, ...] = option("Event batches stored as Parquet.", (), restart=True)
    webhooks: tuple[WebhookConfig, ...] = option("Programs that are notified of writes by HTTP.", ())
    plugins: tuple[str, ...] = option(
        "`package.module:plugin`, or the name of an entry point.", (), restart=True
    )

    def each_namespace(self) -> Iterator[tuple[str, str, tuple[Collection, ...]]]:
        """Yield the collections under each prefix, the root first: the namespace's name (`""` for the root),
        the path at which the file lists them, and the collections."""
        yield "", "collections", self.collections
        for name, namespace in self.namespaces.items():
            yield name, f"namespaces.{name}.collections", namespace.collections

    def each_collection(self) -> Iterator[tuple[str, str, Collection]]:
        """Yield every collection, after its namespace's name (`""` for the root) and its path in the file."""
        for name, path, collections in self.each_namespace():
            for at, collection in enumerate(collections):
                yield name, f"{path}[{at}]", collection

    def collections_by_name(self) -> dict[str, list[Collection]]:
        """Return the collections of each name, in all namespaces."""
        named: dict[str, list[Collection]] = {}
        for _, _, collection in self.each_collection():
            named.setdefault(collection.name, []).append(collection)
        return named

    def effective_limit(self, collection: Collection, action: Action) -> RateRule | None:
        """Return the limit of an action on a collection, with its bucket filled in; None if it is unmetered.

        Only actions that the collection meters have one (`RateLimit.meters`). The nearest rule that names a
        limit wins, in the order: the collection's for the action, the collection's, the server's for the
        action, the server's. Members that it leaves out (`bucket`, one of `windowMs` and `maxRequests`) come
        from the others in that order.
        """
        limit = collection.rate_limit
        return resolve_limit(action, limit, self.rate_limit) if limit and limit.meters(action) else None

    def trust_of(self, namespace: str | None = None, collection: Collection | None = None) -> Trust:
        """Return the trust of a collection, a namespace or the server. Each member is taken from the
        innermost level that sets it."""
        inner = self.namespaces[namespace] if namespace else None
        levels = [one for one in (collection, inner, self.auth) if one is not None]
        issuers = next((one.trusted_issuers for one in levels if one.trusted_issuers is not None), None)
        roles = next(one.identity_roles for one in levels if one.identity_roles is not None)
        return Trust(None if issuers is None else frozenset(issuers), roles)

    @property
    def every_trusted_issuer(self) -> frozenset[str]:
        """The issuers that are trusted anywhere."""
        return frozenset().union(*(trust.issuers or () for trust in self._every_trust()))

    @property
    def every_named_identity(self) -> frozenset[str]:
        """The user ids that have roles of their own, or that a role names."""
        given = frozenset[str]().union(*(trust.identity_roles for trust in self._every_trust()))
        roles = [role.split(":") for role in self.every_role]
        return given | {parts[1] for parts in roles if parts[0] in ("admin", "delegated") and len(parts) > 1}

    @property
    def every_role(self) -> frozenset[str]:
        """Every role that the configuration requires somewhere."""
        required: set[str] = set()
        for _, _, collection in self.each_collection():
            required.update(collection.read_roles, collection.write_roles)
            required.update(collection.delete_roles or (), collection.history_roles or ())
            for permission in collection.field_permissions.values():
                required.update(permission.read_roles or (), permission.write_roles or ())
        return frozenset(required)

    @property
    def effective_coordinator(self) -> str:
        """The coordinator's URL, which may contain a password: the configured one; else `file:`, which uses
        the store's folder, for a `file:` store, and `memory:` for any other."""
        if self.coordinator is not None:
            return self.coordinator
        return "file:" if self.store.url.startswith("file:") else "memory:"

    @property
    def redacted_coordinator(self) -> str:
        """`effective_coordinator` without the user and password of a Redis, which must not be shown."""
        scheme, slashes, rest = self.effective_coordinator.partition("://")
        return scheme + slashes + rest.rpartition("@")[2]

    @property
    def database_paths(self) -> list[tuple[str, Path]]:
        """The SQLite databases: the purpose of each, and its path, which need not exist yet."""
        folder = self.store.url.removeprefix("file:") if self.store.url.startswith("file:") else ""
        found = [("store", Path(folder) / "pysync.db")] if folder else []
        kind, _, rest = self.effective_coordinator.partition(":")
        if kind == "file" and (rest or folder):
            found.append(("coordinator", Path(rest or folder) / "coordinator.db"))
        return found

    @property
    def is_multi_process(self) -> bool:
        """True if other processes may serve the same store: with several workers, or a coordinator of many
        nodes."""
        return self.server.workers > 1 or self.effective_coordinator.startswith("redis")

    def _every_trust(self) -> Iterator[Trust]:
        yield self.trust_of()
        for namespace, _, collection in self.each_collection():
            yield self.trust_of(namespace, collection)
