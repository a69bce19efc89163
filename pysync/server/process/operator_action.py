"""Actions of operators: a POST to their listener has the event loop act, while a thread waits."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import orjson

from pysync.errors import MethodNotAllowed, Unavailable
from pysync.server.http.responses import NO_STORE, Response

RETRY_S: Final = 5
"""Seconds after which a request may try again that came while another one was carried out."""


class AdminRequest(NamedTuple):
    """A request of an operator. The names of `headers` are in lower case; `query` is what follows the `?`."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""
    query: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters in the query, by name."""
        return dict(parse_qsl(self.query, keep_blank_values=True))


class OperatorAction:
    """Responds to requests for one action, once the listener has checked their admin token. `act` does on the
    event loop what a request asks for, and returns the body of the response or raises PysyncError. `busy` is
    the message for a request that comes while another one is carried out, and `stopped` for one that ends
    because the server stops."""

    def __init__(
        self, act: Callable[[AdminRequest], Coroutine[Any, Any, dict[str, Any]]], busy: str, stopped: str
    ) -> None:
        self._act, self._busy, self._stopped = act, busy, stopped
        self._lock = threading.Lock()
        self._running: Future[dict[str, Any]] | None = None
        self._is_closed = False

    def respond(self, request: AdminRequest, loop: asyncio.AbstractEventLoop) -> Response:
        """Act on the event loop, and wait for the end. Raises PysyncError, for all but one request at a time:
        the listener has few threads."""
        if request.method != "POST":
            raise MethodNotAllowed(headers={"Allow": "POST"})
        if not self._lock.acquire(blocking=False):
            raise Unavailable(self._busy, retry_after_s=RETRY_S)
        try:
            self._running = asyncio.run_coroutine_threadsafe(self._act(request), loop)
            if self._is_closed:  # since `cancel` looked for it
                self._running.cancel()
            return Response(200, orjson.dumps(self._running.result()), NO_STORE)
        except CancelledError:
            raise Unavailable(self._stopped) from None
        finally:
            self._running = None
            self._lock.release()

    def cancel(self) -> None:
        """Cancel what is under way, and begin nothing more: the server stops."""
        self._is_closed = True
        if (running := self._running) is not None:
            running.cancel()
