"""The members of a configuration: one tree of frozen values (docs/reference/configuration.md).

Attributes are the file's members in snake_case: `max_body_bytes` is `maxBodyBytes`. `doc` of each field is
the source of `docs/reference/configuration.md`.

"""
# ruff: noqa: RUF009 (`option` is `dataclasses.field`)

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pysync.config.key_templates import KeyTemplate
from pysync.protocol import JSON_TYPE

Encryption = Literal["none", "delegated"]
RateLimitKey = Literal["identity", "ip", "identity+ip"]
Action = Literal["pull", "push", "list"]
LogLevel = Literal["debug", "info", "warning", "error"]


MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader represents exactly."""


_ISSUERS_HERE = "Replaces `auth.trustedIssuers` here; absent: the {}server's."
_ROLES_HERE = "Replaces `auth.identityRoles` here; absent: the {}server's."


def option(
    doc: str,
    default: Any = ...,
    *,
    at_least: int = 1,
    at_most: int = MAX_INT,
    may_be_empty: bool = False,
    secret: bool = False,
    is_path: bool = False,
) -> Any:
    """Return a field with its documentation; a member without a default is required.

    `at_least` and `at_most` bound an integer, `may_be_empty` allows an empty string, and a `secret` is left
    out of `repr`. If `is_path`, a relative path is relative to the file that contains it.
    """
    metadata = {
        "doc": doc,
        "at_least": at_least,
        "at_most": at_most,
        "may_be_empty": may_be_empty,
        "secret": secret,
        "is_path": is_path,
    }
    if default is ...:
        return field(metadata=metadata, repr=not secret)
    if callable(default):
        return field(default_factory=default, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata, repr=not secret)


def wire_name(attribute: str) -> str:
    """Return the member's name in the file: `maxBodyBytes` for `max_body_bytes`."""
    first, *rest = attribute.split("_")
    return first + "".join(map(str.capitalize, rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A number of requests per window."""

    window_ms: int = option("Length of the fixed window, in milliseconds.")
    max_requests: int = option("Requests admitted in one window.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """The limit of one action: `windowMs` and `maxRequests` per `bucket`, or limits of `identity`, `ip`."""

    window_ms: int | None = option("Length of the fixed window, in milliseconds.", None)
    max_requests: int | None = option("Requests admitted in one window.", None)
    bucket: RateLimitKey | None = option(
        "Callers with the same identity, or address, share a counter; absent: `identity`. Anonymous "
        "callers count by address.",
        None,
    )
    identity: Limit | None = option("A limit per caller, beside or instead of the one above.", None)
    ip: Limit | None = option("A limit per address, beside or instead of the one above.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit(RateRule):
    """Limits per action. The flat form, without actions, meters pushes."""

    push: RateRule | Literal[False] | None = option(
        "Limit of pushes and appends. Missing members come from those beside it, else from the server's "
        "limit; `true`: all of them do; `false` or `none`: unmetered.",
        None,
    )
    pull: RateRule | Literal[False] | None = option("Limit of pulls, likewise; absent: unmetered.", None)
    list: RateRule | Literal[False] | None = option("Limit of lists, likewise; absent: unmetered.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Identities that are denied or allowed."""

    mode: Literal["deny", "allow"] = option("`deny` rejects the identities, `allow` rejects all others.")
    identities: tuple[str, ...] = option("User ids.")
    actions: tuple[Action, ...] | None = option("Actions that it concerns; absent: all.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPermission:
    """The roles that may see or change one member of `data`."""

    read_roles: tuple[str, ...] | None = option("Roles that see the member; absent: every reader.", None)
    write_roles: tuple[str, ...] | None = option("Roles that may change it; absent: every writer.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOnly:
    """The settings of an append-only log. Absent members stay None, so that the manifest shows clients only
    what was configured.

    See docs/reference/protocol.md#configuration-manifest.
    """

    type: Literal["by_timestamp"] = option("The only type there is.", "by_timestamp")
    field: str | None = option("Member of `data` that holds the elements; absent: `items`.", None)
    persist: bool | None = option(
        "`false`: appends are announced but not stored, and pulls find nothing.", None
    )
    max_items: int | None = option("Elements a log may hold; 0 or absent: any number.", None)
    chunk_size: int | None = option("Elements per stored segment; absent: as many as suit the store.", None)
    require_author_signature: bool | None = option(
        "`true` or absent: appends need a valid author proof; `false`: proofs are stored unchecked.",
        None,
    )
    allow_full: bool | None = option("`true` or absent: a pull may ask for `full=true`.", None)
    max_pull_limit: int | None = option(
        "Largest number of elements in one pull, except with `full`: the oldest ones after a checkpoint "
        "alone, otherwise the newest.",
        None,
    )
    max_checkpoint_age_ms: int | None = option("Greatest age of a checkpoint; older ones are rejected.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection of documents, logs or files: its keys, access, limits and media types."""

    name: str = option("Name, unique in its namespace.")
    storage_path: str = option("Key template with `{param}` segments; `{identity}` is the caller's.")
    read_roles: tuple[str, ...] = option("Roles that may pull.", ())
    write_roles: tuple[str, ...] = option("Roles that may push.", ())
    require_auth: bool | None = option(
        "`true`: anonymous callers get 401; `false`: they reach the role check as `public`; absent: open to "
        "them exactly where the action's roles contain `public`.",
        None,
    )
    encryption: Encryption = option(
        "`delegated`: clients encrypt, and the server cannot read the data.", "none"
    )
    enforce_sealed: bool = option(
        "Rejects documents and log elements that are not sealed, except keyrings. Needs "
        "`encryption: delegated`; does not apply to files.",
        False,
    )
    max_body_bytes: int = option("Largest push body, in bytes, also after inflation.", 1_048_576)
    allowed_mime_types: tuple[str, ...] = option(
        "Media types accepted on push; parameters (`; charset=utf-8`) do not count. `application/json`, "
        "spelled out, takes documents, all others take files, `type/*` and `*/*` among them.",
        (JSON_TYPE,),
    )
    pull_only: bool = option("No push route.", False)
    push_only: bool = option("No pull route.", False)
    append_only: AppendOnly | None = option("An append-only log; `true` takes every default.", None)
    ttl_ms: int | None = option(
        "A document older than this, or a log whose last append is older, reads as missing; 0 or absent: "
        "nothing expires.",
        None,
    )
    force_full_fetch: bool = option(
        "Disables synchronisation by checkpoint: a pull with `checkpoint` alone returns the log from its "
        "beginning.",
        False,
    )
    listable: bool = option("Serves the list route.", False)
    bundle: str | None = option("Name of the bundle it belongs to.", None)
    keyring_path: str | None = option("Key template of the keyring; absent: `<storagePath>/_keyring`.", None)
    rate_limit: RateLimit | Literal[False] | None = option(
        "Limits of this collection: the flat form `{windowMs, maxRequests}` meters pushes and appends, "
        "`{push, pull, list}` the actions that it names; `true` meters pushes and appends with the server's "
        "numbers; absent, `false` or `none`: unmetered.",
        None,
    )
    cache_duration_ms: int | None = option(
        "How long clients and proxies may cache a pull (`max-age`), in milliseconds.", None, at_least=0
    )
    object_schema: Mapping[str, Any] | bool | None = option("JSON Schema that `data` must satisfy.", None)
    field_permissions: Mapping[str, FieldPermission] = option("Roles per top-level member of `data`.", dict)
    root_only: bool = option("Callers also need the role `device:root`.", False)
    restrictions: tuple[Restriction, ...] = option(
        "Identities denied or allowed: an object or a list of them.", ()
    )
    trusted_issuers: tuple[str, ...] | None = option(_ISSUERS_HERE.format("namespace's, else the "), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = option(
        _ROLES_HERE.format("namespace's, else the "), None
    )

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions that it has routes for. A member of a bundle is pulled with the bundle."""
        has = {"pull": not self.push_only, "push": not self.pull_only, "list": self.listable}
        return tuple(action for action in get_args(Action) if has[action])

    def roles_for(self, action: Action) -> tuple[str, ...]:
        """Return the roles that may perform the action; none if there is no route for it."""
        if action not in self.actions:
            return ()
        return self.write_roles if action == "push" else self.read_roles

    @property
    def path_template(self) -> KeyTemplate:
        """The template of its routes' paths: `storagePath`."""
        return KeyTemplate.of(self.storage_path)

    @property
    def key_template(self) -> KeyTemplate:
        """The template of its documents' keys: members of a bundle lie below its path."""
        path = self.storage_path
        return KeyTemplate.of(path if self.bundle is None else f"{path}/{self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Collections under a prefix of their own."""

    collections: tuple[Collection, ...] = option("Collections served under `/<namespace>`.")
    restrictions: tuple[Restriction, ...] = option("Identities denied or allowed in it, likewise.", ())
    trusted_issuers: tuple[str, ...] | None = option(_ISSUERS_HERE.format(""), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = option(_ROLES_HERE.format(""), None)


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
