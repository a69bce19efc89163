"""Values that follow from several members of the configuration together.

The location of a store: query parameters in the URL of an `s3:` store override the members of the store's
object.

Media types decide if a collection has documents, files, or both (docs/reference/protocol.md#files).

"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from pysync.config.collection import Action, Collection, RateLimit, RateRule
from pysync.config.schema import Config, StoreConfig
from pysync.protocol import JSON_TYPE, PARQUET_MIME_TYPES, PARQUET_TYPE

is_store_url = re.compile(r"memory:|file:[^\0]+|s3://[a-z0-9][a-z0-9.-]+(/[^\s?#]*)?(\?[^\s#]*)?").fullmatch
"""Matches a text that has the form of a store's URL."""
_MEMBERS = ("endpoint", "region", "path_style")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and a prefix in it. `prefix` has no slash at its ends. `endpoint` is None for AWS, `region` is
    None if the environment decides."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    path_style: bool


def s3_location(store: StoreConfig) -> S3Location:
    """Return the location of `store`, whose URL begins with `s3://`. Its URL's query overrides the members of
    the store's object. Raises ValueError for an invalid URL or endpoint; the message quotes no value, except
    the name of an unknown query parameter."""
    parts = urlsplit(store.url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in query:
        if name not in _MEMBERS:
            raise ValueError(f"the URL's query may hold {', '.join(_MEMBERS)}, and not {ascii(name)[:60]}")
    path_style = query.get("path_style")
    if path_style not in (None, "true", "false"):
        raise ValueError("the URL's path_style must be true or false")
    prefix = parts.path.strip("/")
    if not {"", ".", ".."}.isdisjoint(prefix.split("/")) and prefix:
        raise ValueError("the prefix may not hold //, /./ or /../")
    endpoint = query.get("endpoint") or store.endpoint
    if endpoint is not None and not _is_server(endpoint):
        raise ValueError("the endpoint must be http://host:port or https://host")
    return S3Location(
        parts.netloc,
        prefix,
        endpoint,
        query.get("region") or store.region,
        store.force_path_style if path_style is None else path_style == "true",
    )


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc  # a user or password would be shown and logged
        and not (parts.query or parts.fragment)
    )


def accepts_json(collection: Collection) -> bool:
    """Return True if JSON is pushed to the collection as documents, or appended to its logs. It must name
    that media type; a wildcard does not include it."""
    return JSON_TYPE in _lower(collection.allowed_mime_types)


def file_types(collection: Collection) -> tuple[str, ...]:
    """Return the media types and wildcards that are pushed as files; none for logs and members of bundles."""
    if collection.append_only is not None or collection.bundle is not None:
        return ()
    return tuple(found for found in _lower(collection.allowed_mime_types) if found != JSON_TYPE)


def is_parquet(collection: Collection) -> bool:
    """Return True if its files are Parquet, whatever media type they are pushed with."""
    types = _lower(collection.allowed_mime_types)
    return PARQUET_TYPE in types and set(types) <= set(PARQUET_MIME_TYPES)


def _lower(types: Iterable[str]) -> list[str]:
    return [found.lower() for found in types]


def effective_limit(config: Config, collection: Collection, action: Action) -> RateRule | None:
    """Return the limit of an action on a collection, with its bucket filled in; None if it is unmetered.

    Only actions that the collection meters have one (`is_metered`). The nearest rule that names a limit wins,
    in the order: the collection's for the action, the collection's, the server's for the action, the
    server's. Members that it leaves out (`bucket`, one of `windowMs` and `maxRequests`) come from the others
    in that order.
    """
    limit = collection.rate_limit
    if not limit or not is_metered(limit, action):
        return None
    return resolve_limit(action, limit, config.rate_limit)


def is_metered(limit: RateLimit, action: Action) -> bool:
    """Return True if a collection's `limit` meters the action. It meters the actions that it names; the flat
    form, which has numbers of its own or names no action, meters pushes."""
    own: RateRule | Literal[False] | None = getattr(limit, action)
    if own is not None:
        return own is not False
    is_flat = _has_limit(limit) or limit.push is limit.pull is limit.list is None
    return action == "push" and is_flat


def resolve_limit(action: Action, *limits: RateLimit | None) -> RateRule | None:
    """Return the rule for `action` that results from `limits`, the nearest first; None if none of them names
    a limit."""
    rules = list(_rules(action, limits))
    named = next((rule for rule in rules if _has_limit(rule)), None)
    if named is None:
        return None
    if named.window_ms is None and named.max_requests is None:
        return RateRule(identity=named.identity, ip=named.ip)
    return RateRule(
        window_ms=_first(rules, "window_ms"),
        max_requests=_first(rules, "max_requests"),
        bucket=_first(rules, "bucket") or "identity",
        identity=named.identity,
        ip=named.ip,
    )


