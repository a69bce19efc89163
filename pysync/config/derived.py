"""What follows from several members of the configuration together.

Where a store lies. In the URL of an `s3:` store query members stand for those of the store's object.

Media types, and what they make of a collection: documents, files, or both (docs/reference/protocol.md#files).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from pysync.config.schema import Action, Collection, Config, RateLimit, RateRule, StoreConfig
from pysync.protocol import JSON_TYPE, PARQUET_MIME_TYPES, PARQUET_TYPE

is_store_url = re.compile(r"memory:|file:[^\0]+|s3://[a-z0-9][a-z0-9.-]+(/[^\s?#]*)?(\?[^\s#]*)?").fullmatch
"""Whether a text has the form of a store's URL."""
_MEMBERS = ("endpoint", "region", "path_style")


@dataclass(frozen=True, slots=True)
class S3Location:
    """`prefix` has no slash at its ends. `endpoint` None is AWS, `region` None what the environment says."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    path_style: bool


def s3_location(store: StoreConfig) -> S3Location:
    """Where `store`, whose URL begins with `s3://`, lies; what its URL says wins over the members beside it.
    Raises ValueError for a URL that says what none may; the text quotes no value."""
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
        and "@" not in parts.netloc  # a user or a password, which would be shown and logged
        and not (parts.query or parts.fragment)
    )


def accepts_json(collection: Collection) -> bool:
    """Whether JSON is pushed to it as documents, or to its logs: it names that type, and no wildcard stands
    for it."""
    return JSON_TYPE in _lower(collection.allowed_mime_types)


def file_types(collection: Collection) -> tuple[str, ...]:
    """The media types, and wildcards, that are pushed to it as files: none to logs and members of bundles."""
    if collection.append_only is not None or collection.bundle is not None:
        return ()
    return tuple(found for found in _lower(collection.allowed_mime_types) if found != JSON_TYPE)


def is_parquet(collection: Collection) -> bool:
    """Whether its files are Parquet, whatever they are pushed as."""
    types = _lower(collection.allowed_mime_types)
    return PARQUET_TYPE in types and set(types) <= set(PARQUET_MIME_TYPES)


def matches_media_type(types: Iterable[str], media_type: str) -> bool:
    """Whether a media type, without parameters, is one of `types` (`type/*` and `*/*` are wildcards). Both
    are in lower case."""
    return any(
        found in (media_type, "*/*") or (found.endswith("/*") and media_type.startswith(found[:-1]))
        for found in types
    )


def _lower(types: Iterable[str]) -> list[str]:
    return [found.lower() for found in types]


def effective_limit(config: Config, collection: Collection, action: Action) -> RateRule | None:
    """The limit that holds for an action on a collection, its bucket filled in; None: unmetered.

    Only what the collection meters has one (`is_metered`). The nearest rule that names a limit wins: the
    collection's for the action, the collection's, the server's for the action, the server's. Members that it
    leaves out (`bucket`, one of `windowMs` and `maxRequests`) come from the others in that order.
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
    """The rule that `limits`, nearest first, make for `action`."""
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
    """The issuers whose certificates yield roles in a collection (None: all issuers), and the extra roles of
    user ids."""

    issuers: frozenset[str] | None
    identity_roles: Mapping[str, tuple[str, ...]]


def trust_of(config: Config, namespace: str | None = None, collection: Collection | None = None) -> Trust:
    """The trust that holds in a collection, without one of the server: of each member the innermost one that
    is given."""
    inner = config.namespaces[namespace] if namespace else None
    levels = [one for one in (collection, inner, config.auth) if one is not None]
    issuers = next((one.trusted_issuers for one in levels if one.trusted_issuers is not None), None)
    roles = next(one.identity_roles for one in levels if one.identity_roles is not None)
    return Trust(None if issuers is None else frozenset(issuers), roles)


def every_trusted_issuer(config: Config) -> frozenset[str]:
    """The issuers that are trusted anywhere."""
    return frozenset().union(*(trust.issuers or () for trust in _every_trust(config)))


def every_named_identity(config: Config) -> frozenset[str]:
    """Return the user ids that have roles of their own, or that a role names."""
    given = frozenset[str]().union(*(trust.identity_roles for trust in _every_trust(config)))
    roles = [role.split(":") for role in every_role(config)]
    return given | {parts[1] for parts in roles if parts[0] in ("admin", "delegated") and len(parts) > 1}


def every_role(config: Config) -> frozenset[str]:
    """Return every role that the configuration asks for."""
    asked: set[str] = set()
    for _, _, collection in config.each_collection():
        asked.update(collection.read_roles, collection.write_roles)
        for permission in collection.field_permissions.values():
            asked.update(permission.read_roles or (), permission.write_roles or ())
    return frozenset(asked)


def effective_coordinator(config: Config) -> str:
    """The coordinator's URL: the configured one, else `file:` (its own folder) beside a `file:` store, and
    `memory:` beside any other (docs/reference/configuration.md). A URL may hold a password."""
    if config.coordinator is not None:
        return config.coordinator
    return "file:" if config.store.url.startswith("file:") else "memory:"


def redacted_coordinator(config: Config) -> str:
    """`effective_coordinator` without what must not be shown: the user and password of a Redis."""
    scheme, slashes, rest = effective_coordinator(config).partition("://")
    return scheme + slashes + rest.rpartition("@")[2]


def database_paths(config: Config) -> list[tuple[str, Path]]:
    """The SQLite databases of a configuration: what each is of, and where it is, or would be."""
    folder = config.store.url.removeprefix("file:") if config.store.url.startswith("file:") else ""
    found = [("store", Path(folder) / "pysync.db")] if folder else []
    kind, _, rest = effective_coordinator(config).partition(":")
    if kind == "file" and (rest or folder):
        found.append(("coordinator", Path(rest or folder) / "coordinator.db"))
    return found


def collection_for_key(collections: Iterable[Collection], key: str) -> Collection | None:
    """Which of the collections, all of one prefix, a key belongs to; a template stands for the keys that it
    makes. Literal segments win, and of two collections with the same keys the one that is pulled."""
    return min(
        (collection for collection in collections if collection.key_template.matches(key)),
        key=lambda collection: (collection.key_template.open_segments, collection.push_only),
        default=None,
    )


def is_multi_process(config: Config) -> bool:
    """Whether other processes may serve the same store: several workers, or a coordinator of many nodes."""
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
