"""`pysync check`: every problem of a configuration, or warnings about settings that are accepted and probably
not meant, and the route table."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import get_args

from pysync.config import overlaps
from pysync.config.collection import Action, Collection
from pysync.config.convert import suggest
from pysync.config.key_templates import KeyTemplate
from pysync.config.loader import parse, read_file, unread_variables, with_collections
from pysync.config.plugin_validation import has_unowned_target, overlapping_collections, repeated
from pysync.config.problem import ConfigError, FieldError, Problem
from pysync.config.roles import SHARED, needs_trust, role_lists
from pysync.config.routes import Method, RouteSpec, history_roles, routes_of
from pysync.config.schema import LOOPBACK, LOOPBACK_HOSTS, Config, Trust

_CAP_ROLE = re.compile(r"cap:(?:read|write|list):(.+)", re.DOTALL)
_BUILTIN_ROLES = re.compile(
    r"public|self|admin|device:root|admin:.+|cap:(read|write|list):.+|delegated:.+:.+|space:(owner|member)",
    re.DOTALL,
)
"""The forms of the roles that the server assigns. Others come from auth.identityRoles, or from plugins."""
_PLAIN = ("public", "self", "admin", "device:root", "space:owner", "space:member")
_ANY_ISSUER = (
    "anyone can sign a certificate that yields {}: list the issuers that you trust in auth.trustedIssuers"
)


_OF_COLLECTION = ("pull", "push", "append", "delete", "history", "list")
_UNLISTED = ("index", "client", "health", "ready", "metrics", "version")
_SERVICE_ROLES = {
    "batch": "as pulls of what is named",
    "events": "as pulls of what is named",
    "changes": "as pulls of what is named",
    "usage": "signed callers",
    "revoke": "public (a signed list)",
    "revocations": "public",
    "openapi": "public",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One route, its collection (`""` if it has none), and the roles that it requires. A bundle's pull has
    those of all its members."""

    method: Method
    path: str
    collection: str
    roles: tuple[str, ...]


def check(
    path: str,
    environ: Mapping[str, str] = os.environ,
    validate: Callable[[Config], object] = lambda config: None,
    *,
    strict: bool = False,
) -> tuple[bool, str]:
    """Return True if the file is accepted, and a report of its problems or warnings. `validate` may find
    further problems, for which it raises ConfigError. If `strict`, a file with warnings is not accepted."""
    try:
        value = read_file(Path(path))
    except ConfigError as error:
        return False, str(error)  # the message names the file
    try:
        config = parse(value, environ, folder=os.path.dirname(path))
        validate(config)
    except ConfigError as error:
        return False, f"{path}: " + "\n".join(format_problems(error.problems, "problem"))
    warnings = [*lint(config), *unread_variables(environ, value)]
    accepted = not (strict and warnings)
    verdict = "accepted" if accepted else "rejected, because warnings count as problems (--strict)"
    return accepted, f"{path}: {verdict}\n\n{report(config, warnings)}"


def report(config: Config, warnings: Sequence[Problem] | None = None) -> str:
    """Return the warnings and the route table of an accepted configuration, as text without a final line
    break."""
    warnings = lint(config) if warnings is None else warnings
    lines = [*format_problems(warnings, "warning"), ""] if warnings else []
    rows = [("METHOD", "PATH", "COLLECTION", "ROLES")]
    for route in routes_table(config):
        rows.append((route.method, route.path, route.collection, ", ".join(route.roles) or "nobody"))
    return "\n".join(lines + align_columns(rows))


