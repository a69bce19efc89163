"""The operators' listener: health, readiness, metrics and the description of the service at an address of
their own (`server.admin`).

It responds while the event loop is busy or blocked, because threads of its own serve it.
"""

import asyncio
import hmac
import io
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address
from itertools import count
from typing import Any, Final

import orjson

from pysync import __version__, protocol
from pysync.auth.authentication import BEARER
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
from pysync.server.http.connection import bound_sockets
from pysync.server.http.responses import NO_STORE, Response, error_response
from pysync.server.process.erasure import ERASE_PATH, AdminRequest, ErasureEndpoint
from pysync.server.process.metrics import GAUGES, METRICS_TYPE, Counters
from pysync.server.process.readiness import Readiness
from pysync.server.process.supervisor import STALL_S

TURN_EVERY_S: Final = 0.25
"""Seconds between two turns that the event loop records, and between two searches of a server for connections
that must end."""
MAX_CONNECTIONS: Final = 64
"""Connections that are served at once, each by a thread. If one more arrives, the one gives way that has been
sending its request for longest."""
MAX_REQUEST_BYTES: Final = 16 * 1024
"""Bytes of a request: its head and, of an erasure, the body."""
TIMEOUT_S: Final = 2.0
"""Seconds that a client has to send its request, and then to read the response."""
_ADMIN_PATH: Final = "/admin"
_USAGE_PATH: Final = "/admin/usage"
_PORT: Final = re.compile(r":[0-9]+\Z")

log = logging.getLogger("pysync.server")


class LoopMonitor:
    """Records when the running event loop turns, so that other threads find out how long it has been blocked.
    `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self._now = now
        self._turned_at = now()
        self._timer = self.loop.call_later(TURN_EVERY_S, self._on_turn)

    @property
    def blocked_s(self) -> float:
        """Seconds that the event loop is late."""
        return max(0.0, self._now() - self._turned_at - TURN_EVERY_S)

    def close(self) -> None:
        """Stop recording."""
        self._timer.cancel()

    def _on_turn(self) -> None:
        self._turned_at = self._now()
        self._timer = self.loop.call_later(TURN_EVERY_S, self._on_turn)


class AdminPages:
    """The pages of the operators' listener. Any thread may call `respond`; none needs the event loop but
    `/health/ready`."""

    def __init__(
        self,
        readiness: Readiness,
        render_metrics: Callable[[], bytes],
        snapshot: Callable[[], Counters],
        describe: Callable[[], bytes],
        now_ms: Callable[[], int],
        worker: int | None = None,
        usage: Callable[[], Coroutine[None, None, dict[str, Any]]] | None = None,
        erasure: ErasureEndpoint | None = None,
        admin_token: str | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        """`usage` returns what `/admin/usage` shows, on the event loop; None: there is no such page. `hosts`
        are names under which `/admin` is served, besides `localhost` and addresses."""
        self.erasure = erasure
        self._authorization = None if admin_token is None else (BEARER + admin_token).encode()
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._readiness = readiness
        self._snapshot = snapshot
        self._now_ms = now_ms
        self._worker = worker
        self._started_at = time.monotonic()
        self._pages: Mapping[str, Callable[[LoopMonitor], Response]] = {
            "/health": self._health,
            "/health/ready": self._ready,
            "/metrics": lambda monitor: Response(200, render_metrics(), NO_STORE, content_type=METRICS_TYPE),
            "/openapi.json": lambda monitor: Response(200, describe(), NO_STORE),
            "/version": lambda monitor: _json(200, VERSION),
            _ADMIN_PATH: self._admin,
        }
        if usage is not None:
            self._pages = {**self._pages, _USAGE_PATH: partial(_on_event_loop, usage)}

    def respond(self, request: AdminRequest, monitor: LoopMonitor) -> Response:
        """Return the response to a request, without an error."""
        method, path = request.method, request.path
        page = self._pages.get(path)
        try:
            if path == _ADMIN_PATH or path.startswith(f"{_ADMIN_PATH}/"):
                self._check_host(request)
            if path == ERASE_PATH and self.erasure is not None:
                self._check_token(request)
                return self.erasure.respond(request, monitor.loop)
            if page is None:
                raise NotFound
            if method not in ("GET", "HEAD"):
                raise MethodNotAllowed(headers={"Allow": "GET, HEAD"})
            if path == _USAGE_PATH:
                self._check_token(request)
            return page(monitor)
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
        if self._authorization is None:
            raise Forbidden(
                "This needs the admin token: set auth.adminToken (PYSYNC_ADMIN_TOKEN) and send it"
            )
        sent = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, self._authorization):
            error = Unauthorized("admin token")
            error.headers = {"WWW-Authenticate": BEARER.strip()}
            raise error

    def _health(self, monitor: LoopMonitor) -> Response:
        blocked_s = monitor.blocked_s
        if blocked_s > STALL_S:
            raise Unavailable(f"The event loop has been blocked for {blocked_s:.0f} s")
        return _json(200, {"ok": True, "ts": self._now_ms()})

    def _ready(self, monitor: LoopMonitor) -> Response:
        if (error := self._readiness.check_from_thread(monitor.loop)) is not None:
            return error_response(error, close=True)
        return _json(200, self._readiness.body(self._now_ms()))

    def _admin(self, monitor: LoopMonitor) -> Response:
        counters, error = self._snapshot(), self._readiness.error
        page = {
            "version": __version__,
            "pid": os.getpid(),
            "worker": self._worker,
            "uptimeMs": round((time.monotonic() - self._started_at) * 1000),
            "loopBlockedMs": round(monitor.blocked_s * 1000),
            "ready": error is None if self._readiness.is_known else None,
            "reason": None if error is None else error.detail,
            "requests": counters.statuses.total(),
            "gauges": {metric: counters.gauge(metric) for metric in GAUGES},
            "residentBytes": _resident_bytes(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "maxDescriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        return _json(
            200, {name: value for name, value in page.items() if name == "ready" or value is not None}
        )


def _on_event_loop(
    page: Callable[[], Coroutine[None, None, dict[str, Any]]], monitor: LoopMonitor
) -> Response:
    """Return a page that is made on the event loop. Raises Unavailable if it takes longer than 2 s."""
    waiting = asyncio.run_coroutine_threadsafe(page(), monitor.loop)
    try:
        return _json(200, waiting.result(TIMEOUT_S))
    except TimeoutError:
        waiting.cancel()
        raise Unavailable("The event loop does not answer") from None


class AdminListener:
    """Serves `pages` at an address until `close`. `port` is where it listens; port 0 selects a free one.
    Other processes may listen at the same address if it is `shared`.

    Raises OSError, with a message that names the address, if it is in use or unavailable.
    """

    def __init__(self, pages: AdminPages, host: str, port: int, *, shared: bool = False) -> None:
        self._pages = pages
        self._monitor = LoopMonitor()
        ids = map(f"{os.urandom(5).hex()}-{{:x}}".format, count(1))

        def respond(request: AdminRequest) -> bytes:
            response = pages.respond(request, self._monitor)
            response.header_text += f"{protocol.HEADER_REQUEST_ID}: {next(ids)}\r\n"
            text = response.to_bytes()
            return text[: len(text) - len(response.content)] if request.method == "HEAD" else text

        self._servers = [_Server(sock, respond) for sock in bound_sockets(host, port, shared=shared)]
        self.port: int = self._servers[0].server_address[1]
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(TURN_EVERY_S,), name="admin", daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Stop listening, and wait for the responses under way."""
        if self._pages.erasure is not None:
            self._pages.erasure.cancel()
        for server in self._servers:
            await asyncio.to_thread(server.close)
        for thread in self._threads:
            thread.join()
        self._monitor.close()


