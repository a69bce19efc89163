"""Routes for operators: health, readiness, metrics and version."""

from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from pysync import __version__, protocol
from pysync.auth.authentication import ADMIN_CALLER, BEARER, Authenticator
from pysync.errors import NotFound, PysyncError
from pysync.server.http.responses import (
    NO_STORE,
    Response,
    error_response,
    json_response,
)
from pysync.server.http.router import Match
from pysync.server.process.metrics import METRICS_TYPE
from pysync.server.process.readiness import Readiness

VERSION: Final = {"name": "pysync", "version": __version__, "protocol": "3.0"}


class ServiceHandlers:
    """The routes for operators."""

    def __init__(
        self,
        readiness: Readiness,
        render_metrics: Callable[[], bytes],
        authenticator: Authenticator,
        now_ms: Callable[[], int],
        client_ip: Callable[[web.BaseRequest], str],
    ) -> None:
        self._client_ip = client_ip
        self._readiness = readiness
        self._render_metrics = render_metrics
        self._authenticator = authenticator
        self._now_ms = now_ms

    async def health(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /health`: the process responds. A holder of the admin token also learns what arrived of
        its address through proxies."""
        body: dict[str, object] = {"ok": True, "ts": self._now_ms()}
        if await self._is_admin(request):
            forwarded_for = ",".join(request.headers.getall("X-Forwarded-For", ()))
            body["received"] = {"client": self._client_ip(request), "forwardedFor": forwarded_for}
        return json_response(body, NO_STORE)

    async def ready(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /health/ready`: the store and the coordinator work, and the service is not stopping."""
        if (error := await self._readiness.check()) is not None:
            return error_response(error)  # not raised: the change is logged, not each request
        return json_response(self._readiness.body(self._now_ms()), NO_STORE)

    async def metrics(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /metrics`, in Prometheus' text format, to processes of this machine and to the holder of
        the admin token. For others it does not exist."""
        if not (is_local(request.headers, request.remote) or await self._is_admin(request)):
            raise NotFound
        return Response(200, self._render_metrics(), NO_STORE, content_type=METRICS_TYPE)

    async def _is_admin(self, request: web.BaseRequest) -> bool:
        if not request.headers.get(protocol.HEADER_AUTHORIZATION, "").startswith(BEARER):
            return False
        try:
            return await self._authenticator.identify_unverified(request.headers) is ADMIN_CALLER
        except PysyncError:
            return False

    async def version(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /version`."""
        return json_response(VERSION, NO_STORE)


def is_local(headers: Mapping[str, str], peer: str | None) -> bool:
    """Return True if a request comes from this machine, and was not forwarded by a proxy on it."""
    if "X-Forwarded-For" in headers or "Forwarded" in headers:
        return False
    try:
        return ip_address(peer or "").is_loopback
    except ValueError:
        return False
