"""Collections: their members, their short form for Parquet files, quotas, and the fields of all members."""
# ruff: noqa: RUF009 (`option` and `_field_like` make `dataclasses.field`)

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from math import inf
from typing import Any, Literal, get_args

from pysync.config.key_templates import KeyTemplate
from pysync.protocol import JSON_TYPE, MAX_INT, OCTET_STREAM, PARQUET_MIME_TYPES, PARQUET_TYPE

Encryption = Literal["none", "delegated"]
RateLimitKey = Literal["identity", "ip", "identity+ip"]
Action = Literal["pull", "push", "list"]
AccessLevel = Literal["public", "authenticated", "none"]

ISSUERS_HERE = "Replaces `auth.trustedIssuers` here; absent: the {}server's."
ROLES_HERE = "Replaces `auth.identityRoles` here; absent: the {}server's."


def option(
    doc: str,
    default: Any = dataclasses.MISSING,
    *,
    at_least: int = 1,
    at_most: int = MAX_INT,
    may_be_empty: bool = False,
    secret: bool = False,
    is_path: bool = False,
    restart: bool = False,
) -> Any:
    """Return a field with its documentation; a member without a default is required.

    `at_least` and `at_most` bound an integer, `may_be_empty` allows an empty string, and a `secret` is left
    out of `repr`. If `is_path`, a relative path is relative to the file that contains it. A reload rejects
    changes of a member that needs a `restart`, and of those inside it.
    """
    metadata = {
        "doc": doc,
        "at_least": at_least,
        "at_most": at_most,
        "may_be_empty": may_be_empty,
        "secret": secret,
        "is_path": is_path,
        "restart": restart,
    }
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

    @property
    def has_limit(self) -> bool:
        """True if it names a limit, complete or not."""
        return any(part is not None for part in (self.window_ms, self.max_requests, self.identity, self.ip))


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

    def meters(self, action: Action) -> bool:
        """Return True if a collection with this limit meters the action. It meters the actions that it names;
        the flat form, which has numbers of its own or names no action, meters pushes."""
        own: RateRule | Literal[False] | None = getattr(self, action)
        if own is not None:
            return own is not False
        return action == "push" and (self.has_limit or self.push is self.pull is self.list is None)


