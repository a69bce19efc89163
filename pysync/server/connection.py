"""Connections that do not wait for ever: aiohttp's protocol with a limit on slow heads and JSON errors."""

import asyncio
import logging
from typing import Any

from aiohttp import web

from pysync.errors import BadRequest, InternalError, PysyncError, RequestTimeout
from pysync.server.answer import Answer, error_answer

HEAD_TIMEOUT_S = 10.0
CHECK_EVERY_S = 1.0
KEEPALIVE_S = 75.0

log = logging.getLogger("pysync.server")


class Connection(web.RequestHandler):
    """One client connection. `head_since`: when an unfinished request head began to arrive, else 0.0."""

    __slots__ = ("head_since",)

    def __init__(self, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.head_since = 0.0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self._current_request is not None:
            self.head_since = 0.0
        elif self.head_since == 0.0:
            self.head_since = self._loop.time()

    def expire(self) -> None:
        """Answer 408 to a head that never came, and close."""
        transport = self.transport
        if transport is not None:
            answer = error_answer(RequestTimeout())
            transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
                + f"Content-Length: {len(answer.content)}\r\n\r\n".encode()
                + answer.content
            )
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Answer:
        """The JSON answer to what aiohttp could not parse, or to what no handler caught."""
        error: PysyncError
        if status >= 500:
            log.error("unhandled error", exc_info=exc)
            error = InternalError()
        else:
            error = BadRequest("Malformed request")
        return error_answer(error, close=True)


class Listener(web.Server):
    """Makes a `Connection` for each client and ends those whose head takes longer than 10 s."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._watch: asyncio.Task[None] | None = None

    def __call__(self) -> Connection:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._expire_slow_heads())
        return Connection(self, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 (aiohttp's name)
        if self._watch is not None:
            self._watch.cancel()
        await super().shutdown(timeout)

    async def _expire_slow_heads(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            latest = loop.time() - HEAD_TIMEOUT_S
            for connection in self.connections:
                if isinstance(connection, Connection) and 0.0 < connection.head_since <= latest:
                    connection.expire()


def listen(handler: Any) -> Listener:
    """The aiohttp server of `handler`: bodies arrive as they were sent, and nothing lingers unasked."""
    return Listener(
        handler,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=0,
        max_field_size=16 * 1024,
    )
