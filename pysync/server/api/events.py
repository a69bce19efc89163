"""`GET {ns}/events`: authorises and begins change streams, which `pysync.server.sse` then writes to.

See docs/reference/protocol.md#change-stream.
"""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion

from pysync import protocol
from pysync.auth.addresses import network_of
from pysync.auth.authentication import AuthenticatedRequest
from pysync.errors import Unauthorized
from pysync.server.api import Service
from pysync.server.api.topics import TopicRequests
from pysync.server.http.connection import Connection
from pysync.server.http.responses import Response
from pysync.server.http.router import Match
from pysync.server.sse import SSEConnection, SSEHub, StreamSource

HEADERS = "Cache-Control: no-store\r\nX-Accel-Buffering: no\r\nVary: Authorization\r\n"
_MAX_EVENT_ID_CHARS: Final = 100


class EventStreamHandler:
    """The change stream of one namespace."""

    def __init__(self, service: Service, requests: TopicRequests, source: StreamSource, hub: SSEHub) -> None:
        self._requests = requests
        self._authenticator = service.authenticator
        self._client_ip = service.authorizer.client_ip
        self._source = source
        self._hub = hub

    async def open(self, request: web.BaseRequest, match: Match) -> Response:
        """Begin a stream. It counts as a pull of each collection whose changes it delivers.

        Raises as `TopicRequests.admit`; Unauthorized if the certificate has expired; Overloaded if too many
        streams are open, in all or of this caller.
        """
        self._hub.require_room()

        def account_of(verified: AuthenticatedRequest) -> str:
            return verified.caller.identity or network_of(self._client_ip(request))

        def check(verified: AuthenticatedRequest) -> None:
            if verified.certificate is not None and self._authenticator.has_expired(verified.certificate):
                raise Unauthorized("expired: a stream would end at once")
            self._hub.require_room(account_of(verified))

        verified, grant = await self._requests.admit(request, check)
        start = await self._source.dispatcher.resolve_start(_last_event_id(request))
        subscriber = SSEConnection(
            self._hub,
            self._source,
            grant,
            verified.caller,
            verified.certificate,
            start,
            account_of(verified),
        )
        return EventStreamResponse(subscriber.begin)


class EventStreamResponse(Response):
    """The head of a stream, whose body ends with the connection, so that one text of an event serves all
    subscribers. `begin` takes over the connection, and the head as the first bytes to write."""

    def __init__(self, begin: Callable[[Connection, bytes], None]) -> None:
        super().__init__(200, b"", HEADERS, content_type="text/event-stream", close=True)
        self._begin_stream = begin

    @property
    def size(self) -> int | None:
        """None, because a stream has no size. See `Response.size`."""
        return None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the head to the connection of `request`, and begin the stream."""
        if self._has_begun:
            return None
        transport = self._begin(request)
        head = self._head(request.version)
        if request.method == "HEAD":
            transport.write(head)
        else:
            connection = request.protocol
            assert isinstance(connection, Connection)
            self._begin_stream(connection, head)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: the stream ends the response."""

    def _length(self, version: HttpVersion) -> str:
        return ""


def _last_event_id(request: web.BaseRequest) -> str:
    """Return the cursor at which the client stopped, `""` for a new stream. A browser that reconnects by
    itself sends it in the header, while its query still has the one of the first request; so the header wins.
    """
    cursor = request.headers.get(protocol.HEADER_LAST_EVENT_ID) or request.query.get("lastEventId", "")
    return cursor if len(cursor) <= _MAX_EVENT_ID_CHARS and cursor.isascii() and cursor.isprintable() else "?"
