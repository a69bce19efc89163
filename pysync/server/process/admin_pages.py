"""The pages of the operators' listener: health, readiness, metrics and the description of the service."""

import asyncio
import logging
import os
import re
import resource
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from pysync import __version__
from pysync.auth.authentication import BEARER, AdminTokens
from pysync.errors import (
    BadRequest,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    PysyncError,
    Unauthorized,
    Unavailable,
)
from pysync.server.api.health import VERSION
from pysync.server.http.responses import NO_STORE, Response, error_response, page_headers
from pysync.server.process.inspection import Json, Query
from pysync.server.process.metrics import GAUGES, METRICS_TYPE, WORKER_PID, Counters, resident_bytes
from pysync.server.process.operator_action import AdminRequest, OperatorAction
from pysync.server.process.readiness import Readiness
from pysync.server.process.watchdog import LoopMonitor
from pysync.server.process.worker import STALL_S

TIMEOUT_S: Final = 2.0
"""Seconds that a client has to send its request, and then to read the response. The event loop has as long to
make a page."""
_ADMIN_PATH: Final = "/admin"
_is_count = re.compile("[1-9][0-9]{0,3}").fullmatch
_PORT: Final = re.compile(r":[0-9]+\Z")

log = logging.getLogger("pysync.server")


Page = Callable[[AdminRequest], Response]
MakePage = Callable[[Query], Coroutine[None, None, Json]]


