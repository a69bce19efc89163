"""`GET {ns}/events`: authorises and begins change streams, which `pysync.server.sse` then writes to.

See docs/reference/protocol.md#change-stream.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion

from pysync import _core, protocol
from pysync.auth.addresses import network_of
from pysync.auth.authentication import NO_CREDENTIALS, AuthenticatedRequest
from pysync.auth.policy import AccessPolicy
from pysync.config.key_templates import is_parameter
from pysync.engine.subscriptions import Topic
from pysync.errors import Forbidden, InvalidParams, MissingCollections, Unauthorized, UnknownCollection
from pysync.model import Caller
from pysync.server.api import Service
from pysync.server.http.connection import Connection
from pysync.server.http.responses import Response
from pysync.server.http.router import Match
from pysync.server.sse import SSEConnection, SSEHub, StreamSource
from pysync.server.stream_authorization import StreamGrant, topic_of

HEADERS = "Cache-Control: no-store\r\nX-Accel-Buffering: no\r\nVary: Authorization\r\n"
_MAX_EVENT_ID_CHARS: Final = 100

RequestedTopics = Mapping[Topic, Mapping[str, str]]


class EventStreamHandler:
    """The change stream of one namespace. `policies` are those of pulls of its collections."""

    def __init__(
        self,
        service: Service,
        policies: Sequence[AccessPolicy],
        source: StreamSource,
        hub: SSEHub,
    ) -> None:
        self._policies = {policy.collection.name: policy for policy in policies}
        self._namespace = policies[0].namespace
        self._authenticator = service.authenticator
        self._authorizer = service.authorizer
        self._source = source
        self._hub = hub

    async def open(self, request: web.BaseRequest, match: Match) -> Response:
        """Begin a stream. It counts as a pull of each collection whose changes it delivers.

        Raises:
            BadRequest: a collection or parameter does not exist.
            Unauthorized: the credentials are invalid, or missing and no collection is open.
            Forbidden: the caller may read none of the collections.
            Overloaded: too many streams are open, in all or of this caller.
            RateLimited, Unavailable.
        """
        self._hub.require_room()
        named, wanted = self._parse_topics(request.query)
        needs_credentials = any(policy.needs_credentials for policy in named)
        credentials = NO_CREDENTIALS
        if needs_credentials:
            credentials = self._authenticator.parse_credentials(request.headers)

        def delivered(caller: Caller) -> list[AccessPolicy]:
            grant = self._source.authorizer.grant(wanted, caller)
            return [policy for policy in named if topic_of(policy) in grant.filter]

        async def decide(verified: AuthenticatedRequest) -> tuple[AuthenticatedRequest, StreamGrant, str]:
            if verified.certificate is not None and self._authenticator.has_expired(verified.certificate):
                raise Unauthorized("expired: a stream would end at once")
            grant = self._source.authorizer.grant(wanted, verified.caller)
            if not grant.filter:
                if credentials is NO_CREDENTIALS:
                    raise Unauthorized("no credentials")
                raise Forbidden(reason="roles: none of the collections")
            account = verified.caller.identity or network_of(self._authorizer.client_ip(request))
            self._hub.require_room(account)
            return verified, grant, account

        verified, grant, account = await self._authorizer.admit(
            request, self._namespace, credentials, b"", delivered, decide
        )
        start = await self._source.dispatcher.resolve_start(_last_event_id(request))
        subscriber = SSEConnection(
            self._hub, self._source, grant, verified.caller, verified.certificate, start, account
        )
        return EventStreamResponse(subscriber.begin)

    def _parse_topics(self, query: Mapping[str, str]) -> tuple[list[AccessPolicy], RequestedTopics]:
        """Return the policies of the collections that a query names, and the parameters that it requests of
        each."""
        sets = _param_sets(query.get("params"))
        text = query.get("collections")
        names = self._policies if text is None else dict.fromkeys(filter(None, text.split(",")))
        if not names:
            raise MissingCollections
        if not sets.keys() <= names.keys() or not names.keys() <= self._policies.keys():
            raise UnknownCollection
        policies = [self._policies[name] for name in names]
        return policies, {
            topic_of(policy): _values(policy, sets.get(policy.collection.name, {})) for policy in policies
        }


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


def _param_sets(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        sets = orjson.loads(text)
    except ValueError:
        raise InvalidParams from None
    if not isinstance(sets, dict):
        raise InvalidParams
    return sets


def _values(policy: AccessPolicy, param_set: object) -> Mapping[str, str]:
    """Return the values that a param-set requests. Raises InvalidParams if no document can have them."""
    names = policy.collection.path_template.params
    if not isinstance(param_set, dict) or not param_set.keys() <= set(names):
        raise InvalidParams
    values = {name: _text(value) for name, value in param_set.items()}
    if not all(map(is_parameter, values.values())):
        raise InvalidParams
    return values


def _text(value: object) -> str:
    """Return a parameter's value: text, or a number as ECMAScript writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParams
    return _core.canonicalize(orjson.dumps(value)).decode() if isinstance(value, float) else str(value)
