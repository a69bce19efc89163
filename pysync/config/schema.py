"""The members of a configuration: one tree of frozen values (docs/reference/configuration.md).

Attributes are the file's members in snake_case: `max_body_bytes` is `maxBodyBytes`. `doc` of each field is
the source of `docs/reference/configuration.md`.

"""
# ruff: noqa: RUF009 (`option` is `dataclasses.field`)

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pysync.config.collection import (
    ISSUERS_HERE,
    ROLES_HERE,
    Collection,
    RateLimit,
    Restriction,
    option,
)

LogLevel = Literal["debug", "info", "warning", "error"]


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
class Server:
    """Address, limits and logging of the server."""

    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", 8080, at_least=0, at_most=65535)
    mount_path: str = option("Prefix of every route, e.g. `/v1`.", "", may_be_empty=True)
    public_hosts: tuple[str, ...] = option("Host names that requests may use; empty: any.", ())
    trusted_proxy_hops: int = option(
        "Number of proxies in front whose `X-Forwarded-For` is trusted.", 0, at_least=0
    )
    cors: Cors = option("Cross-origin callers.", Cors)
    examples: str | None = option(
        "Folder whose files (HTML and what belongs to it) are served below `/examples/`, relative to this "
        "file; absent: no such route.",
        None,
        is_path=True,
    )
    workers: int = option("Processes that serve.", 1)
    drain_timeout_ms: int = option("How long running requests may take on shutdown, in milliseconds.", 10_000)
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

    admin_token: str | None = option(
        "Bearer token that gives the role `admin`: 16 or more characters of printable ASCII, without spaces.",
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
        "Milliseconds between merges of small files; absent: only by `pysync events compact`.",
        None,
    )
    compact_older_than_ms: int = option(
        "Smallest age of files that are merged, in milliseconds.", 600_000, at_least=0
    )
    compact_to_bytes: int = option("Approximate size of merged files, in bytes.", 134_217_728)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    version: Literal[1] = option("Always 1.", 1)
    collections: tuple[Collection, ...] = option("Root collections.", ())
    namespaces: Mapping[str, Namespace] = option("Collections under a prefix of their own.", dict)
    server: Server = option("Address, limits and logging of the server.", Server)
    store: StoreConfig = option("Where data is stored; a string is its `url`.", StoreConfig)
    coordinator: str | None = option(
        "`memory:`, `file:`, `file:DIR` or `redis://…`; absent: what suits the store.", None, secret=True
    )
    auth: Auth = option("Admin token, trusted issuers, and roles.", Auth)
    config_endpoint: ConfigEndpoint | None = option("`GET /config`; absent: 404.", None)
    max_collections_per_batch: int = option("Largest number of names, and of reads, in one batch.", 100)
    max_batch_append_elements: int = option("Largest number of log elements in one batch.", 5000)
    max_batch_bytes: int = option(
        "Largest number of bytes of documents and logs in the response to a batch.", 33_554_432
    )
    batch_key_deny_suffixes: tuple[str, ...] = option(
        "Last segments of keys, and names of collections, that batches reject.",
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
        "How far back change streams can resume without a gap.", ChangeRetention
    )
    scrub: ScrubConfig | Literal[False] = option(
        "Background check of everything stored against its hashes, by one of all processes; `false`: off.",
        ScrubConfig,
    )
    projections: tuple[ProjectionConfig, ...] = option("Lists that the server maintains.", ())
    events: tuple[EventsConfig, ...] = option("Event batches stored as Parquet.", ())
    plugins: tuple[str, ...] = option("`package.module:plugin`, or the name of an entry point.", ())

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
