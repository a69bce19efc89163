"""Connections: aiohttp's protocol with a time limit for request heads and JSON errors."""

import asyncio
import logging
import os
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from pysync import protocol
from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout, Unavailable
from pysync.server.http.in_flight import release
from pysync.server.http.load import Address, Load
from pysync.server.http.responses import Response, error_response

log = logging.getLogger("pysync.server")


class Connection(web.RequestHandler):
    """A connection of a client to `server`."""

    __slots__ = ("address", "is_silent", "load", "waits_since")

    def __init__(self, server: web.Server, load: Load, **aiohttp_options: Any) -> None:
        super().__init__(server, **aiohttp_options)
        # aiohttp's parser counts a request that was taken before its body had arrived, so it may stop one
        # request earlier than the connection expects, which would then never let it go on.
        self._max_msg_queue_size -= 1
        self.load = load
        self.address: Address | None = None
        """What the connection counts for; None once it is closed."""
        self.is_silent = True
        """True until its first byte."""
        self.waits_since = 0.0
        """When its last request arrived, as `Load.now` has it."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection, which is closed."""
        self.load.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Note when a head begins to arrive."""
        load, address = self.load, self.address
        if address is not None and self in address.idle and self not in load.heads:
            load.heads[self] = load.now()
        self.is_silent = False
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """True if no request is being handled."""
        return self.address is None or self in self.address.idle

    def abort(self) -> None:
        """End the connection at once."""
        self.load.closed(self)
        if self.transport is not None:
            self.transport.abort()

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
        if self.writing_paused:
            protocol.pause_writing()
        transport.resume_reading()
        return transport

    def time_out(self) -> None:
        """Close, because a head did not arrive in time. If a part of it did, the response is 408."""
        if self.transport is not None and not self.is_silent:
            self.transport.write(_protocol_error(RequestTimeout()).to_bytes())
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write a response. What the request held is then free."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if len(request):  # few requests have stored anything
                release(request)
            self.load.end(self)

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
            if not isinstance(exc, ConnectionError):  # the client has not gone
                log.error("unhandled error", exc_info=exc)
            error = Unavailable() if isinstance(exc, MemoryError) else InternalError()
        else:
            error = BadRequest("Malformed request")
            if exc is not None:
                exc.__traceback__ = None  # its frames have the bytes, and lead to the error
        return _protocol_error(error)


def begin_request(
    message: RawRequestMessage,
    payload: StreamReader,
    connection: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    """Return a request whose handler is about to be called."""
    assert isinstance(connection, Connection)
    connection.load.begin(connection)
    return web.BaseRequest(message, payload, connection, writer, task, asyncio.get_running_loop())


def _protocol_error(error: PysyncError) -> Response:
    """Return the response to bytes that are not a request. It has a request id too."""
    response = error_response(error, close=True)
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: {os.urandom(8).hex()}\r\n"
    return response