def format_problems(problems: Sequence[Problem], noun: str) -> list[str]:
    """Return the problems as lines, after a line with their number."""
    lines = align_columns([(found.location, found.message) for found in problems])
    return [pluralize(problems, noun), "", *(f"  {line}" for line in lines)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; the last column may have any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def routes_table(config: Config) -> list[Row]:
    """Return the routes that are served, in the order of the file, under the mount path and their namespace;
    last those of the whole service. Probes and metrics are left out."""
    mount = config.server.mount_path
    hidden = {f"{mount}/sync/config", "/openapi.json" if mount else ""}
    return [
        _row(spec, config)
        for spec in routes_of(config)
        if spec.action not in _UNLISTED and (spec.namespace or spec.path not in hidden)
    ]


def _row(spec: RouteSpec, config: Config) -> Row:
    label = ""
    if spec.action == "bundle":
        label = ", ".join(member.name for member in spec.collections)
        roles = tuple(dict.fromkeys(role for member in spec.collections for role in member.read_roles))
    elif spec.action in _OF_COLLECTION:
        (collection,) = spec.collections
        is_batched = any(events.collection == collection.name for events in config.events)
        kind = "events" if is_batched else kind_of(collection)
        label = collection.name + ("" if kind == "documents" else f" ({kind})")
        roles = (
            collection.write_roles if spec.action in ("push", "append", "delete") else collection.read_roles
        )
        if spec.action == "delete" and collection.delete_roles is not None:
            roles = collection.delete_roles
        if spec.action == "history":
            roles = history_roles(config, spec.namespace, collection)
        if collection.require_auth is True:
            roles = tuple("public (signed)" if role == "public" else role for role in roles)
        if collection.root_only:
            roles = tuple(f"{role} + device:root" for role in roles)
    elif spec.action == "config" and config.config_endpoint is not None:
        roles = ("public" if config.config_endpoint.auth == "public" else "public (filtered by roles)",)
    else:
        roles = (_SERVICE_ROLES[spec.action],)
    return Row(spec.method, spec.path, label, roles)


def kind_of(collection: Collection) -> str:
    """Return the kind of its contents: `documents`, `log`, `files`, or `documents, files`."""
    if collection.append_only is not None:
        return "log"
    if not collection.file_types:
        return "documents"
    return "documents, files" if collection.accepts_json else "files"


def pluralize(items: Sequence[object], noun: str) -> str:
    """Return the number of items with its noun: `1 warning`, `2 warnings`."""
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


def lint(config: Config) -> list[Problem]:
    """Return the warnings about a configuration that the loader accepted, in the order of the file."""
    names = {path: collection.name for _, path, collection in config.each_collection()}
    return list(with_collections(_warnings(config), names))


def _warnings(config: Config) -> Iterator[Problem]:
    found = list(config.each_collection())
    if not found:
        yield Problem("collections", "nothing is served: there is no collection")
    is_trial = _is_trial(config)
    for namespace, path, collection in found:
        known = _Roles(config, collection, config.trust_of(namespace, collection))
        yield from _collection(collection, path, known, is_trial=is_trial)
        yield from _history(config, namespace, path, collection)
    yield from _limits(config)
    yield from _full_quotas(config)
    yield from _uncounted(config)
    yield from _shared_keys(config)
    yield from overlaps.shared_between_namespaces(config)
    yield from overlaps.exposed_fields(config)
    yield from overlaps.replaceable_access_documents(config)
    yield from overlaps.exposed_by_projections(config)
    for at, projection in enumerate(config.projections):
        if has_unowned_target(projection, config):
            message = "belongs to no collection: no client can pull the list or subscribe to its changes"
            yield Problem(f"projections[{at}].target", message, projection.target)
    for at, events in enumerate(config.events):
        for name in overlapping_collections(events, config):
            message = f"its files have keys of {name}, where they could be read, and replaced"
            yield Problem(f"events[{at}].storagePath", message, events.collection)
    for at, webhook in enumerate(config.webhooks):
        if webhook.url.lower().startswith("http:"):
            message = "http: changes are sent unencrypted, and anybody on the way can read them: use https"
            yield Problem(f"webhooks[{at}].url", message)
    yield from _shared_issuers(config)
    if config.auth.spaces is not None and config.auth.spaces.trust_on_first_use:
        yield Problem("auth.spaces.trustOnFirstUse", "the first caller would own a space: only false is safe")
    if not is_trial:
        yield from _rebinding(config)


def _is_trial(config: Config) -> bool:
    """Return True if only programs of its machine can reach the service, and it has example pages, or rejects
    requests that name another host. It is open to them on purpose."""
    server = config.server
    names_this_machine = bool(server.public_hosts) and LOOPBACK_HOSTS.issuperset(server.public_hosts)
    return server.host in LOOPBACK and (server.examples is not None or names_this_machine)


def _collection(collection: Collection, path: str, known: "_Roles", *, is_trial: bool) -> Iterator[Problem]:
    if not is_trial:
        yield from _open(collection, path)
    if not (collection.roles_for("pull") or collection.roles_for("push")):
        yield Problem(path, "no caller may use it: no route has roles")
    for member, roles in role_lists(collection):
        for at, role in enumerate(roles):
            for message in known.warnings_for(role):
                yield Problem(f"{path}.{member}[{at}]", message)
    for member, message in (*_log(collection), *_files(collection)):
        yield Problem(f"{path}.{member}", message)


def _history(config: Config, namespace: str, path: str, collection: Collection) -> Iterator[Problem]:
    """Warn about members of spaces who read what was there before they came."""
    if collection.history is None or collection.history_roles is not None:
        return
    roles = history_roles(config, namespace, collection)
    if roles == collection.read_roles and "space:member" in roles:
        message = "absent: everybody who may read also reads what was replaced or deleted before they came"
        yield Problem(f"{path}.historyRoles", f'{message}; name who may, for example ["space:owner"]')


def _open(collection: Collection, path: str) -> Iterator[Problem]:
    """Warn about what strangers may write, and about writers who may claim to be somebody else."""
    if "public" in collection.roles_for("push"):
        yield Problem(f"{path}.writeRoles", f"public: {_anyone(collection)} may write")
    if collection.deletable and "public" in (collection.delete_roles or collection.write_roles):
        yield Problem(f"{path}.deletable", f"public: {_anyone(collection)} may delete")
    log = collection.append_only
    if log is not None and log.persist is not False and log.require_author_signature is False:
        message = "false: author proofs are stored as they are sent, unchecked"
        yield Problem(f"{path}.appendOnly.requireAuthorSignature", message)


def _shared_issuers(config: Config) -> Iterator[Problem]:
    """Warn about the server's issuers if their certificates yield roles in several namespaces."""
    if not config.auth.trusted_issuers:
        return
    trusting: dict[str, None] = {}
    for name, _, collection in config.each_collection():
        namespace = config.namespaces[name] if name else None
        is_own = collection.trusted_issuers is not None or (
            namespace is not None and namespace.trusted_issuers is not None
        )
        roles = collection.every_role_for("pull") + collection.every_role_for("push")
        if not is_own and any(map(needs_trust, roles)):
            trusting[name or "the root"] = None
    if len(trusting) > 1:
        message = f"are trusted in {', '.join(trusting)} alike: give each namespace its own trustedIssuers"
        yield Problem("auth.trustedIssuers", message)


def _anyone(collection: Collection) -> str:
    """Return who has the role `public`."""
    return "anyone" if collection.require_auth is not True else "anyone with a key of their own"


def _rebinding(config: Config) -> Iterator[Problem]:
    """Warn about anonymous writes if only the Host header distinguishes them from writes of a page of another
    site."""
    names = [
        found.name
        for _, _, found in config.each_collection()
        if "public" in found.roles_for("push") and found.require_auth is not True
    ]
    if names and not config.server.public_hosts:
        written = f"{', '.join(dict.fromkeys(names))} through a visitor's browser (DNS rebinding)"
        message = (
            "name the hosts by which this server is reached: without them a page of any site can write to "
        )
        yield Problem("server.publicHosts", message + written)


def _limits(config: Config) -> Iterator[Problem]:
    """Warn about limits that meter nothing, because they lack numbers or no collection uses them."""
    used = False
    for _, path, collection in config.each_collection():
        limit = collection.rate_limit
        metered = [action for action in get_args(Action) if limit and limit.meters(action)]
        used = used or bool(metered)
        unlimited = [one for one in metered if config.effective_limit(collection, one) is None]
        if unlimited:
            message = f"meters no {', '.join(unlimited)}: neither it nor the server's rateLimit has numbers"
            yield Problem(f"{path}.rateLimit", message)
    if config.rate_limit is not None and not used:
        message = "meters nothing: no collection has a rateLimit that takes these numbers"
        yield Problem("rateLimit", message)


def _full_quotas(config: Config) -> Iterator[Problem]:
    """Warn about versions that count for users who cannot remove them."""
    quotas = {} if config.quotas is None else config.quotas.limits()
    if config.store.url.startswith("file:"):
        return  # there they give way to new data
    if not any(most < inf for most, *_ in quotas.values()):
        return
    for _, path, collection in config.each_collection():
        if collection.history is not None and collection.history.for_ms is None:
            message = "absent: what users delete counts for their quotas of bytes for good"
            yield Problem(f"{path}.history.forMs", message)


def _uncounted(config: Config) -> Iterator[Problem]:
    """Warn about writes that no quota limits, because they count for no identity and no space."""
    quotas = config.quotas
    if quotas is None or quotas.namespace is not None or (quotas.identity is None and quotas.space is None):
        return
    for _, path, collection in config.each_collection():
        if "public" in collection.roles_for("push") and collection.require_auth is not True:
            message = (
                "public: anonymous writes count for no identity and no space: limit quotas.namespace too"
            )
            yield Problem(f"{path}.writeRoles", message)


def _shared_keys(config: Config) -> Iterator[Problem]:
    """Warn about collections of different namespaces that share keys and would store them differently."""
    alike = repeated(config.each_collection(), lambda found: found[2].key_template.shape)
    for (_, path, collection), (_, _, first) in alike:
        if _storage_settings(first) != _storage_settings(collection):
            members = "appendOnly, ttlMs, allowedMimeTypes, history"
            message = f"its keys are also those of {first.name}, which stores them differently: {members}"
            yield Problem(f"{path}.storagePath", message)


def _storage_settings(collection: Collection) -> tuple[object, ...]:
    log = collection.append_only
    field = None if log is None else log.field or "items"
    return field, collection.ttl_ms, collection.accepts_json, bool(collection.file_types), collection.history


def _log(collection: Collection) -> Iterator[FieldError]:
    log = collection.append_only
    if log is None or log.persist is False:
        return
    if log.allow_full is False and log.max_pull_limit is None:
        yield "appendOnly.allowFull", "false, but checkpoint=0 gives the whole log too: set maxPullLimit"


def _files(collection: Collection) -> Iterator[FieldError]:
    if collection.accepts_json:
        return
    if collection.object_schema is not None:
        yield "objectSchema", "is for documents: no media type is application/json, so all are files"
    if collection.field_permissions:
        yield "fieldPermissions", "are for documents: no media type is application/json, so all are files"


class _Roles:
    """The roles that callers can have in one collection."""

    def __init__(self, config: Config, collection: Collection, trust: Trust) -> None:
        self._config = config
        self._collection = collection
        self._issuers = trust.issuers
        self._granted = {role for roles in trust.identity_roles.values() for role in roles}
        self._params = collection.path_template.params

    def warnings_for(self, role: str) -> Iterator[str]:
        """Yield the warnings about a role that the collection names."""
        if not self._config.plugins and role not in self._granted:
            missing = self._missing(role)
            if missing:
                yield missing
                return
        name = self._collection.name
        cap = _CAP_ROLE.fullmatch(role)
        if cap and cap[1] == "*":
            yield f"{role} is compared as text: only certificates for the collection '*' grant it"
        elif cap and cap[1] != name:
            yield f"{role} names another collection than {name}"
        if role == "self" and "identity" not in self._params:
            yield "self is never granted: storagePath has no {identity}"
        if role.startswith(f"{SHARED}:") and (role.endswith(":*") or self._collection.root_only):
            yield f"{role} is never granted: certificates for it name one collection, and no root device"
        if role == "device:root":
            yield "device:root grants no protection: anyone can create a key that has this role"
        if self._issuers is None and needs_trust(role):
            yield _ANY_ISSUER.format(role)

    def _missing(self, role: str) -> str | None:
        """Return the reason why no caller can have the role; None if one may. Plugins and `identityRoles` can
        assign any role."""
        auth = self._config.auth
        if not _BUILTIN_ROLES.fullmatch(role):
            caps = (f"cap:{op}:{self._collection.name}" for op in ("read", "write", "list"))
            return f"no caller can have {role!r}{suggest(role.lower(), (*_PLAIN, *caps))}"
        if role.startswith("delegated:{") and not role.startswith(f"{SHARED}:"):
            return f"no caller can have {role}; did you mean {SHARED}:{self._collection.name}?"
        if role == "admin" and not auth.admin_token:
            return "no caller can have admin: auth.adminToken is not set"
        if role.startswith("space:"):
            if auth.spaces is None:
                return f"no caller can have {role}: auth.spaces is not set"
            params = KeyTemplate.of(auth.spaces.access_path).params
            lacking = [f"{{{one}}}" for one in params if one not in self._params]
            if lacking:
                reason = f"storagePath lacks {', '.join(lacking)} of auth.spaces.accessPath"
                return f"{role} is never granted: {reason}"
        if self._issuers is not None and not self._issuers and needs_trust(role):
            return f"no caller can have {role}: trustedIssuers is empty, so no certificate yields it"
        return None
