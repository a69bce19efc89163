"""The HTTP server: aiohttp's, with connections of our own."""

import asyncio
import logging
from contextlib import suppress
from math import inf
from typing import Any, Final

from aiohttp import web

from pysync.concurrency import every
from pysync.server.connection import Connection, ConnectionOptions
from pysync.server.early_rejection import EarlyRejections
from pysync.server.overload import Address, LoadShedder

HEAD_TIMEOUT_S = 10.0
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0
READ_BUFFER_BYTES = 32 * 1024
"""Bytes of a body that are read ahead. Reading stops at twice as many."""
DRAIN_CHECK_S = 0.02
CANCEL_S = 0.5

log = logging.getLogger("pysync.server")


class HttpServer(web.Server):
    """Creates the connections of a `Listener`, and times out those whose head takes longer than 10 s. On
    shutdown it lets requests finish that are being handled; aiohttp would discard the part of their bodies
    that has not arrived yet. The other arguments are those of `ConnectionOptions`."""

    def __init__(
        self,
        handler: Any,
        load: LoadShedder | None = None,
        early_rejections: EarlyRejections | None = None,
        *,
        isolates_requests: bool = False,
    ) -> None:
        super().__init__(
            handler,
            access_log=None,
            auto_decompress=False,  # bodies are passed on as they were sent
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=0,
            max_field_size=16 * 1024,
            read_bufsize=READ_BUFFER_BYTES,
        )
        self.load: Final = load or LoadShedder(inf)
        self._options: Final = ConnectionOptions(self.load, early_rejections, isolates_requests)
        self._watch: asyncio.Task[None] | None = None

    def make_connection(self, address: Address) -> Connection:
        """Return the protocol of a connection that counts for `address`."""
        if self._watch is None:
            checks = every(CHECK_EVERY_S, self._time_out_slow_heads, "cannot time out slow clients", log)
            self._watch = asyncio.get_running_loop().create_task(checks)
        return Connection(self, self._options, address, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 (aiohttp's name)
        """Wait up to `timeout` seconds until all connections are idle, then close them."""
        if self._watch is not None:
            self._watch.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not all(connection.is_idle for connection in self._own_connections()):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_CHECK_S)
        await super().shutdown(CANCEL_S)

    def pre_shutdown(self) -> None:
        """Close the idle connections."""
        for connection in self._own_connections():
            if connection.is_idle:
                connection.close()

    def _own_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if isinstance(connection, Connection)]

    async def _time_out_slow_heads(self) -> None:
        latest = asyncio.get_running_loop().time() - HEAD_TIMEOUT_S
        for connection in self._own_connections():
            if 0.0 < connection.head_since <= latest:
                connection.time_out()
