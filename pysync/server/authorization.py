"""The caller of an aiohttp request, and the decision whether the caller may do what it asks for.

The roles that callers hold for one request alone: by the space that it is about, and by plugins.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address

from aiohttp import web

from pysync.auth.authentication import (
    ANONYMOUS_REQUEST,
    NO_CREDENTIALS,
    AuthenticatedRequest,
    Authenticator,
    Credentials,
    SignedRequest,
)
from pysync.auth.policy import AccessPolicy
from pysync.auth.signing import canonical_host_of_header
from pysync.auth.spaces import Spaces, add_roles
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import PluginRequest
from pysync.plugins.hooks import Hooks
from pysync.server.request_log import RequestLog
from pysync.server.router import Match


class RoleResolver:
    """Where such roles come from. What asks for them looks at `Rule.uses_dynamic_roles` first: most rules
    name none, and pay nothing. All of this raises AuthorizationError where nobody can tell, RolesUnavailable
    where that takes longer than 5 s, and whatever a plugin refuses the request with."""

    def __init__(self, spaces: Spaces, hooks: Hooks) -> None:
        self.spaces = spaces
        self._hooks = hooks

    async def enrich(self, rule: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str) -> Caller:
        """`caller` with the roles it has beside its own for what `rule` is about at `key`, whose template has
        `params`."""
        if rule.uses_space_roles:
            caller = await self.spaces.enrich(rule, caller, params)
        return await self.add_plugin_roles(rule, caller, params, key) if rule.uses_plugin_roles else caller

    async def enrich_for_push(
        self, rule: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str, text: bytes
    ) -> Caller:
        """`enrich`, for a push of `text`."""
        if rule.uses_space_roles:
            caller = await self.spaces.enrich_for_push(rule, caller, params, key, text)
        return await self.add_plugin_roles(rule, caller, params, key) if rule.uses_plugin_roles else caller

    async def add_plugin_roles(
        self, rule: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str
    ) -> Caller:
        """`caller`, who has its roles by the space already, with those that plugins give. Nobody is asked
        about a caller without credentials where these are needed: it is refused anyway."""
        if not rule.uses_plugin_roles or (caller == ANONYMOUS and not rule.allows_anonymous):
            return caller
        return add_roles(caller, await self._hooks.roles(plugin_request(rule, caller, params, key)))


def plugin_request(rule: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str) -> PluginRequest:
    """A request as plugins see it."""
    if rule.trust is not None:
        caller = replace(caller, roles=rule.trusted_roles(caller))
    return PluginRequest(rule.action, rule.collection.name, rule.namespace, params, key, caller)


class RequestAuthenticator:
    """Requests as `Access` sees them. `mount` is the prefix of every route, `proxy_hops` how many proxies in
    front are believed.

    The order is the same everywhere: the signature, rate limits, roles and scope, and the nonce last, so that
    nothing that is refused takes any of the replay memory.
    """

    def __init__(
        self, access: Authenticator, roles: RoleResolver, request_log: RequestLog, mount: str, proxy_hops: int
    ) -> None:
        self._access = access
        self._roles = roles
        self._log = request_log
        self._mount = mount
        self._proxy_hops = proxy_hops

    async def authorize_read(self, request: web.BaseRequest, match: Match) -> tuple[Caller, Caller]:
        """Return the caller of an allowed request without a body to speak of: as its credentials say, and
        with its roles for this request. Raises what `Access.present`, `authorize` and `Rule.authorize` do."""
        return await self.authorize(
            request, match, self._access.credentials_for(match.policy, request.headers)
        )

    async def authorize(
        self,
        request: web.BaseRequest,
        match: Match,
        credentials: Credentials,
        body: bytes = b"",
        *,
        pushes: bool = False,
    ) -> tuple[Caller, Caller]:
        """`authorize_read`, of a request with `body` that presents `credentials`; `pushes` a document.

        Raises what `Access.verify`, `enforce_rate_limits` and `consume`, `RoleResolver` and `Rule.authorize`
        do.
        """
        rule = match.policy
        verified = await self.authenticate(request, credentials, body, rule)
        signer = caller = verified.caller
        if rule.uses_dynamic_roles:
            if pushes:
                caller = await self._roles.enrich_for_push(rule, signer, match.params, match.key, body)
            else:
                caller = await self._roles.enrich(rule, signer, match.params, match.key)
        rule.authorize(caller, match.identity, match.key)
        if verified.certificate is not None:
            await self._access.consume_nonce(verified)
        return signer, caller

    async def authenticate(
        self,
        request: web.BaseRequest,
        credentials: Credentials,
        body: bytes,
        rule: AccessPolicy,
        *others: AccessPolicy,
    ) -> AuthenticatedRequest:
        """Return the caller of a request, its signature checked and counted against the limits of these
        rules. The nonce is not taken yet: call `Access.consume` once the request is allowed."""
        is_metered = _has_rate_limit(rule, *others)
        if credentials is NO_CREDENTIALS and not is_metered:
            return ANONYMOUS_REQUEST
        inbound = self.signed_request(request, rule.namespace)
        verified = await self._access.authenticate(credentials, inbound, body)
        if verified.certificate is not None:
            self._log.set_identity(verified.caller.identity)
        if is_metered:
            await self._access.enforce_rate_limits(
                verified.caller.identity, self.client_ip(request), (rule, *others)
            )
        return verified

    async def authenticate_optional(
        self, request: web.BaseRequest, namespace: str | None
    ) -> AuthenticatedRequest:
        """Return the caller of a request without a body that anybody may send: `ANONYMOUS_REQUEST` if its
        credentials are not valid. The request is not counted, and its nonce not taken."""
        try:
            credentials = self._access.parse_credentials(request.headers)
            if credentials is NO_CREDENTIALS:
                return ANONYMOUS_REQUEST
            verified = await self._access.authenticate(
                credentials, self.signed_request(request, namespace), b""
            )
        except (Unauthorized, Forbidden) as error:
            self._log.log_ignored_credentials(request, error)
            return ANONYMOUS_REQUEST
        self._log.set_identity(verified.caller.identity)
        return verified

    async def enforce_rate_limits(
        self, request: web.BaseRequest, caller: Caller, rules: list[AccessPolicy]
    ) -> None:
        """Count a request once for each of `rules` that has a limit. Raises as
        `Access.enforce_rate_limits`."""
        if _has_rate_limit(*rules):
            await self._access.enforce_rate_limits(caller.identity, self.client_ip(request), rules)

    async def consume_nonce(self, request: web.BaseRequest, verified: AuthenticatedRequest) -> bool:
        """Take the nonce of a request that anybody may send; False if its credentials are not valid."""
        try:
            await self._access.consume_nonce(verified)
        except Unauthorized as error:
            self._log.log_ignored_credentials(request, error)
            return False
        return True

    def signed_request(self, request: web.BaseRequest, namespace: str | None) -> SignedRequest:
        """The parts of a request to `namespace` that its signature covers."""
        return SignedRequest(
            request.method,
            _targets(request.raw_path, self._mount, namespace),
            canonical_host_of_header(request.headers.get("Host", ""), "http"),
        )

    def client_ip(self, request: web.BaseRequest) -> str:
        """The client's address, as the outermost of the believed proxies saw it."""
        if self._proxy_hops:
            seen = ",".join(request.headers.getall("X-Forwarded-For", ())).split(",")
            if len(seen) >= self._proxy_hops:
                with suppress(ValueError):
                    # Without the zone of a link-local address, which may be any text.
                    return str(ip_address(seen[-self._proxy_hops].strip())).partition("%")[0]
        return request.remote or ""


def _has_rate_limit(*rules: AccessPolicy) -> bool:
    for rule in rules:  # noqa: SIM110 (a generator costs every request more than the test itself)
        if rule.limit is not None:
            return True
    return False


def _targets(raw: str, mount: str, namespace: str | None) -> list[str]:
    """The forms of the request target that a client may have signed: with the mount (a namespaced client,
    whose base URL is the origin) or without it (any other, whose base URL holds the mount)."""
    if not mount:
        return [raw]
    forms = [raw.removeprefix(mount), raw]
    return forms if namespace is None else forms[::-1]
