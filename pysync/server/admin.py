"""The operators' listener: health, readiness, metrics and the description of the service at an address of
their own (`server.admin`).

It responds while the event loop is busy or blocked, because threads of its own serve it. If the event loop
has work, a thread that returns from a system call waits up to 5 ms for the interpreter's lock. So a response
needs few such calls: the threads use blocking sockets, and the system enforces the time limits.
"""

import asyncio
import errno
import hmac
import logging
import os
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from itertools import count
from typing import Any, Final

import orjson

from pysync import __version__, protocol
from pysync.auth.authentication import BEARER
from pysync.errors import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    PysyncError,
    Unauthorized,
    Unavailable,
)
from pysync.server.erasure import ERASE_PATH, AdminRequest, ErasureEndpoint
from pysync.server.handlers.health import VERSION
from pysync.server.listener import bound_sockets
from pysync.server.metrics import GAUGES, METRICS_TYPE, Counters
from pysync.server.readiness import Readiness
from pysync.server.responses import NO_STORE, Response, error_response

STALLED_S: Final = 10.0
"""Seconds without a turn of the event loop after which the process is not healthy."""
TURN_EVERY_S: Final = 0.25
MAX_CONNECTIONS: Final = 4
"""Connections that are served at once, each by a thread. Others wait in the kernel."""
MAX_HEAD_BYTES: Final = 16 * 1024
"""Bytes of a request: its head and, of an erasure, the body."""
TIMEOUT_S: Final = 2.0
"""Seconds that a client has to send its request, and then to read the response."""
_BACKLOG: Final = 64
_ADMIN_PATH: Final = "/admin"
_USAGE_PATH: Final = "/admin/usage"
_PORT: Final = re.compile(r":[0-9]+\Z")

log = logging.getLogger("pysync.server")


class LoopMonitor:
    """Notes when the running event loop turns, and tells other threads how long it has been blocked. `now` is
    a clock in seconds."""

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
        """Stop noting."""
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
        if blocked_s > STALLED_S:
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
        self._closing = False
        self._request_numbers = count(1)
        self._id_prefix = os.urandom(5).hex()
        self._sockets = _listening_sockets(host, port, shared=shared)
        self.port: int = self._sockets[0].getsockname()[1]
        self._monitor = LoopMonitor()
        self._threads = [
            threading.Thread(target=self._serve, args=(sock,), name="admin", daemon=True)
            for sock in self._sockets
            for _ in range(MAX_CONNECTIONS)
        ]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Stop listening, and wait for the responses under way."""
        self._closing = True
        if self._pages.erasure is not None:
            self._pages.erasure.cancel()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait in accept
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for sock in self._sockets:
            sock.close()
        self._monitor.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if self._closing:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(0.1)
                continue
            with connection, suppress(OSError, MemoryError):
                self._serve_connection(connection)

    def _serve_connection(self, connection: socket.socket) -> None:
        """Respond to one request. The time limits are not those of Python's sockets, with which each call
        would release the interpreter's lock twice."""
        limit = struct.pack("ll", int(TIMEOUT_S), int(TIMEOUT_S % 1 * 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        request = _receive(connection)
        if request is None:
            return
        response = self._pages.respond(request, self._monitor)
        number = next(self._request_numbers)
        response.header_text += f"{protocol.HEADER_REQUEST_ID}: {self._id_prefix}-{number:x}\r\n"
        text = response.to_bytes()
        connection.sendall(text[: len(text) - len(response.content)] if request.method == "HEAD" else text)


def _listening_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    sockets = bound_sockets(host, port, shared=shared)
    for sock in sockets:
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # a connection that sends nothing occupies no thread
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(TIMEOUT_S))
        sock.listen(_BACKLOG)
    return sockets


def _receive(connection: socket.socket) -> AdminRequest | None:
    """Return the request that arrives within the time limit; None if none does, or it is too large."""
    deadline = time.monotonic() + TIMEOUT_S
    data = b""

    def read_until(is_enough: Callable[[], bool]) -> bool:
        nonlocal data
        while not is_enough():
            piece = connection.recv(MAX_HEAD_BYTES)
            data += piece
            if not piece or len(data) > MAX_HEAD_BYTES or time.monotonic() > deadline:
                return False
        return True

    if not read_until(lambda: b"\r\n\r\n" in data):
        return None
    head, _, _ = data.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    pairs = (field.partition(":") for field in fields)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length, begin = headers.get("content-length", "0"), len(head) + 4
    if not (length.isascii() and length.isdecimal()):
        return None
    end = begin + int(length)
    if method == "POST" and not read_until(lambda: len(data) >= end):
        return None
    return AdminRequest(method, protocol.path_of(rest.partition(" ")[0]), headers, data[begin:end])


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
