"""`GET {ns}/events`: what is written, told as it happens (wire section 9)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion

from pysync import _core, protocol
from pysync.auth.authentication import NOBODY, Access
from pysync.auth.policy import Rule
from pysync.config.key_templates import is_parameter, params
from pysync.engine.subscriptions import Topic
from pysync.errors import Forbidden, InvalidParams, MissingCollections, Unauthorized, UnknownCollection
from pysync.server.authorization import Callers
from pysync.server.connection import Connection
from pysync.server.responses import Answer
from pysync.server.router import Match
from pysync.server.sse import Subscriber, Subscribers
from pysync.server.stream_authorization import Hearing, topic_of

HEADERS = "Cache-Control: no-store\r\nX-Accel-Buffering: no\r\nVary: Authorization\r\n"
_MAX_PLACE_CHARS = 100

Wanted = Mapping[Topic, Mapping[str, str]]


class Stream:
    """The change stream of one namespace. `rules` are those of pulling its collections."""

    def __init__(
        self,
        rules: Sequence[Rule],
        access: Access,
        callers: Callers,
        hearing: Hearing,
        subscribers: Subscribers,
    ) -> None:
        self._rules = {rule.collection.name: rule for rule in rules}
        # What a stream as a whole asks: credentials that hold, where any collection looks at them.
        self._gate = replace(rules[0], limit=None)
        self._access = access
        self._callers = callers
        self._hearing = hearing
        self._subscribers = subscribers

    async def open(self, request: web.BaseRequest, match: Match) -> Answer:
        """Begin a stream. It counts as a pull of each collection that it tells of.

        Raises:
            BadRequest: a collection or parameter that does not exist.
            Unauthorized: bad credentials, or none where nothing is open.
            Forbidden: the caller may read none of the collections.
            RateLimited, Unavailable.
        """
        named, wanted = self._wanted(request.query)
        examines = any(rule.examines for rule in named)
        credentials = self._access.credentials(request.headers) if examines else NOBODY
        verified = await self._callers.verified(request, credentials, b"", self._gate)
        if verified.proof is not None and self._access.has_expired(verified.proof):
            raise Unauthorized("expired: a stream would end at once")
        grant = self._hearing.grant(wanted, verified.caller)
        if not grant.interest:
            if credentials is NOBODY:
                raise Unauthorized("no credentials")
            raise Forbidden(reason="roles: none of the collections")
        told = [rule for rule in named if topic_of(rule) in grant.interest]
        await self._callers.meter(request, verified.caller, told)
        await self._access.consume(verified)
        start = await self._subscribers.feed.begin(_last_event_id(request))
        account = verified.caller.identity or self._callers.address(request)
        subscriber = Subscriber(self._subscribers, grant, verified.caller, verified.proof, start, account)
        return StreamAnswer(lambda connection, head: subscriber.begin(connection, head, start))

    def _wanted(self, query: Mapping[str, str]) -> tuple[list[Rule], Wanted]:
        """The collections that a query is about, and which parameters are wanted of each."""
        sets = _param_sets(query.get("params"))
        text = query.get("collections")
        names = self._rules if text is None else dict.fromkeys(filter(None, text.split(",")))
        if not names:
            raise MissingCollections
        if not sets.keys() <= names.keys() or not names.keys() <= self._rules.keys():
            raise UnknownCollection
        rules = [self._rules[name] for name in names]
        return rules, {topic_of(rule): _values(rule, sets.get(rule.collection.name, {})) for rule in rules}


class StreamAnswer(Answer):
    """The head of a stream, whose body ends with the connection: so one text of an event serves all. `begin`
    takes the connection over, and the head as the first of what is to be written."""

    def __init__(self, begin: Callable[[Connection, bytes], None]) -> None:
        super().__init__(200, b"", HEADERS, content_type="text/event-stream", close=True)
        self._begin_stream = begin

    @property
    def size(self) -> int | None:
        """`Answer.size`."""
        return None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the head to the connection of `request`, and let the stream begin."""
        if self._eof_sent:
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
        """The rest is the stream's."""

    def _length(self, version: HttpVersion) -> str:
        return ""


def _last_event_id(request: web.BaseRequest) -> str:
    """Where the client stopped, `""` for one that begins. A browser that comes back by itself says it in the
    header, and has in its query what it said at first."""
    place = request.headers.get(protocol.HEADER_LAST_EVENT_ID) or request.query.get("lastEventId", "")
    return place if len(place) <= _MAX_PLACE_CHARS and place.isascii() and place.isprintable() else "?"


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


def _values(rule: Rule, param_set: object) -> Mapping[str, str]:
    """The values that a param-set asks for. Raises InvalidParams for any that no document has."""
    if not isinstance(param_set, dict) or not param_set.keys() <= set(params(rule.collection.storage_path)):
        raise InvalidParams
    values = {name: _text(value) for name, value in param_set.items()}
    if not all(map(is_parameter, values.values())):
        raise InvalidParams
    return values


def _text(value: object) -> str:
    """A parameter's value: text, or a number, which stands for the text that ECMAScript writes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParams
    return _core.canonicalize(orjson.dumps(value)).decode() if isinstance(value, float) else str(value)
