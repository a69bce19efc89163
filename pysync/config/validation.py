"""Rules beyond types: names, templates, and members that cannot be used together."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, fields
from itertools import product
from typing import Any, get_args

from pysync import extras
from pysync.config import key_templates
from pysync.config.collection import Action, Collection, QuotasConfig, RateLimit, resolve_limit, wire_name
from pysync.config.convert import join
from pysync.config.key_templates import KeyTemplate
from pysync.config.overlaps import takeovers, vanishing_access_documents
from pysync.config.plugin_validation import (
    OBJECT_REFERENCE,
    cycles,
    events_errors,
    projection_errors,
    projection_name,
    repeated,
)
from pysync.config.problem import FieldError, Problem
from pysync.config.roles import SHARED, role_lists
from pysync.config.schema import Auth, Config, Namespace, Server, is_store_url
from pysync.config.webhooks import webhook_errors

PathOf = Callable[[object], str]
"""Returns the path in the file at which an object of the tree was written."""

_NEEDS_PERSIST = (
    "max_items", "chunk_size", "max_pull_limit", "max_checkpoint_age_ms", "keep_elements", "keep_ms",
)  # fmt: skip
RESERVED_NAMESPACES = frozenset({"pull", "push", "health", "batch", "list", "config", "events"})
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/([A-Za-z0-9!#$&^_.+-]+|\*)|\*/\*")
_ISSUER = re.compile(r"[0-9a-f]{64}")
_ADMIN_TOKEN = re.compile(r"[!-~]{16,}")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+")
_HOST = re.compile(r"[^/\s?#@]+")
_HOST_NAME = re.compile(r"[^/\s?#@:]+")
_MOUNT = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._:@-]+)*")
_PLUGIN = re.compile(rf"{OBJECT_REFERENCE.pattern}|\w[\w.-]*")
_COORDINATOR = re.compile(r"memory:|file:[^\0]*|rediss?://[^\s/]+(/[^\s]*)?")


def validate(config: Config, path_of: PathOf) -> Iterator[Problem]:
    """Yield every rule that `config` breaks."""
    yield from _under_one_prefix(config.collections, path_of)
    for name, namespace in config.namespaces.items():
        yield from _namespace(name, namespace, path_of)
    if config.server.examples is not None and "examples" in config.namespaces:
        yield Problem("namespaces.examples", "server.examples has that path: use another name")
    if "history" in config.namespaces and any(one.history is not None for one in config.collections):
        yield Problem("namespaces.history", "a root collection with history has that path: use another name")
    message = "must be package.module:plugin, or the name of an entry point"
    for path, faults in (
        ("server", _server(config.server)),
        ("auth", _auth(config.auth)),
        ("", _storage(config)),
        ("", _each("plugins", config.plugins, _PLUGIN, message)),
        ("", (fault for action in get_args(Action) for fault in _limit(action, config.rate_limit))),
    ):
        yield from _at(path, faults)
    for _, _, collection in config.each_collection():
        limit = collection.rate_limit
        for action in get_args(Action):
            if limit and limit.meters(action):
                yield from _at(path_of(collection), _limit(action, limit, config.rate_limit))
    if config.quotas is not None:
        yield from _at("quotas", _quota_errors(config.quotas, config))
    known = config.collections_by_name()
    for projection in config.projections:
        yield from _at(path_of(projection), projection_errors(projection, config))
    for projection, _ in repeated(config.projections, projection_name):
        message = f"{projection_name(projection)!r} is also another projection's"
        required = "is required: " if projection.name is None else ""
        yield Problem(f"{path_of(projection)}.name", required + message)
    for projection, source in cycles(config):
        message = f"leads back to {source}, one of its sources, by other projections"
        yield Problem(f"{path_of(projection)}.target", message)
    for events in config.events:
        if events.compact_every_ms is not None and (missing := extras.missing("pyarrow")):
            yield Problem(f"{path_of(events)}.compactEveryMs", missing)
        yield from _at(path_of(events), events_errors(events, known))
    for events, _ in repeated(config.events, lambda one: one.collection):
        yield Problem(f"{path_of(events)}.collection", f"{events.collection!r} is also another one's")
    names = {*known, *(f"{namespace}/{one.name}" for namespace, _, one in config.each_collection())}
    for webhook in config.webhooks:
        yield from _at(path_of(webhook), webhook_errors(webhook, names))
    for webhook, _ in repeated(config.webhooks, lambda one: one.name):
        yield Problem(f"{path_of(webhook)}.name", f"{webhook.name!r} is also another one's")
    yield from takeovers(config, path_of)
    yield from vanishing_access_documents(config, path_of)


def _quota_errors(quotas: QuotasConfig, config: Config) -> Iterator[FieldError]:
    if quotas.issuer is not None and not config.store.url.startswith("file:"):
        yield "issuer", "needs a store in a folder (file:DIR): other stores count by keys, without issuers"
    if quotas.space is not None and config.auth.spaces is None:
        yield "space", "needs auth.spaces, whose path parameter names the space"
    for field in fields(quotas):
        quota = getattr(quotas, field.name)
        if quota is not None and all(most is None for most in astuple(quota)):
            names = ", ".join(wire_name(each.name) for each in fields(quota))
            yield field.name, f"must limit one of {names}"


def _at(path: str, faults: Iterable[FieldError]) -> Iterator[Problem]:
    for member, message in faults:
        yield Problem(f"{path}.{member}" if path else member, message)


def _each(
    member: str, values: Iterable[str] | None, form: re.Pattern[str], message: str
) -> Iterator[FieldError]:
    """Yield `message` for each of the values that does not have the form."""
    for at, value in enumerate(values or ()):
        if not form.fullmatch(value):
            yield f"{member}[{at}]", message


def _namespace(name: str, namespace: Namespace, path_of: PathOf) -> Iterator[Problem]:
    path = join("namespaces", name)
    if not _NAMESPACE.fullmatch(name):
        yield Problem(path, "a namespace name may hold only letters, digits, - and _")
    if name in RESERVED_NAMESPACES:
        yield Problem(path, f"a namespace cannot be named {name}")
    if not namespace.collections:
        yield Problem(f"{path}.collections", "a namespace needs at least one collection")
    yield from _at(path, _issuers(namespace.trusted_issuers))
    yield from _under_one_prefix(namespace.collections, path_of)


def _under_one_prefix(collections: tuple[Collection, ...], path_of: PathOf) -> Iterator[Problem]:
    """Yield the broken rules of the collections that share one prefix."""
    for collection in collections:
        yield from _at(path_of(collection), _collection(collection))
    for collection, other in repeated(collections, lambda one: one.name):
        yield Problem(f"{path_of(collection)}.name", f"{collection.name!r} is also {path_of(other)}")
    bundled = [collection for collection in collections if collection.bundle is not None]
    for collection, other in repeated(bundled, lambda one: one.bundle):
        if other.storage_path != collection.storage_path:
            message = f"members of a bundle share one storagePath: that of {path_of(other)}"
            yield Problem(f"{path_of(collection)}.storagePath", message)
    # A collection that can only be pushed may share its path with one that can only be pulled.
    taken = [(action, path, one) for one in collections for action, path in product(one.actions, _paths(one))]
    for (_, path, collection), (_, _, other) in repeated(taken, lambda one: one[:2]):
        of_one_bundle = collection.bundle is not None and collection.bundle == other.bundle
        if not (of_one_bundle and path == collection.path_template.shape):
            message = f"matches the same keys as {path_of(other)}.storagePath"
            yield Problem(f"{path_of(collection)}.storagePath", message)


def _paths(collection: Collection) -> list[str]:
    """Return the shapes of the paths on which the collection has routes."""
    path = collection.path_template.shape
    return [path] if collection.bundle is None else [path, f"{path}/{collection.name}"]


def _collection(collection: Collection) -> Iterator[FieldError]:
    if not collection.name.isprintable() or "," in collection.name:
        yield "name", "must be printable and hold no comma"
    is_segment = key_templates.LITERAL.fullmatch(collection.name) and not any(
        key_templates.errors(collection.name)
    )
    if collection.bundle is not None and not is_segment:
        yield "name", "a bundle member's name is a key segment, of A-Z a-z 0-9 . _ : @ -"
    for message in key_templates.errors(collection.storage_path):
        yield "storagePath", message
    if collection.pull_only and collection.push_only:
        yield "pushOnly", "pullOnly and pushOnly together leave no route"
    if not collection.allowed_mime_types:
        yield "allowedMimeTypes", "must name at least one media type"
    media_types = collection.allowed_mime_types
    yield from _each("allowedMimeTypes", media_types, _MEDIA_TYPE, "must be type/subtype, type/* or */*")
    yield from _deletable(collection)
    yield from _history(collection)
    if collection.root_only:
        for member, roles in (
            ("readRoles", collection.read_roles),
            ("writeRoles", collection.write_roles),
            ("deleteRoles", collection.delete_roles),
            ("historyRoles", collection.history_roles),
        ):
            if "public" in (roles or ()):
                yield member, "rootOnly cannot be used with the role public"
    if collection.bundle is not None and not collection.accepts_json:
        yield "bundle", "bundle needs application/json in allowedMimeTypes"
    if collection.enforce_sealed and collection.encryption != "delegated":
        yield "enforceSealed", "enforceSealed needs encryption: delegated"
    if collection.enforce_sealed and collection.file_types:
        yield "enforceSealed", "enforceSealed is for documents and logs: sealed files look like any others"
    for member, roles in role_lists(collection):
        shared = [role for role in roles if role.startswith(f"{SHARED}:")]
        if shared and "identity" not in collection.path_template.params:
            yield member, f"{shared[0]} needs {{identity}} in storagePath: it says whose certificates count"
    yield from _append_only(collection)
    yield from _listable(collection)
    yield from _keyring(collection)
    yield from _schema(collection.object_schema)
    yield from _issuers(collection.trusted_issuers)


def _deletable(collection: Collection) -> Iterator[FieldError]:
    if not collection.deletable:
        if collection.delete_roles is not None:
            yield "deleteRoles", "deleteRoles needs deletable: true"
        return
    if collection.pull_only:
        yield "deletable", "deletable cannot be used with pullOnly"
    if collection.append_only is not None and collection.append_only.persist is False:
        yield "deletable", "deletable cannot be used with appendOnly+persist=false: nothing is stored"


def _history(collection: Collection) -> Iterator[FieldError]:
    if collection.history is None:
        if collection.history_roles is not None:
            yield "historyRoles", "historyRoles needs history"
        return
    if collection.append_only is not None:
        yield "history", "history cannot be used with appendOnly: a log keeps its elements"
    elif collection.file_types or not collection.accepts_json:
        yield "history", "history is for documents: allowedMimeTypes may only be application/json"
    if collection.ttl_ms is not None:
        yield "history", "history cannot be used with ttlMs: it would keep what has expired"
    if collection.bundle is not None:
        yield "history", "history cannot be used with bundle"


def _append_only(collection: Collection) -> Iterator[FieldError]:
    log = collection.append_only
    if log is None:
        return
    if collection.pull_only:
        yield "appendOnly", "appendOnly cannot be used with pullOnly"
    if not collection.accepts_json:
        yield "appendOnly", "appendOnly needs application/json in allowedMimeTypes"
    if log.persist is not False:
        if collection.bundle is not None:
            yield "appendOnly", "appendOnly cannot be used with bundle, unless with persist=false"
        if log.keep_elements is not None and log.max_items is not None:
            message = "cannot be used with maxItems: one lets old elements leave, the other rejects new ones"
            yield "appendOnly.keepElements", message
        return
    for member in _NEEDS_PERSIST:
        if getattr(log, member) is not None:
            yield f"appendOnly.{wire_name(member)}", "cannot be used with persist=false: nothing is stored"


def _listable(collection: Collection) -> Iterator[FieldError]:
    if not collection.listable:
        return
    if not collection.path_template.params:
        yield "listable", "listable requires at least one path parameter"
    elif not collection.path_template.ends_in_param:
        yield "listable", "listable requires the last storagePath segment to be a path parameter"
    if collection.append_only is not None and collection.append_only.persist is False:
        yield "listable", "listable cannot be used with appendOnly+persist=false"
    if collection.bundle is not None:
        yield "listable", "listable cannot be used with bundle"
    if collection.secret_names:
        yield "listable", "listable cannot be used with secretNames: a list tells the names"


def _keyring(collection: Collection) -> Iterator[FieldError]:
    if collection.keyring_path is None:
        return
    for message in key_templates.errors(collection.keyring_path):
        yield "keyringPath", message
    known = collection.path_template.params
    for name in KeyTemplate.of(collection.keyring_path).params:
        if name not in known:
            yield "keyringPath", f"{{{name}}} is not a parameter of storagePath"


def _schema(schema: Mapping[str, Any] | bool | None) -> Iterator[FieldError]:
    if schema is None:
        return
    if message := extras.missing("jsonschema_rs"):
        yield "objectSchema", message
        return
    from jsonschema_rs import ValidationError, validator_for  # a heavy import, made only if it is used

    try:
        validator_for(schema if isinstance(schema, bool) else dict(schema), offline=True)
    except ValueError as error:
        reason = error.message if isinstance(error, ValidationError) else error
        yield "objectSchema", f"is not a usable JSON Schema: {reason}"


def _limit(action: Action, limit: RateLimit | None, default: RateLimit | None = None) -> Iterator[FieldError]:
    """Require both a window and a count, in the rule itself or in what it inherits."""
    rule = resolve_limit(action, limit, default)
    if rule is not None and (rule.window_ms is None) != (rule.max_requests is None):
        lacks_window = rule.window_ms is None
        missing, other = ("windowMs", "maxRequests") if lacks_window else ("maxRequests", "windowMs")
        at = "rateLimit" if getattr(limit, action) is None else f"rateLimit.{action}"
        yield f"{at}.{missing}", f"is required: {other} alone limits nothing"


def _server(server: Server) -> Iterator[FieldError]:
    if not _MOUNT.fullmatch(server.mount_path):
        yield "mountPath", "must be empty or of the form /v1, without a slash at its end"
    message = "must be a host, with :port where it is not the default one"
    yield from _each("publicHosts", server.public_hosts, _HOST, message)
    if server.admin is not None:
        yield from _each("admin.hosts", server.admin.hosts, _HOST_NAME, "must be a host name without a port")
    message = 'must be "*" or scheme://host, without a path'
    yield from _each("cors.origins", server.cors.origins, _ORIGIN, message)


def _issuers(issuers: Iterable[str] | None) -> Iterator[FieldError]:
    return _each("trustedIssuers", issuers, _ISSUER, "must be a public key of 64 lower-case hex digits")


def _auth(auth: Auth) -> Iterator[FieldError]:
    yield from _issuers(auth.trusted_issuers)
    form = "16 or more characters of printable ASCII, without spaces"
    message = f"must be {form} (PYSYNC_ADMIN_TOKEN sets it too)"
    if isinstance(auth.admin_token, str):
        if not _ADMIN_TOKEN.fullmatch(auth.admin_token):
            yield "adminToken", message
    else:
        yield from _each("adminToken", auth.admin_token, _ADMIN_TOKEN, message)
    if auth.spaces is not None:
        for message in key_templates.errors(auth.spaces.access_path):
            yield "spaces.accessPath", message
        if auth.spaces.param not in KeyTemplate.of(auth.spaces.access_path).params:
            yield "spaces.param", "must be a parameter of accessPath"


def _storage(config: Config) -> Iterator[FieldError]:
    """Validate the store and the coordinator. Messages never quote URLs, which may contain a password."""
    store, workers = config.store.url, config.server.workers
    coordinator = config.effective_coordinator
    if (config.store.access_key_id is None) != (config.store.secret_access_key is None):
        yield "store", "accessKeyId and secretAccessKey belong together"
    if not is_store_url(store):
        yield "store", "must be memory:, file:DIR or s3://bucket/prefix"
        return
    if store.startswith("s3:"):
        try:
            config.store.s3_location()
        except ValueError as error:
            yield "store", str(error)
        if message := extras.missing("aiobotocore", "botocore"):
            yield "store", message
    if not _COORDINATOR.fullmatch(coordinator):
        yield "coordinator", "must be memory:, file:, file:DIR or redis://host:port/number"
        return
    if coordinator.startswith("redis") and (message := extras.missing("redis", "hiredis")):
        yield "coordinator", message
    if coordinator == "file:" and not store.startswith("file:"):
        yield "coordinator", "file: lies in the folder of a file: store; name one: file:DIR"
    if workers > 1 and store == "memory:":
        yield "store", f"memory: cannot carry {workers} workers"
    if workers > 1 and coordinator == "memory:":
        yield "coordinator", f"{workers} workers need file:DIR or redis://host:port/number"
