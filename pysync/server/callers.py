"""Who sends a request, from what aiohttp knows of it."""

from contextlib import suppress
from ipaddress import ip_address

from aiohttp import web

from pysync.access import NOBODY, Access, Credentials, Inbound
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, Caller
from pysync.rule import Rule
from pysync.signing import host_of_header


class Callers:
    """Requests as `Access` sees them. `mount` is the prefix of every route, `proxy_hops` how many proxies in
    front are believed."""

    def __init__(self, access: Access, mount: str, proxy_hops: int) -> None:
        self._access = access
        self._mount = mount
        self._proxy_hops = proxy_hops

    async def reader(self, request: web.BaseRequest, rule: Rule, *others: Rule) -> Caller:
        """Who sends a request that has no body to speak of. It counts against the rate limits of `others`
        too. Raises what `Access.present` and `admit` do."""
        return await self.admitted(request, self._access.present(rule, request.headers), rule, *others)

    async def admitted(
        self, request: web.BaseRequest, credentials: Credentials, rule: Rule, *others: Rule
    ) -> Caller:
        """`reader`, of a request that presents `credentials`. Raises what `Access.admit` does."""
        if credentials is NOBODY and not _is_metered(rule, *others):
            return ANONYMOUS
        return await self._access.admit(rule, credentials, self.inbound(request, rule, *others), b"", *others)

    async def writer(
        self, request: web.BaseRequest, rule: Rule, credentials: Credentials, body: bytes
    ) -> Caller:
        """Who sends a request with `body`, whose headers present `credentials`. Raises what `admit` does."""
        if credentials is NOBODY and rule.limit is None:
            return ANONYMOUS
        return await self._access.admit(rule, credentials, self.inbound(request, rule), body)

    def claimed(self, request: web.BaseRequest) -> Credentials:
        """The credentials of a request that anybody may send: `NOBODY` where there are none, or bad ones.
        Nothing is proved yet."""
        try:
            return self._access.credentials(request.headers)
        except (Unauthorized, Forbidden):
            return NOBODY

    async def anybody(self, request: web.BaseRequest, credentials: Credentials, rules: list[Rule]) -> Caller:
        """Who sends a request, without a body, that anybody may send: `ANONYMOUS` where its credentials do
        not hold, or nothing is asked for. It counts once for each of `rules` that has a limit.

        Raises RateLimited, CoordinatorUnavailable, StoreUnavailable.
        """
        metered = any(rule.limit is not None for rule in rules)
        if not rules or (credentials is NOBODY and not metered):
            return ANONYMOUS
        inbound = self.inbound(request, *rules)
        try:
            return await self._access.admit(rules[0], credentials, inbound, b"", *rules[1:])
        except (Unauthorized, Forbidden):
            return await self._access.admit(rules[0], NOBODY, inbound, b"", *rules[1:])

    def inbound(self, request: web.BaseRequest, rule: Rule, *others: Rule) -> Inbound:
        """The parts of `request` that its signature and its rate are told by."""
        return Inbound(
            request.method,
            _targets(request.raw_path, self._mount, rule.namespace),
            host_of_header(request.headers.get("Host", ""), "http"),
            self.address(request) if _is_metered(rule, *others) else "",
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
