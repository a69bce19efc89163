"""The caller of an aiohttp request, and the decision whether the caller may do what it asks for.

The roles that callers hold for one request alone: by the space that it is about, and by plugins.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address

from aiohttp import web

from pysync.auth.authentication import ANYBODY, NOBODY, Access, Credentials, Inbound, Verified
from pysync.auth.policy import Rule
from pysync.auth.signing import host_of_header
from pysync.auth.spaces import Spaces, with_roles
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import Request
from pysync.plugins.hooks import Hooks
from pysync.server.request_log import RequestLog
from pysync.server.router import Match


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


class Callers:
    """Requests as `Access` sees them. `mount` is the prefix of every route, `proxy_hops` how many proxies in
    front are believed.

    The order is the same everywhere: the signature, rate limits, roles and scope, and the nonce last, so that
    nothing that is refused takes any of the replay memory.
    """

    def __init__(
        self, access: Access, roles: Roles, request_log: RequestLog, mount: str, proxy_hops: int
    ) -> None:
        self._access = access
        self._roles = roles
        self._log = request_log
        self._mount = mount
        self._proxy_hops = proxy_hops

    async def reader(self, request: web.BaseRequest, match: Match) -> tuple[Caller, Caller]:
        """Return the caller of an allowed request without a body to speak of: as its credentials say, and
        with its roles for this request. Raises what `Access.present`, `allowed` and `Rule.authorize` do."""
        return await self.allowed(request, match, self._access.present(match.rule, request.headers))

    async def allowed(
        self,
        request: web.BaseRequest,
        match: Match,
        credentials: Credentials,
        body: bytes = b"",
        *,
        pushes: bool = False,
    ) -> tuple[Caller, Caller]:
        """`reader`, of a request with `body` that presents `credentials`; `pushes` a document.

        Raises what `Access.verify`, `meter` and `consume`, `Roles` and `Rule.authorize` do.
        """
        rule = match.rule
        verified = await self.verified(request, credentials, body, rule)
        signer = caller = verified.caller
        if rule.by_request:
            if pushes:
                caller = await self._roles.pushing(rule, signer, match.params, match.key, body)
            else:
                caller = await self._roles.enriched(rule, signer, match.params, match.key)
        rule.authorize(caller, match.identity, match.key)
        if verified.proof is not None:
            await self._access.consume(verified)
        return signer, caller

    async def verified(
        self, request: web.BaseRequest, credentials: Credentials, body: bytes, rule: Rule, *others: Rule
    ) -> Verified:
        """Return the caller of a request, its signature checked and counted against the limits of these
        rules. The nonce is not taken yet: call `Access.consume` once the request is allowed."""
        is_metered = _is_metered(rule, *others)
        if credentials is NOBODY and not is_metered:
            return ANYBODY
        inbound = self.inbound(request, rule.namespace)
        verified = await self._access.verify(credentials, inbound, body)
        if verified.proof is not None:
            self._log.identify(verified.caller.identity)
        if is_metered:
            await self._access.meter(verified.caller.identity, self.address(request), (rule, *others))
        return verified

    async def claimed(self, request: web.BaseRequest, namespace: str | None) -> Verified:
        """Return the caller of a request without a body that anybody may send: `ANYBODY` if its credentials
        are not valid. The request is not counted, and its nonce not taken."""
        try:
            credentials = self._access.credentials(request.headers)
            if credentials is NOBODY:
                return ANYBODY
            verified = await self._access.verify(credentials, self.inbound(request, namespace), b"")
        except (Unauthorized, Forbidden) as error:
            self._log.degrade(request, error)
            return ANYBODY
        self._log.identify(verified.caller.identity)
        return verified

    async def meter(self, request: web.BaseRequest, caller: Caller, rules: list[Rule]) -> None:
        """Count a request once for each of `rules` that has a limit. Raises as `Access.meter`."""
        if _is_metered(*rules):
            await self._access.meter(caller.identity, self.address(request), rules)

    async def holds(self, request: web.BaseRequest, verified: Verified) -> bool:
        """Take the nonce of a request that anybody may send; False if its credentials are not valid."""
        try:
            await self._access.consume(verified)
        except Unauthorized as error:
            self._log.degrade(request, error)
            return False
        return True

    def inbound(self, request: web.BaseRequest, namespace: str | None) -> Inbound:
        """The parts of a request to `namespace` that its signature covers."""
        return Inbound(
            request.method,
            _targets(request.raw_path, self._mount, namespace),
            host_of_header(request.headers.get("Host", ""), "http"),
        )

    def address(self, request: web.BaseRequest) -> str:
        """The client's address, as the outermost of the believed proxies saw it."""
        if self._proxy_hops:
            seen = ",".join(request.headers.getall("X-Forwarded-For", ())).split(",")
            if len(seen) >= self._proxy_hops:
                with suppress(ValueError):
                    # Without the zone of a link-local address, which may be any text.
                    return str(ip_address(seen[-self._proxy_hops].strip())).partition("%")[0]
        return request.remote or ""


def _is_metered(*rules: Rule) -> bool:
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