def resolve_limit(action: Action, *limits: RateLimit | None) -> RateRule | None:
    """Return the rule for `action` that results from `limits`, the nearest first; None if none of them names
    a limit."""
    rules: list[RateRule] = []
    for limit in filter(None, limits):
        own: RateRule | Literal[False] | None = getattr(limit, action)
        if own is False:
            break
        rules += [limit] if own is None else [own, limit]
    named = next((rule for rule in rules if rule.has_limit), None)
    if named is None:
        return None
    if named.window_ms is None and named.max_requests is None:
        return RateRule(identity=named.identity, ip=named.ip)

    def first(name: str) -> Any:
        return next((value for rule in rules if (value := getattr(rule, name)) is not None), None)

    return RateRule(
        window_ms=first("window_ms"),
        max_requests=first("max_requests"),
        bucket=first("bucket") or "identity",
        identity=named.identity,
        ip=named.ip,
    )


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
        "`true` or absent: appends need a valid author proof; `false`: proofs are stored unchecked.", None
    )
    allow_full: bool | None = option("`true` or absent: a pull may ask for `full=true`.", None)
    max_pull_limit: int | None = option(
        "Largest number of elements in one pull, except with `full`: the oldest ones after a checkpoint "
        "alone, otherwise the newest.",
        None,
    )
    max_checkpoint_age_ms: int | None = option("Greatest age of a checkpoint; older ones are rejected.", None)
    keep_elements: int | None = option(
        "Newest elements that stay; older ones leave, a whole segment at a time. Absent: all stay.", None
    )
    keep_ms: int | None = option(
        "Age up to which elements stay; older ones leave, a whole segment at a time. Absent: all stay.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """The versions of a document that are kept when it is replaced or deleted."""

    versions: int = option("Largest number of earlier versions of one document.", 20, at_most=1000)
    for_ms: int | None = option(
        "How long a version is kept after it was replaced or deleted, in milliseconds; absent: as long as "
        "`versions` allows.",
        None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection of documents, logs or files: its keys, access, limits and media types."""

    name: str = option("Name, unique in its namespace.")
    storage_path: str = option("Key template with `{param}` segments; `{identity}` is the caller's.")
    read_roles: tuple[str, ...] = option("Roles that may pull.", ())
    write_roles: tuple[str, ...] = option("Roles that may push.", ())
    deletable: bool = option(
        "Serves `DELETE` on the push route, which removes documents, files and logs.", False
    )
    delete_roles: tuple[str, ...] | None = option(
        "With `deletable`: roles that may delete; absent: `writeRoles`.", None
    )
    history: HistoryConfig | None = option(
        "Keeps earlier versions of documents, and serves the history route.", None
    )
    history_roles: tuple[str, ...] | None = option(
        "With `history`: roles that may read earlier versions; absent: `readRoles`, and `space:owner` where "
        "access documents of spaces (`auth.spaces.accessPath`) are pulled.",
        None,
    )
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
    force_full_fetch: bool = option("A pull with `checkpoint` alone returns the whole log.", False)
    listable: bool = option("Serves the list route.", False)
    secret_names: bool = option(
        "Tells changes only to those who name every path parameter: names are secrets. Not with `listable`.",
        False,
    )
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
    trusted_issuers: tuple[str, ...] | None = option(ISSUERS_HERE.format("namespace's, else the "), None)
    identity_roles: Mapping[str, tuple[str, ...]] | None = option(
        ROLES_HERE.format("namespace's, else the "), None
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

    def every_role_for(self, action: Literal["pull", "push"]) -> tuple[str, ...]:
        """Return the roles that may read, or change, what it stores in any way; none if there is no route for
        it."""
        roles = self.roles_for(action)
        if action == "push" and self.deletable:
            roles += self.delete_roles or ()
        if action == "pull" and self.history is not None:
            roles += self.history_roles or ()
        return roles

    @property
    def uses_space_roles(self) -> bool:
        """True if a role in a space may read, or change, what it stores."""
        roles = self.every_role_for("pull") + self.every_role_for("push")
        return any(role.startswith("space:") for role in roles)

    @property
    def path_template(self) -> KeyTemplate:
        """The template of its routes' paths: `storagePath`."""
        return KeyTemplate.of(self.storage_path)

    @property
    def key_template(self) -> KeyTemplate:
        """The template of its documents' keys: members of a bundle lie below its path."""
        path = self.storage_path
        return KeyTemplate.of(path if self.bundle is None else f"{path}/{self.name}")

    @property
    def accepts_json(self) -> bool:
        """True if JSON is pushed to it as documents, or appended to its logs. It must name that media type; a
        wildcard does not include it."""
        return JSON_TYPE in self._media_types

    @property
    def file_types(self) -> tuple[str, ...]:
        """The media types and wildcards that are pushed as files; none for logs and members of bundles."""
        if self.append_only is not None or self.bundle is not None:
            return ()
        return tuple(found for found in self._media_types if found != JSON_TYPE)

    @property
    def is_parquet(self) -> bool:
        """True if its files are Parquet, whatever media type they are pushed with."""
        return PARQUET_TYPE in self._media_types and set(self._media_types) <= set(PARQUET_MIME_TYPES)

    @property
    def _media_types(self) -> list[str]:
        return [found.lower() for found in self.allowed_mime_types]


def collection_for_key(collections: Iterable[Collection], key: str) -> Collection | None:
    """Return the collection, of several under one prefix, that a key belongs to; None if there is none. A
    template stands for the keys that it makes. Literal segments win, and of two collections with the same
    keys the one that can be pulled."""
    return min(
        (collection for collection in collections if collection.key_template.matches(key)),
        key=lambda collection: (collection.key_template.open_segments, collection.push_only),
        default=None,
    )


def _field_like(name: str) -> Any:
    """Return a field with the default and documentation of a collection's member."""
    (found,) = (field for field in dataclasses.fields(Collection) if field.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetPreset:
    """A short form of a collection of files. Its roles decide who has access; `requireAuth` stays absent."""

    preset: Literal["parquet", "sealedParquet"] = option(
        "`parquet`: Parquet files, with all media types that they are sent as; `sealedParquet`: the same, "
        "sealed by clients, as `application/octet-stream`. `encryption` is `none`, and `listable` true where "
        "the last segment of `storagePath` is a parameter."
    )
    name: str = _field_like("name")
    storage_path: str = _field_like("storage_path")
    read: AccessLevel | tuple[str, ...] | None = option(
        "Access to pulls: `public`; `authenticated`, which is the role `cap:read:NAME`; `none`: there is no "
        "pull route; or a list of roles. Absent: `public`, of `sealedParquet` `authenticated`.",
        None,
    )
    write: AccessLevel | tuple[str, ...] = option(
        "Access to pushes, likewise: `authenticated` is the role `cap:write:NAME`.", "authenticated"
    )
    max_body_bytes: int = _field_like("max_body_bytes")
    rate_limit: RateLimit | Literal[False] | None = _field_like("rate_limit")
    cache_duration_ms: int | None = _field_like("cache_duration_ms")
    trusted_issuers: tuple[str, ...] | None = _field_like("trusted_issuers")
    identity_roles: Mapping[str, tuple[str, ...]] | None = _field_like("identity_roles")

    @property
    def is_inaccessible(self) -> bool:
        """True if neither pulls nor pushes are possible, which is not allowed."""
        return self.read == self.write == "none"

    def collection(self) -> Collection:
        """Return the collection that the preset describes."""
        is_sealed = self.preset == "sealedParquet"
        read = self.read if self.read is not None else "authenticated" if is_sealed else "public"
        return Collection(
            name=self.name,
            storage_path=self.storage_path,
            read_roles=self._roles("read", read),
            write_roles=self._roles("write", self.write),
            encryption="none",
            max_body_bytes=self.max_body_bytes,
            allowed_mime_types=(OCTET_STREAM,) if is_sealed else PARQUET_MIME_TYPES,
            pull_only=self.write == "none",
            push_only=read == "none" and not self.is_inaccessible,
            listable=KeyTemplate.of(self.storage_path).ends_in_param,
            rate_limit=self.rate_limit,
            cache_duration_ms=self.cache_duration_ms,
            trusted_issuers=self.trusted_issuers,
            identity_roles=self.identity_roles,
        )

    def _roles(self, verb: str, access: AccessLevel | tuple[str, ...]) -> tuple[str, ...]:
        levels = {"public": ("public",), "authenticated": (f"cap:{verb}:{self.name}",), "none": ()}
        return levels[access] if isinstance(access, str) else access


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that may be stored for one subject."""

    bytes: int | None = option("Bytes of documents, logs and files; absent: any number.", None)
    documents: int | None = option("Documents; absent: any number.", None)
    log_elements: int | None = option("Elements of logs; absent: any number.", None)
    files: int | None = option("Files; absent: any number.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasConfig:
    """Limits of what may be stored for whom. Usage is counted while this is configured, also without any
    limit."""

    identity: Quota | None = option(
        "The most for each identity. In a folder: what it wrote last. Otherwise: what has it as `{identity}` "
        "in the key, in collections whose `writeRoles` are `self` or `admin` alone.",
        None,
    )
    space: Quota | None = option(
        "The most for each space, by the path parameter of `auth.spaces`. In a folder: what its members "
        "wrote last. Otherwise: what lies in collections whose `writeRoles` are `space:` roles or `admin` "
        "alone.",
        None,
    )
    namespace: Quota | None = option("The most for each namespace, and for the root.", None)
    issuer: Quota | None = option(
        "The most for each issuer: the one of the certificate with which was written last. Needs a store in "
        "a folder.",
        None,
    )

    def limits(self) -> Mapping[str, tuple[float, float, float, float]]:
        """Return the limits of each kind of subject: bytes, documents, log elements and files, each `inf` for
        none."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            kind: tuple(inf if most is None else most for most in astuple(quota))  # type: ignore[misc]
            for kind, quota in found.items()
            if quota is not None
        }
