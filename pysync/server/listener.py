"""The listener: accepts connections, and decides which of them are read.

uvloop accepts one connection for each tick of the event loop, so under load a new connection would wait for
as many ticks as others came before it. This listener accepts all that have come, up to a time limit, and
costs little for those that are refused or deferred: they have no transport yet.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
from time import perf_counter
from typing import Final

from pysync.server.connection import HEALTH_PROBE
from pysync.server.http_server import HttpServer
from pysync.server.overload import Address, LoadShedder, kernel_wait_s

BACKLOG: Final = 4096
ACCEPT_S: Final = 0.02
"""Seconds for which connections are accepted in one tick of the loop."""
DRAIN_S: Final = 60.0
RETRY_S: Final = 0.1
"""Pause before the next attempt when the system has no descriptor or memory for a connection."""
OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger("pysync.server")


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Return sockets that are bound to every address of `host`, all to the same port; port 0 selects a free
    one. Other processes may bind to it too if it is `shared`. Raises OSError, with a message that names the
    address, if it is in use or unavailable."""
    sockets: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        sock = socket.socket(family, kind, protocol)
        sockets.append(sock)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Allow binding while connections of an earlier service linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
        except OSError as error:
            for opened in sockets:
                opened.close()
            reason = os.strerror(error.errno or 0).lower()
            raise OSError(error.errno, f"cannot listen on {address[0]} port {port}: {reason}") from error
        port = sock.getsockname()[1]
    return sockets


class Listener:
    """Accepts the connections of a `HttpServer`. Raises OSError from `start` as `bound_sockets` does."""

    def __init__(self, http: HttpServer, host: str, port: int = 0, *, shared: bool = False) -> None:
        self._http: Final = http
        self._host, self._port = host, port
        self._shared = shared
        self._sockets: list[socket.socket] = []
        self._retry: asyncio.TimerHandle | None = None
        self._starting = set[asyncio.Task[None]]()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which it listens, the first if it has several."""
        host, port, *_ = self._sockets[0].getsockname()
        return host, port

    async def start(self) -> None:
        """Listen."""
        self._sockets = bound_sockets(self._host, self._port, shared=self._shared)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
        self._watch()

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Stop listening, finish the requests in progress, for at most `drain_s`, and end all connections."""
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
        for sock in self._sockets:
            sock.close()
        if self._starting:
            await asyncio.wait(self._starting)
        await asyncio.sleep(0)  # what has arrived begins, and is no idle connection
        self._http.pre_shutdown()
        await self._http.shutdown(drain_s)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock, self._accept, sock)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections that have come."""
        until = perf_counter() + ACCEPT_S
        while perf_counter() < until:
            try:
                sock, peer = listening.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    log.warning("cannot accept connections: %s", error.strerror)
                    self._pause()
                    self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._watch)
                elif error.errno == errno.ECONNABORTED:
                    continue
                return
            self._open(sock, peer[0])

    def _open(self, sock: socket.socket, ip: str) -> None:
        """Serve a connection, defer it, or end it if there are too many."""
        load = self.load
        address = load.opened(ip)
        if address is None:
            _reset(sock)
            return
        sock.setblocking(False)
        if not load.defers_new:
            self.serve(sock, address)
            return
        unread = None
        try:
            unread = UnreadConnection(self, sock, address)
            load.defer(unread)
            unread.look_for_probe()
        except MemoryError as error:
            if unread is not None:
                unread.abort()
            self._fail(sock, address if unread is None else None, error)

    def serve(self, sock: socket.socket, address: Address, unread_since: float | None = None) -> None:
        """Serve a connection, which is counted for `address` and may have waited since some time."""
        try:
            task = asyncio.get_running_loop().create_task(self._serve(sock, address, unread_since))
        except MemoryError as error:
            self._fail(sock, address, error)
            return
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _serve(self, sock: socket.socket, address: Address, unread_since: float | None) -> None:
        try:
            connection = self._http.make_connection(address)
        except MemoryError as error:
            self._fail(sock, address, error)
            return
        try:
            if unread_since is not None:
                self.load.read_again(connection, unread_since)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except Exception as error:
            self.load.closed(connection)
            self._fail(sock, None, error)

    def _fail(self, sock: socket.socket, address: Address | None, error: Exception) -> None:
        """End a connection that cannot be served, and is still counted for `address`."""
        if address is not None:
            self.load.uncount(address)
        sock.close()
        if not isinstance(error, OSError):  # the client has not gone
            log.error("cannot serve a connection: %r", error)

    @property
    def load(self) -> LoadShedder:
        """What decides which connections are read."""
        return self._http.load


class UnreadConnection:
    """A new connection that is not read, because requests of other connections wait. It is a socket without a
    transport, and costs next to nothing until its turn comes. A health probe does not wait."""

    __slots__ = ("_is_watched", "_listener", "_socket", "address", "was_served")

    def __init__(self, listener: Listener, sock: socket.socket, address: Address) -> None:
        self._listener = listener
        self._socket = sock
        self._is_watched = False
        self.address: Address | None = address
        self.was_served = False

    def look_for_probe(self) -> None:
        """Serve the connection if its first bytes are a health probe, once as many have come."""
        try:
            first = self._socket.recv(len(HEALTH_PROBE), socket.MSG_PEEK)
            may_begin_probe = first != b"" and HEALTH_PROBE.startswith(first)
        except BlockingIOError:
            first, may_begin_probe = b"", True
        except OSError:
            first, may_begin_probe = b"", False
        if first == HEALTH_PROBE:
            self._stop_watching()
            self._listener.load.resume(self)
        elif not may_begin_probe or (self._is_watched and first):  # it ended in its first bytes
            self._stop_watching()
        elif not self._is_watched:
            self._is_watched = True
            self._wake_for(len(HEALTH_PROBE))
            asyncio.get_running_loop().add_reader(self._socket, self.look_for_probe)

    def _stop_watching(self) -> None:
        if self._is_watched:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._socket)
            self._wake_for(1)

    def _wake_for(self, size: int) -> None:
        """Let the event loop know of so many bytes, or of the end, and of no fewer."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def stop_reading(self) -> bool:
        """Return True: nothing is read."""
        return True

    def read_on(self, since: float) -> None:
        """Begin to serve the connection."""
        self._stop_watching()
        address, self.address = self.address, None
        if address is not None:
            self._listener.serve(self._socket, address, since)

    def kernel_wait_s(self) -> float | None:
        """Return how long ago the kernel received the last bytes; None if the client has closed."""
        return kernel_wait_s(self._socket)

    def abort(self) -> None:
        """End the connection."""
        self._stop_watching()
        self._listener.load.closed(self)
        self._socket.close()


def _reset(sock: socket.socket) -> None:
    """Close a connection at once. The client notices, and nothing of it stays in the kernel."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
