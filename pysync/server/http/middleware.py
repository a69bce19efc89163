"""The middleware around all handlers: request ids, errors, cross-origin headers, metrics and logs."""

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from traceback import clear_frames

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from pysync import protocol
from pysync._core import PanicException
from pysync.auth.authentication import BEARER
from pysync.auth.certificates import SCHEME
from pysync.auth.signing import canonical_host_of_header
from pysync.config.schema import LOOPBACK_HOSTS
from pysync.errors import (
    BadRequest,
    DocumentCorrupt,
    ForeignOrigin,
    InternalError,
    MethodNotAllowed,
    MisdirectedRequest,
    Overloaded,
    PysyncError,
    Unavailable,
)
from pysync.server.http.connection import Connection
from pysync.server.http.in_flight import SMALL_BYTES, BytesInFlight, release
from pysync.server.http.load import Load
from pysync.server.http.request_body import media_type
from pysync.server.http.responses import NO_STORE, Response, count_response, error_response
from pysync.server.http.router import Match, Router
from pysync.server.process.logs import RequestLog
from pysync.server.process.metrics import Counters

log = logging.getLogger("pysync.server")

CORS_HEADERS = ", ".join(
    (
        protocol.HEADER_AUTHORIZATION,
        "Content-Type",
        "Content-Encoding",
        protocol.HEADER_SIGNATURE,
        protocol.HEADER_TIMESTAMP,
        protocol.HEADER_NONCE,
        protocol.HEADER_PUB,
        "X-Requested-With",
        protocol.HEADER_REQUEST_ID,
        protocol.HEADER_IDEMPOTENCY_KEY,
        protocol.HEADER_IF_NONE_MATCH,
        protocol.HEADER_RANGE,
        protocol.HEADER_IF_RANGE,
        protocol.HEADER_LAST_EVENT_ID,
    )
)
SIMPLE_TYPES = frozenset({"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""Content types that browsers send for a page without a preflight request (Fetch). `""` stands for no content
type."""
HEALTH_PATHS = frozenset({"/health", "/health/ready"})
CORS_EXPOSED = (
    "ETag, Content-Range, Retry-After, RateLimit, RateLimit-Policy, X-Request-Id, Date, WWW-Authenticate"
)
CORS_MAX_AGE_S = 600

NO_THREAD = "can't start new thread"
"""The message of the RuntimeError with which Python reports that there is no memory for a thread."""

_is_request_id = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


class EntryPoint:
    """Passes each request to the `middleware` in force."""

    def __init__(self, middleware: "Middleware") -> None:
        self.middleware = middleware

    def handle(self, request: web.BaseRequest) -> Awaitable[Response]:
        """Return the response to `request`, as `Middleware.handle` does."""
        return self.middleware.handle(request)


class Middleware:
    """Turns a request into a response. `origins` are the pages that may call, and `hosts` are the accepted
    names of this service (empty: any). `request_id_var` receives the id of each request, for log lines of
    plugins and handlers. `request_log` logs rejections and responses."""

    def __init__(
        self,
        routes: Router,
        counters: Counters,
        origins: Sequence[str],
        hosts: Sequence[str],
        request_id_var: ContextVar[str | None],
        request_log: RequestLog,
        load: Load,
        in_flight: BytesInFlight,
    ) -> None:
        self._routes = routes
        self._counters = counters
        self._origins = frozenset(origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._hosts_of_any_port = self._hosts & LOOPBACK_HOSTS
        self._request_id_var = request_id_var
        self._log = request_log
        self._load = load
        self._in_flight = in_flight
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(5).hex()

    async def handle(self, request: web.BaseRequest) -> Response:
        """Return the response to `request`. All errors except ConnectionError become responses."""
        started = time.perf_counter()
        request_id = self._id_of(request)
        self._request_id_var.set(request_id)
        if self._log.logs_requests:
            self._log.reset_identity()
        match: Match | None = None
        connection = request.protocol
        assert isinstance(connection, Connection)
        is_ambiguous = hdrs.TRANSFER_ENCODING in request.headers and not _is_chunked_alone(request)
        try:
            if (turn := self._load.turn(connection)) is not None:
                await turn
            self._load.goes_on(connection)
            if is_ambiguous:
                raise BadRequest("Transfer-Encoding must be chunked, in HTTP/1.1")
            if self._hosts:
                self._check_host(request)
            method, target = request.method, request.raw_path
            path = target.partition("?")[0] if target.startswith("/") else protocol.path_of(target)
            match = self._routes.match("GET" if method == "HEAD" else method, path)
            if method == "POST" and hdrs.ORIGIN in request.headers:
                self._check_origin(request)
            response = await match.route.handler(request, match)
            if response.held_bytes > SMALL_BYTES:
                await response.reserve(self._in_flight.reservation(request))
        except PysyncError as error:
            response = self._error_response(request, match, error, request_id)
            response.close = response.close or is_ambiguous
            _forget_frames(error)
        except (ConnectionError, asyncio.CancelledError):
            release(request)
            raise
        except (Exception, PanicException, BaseExceptionGroup) as error:
            response = self._unexpected_error_response(request, match, error, request_id)
            _forget_frames(error)
        self._complete(request, match, response, request_id, time.perf_counter() - started)
        return response

    def _id_of(self, request: web.BaseRequest) -> str:
        """Return the id that the client gave to a request, or a new one."""
        request_id = request.headers.get(protocol.HEADER_REQUEST_ID)
        if request_id is None or not _is_request_id(request_id):
            request_id = f"{self._id_prefix}-{next(self._ids):x}"
        return request_id

    def _complete(
        self,
        request: web.BaseRequest,
        match: Match | None,
        response: Response,
        request_id: str,
        seconds: float,
    ) -> None:
        """Add the headers that every response has, and count and log it. `seconds` is the time that it
        took."""
        response.request_id = request_id
        response.header_text += f"{protocol.HEADER_REQUEST_ID}: {request_id}\r\n"
        if self._load.draining:
            response.close = True
        if self._origins and hdrs.ACCESS_CONTROL_ALLOW_ORIGIN not in response.header_text:
            response.header_text += self._cors_lines(request)
        if match is None:
            count_response(self._counters, response.status, seconds)
        else:
            route = match.route
            count_response(self._counters, response.status, seconds, route.action, route.collection)
        if self._log.logs_requests:
            self._log.log_response(request, response, seconds)

    def _check_host(self, request: web.BaseRequest) -> None:
        """Raise MisdirectedRequest for another host. Health probes, which use the IP, are exempt."""
        if request.raw_path in HEALTH_PATHS:
            return
        host = canonical_host_of_header(request.headers.get(hdrs.HOST, ""), "http")
        if host not in self._hosts and host.rpartition(":")[0] not in self._hosts_of_any_port:
            raise MisdirectedRequest(reason=f"host: {request.headers.get('Host', '')}")

    def _check_origin(self, request: web.BaseRequest) -> None:
        """Raise ForeignOrigin for a request that a page of another site may have sent without a preflight.
        Browsers send bodies of these types without one, unless a script has set `Authorization`."""
        headers = request.headers
        is_set = headers.get(protocol.HEADER_AUTHORIZATION, "").startswith((SCHEME, BEARER))
        if is_set or media_type(request) not in SIMPLE_TYPES:
            return
        origin = headers[hdrs.ORIGIN]
        if origin in self._origins or "*" in self._origins:
            return
        scheme, _, host = origin.lower().partition("://")
        own = canonical_host_of_header(headers.get(hdrs.HOST, ""), scheme)
        if not host or host not in {own, *self._hosts}:
            raise ForeignOrigin(reason=f"origin: {origin}")

    def _error_response(
        self, request: web.BaseRequest, match: Match | None, error: PysyncError, request_id: str
    ) -> Response:
        if isinstance(error, MethodNotAllowed) and request.method == "OPTIONS" and self._origins:
            return self._preflight(error)
        collection = "" if match is None else match.route.collection
        self._counters.count("pysync_refusals", collection, error.check)
        if isinstance(error, Overloaded):
            return error_response(error, close=not request.content.is_eof())
        self._log.log_rejection(request, error, request_id)
        if error.status >= 500:
            values = error.status, error.code, _describe(request, match), _cause(error)
            # Requests to a store that does not answer fail with many texts, and no traceback says more.
            is_away = isinstance(error, Unavailable) and type(error) is not Unavailable
            extra = {"request_id": request_id}
            cause = None if is_away else error.__cause__
            log.warning("%s %s: %s: %s", *values, extra=extra, exc_info=cause)
        return error_response(error, close=not request.content.is_eof())

    def _unexpected_error_response(
        self, request: web.BaseRequest, match: Match | None, error: BaseException, request_id: str
    ) -> Response:
        """Return the response to an error that is none of ours, and log it with its traceback."""
        if isinstance(error, MemoryError) or str(error) == NO_THREAD:
            clear_frames(error.__traceback__)  # they hold what did not fit, and the log line needs memory
            refused = Unavailable()
            refused.__cause__ = error
            return self._error_response(request, match, refused, request_id)
        extra = {"request_id": request_id}
        log.exception("unhandled error: %s", _describe(request, match), extra=extra)
        unexpected = InternalError(extras={"requestId": request_id})
        return error_response(unexpected, close=not request.content.is_eof())

    def _preflight(self, error: MethodNotAllowed) -> Response:
        """Return the response to the preflight request for a signed request."""
        lines = (
            f"Access-Control-Allow-Methods: {error.headers['Allow']}\r\n"
            f"Access-Control-Allow-Headers: {CORS_HEADERS}\r\n"
            f"Access-Control-Max-Age: {CORS_MAX_AGE_S}\r\n"
        )
        return Response(204, b"", NO_STORE + lines)

    def _cors_lines(self, request: web.BaseRequest) -> str:
        origin = request.headers.get(hdrs.ORIGIN, "")
        if "*" in self._origins:
            allowed = "*"
        elif origin in self._origins:
            allowed = origin
        else:
            return "Vary: Origin\r\n"
        return (
            f"Access-Control-Allow-Origin: {allowed}\r\nVary: Origin\r\n"
            f"Access-Control-Expose-Headers: {CORS_EXPOSED}\r\n"
        )


def _is_chunked_alone(request: web.BaseRequest) -> bool:
    """Return True if the body is chunked and nothing else. Of any other a proxy in front may see another end,
    and so another request behind it."""
    codings = request.headers.getall(hdrs.TRANSFER_ENCODING)
    return request.version >= HttpVersion11 and [coding.lower() for coding in codings] == ["chunked"]


def _forget_frames(error: BaseException | None) -> None:
    """Forget in which frames an error was raised, and the errors that led to it. A future or stream that the
    frames refer to may refer to the error, so a collection of garbage would have to find what else they have,
    such as the body of the request. Errors may lead to each other in a circle, which ends at one that has no
    frames any more."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _describe(request: web.BaseRequest, match: Match | None) -> str:
    """Return the action, collection and key of a request, for the log."""
    if match is None:
        return repr(protocol.path_of(request.raw_path))
    route = match.route
    return " ".join(filter(None, (route.action, route.collection, repr(match.key))))


def _cause(error: PysyncError) -> str:
    if isinstance(error, Unavailable):
        return error.detail
    if isinstance(error, DocumentCorrupt) and error.key is not None:
        return f"{error.key!r} is corrupt"
    return str(error.__cause__ or error.message)