class Trust(NamedTuple):
    """The trust of a collection: the issuers whose certificates yield roles (None: all issuers), and the
    extra roles of user ids."""

    issuers: frozenset[str] | None
    identity_roles: Mapping[str, tuple[str, ...]]


def trust_of(config: Config, namespace: str | None = None, collection: Collection | None = None) -> Trust:
    """Return the trust of a collection, a namespace or the server. Each member is taken from the innermost
    level that sets it."""
    inner = config.namespaces[namespace] if namespace else None
    levels = [one for one in (collection, inner, config.auth) if one is not None]
    issuers = next((one.trusted_issuers for one in levels if one.trusted_issuers is not None), None)
    roles = next(one.identity_roles for one in levels if one.identity_roles is not None)
    return Trust(None if issuers is None else frozenset(issuers), roles)


def every_trusted_issuer(config: Config) -> frozenset[str]:
    """Return the issuers that are trusted anywhere."""
    return frozenset().union(*(trust.issuers or () for trust in _every_trust(config)))


def every_named_identity(config: Config) -> frozenset[str]:
    """Return the user ids that have roles of their own, or that a role names."""
    given = frozenset[str]().union(*(trust.identity_roles for trust in _every_trust(config)))
    roles = [role.split(":") for role in every_role(config)]
    return given | {parts[1] for parts in roles if parts[0] in ("admin", "delegated") and len(parts) > 1}


def every_role(config: Config) -> frozenset[str]:
    """Return every role that the configuration requires somewhere."""
    required: set[str] = set()
    for _, _, collection in config.each_collection():
        required.update(collection.read_roles, collection.write_roles)
        for permission in collection.field_permissions.values():
            required.update(permission.read_roles or (), permission.write_roles or ())
    return frozenset(required)


def effective_coordinator(config: Config) -> str:
    """Return the coordinator's URL: the configured one; else `file:`, which uses the store's folder, for a
    `file:` store, and `memory:` for any other (docs/reference/configuration.md). A URL may contain a
    password."""
    if config.coordinator is not None:
        return config.coordinator
    return "file:" if config.store.url.startswith("file:") else "memory:"


def redacted_coordinator(config: Config) -> str:
    """Return `effective_coordinator` without the user and password of a Redis, which must not be shown."""
    scheme, slashes, rest = effective_coordinator(config).partition("://")
    return scheme + slashes + rest.rpartition("@")[2]


def database_paths(config: Config) -> list[tuple[str, Path]]:
    """Return the SQLite databases of a configuration: the purpose of each, and its path, which need not exist
    yet."""
    folder = config.store.url.removeprefix("file:") if config.store.url.startswith("file:") else ""
    found = [("store", Path(folder) / "pysync.db")] if folder else []
    kind, _, rest = effective_coordinator(config).partition(":")
    if kind == "file" and (rest or folder):
        found.append(("coordinator", Path(rest or folder) / "coordinator.db"))
    return found


def collection_for_key(collections: Iterable[Collection], key: str) -> Collection | None:
    """Return the collection, of several under one prefix, that a key belongs to; None if there is none. A
    template stands for the keys that it makes. Literal segments win, and of two collections with the same
    keys the one that can be pulled."""
    return min(
        (collection for collection in collections if collection.key_template.matches(key)),
        key=lambda collection: (collection.key_template.open_segments, collection.push_only),
        default=None,
    )


def is_multi_process(config: Config) -> bool:
    """Return True if other processes may serve the same store: with several workers, or a coordinator of many
    nodes."""
    return config.server.workers > 1 or effective_coordinator(config).startswith("redis")


def _every_trust(config: Config) -> Iterator[Trust]:
    yield trust_of(config)
    for namespace, _, collection in config.each_collection():
        yield trust_of(config, namespace, collection)


def _rules(action: Action, limits: tuple[RateLimit | None, ...]) -> Iterator[RateRule]:
    for limit in limits:
        if limit is not None:
            own: RateRule | Literal[False] | None = getattr(limit, action)
            if own is False:
                return
            if own is not None:
                yield own
            yield limit


def _has_limit(rule: RateRule) -> bool:
    return any(part is not None for part in (rule.window_ms, rule.max_requests, rule.identity, rule.ip))


def _first(rules: list[RateRule], name: str) -> Any:
    return next((value for rule in rules if (value := getattr(rule, name)) is not None), None)
