"""The roles that callers hold for one request alone: by the space that it is about, and by plugins."""

from collections.abc import Mapping
from dataclasses import replace

from pysync.auth.policy import Rule
from pysync.auth.spaces import Spaces, with_roles
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import Request
from pysync.plugins.hooks import Hooks


class Roles:
    """Where such roles come from. What asks for them looks at `Rule.by_request` first: most rules name none,
    and pay nothing. All of this raises AuthorizationError where nobody can tell, RolesUnavailable where that
    takes longer than 5 s, and whatever a plugin refuses the request with."""

    def __init__(self, spaces: Spaces, hooks: Hooks) -> None:
        self.spaces = spaces
        self._hooks = hooks

    async def enriched(self, rule: Rule, caller: Caller, params: Mapping[str, str], key: str) -> Caller:
        """`caller` with the roles it has beside its own for what `rule` is about at `key`, whose template has
        `params`."""
        if rule.by_space:
            caller = await self.spaces.enriched(rule, caller, params)
        return await self.by_plugins(rule, caller, params, key) if rule.by_plugin else caller

    async def pushing(
        self, rule: Rule, caller: Caller, params: Mapping[str, str], key: str, text: bytes
    ) -> Caller:
        """`enriched`, for a push of `text`."""
        if rule.by_space:
            caller = await self.spaces.pushing(rule, caller, params, key, text)
        return await self.by_plugins(rule, caller, params, key) if rule.by_plugin else caller

    async def by_plugins(self, rule: Rule, caller: Caller, params: Mapping[str, str], key: str) -> Caller:
        """`caller`, who has its roles by the space already, with those that plugins give. Nobody is asked
        about a caller without credentials where these are needed: it is refused anyway."""
        if not rule.by_plugin or (caller == ANONYMOUS and not rule.admits_anonymous):
            return caller
        return with_roles(caller, await self._hooks.roles(request_of(rule, caller, params, key)))


def request_of(rule: Rule, caller: Caller, params: Mapping[str, str], key: str) -> Request:
    """A request as plugins see it."""
    if rule.trust is not None:
        caller = replace(caller, roles=rule.held(caller))
    return Request(rule.action, rule.collection.name, rule.namespace, params, key, caller)
