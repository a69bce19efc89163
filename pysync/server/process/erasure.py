"""`POST /admin/erase` of the operators' listener: a thread waits for what the event loop erases.

See docs/reference/protocol.md#erase.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import orjson

from pysync.erase import EraseReport, EraseRequest
from pysync.errors import (
    BadRequest,
    BodyNotObject,
    ForeignOrigin,
    InvalidJson,
    MethodNotAllowed,
    Unavailable,
    UnsupportedMediaType,
)
from pysync.protocol import JSON_TYPE
from pysync.server.http.responses import NO_STORE, Response

ERASE_PATH: Final = "/admin/erase"
RETRY_S: Final = 5
"""Seconds after which a request may try again that came during an erasure."""


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


Erase = Callable[[EraseRequest, bool], Coroutine[Any, Any, EraseReport]]
"""Erases what belongs to the request, or with True only reports what would go."""


class ErasureEndpoint:
    """Responds to requests to erase, once the listener has checked their admin token."""

    def __init__(self, erase: Erase) -> None:
        self._erase = erase
        self._lock = threading.Lock()
        self._running: Future[EraseReport] | None = None
        self._is_closed = False

    def respond(self, request: AdminRequest, loop: asyncio.AbstractEventLoop) -> Response:
        """Erase on the event loop, and wait for the report. Raises PysyncError, for all but one request at a
        time: the listener has few threads."""
        if request.method != "POST":
            raise MethodNotAllowed(headers={"Allow": "POST"})
        if "origin" in request.headers:  # browsers send it with each POST, also of their own origin
            raise ForeignOrigin("Pages of browsers may not erase")
        what, is_dry_run = _parse(request)
        if not self._lock.acquire(blocking=False):
            raise Unavailable(
                "An erasure is under way: try again when it has finished", retry_after_s=RETRY_S
            )
        try:
            self._running = asyncio.run_coroutine_threadsafe(self._erase(what, is_dry_run), loop)
            if self._is_closed:  # since `cancel` looked for it
                self._running.cancel()
            report = self._running.result()
        except CancelledError:
            raise Unavailable("the server stops; it finishes the erasure when it starts again") from None
        finally:
            self._running = None
            self._lock.release()
        return Response(200, orjson.dumps(report.describe(what, is_dry_run=is_dry_run)), NO_STORE)

    def cancel(self) -> None:
        """Cancel what is being erased, and erase nothing more. The next start of a service finishes it."""
        self._is_closed = True
        if (running := self._running) is not None:
            running.cancel()


def _parse(request: AdminRequest) -> tuple[EraseRequest, bool]:
    """Return what is to be erased, and True for a dry run. Raises BadRequest and UnsupportedMediaType."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_TYPE:
        raise UnsupportedMediaType(f"Content-Type must be {JSON_TYPE}")
    try:
        members = orjson.loads(request.body)
    except ValueError:
        raise InvalidJson from None
    if not isinstance(members, dict):
        raise BodyNotObject
    is_dry_run = members.pop("dryRun", False)
    if not isinstance(is_dry_run, bool):
        raise BadRequest("dryRun must be true or false")
    try:
        return EraseRequest.parse(members), is_dry_run
    except ValueError as error:
        raise BadRequest(str(error)) from None
