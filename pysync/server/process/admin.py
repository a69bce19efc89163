"""The operators' listener: serves `admin_pages` at an address of their own (`server.admin`).

It responds while the event loop is busy or blocked, because threads of its own serve it.
"""

import asyncio
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Final

from pysync import protocol
from pysync.errors import BadRequest
from pysync.server.http.connection import bound_sockets
from pysync.server.http.responses import error_response
from pysync.server.process.admin_pages import TIMEOUT_S, AdminPages
from pysync.server.process.operator_action import AdminRequest
from pysync.server.process.watchdog import TURN_EVERY_S

MAX_CONNECTIONS: Final = 64
"""Connections that are served at once, each by a thread. If one more arrives, the one gives way that has been
sending its request for longest."""
MAX_REQUEST_BYTES: Final = 16 * 1024
"""Bytes of a request: its head and, of an erasure, the body."""

log = logging.getLogger("pysync.server")


class AdminListener:
    """Serves `pages` at an address until `close`. `port` is where it listens; port 0 selects a free one.
    Other processes may listen at the same address if it is `shared`.

    Raises OSError, with a message that names the address, if it is in use or unavailable.
    """

    def __init__(self, pages: AdminPages, host: str, port: int, *, shared: bool = False) -> None:
        self._pages = pages
        ids = map(f"{os.urandom(5).hex()}-{{:x}}".format, count(1))

        def respond(request: AdminRequest) -> bytes:
            response = pages.respond(request)
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
        for action in self._pages.actions.values():
            action.cancel()
        for server in self._servers:
            await asyncio.to_thread(server.close)
        for thread in self._threads:
            thread.join()


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
        path, query = protocol.path_of(self.path), self.path.partition("?")[2]
        self.wfile.write(self.server.respond(AdminRequest(self.command, path, headers, body, query)))
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
