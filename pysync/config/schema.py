"""What a configuration may say: one tree of frozen values (wire section 10).

Attributes are the file's members in snake_case: `max_body_bytes` is `maxBodyBytes`. `doc` of each field is
the source of `docs/configuration.md`.
"""
# ruff: noqa: RUF009 (`member` is `dataclasses.field`)

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Encryption = Literal["none", "delegated"]
Bucket = Literal["identity", "ip", "identity+ip"]
Action = Literal["pull", "push", "list"]
LogLevel = Literal["debug", "info", "warning", "error"]


MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""


_ISSUERS_HERE = "In place of `auth.trustedIssuers`, here alone; absent: the {}server's."
_ROLES_HERE = "In place of `auth.identityRoles`, here alone; absent: the {}server's."


def member(
    doc: str,
    default: Any = ...,
    *,
    at_least: int = 1,
    at_most: int = MAX_INT,
    may_be_empty: bool = False,
    secret: bool = False,
    is_path: bool = False,
) -> Any:
    """A field with its documentation; without a default the member is required.

    `at_least` and `at_most` bound an integer, `may_be_empty` admits an empty string, and a `secret` is kept
    out of `repr`. One that `is_path` is relative to the file it is written in.
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
    """The member's name in the file: `maxBodyBytes` for `max_body_bytes`."""
    first, *rest = attribute.split("_")
    return first + "".join(map(str.capitalize, rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    window_ms: int = member("Length of the fixed window, in milliseconds.")
    max_requests: int = member("Requests admitted in one window.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """One action's limit: `windowMs` and `maxRequests` per `bucket`, or limits of `identity` and `ip`."""

    window_ms: int | None = member("Length of the fixed window, in milliseconds.", None)
    max_requests: int | None = member("Requests admitted in one window.", None)
    bucket: Bucket | None = member(
        "Who shares a counter; absent: `identity`. Anonymous callers count by address.", None
    )
    identity: Limit | None = member("A limit per caller, beside or instead of the one above.", None)
    ip: Limit | None = member("A limit per address, beside or instead of the one above.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit(RateRule):
    """Limits per action. The flat form, without actions, meters pushes."""

    push: RateRule | Literal[False] | None = member(
        "Limit of pushes and appends. Missing members come from those beside it, else from the server's "
        "limit; `true`: all of them do; `false` or `none`: unmetered.",
        None,
    )
    pull: RateRule | Literal[False] | None = member("Limit of pulls, likewise; absent: unmetered.", None)
    list: RateRule | Literal[False] | None = member("Limit of lists, likewise; absent: unmetered.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    mode: Literal["deny", "allow"] = member("`deny` refuses the identities, `allow` refuses all others.")
    identities: tuple[str, ...] = member("User ids.")
    actions: tuple[Action, ...] | None = member("Actions it covers; absent: all.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPermission:
    read_roles: tuple[str, ...] | None = member("Roles that see the member; absent: every reader.", None)
    write_roles: tuple[str, ...] | None = member("Roles that may change it; absent: every writer.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOnly:
    """Absent members stay None, so that clients are told what was configured, not more (wire section 10)."""

    type: Literal["by_timestamp"] = member("The only type there is.", "by_timestamp")
    field: str | None = member("Member of `data` that holds the elements; absent: `items`.", None)
    persist: bool | None = member("False: announced, and not stored: pulls find nothing.", None)
    max_items: int | None = member("Elements a log may hold; 0 or absent: any number.", None)
    chunk_size: int | None = member(
        "Elements after which a segment is begun; absent: as many as suit the store.", None
    )
    require_author_signature: bool | None = member(
        "Appends carry an author proof, which is checked; false: proofs are kept unchecked; absent: true.",
        None,
    )
    allow_full: bool | None = member("`full=true` may be asked for; absent: true.", None)
    max_pull_limit: int | None = member(
        "Elements one pull returns at most, except with `full`: after a checkpoint alone the oldest, else "
        "the newest.",
        None,
    )
    max_checkpoint_age_ms: int | None = member(
        "How far back a checkpoint may lie; older ones are refused.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    name: str = member("Name, unique in its namespace.")
    storage_path: str = member("Key template with `{param}` segments; `{identity}` is the caller's.")
    read_roles: tuple[str, ...] = member("Roles that may pull.", ())
    write_roles: tuple[str, ...] = member("Roles that may push.", ())
    require_auth: bool | None = member(
        "`true`: anonymous callers get 401; `false`: they reach the role check as `public`; absent: open to "
        "them exactly where the action's roles contain `public`.",
        None,
    )
    encryption: Encryption = member("`delegated`: clients encrypt, the server cannot read.", "none")
    enforce_sealed: bool = member(
        "Refuses documents and log elements that are not sealed, except keyrings; needs "
        "`encryption: delegated`, and is not for files.",
        False,
    )
    max_body_bytes: int = member("Largest push body, in bytes, also after inflation.", 1_048_576)
    allowed_mime_types: tuple[str, ...] = member(
        "Media types accepted on push; parameters (`; charset=utf-8`) do not count. `application/json`, "
        "spelled out, takes documents, all others take files, `type/*` and `*/*` among them.",
        ("application/json",),
    )
    pull_only: bool = member("No push route.", False)
    push_only: bool = member("No pull route.", False)
    append_only: AppendOnly | None = member("An append-only log; `true` takes every default.", None)
    ttl_ms: int | None = member(
        "A document older than this, or a log whose last append is, reads as missing; 0 or absent: none is "
        "too old.",
        None,
    )
    force_full_fetch: bool = member(
        "Disables sync by checkpoint: a pull with `checkpoint` alone returns the log from its beginning.",
        False,
    )
    listable: bool = member("Serves the list route.", False)
    bundle: str | None = member("Name of the bundle it belongs to.", None)
    keyring_path: str | None = member("Key template of the keyring; absent: `<storagePath>/_keyring`.", None)
    rate_limit: RateLimit | Literal[False] | None = member(
        "Limits of this collection: the flat form `{windowMs, maxRequests}` meters pushes and appends, "
        "`{push, pull, list}` the actions that it names; `true` meters pushes and appends with the server's "
        "numbers; absent, `false` or `none`: unmetered.",
        None,
    )
    cache_duration_ms: int | None = member("`max-age` of pulls, in milliseconds.", None, at_least=0)
    object_schema: Mapping[str, Any] | bool | None = member("JSON Schema that `data` must satisfy.", None)
    field_permissions: Mapping[str, FieldPermission] = member("Roles per top-level member of `data`.", dict)
    root_only: bool = member("Callers also need `device:root`.", False)
    restrictions: tuple[Restriction, ...] = member(
        "Identities denied or allowed: an object or a list of them.", ()
    )
    trusted_issuers: tuple[str, ...] | None = member(_ISSUERS_HERE.format("namespace's, else the "), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = member(
        _ROLES_HERE.format("namespace's, else the "), None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    collections: tuple[Collection, ...] = member("Collections served under `/<namespace>`.")
    restrictions: tuple[Restriction, ...] = member("Identities denied or allowed in it, likewise.", ())
    trusted_issuers: tuple[str, ...] | None = member(_ISSUERS_HERE.format(""), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = member(_ROLES_HERE.format(""), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    origins: tuple[str, ...] = member('Origins whose pages may call; `"*"` for any.', ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    host: str = member("Address to listen on.", "127.0.0.1")
    port: int = member("Port to listen on; 0 takes a free one.", 8080, at_least=0, at_most=65535)
    mount_path: str = member("Prefix of every route, e.g. `/v1`.", "", may_be_empty=True)
    public_hosts: tuple[str, ...] = member("Hosts that requests may name; empty: any.", ())
    trusted_proxy_hops: int = member("Proxies in front whose `X-Forwarded-For` is believed.", 0, at_least=0)
    cors: Cors = member("Cross-origin callers.", Cors)
    examples: str | None = member(
        "Folder whose files (HTML and what belongs to it) are served below `/examples/`, relative to this "
        "file. Absent: nothing is.",
        None,
        is_path=True,
    )
    workers: int = member("Processes that serve.", 1)
    drain_timeout_ms: int = member("How long requests under way may take on shutdown.", 10_000)
    log_level: LogLevel = member("The least serious records that are logged.", "info")
    log_refusals: bool = member(
        "Logs which check each 401, 403 and 421 failed; without it they are logged at the level `debug`.",
        False,
    )
    access_log: bool = member("Logs a line for each request: what was asked, by whom, and the answer.", False)
    quick_check_max_bytes: int = member(
        "Before it serves, the server checks SQLite databases up to this size (`quick_check`, which "
        "reads all of one); 0: none.",
        268_435_456,
        at_least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    url: str = member(
        "`memory:`, `file:DIR` or `s3://bucket/prefix`; `?endpoint=…&region=…&path_style=true` stand for the "
        "members below.",
        "file:./data",
    )
    endpoint: str | None = member("URL of the S3 service; absent: AWS.", None)
    region: str | None = member("S3 region; absent: from the environment, else `us-east-1`.", None)
    force_path_style: bool = member(
        "The bucket in the path instead of the host; hosts that are numbers get it anyway.", False
    )
    access_key_id: str | None = member(
        "S3 credentials; absent: from the environment, the shared files, or the machine's role.", None
    )
    secret_access_key: str | None = member("Belongs to `accessKeyId`.", None, secret=True)
    max_connections: int = member("Connections to S3 that one process keeps.", 128, at_most=4096)
    timeout_ms: int = member("How long one request to S3 may take, before it is tried again.", 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    access_path: str = member("Key template of a space's access document.", "spaces/{spaceId}/_access")
    param: str = member("Path parameter that names the space.", "spaceId")
    trust_on_first_use: bool = member("Only `false` is safe.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    admin_token: str | None = member(
        "Bearer token that gives the role `admin`: 16 or more characters of printable ASCII, without spaces.",
        None,
        secret=True,
    )
    trusted_issuers: tuple[str, ...] | None = member(
        "Keys (hex) of issuers whose certificates yield `cap:` and `delegated:` roles; absent: anybody's.",
        None,
    )
    identity_roles: Mapping[str, tuple[str, ...]] = member("Extra roles per user id.", dict)
    spaces: Spaces | None = member("Roles from a space's access document.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEndpoint:
    auth: Literal["public", "role-filtered"] = member("Who sees what of the configuration.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesKept:
    max_count: int = member("Changes that the change log keeps at least.", 100_000)
    max_resumed: int = member(
        "Changes that a stream may have missed when it resumes, of the collections that it follows; if there "
        "are more it gets a reset.",
        20_000,
    )
    max_age_ms: int = member("How old they may get.", 86_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    every_ms: int = member("From the end of one scrub to the beginning of the next.", 86_400_000)
    max_bytes_per_second: int = member(
        "Bytes read per second at most; an object counts as at least 16 KiB.", 8_388_608
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    name: str | None = member("What `pysync project rebuild` calls it; absent: its `target`.", None)
    source: tuple[str, ...] = member(
        "Collections whose writes are projected: a name or a list of them. `notes` is found in every "
        "namespace, `acme/notes` in one, `/notes` in the root alone."
    )
    target: str = member("Key template of the list, or `module:function`.")
    id: str | None = member("Template of the entry's id.", None)
    value: Mapping[str, str] = member("Members of the value, as JSON pointers into `data`.", dict)
    remove_when: Mapping[str, Any] = member("Pointers whose values mark a removal.", dict)
    project: str | None = member("`module:function` in place of `id`, `value`, `removeWhen`.", None)
    max_items: int | None = member("Entries a list holds at most.", None)
    max_retries: int = member("Retries of a list write.", 8, at_least=0)
    wait: bool = member(
        "Pushes to its sources are answered when the list holds them, at the latest after 5 s.", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsPlugin:
    collection: str = member("Collection whose pushes become Parquet files.")
    storage_path: str = member("Key template whose last segment is a path parameter: the id of the batch.")
    compact_every_ms: int | None = member(
        "How often small files are merged into larger ones; absent: only by `pysync events compact`.", None
    )
    compact_older_than_ms: int = member(
        "How old the files are at least that are merged.", 600_000, at_least=0
    )
    compact_to_bytes: int = member("How large merged files get, about.", 134_217_728)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    version: Literal[1] = member("Always 1.", 1)
    collections: tuple[Collection, ...] = member("Root collections.", ())
    namespaces: Mapping[str, Namespace] = member("Collections under a prefix of their own.", dict)
    server: Server = member("How to listen.", Server)
    store: StoreConfig = member("Where documents live; a string is its `url`.", StoreConfig)
    coordinator: str | None = member(
        "`memory:`, `file:`, `file:DIR` or `redis://…`; absent: what suits the store.", None, secret=True
    )
    auth: Auth = member("Who is trusted.", Auth)
    config_endpoint: ConfigEndpoint | None = member("`GET /config`; absent: 404.", None)
    max_collections_per_batch: int = member("Names, and reads, of one batch.", 100)
    max_batch_append_elements: int = member("Log elements of one batch.", 5000)
    max_batch_bytes: int = member("Bytes of documents and logs in one batch's answer.", 33_554_432)
    batch_key_deny_suffixes: tuple[str, ...] = member(
        "Last segments of keys, and names of collections, that batches refuse.",
        ("_keyring", "_members"),
    )
    rate_limit: RateLimit | None = member(
        "The numbers for members that collections leave out of their `rateLimit`. By itself it meters "
        "nothing. `true`, `false`, `none` or absent: no numbers.",
        None,
    )
    restrictions: tuple[Restriction, ...] = member(
        "Identities denied or allowed everywhere: an object or a list of them.", ()
    )
    changes: ChangesKept = member(
        "For how long who follows the change stream may be away without a gap.", ChangesKept
    )
    scrub: ScrubConfig | Literal[False] = member(
        "Background check of everything stored against its hashes, by one of all processes; `false`: off.",
        ScrubConfig,
    )
    projections: tuple[Projection, ...] = member("Lists kept by the server.", ())
    events: tuple[EventsPlugin, ...] = member("Event batches stored as Parquet.", ())
    plugins: tuple[str, ...] = member("`package.module:plugin`, or the name of an entry point.", ())

    def each_namespace(self) -> Iterator[tuple[str, str, tuple[Collection, ...]]]:
        """The collections under each prefix, the root first: the namespace's name (`""`: the root), the path
        at which the file lists them, and they themselves."""
        yield "", "collections", self.collections
        for name, namespace in self.namespaces.items():
            yield name, f"namespaces.{name}.collections", namespace.collections

    def by_name(self) -> dict[str, list[Collection]]:
        """The collections of each name, in all namespaces."""
        named: dict[str, list[Collection]] = {}
        for _, _, collections in self.each_namespace():
            for collection in collections:
                named.setdefault(collection.name, []).append(collection)
        return named
