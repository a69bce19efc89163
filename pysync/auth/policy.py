"""What a collection's actions ask of a caller: roles, scopes, restrictions.

See docs/reference/protocol.md#authorisation.
"""

from dataclasses import dataclass, field

from pysync.config import Action, Collection, Config, RateRule, Restriction, Trust, effective_limit, trust_of
from pysync.config.key_templates import KeyTemplate, params
from pysync.model import ANONYMOUS, Caller

_OPS: dict[Action, frozenset[str]] = {
    "pull": frozenset({"read"}),
    "push": frozenset({"write"}),
    "list": frozenset({"list", "read"}),
}
SPACE_ROLE_PREFIX = "space:"
"""How the roles start that a space's access document gives."""
_OWN_IDENTITY_ONLY = frozenset({"self", "device:root"})
"""Roles that everybody holds for what is theirs: they open nothing that belongs to another identity."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """What one action on one collection asks of a caller."""

    action: Action
    collection: Collection
    namespace: str | None
    roles: frozenset[str]
    allows_anonymous: bool
    """Callers without credentials reach the role check, as `public`."""
    needs_credentials: bool
    """Credentials are looked at."""
    identity_index: int | None
    """Which path parameter is `{identity}`: of a list, of its prefix."""
    uses_space_roles: bool
    """Roles that a space's access document gives count (`pysync.spaces`)."""
    uses_plugin_roles: bool
    """Roles that plugins give count."""
    restrictions: tuple[Restriction, ...]
    limit: RateRule | None
    trust: Trust | None = None
    """The issuers that this collection trusts; None: those that the server trusts."""
    shadowing_templates: tuple[KeyTemplate, ...] = ()
    """Templates of other collections in the namespace that win keys over this one's."""
    uses_dynamic_roles: bool = field(init=False)
    """Roles count that a caller holds for one request alone: of a space, or of plugins."""
    is_open: bool = field(init=False)
    """Everybody may act on every key, and credentials are not looked at."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uses_dynamic_roles", self.uses_space_roles or self.uses_plugin_roles)
        denials = (self.denial_reason(ANONYMOUS, identity, "") for identity in (None, "anybody"))
        object.__setattr__(self, "is_open", not self.needs_credentials and not any(denials))

    @classmethod
    def from_config(
        cls,
        config: Config,
        namespace: str | None,
        collection: Collection,
        action: Action,
        *,
        uses_plugin_roles: bool = False,
    ) -> "AccessPolicy":
        """The rule that the configuration makes for `action` on `collection`. `uses_plugin_roles`: there is a
        plugin that gives roles. As it may give them to anybody, everybody's credentials are looked at."""
        roles = frozenset(collection.write_roles if action == "push" else collection.read_roles)
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
        # What is listed are the values of the last parameter: the path does not have it.
        path = collection.storage_path
        names = params(path.rpartition("/")[0] if action == "list" else path)
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
            limit=effective_limit(config, collection, action),
            trust=_own_trust(config, namespace, collection),
            shadowing_templates=_shadowing_templates(config, namespace, collection),
        )

    def owns_key(self, document_key: str) -> bool:
        """Whether the key, which has the shape of this collection's, is not another collection's. What routes
        lead to is owned; what is put together from a template need not be."""
        return not any(rival.matches(document_key) for rival in self.shadowing_templates)

    def denial_reason(self, caller: Caller, identity: str | None, document_key: str) -> str | None:
        """Return the reason, for the operator's log, why `caller` may not act on `document_key`; None if it
        may."""
        if self.restrictions and self._is_denied(caller.identity):
            return "restrictions"
        if caller.ops is not None and not (caller.ops & _OPS[self.action]):
            return "scope: the certificate's ops"
        if caller.scope is not None and not caller.scope.allows(document_key):
            return "scope: the certificate's paths"
        roles = self.trusted_roles(caller)
        if self.collection.root_only and "device:root" not in roles:
            return "roles: rootOnly"
        held = self.roles & roles
        if identity is None:
            return None if held else "roles"
        if identity == caller.identity:
            return None if "self" in self.roles or held else "roles"
        if any(role not in _OWN_IDENTITY_ONLY and not role.startswith("cap:") for role in held):
            return None
        return "roles: the path names another identity"

    def effective_roles(self, caller: Caller, identity: str | None) -> frozenset[str]:
        """The roles that `caller` holds where the path names `identity`: `self` too, where it is theirs."""
        roles = self.trusted_roles(caller)
        return roles | {"self"} if identity and identity == caller.identity else roles

    def trusted_roles(self, caller: Caller) -> frozenset[str]:
        """The roles that `caller` holds in this collection, by whom it trusts."""
        if self.trust is None or caller.claims is None:
            return caller.roles
        return caller.claims.roles(caller.identity, *self.trust) | caller.given

    def _is_denied(self, identity: str) -> bool:
        allowed = True
        for restriction in self.restrictions:
            listed = identity in restriction.identities
            if restriction.mode == "deny" and listed:
                return True
            if restriction.mode == "allow" and not listed:
                allowed = False
        return not allowed


class PolicyTable:
    """The policies of one configuration, each made once. `uses_plugin_roles`: there is a plugin that gives
    roles."""

    def __init__(self, config: Config, *, uses_plugin_roles: bool) -> None:
        self._config = config
        self._uses_plugin_roles = uses_plugin_roles
        self._made: dict[tuple[str | None, str, Action], AccessPolicy] = {}

    def of(self, namespace: str | None, collection: Collection, action: Action) -> AccessPolicy:
        """The policy for an action on a collection of the namespace."""
        key = namespace, collection.name, action
        if key not in self._made:
            self._made[key] = AccessPolicy.from_config(
                self._config, namespace, collection, action, uses_plugin_roles=self._uses_plugin_roles
            )
        return self._made[key]

    def pulls(self) -> list[AccessPolicy]:
        """The policies for pulls of every collection, also of those that are only pushed to."""
        return [self.of(name or None, found, "pull") for name, _, found in self._config.each_collection()]


def _shadowing_templates(
    config: Config, namespace: str | None, collection: Collection
) -> tuple[KeyTemplate, ...]:
    siblings = config.collections if namespace is None else config.namespaces[namespace].collections
    return tuple(
        template
        for other in siblings
        if other is not collection and not other.push_only
        for template in {other.path_template, other.key_template}
        if template.shadows(collection.key_template)
    )


def _own_trust(config: Config, namespace: str | None, collection: Collection) -> Trust | None:
    trust = trust_of(config, namespace, collection)
    return None if trust == trust_of(config) else trust


def _names_space_roles(roles: frozenset[str], collection: Collection) -> bool:
    named = set(roles)
    for permission in collection.field_permissions.values():
        named.update(permission.read_roles or (), permission.write_roles or ())
    return any(role.startswith(SPACE_ROLE_PREFIX) for role in named)