class _Server(ThreadingHTTPServer):
    """Serves the connections of a bound socket, one request each. `respond` returns the text of a
    response."""

    daemon_threads = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, sock: socket.socket, respond: Callable[[AdminRequest], bytes]) -> None:
        super().__init__(sock.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = sock, sock.getsockname()
        self.respond: Final = respond
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._arriving: dict[socket.socket, float] = {}
        """When the connections were accepted whose request has not arrived, the oldest first."""
        self.server_activate()

    def close(self) -> None:
        """Stop listening, end connections without a request, and wait for the responses under way."""
        self.shutdown()
        self._end_arriving(self._arriving)
        self.server_close()

    def record_arrival(self, connection: socket.socket) -> None:
        """Record that the request of a connection is complete."""
        with self._lock:
            self._arriving.pop(connection, None)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Waits a moment if there is no descriptor, and then raises OSError."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection. Return False if all others have sent their request."""
        with self._lock:
            oldest = next(iter(self._arriving), None)
            if len(self._connections) >= MAX_CONNECTIONS:
                if oldest is None:
                    return False
                self._end(oldest)
            self._connections.add(request)
            self._arriving[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """End the connections whose request takes too long. The server calls this every `TURN_EVERY_S`."""
        now = time.monotonic()
        with self._lock:
            late = [each for each, began in self._arriving.items() if now - began > TIMEOUT_S]
        self._end_arriving(late)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.discard(request)
            self._arriving.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a client is gone, or that there is no memory for a thread."""
        log.debug("failed to serve an operator", exc_info=True)

    def _end_arriving(self, connections: Iterable[socket.socket]) -> None:
        with self._lock:
            for connection in list(connections):
                if connection in self._arriving:
                    self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """End a connection without a request; its thread then finds nothing more to read."""
        del self._arriving[connection]
        self._connections.discard(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Serves one request of a connection."""

    server: _Server

    def setup(self) -> None:
        """Limit the bytes and the time of the request, and the time of the response."""
        self.request.settimeout(TIMEOUT_S)
        super().setup()
        self.rfile = io.BufferedReader(_Limited(self.connection))

    def respond(self) -> None:
        """Respond to the request, unless its body does not arrive."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()):
            return self.send_error(400)
        body = self.rfile.read(min(int(length), MAX_REQUEST_BYTES)) if self.command == "POST" else b""
        if self.command == "POST" and len(body) != int(length):
            return None
        self.server.record_arrival(self.connection)
        path = protocol.path_of(self.path)
        self.wfile.write(self.server.respond(AdminRequest(self.command, path, headers, body)))
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject what is no request."""
        self.close_connection = True
        self.wfile.write(error_response(BadRequest(message or "Bad request"), close=True).to_bytes())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the pages are requested every few seconds."""


class _Limited(io.RawIOBase):
    """Reads at most `MAX_REQUEST_BYTES` from a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        read = self._connection.recv_into(memoryview(buffer)[: self._left]) if self._left else 0
        self._left -= read
        return read


def _is_address(host: str) -> bool:
    """Return True for an IPv4 address, and for an IPv6 address in brackets."""
    try:
        IPv6Address(host[1:-1]) if host[:1] + host[-1:] == "[]" else IPv4Address(host)
    except ValueError:
        return False
    return True


def _json(status: int, value: Any) -> Response:
    return Response(status, orjson.dumps(value), NO_STORE)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
