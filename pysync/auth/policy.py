"""Access policies: the roles, scopes and restrictions of each action on a collection.

See docs/reference/protocol.md#authorisation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pysync.config import Action, Collection, Config, Limit, RateRule, Restriction, Trust
from pysync.config.key_templates import KeyTemplate
from pysync.config.routes import history_roles
from pysync.model import ANONYMOUS, Caller

_OPS: dict[Action, frozenset[str]] = {
    "pull": frozenset({"read"}),
    "push": frozenset({"write"}),
    "list": frozenset({"list", "read"}),
}
SPACE_ROLE_PREFIX = "space:"
"""Prefix of the roles that a space's access document gives."""
Use = Literal["pull", "push", "list", "delete", "history"]
"""An `Action`, or a use of a collection that counts as one but may have roles of its own: for restrictions,
rate limits, certificates and plugins a delete is a push, and a read of earlier versions a pull."""
_OWN_IDENTITY_ONLY = frozenset({"self", "device:root"})
"""Roles that every identity has for its own data. They give no access to the data of another identity."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The requirements of one action on one collection."""

    action: Action
    collection: Collection
    namespace: str | None
    roles: frozenset[str]
    allows_anonymous: bool
    """Callers without credentials reach the role check, as `public`."""
    needs_credentials: bool
    """Credentials are read and checked."""
    identity_index: int | None
    """Index of the path parameter `{identity}`; for a list, in its prefix. None if there is none."""
    uses_space_roles: bool
    """Roles that a space's access document gives apply (`pysync.auth.spaces`)."""
    uses_plugin_roles: bool
    """Roles that plugins give apply."""
    restrictions: tuple[Restriction, ...]
    limit: RateRule | None
    trust: Trust | None = None
    """The issuers that this collection trusts; None for those that the server trusts."""
    shadowing_templates: tuple[KeyTemplate, ...] = ()
    """Templates of other collections in the namespace that take precedence for some keys of this one."""
    counters: tuple[tuple[Limit, str, str], ...] = field(init=False)
    """The limits of a request, each with the beginning of its counter's name and the kind of its bucket."""
    uses_dynamic_roles: bool = field(init=False)
    """Roles that a space or plugins give for a single request apply."""
    is_open: bool = field(init=False)
    """Anyone may act on every key, and credentials are ignored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", tuple(self._each_counter()))
        object.__setattr__(self, "uses_dynamic_roles", self.uses_space_roles or self.uses_plugin_roles)
        denials = (self.denial_reason(ANONYMOUS, identity, "") for identity in (None, "anybody"))
        object.__setattr__(self, "is_open", not self.needs_credentials and not any(denials))

    @classmethod
    def from_config(
        cls,
        config: Config,
        namespace: str | None,
        collection: Collection,
        use: Use,
        *,
        uses_plugin_roles: bool = False,
    ) -> "AccessPolicy":
        """Return the policy that the configuration defines for a use of `collection`. `uses_plugin_roles` is
        True if a plugin grants roles. It may grant them to anyone, so credentials are then always checked."""
        action: Action = "push" if use == "delete" else "pull" if use == "history" else use
        roles = frozenset(collection.write_roles if action == "push" else collection.read_roles)
        if use == "delete" and collection.delete_roles is not None:
            roles = frozenset(collection.delete_roles)
        if use == "history":
            roles = frozenset(history_roles(config, namespace, collection))
        levels = [config.restrictions, collection.restrictions]
        if namespace is not None:
            levels.insert(1, config.namespaces[namespace].restrictions)
        restrictions = tuple(
            restriction
            for level in levels
            for restriction in level
            if restriction.actions is None or action in restriction.actions
        )
        public = "public" in roles
        needed = collection.require_auth
        if needed is None:
            needed = not public
        # A list returns the values of the last parameter, so its path does not contain it.
        path = collection.storage_path
        names = KeyTemplate.of(path.rpartition("/")[0] if action == "list" else path).params
        return cls(
            action=action,
            collection=collection,
            namespace=namespace,
            roles=roles,
            allows_anonymous=not needed,
            needs_credentials=(
                needed
                or not public
                or uses_plugin_roles
                or bool(restrictions)
                or bool(collection.field_permissions)
            ),
            identity_index=names.index("identity") if "identity" in names else None,
            uses_space_roles=config.auth.spaces is not None and _names_space_roles(roles, collection),
            uses_plugin_roles=uses_plugin_roles,
            restrictions=restrictions,
            limit=config.effective_limit(collection, action),
            trust=_own_trust(config, namespace, collection),
            shadowing_templates=_shadowing_templates(config, namespace, collection),
        )

    def _each_counter(self) -> Iterator[tuple[Limit, str, str]]:
        rule = self.limit
        if rule is None:
            return
        prefix = f"{self.namespace or ''}/{self.collection.name}/{self.action}"
        if rule.window_ms is not None and rule.max_requests is not None:
            limit = Limit(window_ms=rule.window_ms, max_requests=rule.max_requests)
            yield limit, f"{prefix}:", rule.bucket or "identity"
        if rule.identity is not None:
            yield rule.identity, f"{prefix}:each ", "identity"
        if rule.ip is not None:
            yield rule.ip, f"{prefix}:each ", "ip"

    def owns_key(self, document_key: str) -> bool:
        """Return True if the key, which matches this collection's template, does not resolve to another
        collection. This always holds for a key that a route matched, but not for one that was filled into a
        template."""
        return not any(template.matches(document_key) for template in self.shadowing_templates)

    def denial_reason(self, caller: Caller, identity: str | None, document_key: str) -> str | None:
        """Return the reason, for the log, why `caller` may not act on `document_key`; None if it may."""
        if self.restrictions and self._is_restricted(caller.identity):
            return "restrictions"
        if caller.ops is not None and caller.ops.isdisjoint(_OPS[self.action]):
            return "scope: the certificate's ops"
        if caller.scope is not None and not caller.scope.allows(document_key):
            return "scope: the certificate's paths"
        roles = self.effective_roles(caller, identity)
        if self.collection.root_only and "device:root" not in roles:
            return "roles: rootOnly"
        matching = self.roles & roles
        if identity is None or identity == caller.identity:
            return None if matching else "roles"
        if any(role not in _OWN_IDENTITY_ONLY and not role.startswith("cap:") for role in matching):
            return None
        return "roles: the path names another identity"

    def effective_roles(self, caller: Caller, identity: str | None) -> frozenset[str]:
        """Return the caller's roles on a path that names `identity`: with `self` if that is the caller, and
        with the roles that a certificate shares if that is its issuer, whom no restriction excludes."""
        roles, claims = self.trusted_roles(caller), caller.claims
        if claims is not None and claims.issuer_id == identity and not self._is_restricted(identity):
            roles |= claims.shared
        return roles | {"self"} if identity and identity == caller.identity else roles

    def is_visible(self, caller: Caller) -> bool:
        """Return True if `caller` may read or write some document of the collection."""
        issuer = None if caller.claims is None else caller.claims.issuer_id
        roles = self.effective_roles(caller, issuer)
        return not roles.isdisjoint(self.collection.read_roles + self.collection.write_roles)

    def trusted_roles(self, caller: Caller) -> frozenset[str]:
        """Return the roles of `caller` in this collection, from the issuers that it trusts."""
        if self.trust is None or caller.claims is None:
            return caller.roles
        return caller.claims.roles(caller.identity, *self.trust) | caller.given

    def _is_restricted(self, identity: str) -> bool:
        """Return True if a restriction denies this identity, or allows only others."""
        return any((identity in one.identities) == (one.mode == "deny") for one in self.restrictions)


class PolicyTable:
    """The policies of one configuration, each created once. `uses_plugin_roles`: a plugin grants roles."""

    def __init__(self, config: Config, *, uses_plugin_roles: bool) -> None:
        self._config = config
        self._uses_plugin_roles = uses_plugin_roles
        self._made: dict[tuple[str | None, str, Use], AccessPolicy] = {}

    def of(self, namespace: str | None, collection: Collection, use: Use) -> AccessPolicy:
        """Return the policy for a use of a collection of the namespace."""
        key = namespace, collection.name, use
        if key not in self._made:
            self._made[key] = AccessPolicy.from_config(
                self._config, namespace, collection, use, uses_plugin_roles=self._uses_plugin_roles
            )
        return self._made[key]

    def pulls(self) -> list[AccessPolicy]:
        """Return the policies for pulls of all collections, including those that are push-only."""
        return [self.of(name or None, found, "pull") for name, _, found in self._config.each_collection()]


def _shadowing_templates(
    config: Config, namespace: str | None, collection: Collection
) -> tuple[KeyTemplate, ...]:
    siblings = config.collections if namespace is None else config.namespaces[namespace].collections
    own = collection.key_template
    shadowing = (
        template
        for other in siblings
        if other is not collection and not other.push_only
        for template in (other.path_template, other.key_template)
        if template.shadows(own)
    )
    return tuple(dict.fromkeys(shadowing))


def _own_trust(config: Config, namespace: str | None, collection: Collection) -> Trust | None:
    trust = config.trust_of(namespace, collection)
    return None if trust == config.trust_of() else trust


def _names_space_roles(roles: frozenset[str], collection: Collection) -> bool:
    named = set(roles)
    for permission in collection.field_permissions.values():
        named.update(permission.read_roles or (), permission.write_roles or ())
    return any(role.startswith(SPACE_ROLE_PREFIX) for role in named)