class AdminPages:
    """The pages of the operators' listener. Any thread may call `respond`. `/health/ready` waits for the
    event loop, and so do actions and the pages that are made on it; no other page does."""

    def __init__(
        self,
        readiness: Readiness,
        render_metrics: Callable[[], bytes],
        snapshot: Callable[[], Counters],
        describe: Callable[[], bytes],
        now_ms: Callable[[], int],
        monitor: LoopMonitor,
        worker: int | None,
        describe_collections: Callable[[], Json],
        on_loop: Mapping[str, MakePage],
        hosts: Collection[str],
    ) -> None:
        """`on_loop` has the functions that make pages on the event loop, by path; these pages need one of the
        admin tokens. `hosts` are names under which `/admin` is served, besides `localhost` and addresses."""
        self.actions: Final[dict[str, OperatorAction]] = {}
        """The actions of a POST with an admin token, by path."""
        self.admin_tokens = AdminTokens(None)
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._readiness = readiness
        self._snapshot = snapshot
        self._now_ms = now_ms
        self._monitor = monitor
        self._worker = worker
        self._started_at = time.monotonic()
        self._pages: Mapping[str, Page] = {
            "/health": self._health,
            "/health/ready": self._ready,
            "/metrics": lambda _: Response(200, render_metrics(), NO_STORE, content_type=METRICS_TYPE),
            "/openapi.json": lambda _: Response(200, describe(), NO_STORE),
            "/version": lambda _: _json(200, VERSION),
            _ADMIN_PATH: self._admin,
            "/admin/collections": lambda _: _json(200, describe_collections()),
        }
        self._guarded: Mapping[str, Page] = {
            "/admin/refusals": self._refusals,
            **{path: partial(self._on_event_loop, make) for path, make in on_loop.items()},
        }

    def respond(self, request: AdminRequest) -> Response:
        """Return the response to a request, without an error."""
        method, path = request.method, request.path
        page = self._pages.get(path) or self._guarded.get(path)
        try:
            if path == _ADMIN_PATH or path.startswith(f"{_ADMIN_PATH}/"):
                self._check_host(request)
            if path in self.actions:
                self._check_token(request)
                return self.actions[path].respond(request, self._monitor.loop)
            if page is None:
                raise NotFound
            if method not in ("GET", "HEAD"):
                raise MethodNotAllowed(headers={"Allow": "GET, HEAD"})
            if path in self._guarded:
                self._check_token(request)
            return page(request)
        except PysyncError as error:
            return error_response(error, close=True)
        except Exception:
            log.exception("unhandled error: %s", path)
            return error_response(InternalError(), close=True)

    def _check_host(self, request: AdminRequest) -> None:
        """Raise MisdirectedRequest for a host that may be of another site: a page that a browser loaded from
        there reaches this address once the site names it as its own (DNS rebinding)."""
        host = request.headers.get("host", "").lower()
        name = _PORT.sub("", host)
        if name not in self._hosts and not _is_address(name):
            raise MisdirectedRequest(f"Add the host {host[:255]!a} to server.admin.hosts, or use an address")

    def _check_token(self, request: AdminRequest) -> None:
        """Raise Unauthorized without the admin token, Forbidden if none is configured."""
        if not self.admin_tokens:
            raise Forbidden(
                "This needs the admin token: set auth.adminToken (PYSYNC_ADMIN_TOKEN) and send it"
            )
        if not self.admin_tokens.accept(request.headers.get("authorization", "")):
            error = Unauthorized("admin token")
            error.headers = {"WWW-Authenticate": BEARER.strip()}
            raise error

    def _health(self, request: AdminRequest) -> Response:
        blocked_s = self._monitor.blocked_s
        if blocked_s > STALL_S:
            raise Unavailable(f"The event loop has been blocked for {blocked_s:.0f} s")
        return _json(200, {"ok": True, "ts": self._now_ms()})

    def _ready(self, request: AdminRequest) -> Response:
        if (error := self._readiness.check_from_thread(self._monitor.loop)) is not None:
            return error_response(error, close=True)
        return _json(200, self._readiness.body(self._now_ms()))

    def _on_event_loop(self, make: MakePage, request: AdminRequest) -> Response:
        """Return a page that is made on the event loop. Raises Unavailable if it takes longer than 2 s."""
        waiting = asyncio.run_coroutine_threadsafe(make(request.parameters), self._monitor.loop)
        try:
            return _json(200, waiting.result(TIMEOUT_S))
        except TimeoutError:
            waiting.cancel()
            raise Unavailable("The event loop does not answer") from None

    def _refusals(self, request: AdminRequest) -> Response:
        asked = request.parameters
        last, request_id = asked.get("last", "100"), asked.get("requestId")
        if not _is_count(last):
            raise BadRequest("last must be a number of refusals, such as 100")
        refusals = reversed(self._snapshot().recent["refusal"])
        found = (each for each in refusals if request_id in (None, each["requestId"]))
        return _json(200, {"refusals": list(islice(found, int(last)))})

    def _admin(self, request: AdminRequest) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            headers, text = _browser_page()
            return Response(200, text, headers, content_type="text/html; charset=utf-8")
        counters, error = self._snapshot(), self._readiness.error
        page = {
            "version": __version__,
            "pid": os.getpid(),
            "worker": self._worker,
            "uptimeMs": round((time.monotonic() - self._started_at) * 1000),
            "loopBlockedMs": round(self._monitor.blocked_s * 1000),
            "ready": error is None if self._readiness.is_known else None,
            "reason": None if error is None else error.detail,
            "code": None if error is None else error.code,
            "requests": counters.statuses.total(),
            "gauges": {metric: counters.gauge(metric) for metric in GAUGES},
            "residentBytes": resident_bytes(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "maxDescriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "workers": [
                {"number": int(labels[1]), "pid": pid, "alive": os.path.exists(f"/proc/{pid:.0f}")}
                for labels, pid in sorted(counters.peaks.items())
                if labels[0] == WORKER_PID
            ],
        }
        shown = {name: value for name, value in page.items() if name == "ready" or value is not None}
        return Response(200, orjson.dumps(shown), NO_STORE + "Vary: Accept\r\n")


@cache
def _browser_page() -> tuple[str, bytes]:
    """Return the headers and the text of the page for browsers."""
    text = Path(__file__).with_name("admin.html").read_bytes()
    parts = [text.split(b"<%b>" % tag)[1].split(b"</%b>" % tag)[0] for tag in (b"script", b"style")]
    return f"{NO_STORE}Vary: Accept\r\n{page_headers(*parts)}", text


def _is_address(host: str) -> bool:
    """Return True for an IPv4 address, and for an IPv6 address in brackets."""
    try:
        IPv6Address(host[1:-1]) if host[:1] + host[-1:] == "[]" else IPv4Address(host)
    except ValueError:
        return False
    return True


def _json(status: int, value: Any) -> Response:
    return Response(status, orjson.dumps(value), NO_STORE)
