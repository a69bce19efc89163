"""Who sends a request, from what aiohttp knows of it."""

from aiohttp import web

from pysync.access import NOBODY, Access, Inbound, Rule
from pysync.model import ANONYMOUS, Caller
from pysync.signing import host_of_header


class Callers:
    """Requests as `Access` sees them. `mount` is the prefix of every route, `proxy_hops` how many proxies in
    front are believed."""

    def __init__(self, access: Access, mount: str, proxy_hops: int) -> None:
        self._access = access
        self._mount = mount
        self._proxy_hops = proxy_hops

    async def reader(self, request: web.BaseRequest, rule: Rule) -> Caller:
        """Who sends a request that has no body to speak of. Raises what `Access.present` and `admit` do."""
        credentials = self._access.present(rule, request.headers)
        if credentials is NOBODY and rule.limit is None:
            return ANONYMOUS
        return await self._access.admit(rule, credentials, self.inbound(request, rule), b"")

    def inbound(self, request: web.BaseRequest, rule: Rule) -> Inbound:
        """The parts of `request` that its signature and its rate are told by."""
        return Inbound(
            request.method,
            _targets(request.raw_path, self._mount, rule.namespace),
            host_of_header(request.headers.get("Host", ""), "http"),
            _address(request, self._proxy_hops) if rule.limit is not None else "",
        )


def _targets(raw: str, mount: str, namespace: str | None) -> list[str]:
    """The forms of the request target that a client may have signed: with the mount (a namespaced client,
    whose base URL is the origin) or without it (any other, whose base URL holds the mount)."""
    if not mount:
        return [raw]
    forms = [raw.removeprefix(mount), raw]
    return forms if namespace is None else forms[::-1]


def _address(request: web.BaseRequest, proxy_hops: int) -> str:
    """The client's address, as the outermost of `proxy_hops` believed proxies saw it."""
    if proxy_hops:
        seen = request.headers.get("X-Forwarded-For", "").split(",")
        if len(seen) >= proxy_hops:
            return seen[-proxy_hops].strip()
    return request.remote or ""
