"""Connections: aiohttp's protocol with a time limit for request heads and JSON errors."""

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from aiohttp import web

from pysync import protocol
from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout
from pysync.server.responses import Response, error_response

HEAD_TIMEOUT_S = 10.0
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0
DRAIN_CHECK_S = 0.02
CANCEL_S = 0.5

log = logging.getLogger("pysync.server")


class Connection(web.RequestHandler):
    """One client connection. `head_since` is the loop time at which an unfinished head began, else 0.0."""

    __slots__ = ("head_since",)

    def __init__(self, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.head_since = 0.0

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client, and note when a request head begins."""
        super().data_received(data)
        if self._request_in_progress or self._messages:
            self.head_since = 0.0
        elif self.head_since == 0.0:
            self.head_since = self._loop.time()

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting for the end of its response."""
        return not self._request_in_progress and not self._messages

    def detach(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Hand the connection, whose last response has begun, to `protocol`, which may write the rest for
        hours. The state that aiohttp keeps for a connection is several times larger than such a response
        needs, so it is released as if the connection were lost. Raises ConnectionResetError if the connection
        is lost."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.transport = None
        self.connection_lost(None)
        transport.set_protocol(protocol)
        if self._paused:
            protocol.pause_writing()
        if self._buffer_paused or self._reading_paused:
            transport.resume_reading()
        return transport

    def time_out(self) -> None:
        """Send 408 for a head that did not arrive in time, and close."""
        if self.transport is not None:
            self.transport.write(_protocol_error(RequestTimeout()).to_bytes())
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Response:
        """Return the response to a request that aiohttp could not parse, or to an unhandled error."""
        error: PysyncError
        if status >= 500:
            log.error("unhandled error", exc_info=exc)
            error = InternalError()
        else:
            error = BadRequest("Malformed request")
        return _protocol_error(error)


def _protocol_error(error: PysyncError) -> Response:
    """Return the response to bytes that are not a request. It has a request id too."""
    response = error_response(error, close=True)
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: {os.urandom(8).hex()}\r\n"
    return response


class HttpServer(web.Server):
    """Creates a `Connection` for each client, and times out those whose head takes longer than 10 s. On
    shutdown it lets requests finish that are being handled; aiohttp would discard the part of their bodies
    that has not arrived yet."""

    def __init__(self, handler: Any) -> None:
        super().__init__(
            handler,
            access_log=None,
            auto_decompress=False,  # bodies are passed on as they were sent
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=0,
            max_field_size=16 * 1024,
        )
        self._watch: asyncio.Task[None] | None = None

    def __call__(self) -> Connection:
        """Return the protocol of a new connection."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._time_out_slow_heads())
        return Connection(self, loop=self._loop, **self._kwargs)

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
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            latest = loop.time() - HEAD_TIMEOUT_S
            for connection in self._own_connections():
                if 0.0 < connection.head_since <= latest:
                    connection.time_out()
