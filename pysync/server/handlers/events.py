"""`GET {ns}/events`: writes, delivered as they happen, and heartbeats in between.

See docs/reference/protocol.md#change-stream and docs/reference/protocol.md#keep-alive.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion

from pysync import _core, protocol
from pysync._core import PanicException
from pysync.auth.authentication import NO_CREDENTIALS
from pysync.auth.policy import AccessPolicy
from pysync.auth.verification import VerifiedCertificate
from pysync.config.key_templates import is_parameter, params
from pysync.engine.catch_up import CatchUp
from pysync.engine.subscriptions import ChangeDispatcher, Event, StartPosition, Topic
from pysync.errors import Forbidden, InvalidParams, MissingCollections, Unauthorized, UnknownCollection
from pysync.model import Caller
from pysync.server.connection import Connection
from pysync.server.handlers import Service
from pysync.server.metrics import Counters
from pysync.server.responses import Response
from pysync.server.router import Match
from pysync.server.stream_authorization import StreamAuthorizer, StreamGrant, topic_of

log = logging.getLogger("pysync.server")

HEADERS = "Cache-Control: no-store\r\nX-Accel-Buffering: no\r\nVary: Authorization\r\n"
_MAX_EVENT_ID_CHARS = 100
HEARTBEAT_S: Final = 4.0
"""Seconds between two heartbeats. Published clients give up on a stream that is silent for 5 s."""
HEARTBEAT_BUCKETS: Final = 16
"""Number of groups of streams. Heartbeats of different groups are spread over the interval."""
MAX_WRITE_BUFFER: Final = 256 * 1024
"""Bytes buffered by a connection above which it is aborted because its reader is too slow."""
STALL_S: Final = 30.0
"""Seconds that a subscriber that catches up has to read the bytes that the connection has buffered."""
RETRY_MS: Final = (1_000, 3_000)
"""Bounds of the delay, in milliseconds, after which clients reconnect to a service that has stopped."""

_COMMENT: Final = b":\n\n"

RequestedTopics = Mapping[Topic, Mapping[str, str]]


class EventStreamHandler:
    """The change stream of one namespace. `policies` are those of pulls of its collections."""

    def __init__(
        self,
        service: Service,
        policies: Sequence[AccessPolicy],
        stream_authorizer: StreamAuthorizer,
        hub: "SSEHub",
    ) -> None:
        self._policies = {policy.collection.name: policy for policy in policies}
        # The policy of the stream as a whole: valid credentials if any collection needs them.
        self._policy = replace(policies[0], limit=None)
        self._authenticator = service.authenticator
        self._authorizer = service.authorizer
        self._stream_authorizer = stream_authorizer
        self._hub = hub

    async def open(self, request: web.BaseRequest, match: Match) -> Response:
        """Begin a stream. It counts as a pull of each collection whose changes it delivers.

        Raises:
            BadRequest: a collection or parameter does not exist.
            Unauthorized: the credentials are invalid, or missing and no collection is open.
            Forbidden: the caller may read none of the collections.
            RateLimited, Unavailable.
        """
        named, wanted = self._parse_topics(request.query)
        needs_credentials = any(rule.needs_credentials for rule in named)
        credentials = (
            self._authenticator.parse_credentials(request.headers) if needs_credentials else NO_CREDENTIALS
        )
        verified = await self._authorizer.authenticate(request, credentials, b"", self._policy)
        if verified.certificate is not None and self._authenticator.has_expired(verified.certificate):
            raise Unauthorized("expired: a stream would end at once")
        grant = self._stream_authorizer.grant(wanted, verified.caller)
        if not grant.filter:
            if credentials is NO_CREDENTIALS:
                raise Unauthorized("no credentials")
            raise Forbidden(reason="roles: none of the collections")
        delivered = [rule for rule in named if topic_of(rule) in grant.filter]
        await self._authorizer.enforce_rate_limits(request, verified.caller, delivered)
        await self._authorizer.consume_nonce(verified)
        start = await self._hub.dispatcher.resolve_start(_last_event_id(request))
        account = verified.caller.identity or self._authorizer.client_ip(request)
        subscriber = SSEConnection(self._hub, grant, verified.caller, verified.certificate, start, account)
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
        rules = [self._policies[name] for name in names]
        return rules, {topic_of(rule): _values(rule, sets.get(rule.collection.name, {})) for rule in rules}


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


def _values(rule: AccessPolicy, param_set: object) -> Mapping[str, str]:
    """Return the values that a param-set requests. Raises InvalidParams if no document can have them."""
    if not isinstance(param_set, dict) or not param_set.keys() <= set(params(rule.collection.storage_path)):
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


class SSEConnection(asyncio.Protocol):
    """A connection whose response is a change stream: an `AuthorizedSubscriber` to the events of `grant`.
    While it waits for events it has no task."""

    __slots__ = (
        "_hub", "_is_live", "_resumed", "_start", "_task", "_transport", "account", "bucket", "caller",
        "cursor", "filter", "needs_authorization", "proof", "restricted", "verified_at_ms",
    )  # fmt: skip

    def __init__(
        self,
        hub: "SSEHub",
        grant: StreamGrant,
        caller: Caller,
        proof: VerifiedCertificate | None,
        start: StartPosition,
        account: str = "",
    ) -> None:
        self._hub = hub
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._is_live = False
        self.filter, self.restricted = grant
        self.needs_authorization = bool(grant.restricted) or proof is not None
        self.account = account
        self.caller = caller
        self.proof = proof
        self.verified_at_ms = 0
        self._start = start
        self.cursor = start.cursor
        self.bucket: set[SSEConnection] = set()

    def begin(self, connection: Connection, head: bytes) -> None:
        """Write the beginning of the stream, then catch up or subscribe. Raises ConnectionResetError."""
        self._transport = connection.detach(self)
        start = self._start
        if start.is_reset:
            head += _COMMENT + _reset_event(start.cursor)
        else:
            # A subscriber that disconnects before the first event resumes from here.
            head += b":\nid: %b\n\n" % start.cursor.encode()
        self._transport.write(head)
        self._hub.add(self)
        self._is_live = not start.is_resumed and self._hub.dispatcher.subscribe(self)
        if not self._is_live:
            self._task = asyncio.get_running_loop().create_task(self._catch_up())

    def deliver(self, events: Sequence[Event]) -> None:
        """See `Subscriber.deliver`."""
        self.cursor = events[-1].id
        if self._write(b"".join(event.sse_bytes for event in events)):
            for event in events:
                self._hub.counters.count("pysync_events", event.collection)

    def reset(self, cursor: str) -> None:
        """See `Subscriber.reset`."""
        self.cursor = cursor
        self._write(_reset_event(cursor))

    def heartbeat(self, watermark: str) -> None:
        """Write a heartbeat, with the watermark if it has advanced. A stream without events thus has a recent
        cursor from which it can resume."""
        if self._is_live and watermark > self.cursor:
            self.cursor = watermark
            self._write(b":\nid: %b\n\n" % watermark.encode())
        elif self.is_writable:
            self._write(_COMMENT)

    def abort(self) -> None:
        """See `Subscriber.abort`."""
        if self._transport is not None:
            self._transport.abort()

    def close(self, last: bytes = b"") -> None:
        """Write `last`, and close gracefully."""
        if self._write(last) and self._transport is not None:
            self._transport.close()

    @property
    def is_writable(self) -> bool:
        """See `Subscriber.is_writable`."""
        return self._resumed is None

    async def drained(self) -> bool:
        """See `Subscriber.drained`."""
        while (resumed := self._resumed) is not None:
            await asyncio.wait([resumed], timeout=STALL_S)
            if not resumed.done():
                self.abort()
                break
        return self._transport is not None and not self._transport.is_closing()

    def pause_writing(self) -> None:
        """Note that the write buffer is full."""
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Note that the write buffer has room again."""
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop catching up, and leave the hub."""
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()
        self._hub.remove(self)

    async def _catch_up(self) -> None:
        try:
            self._is_live = await self._hub.catch_up.catch_up(self)
        except (Exception, PanicException):
            log.exception("failed to catch up a change stream")
            self.abort()
        self._task = None

    def _write(self, text: bytes) -> bool:
        """Write `text` and return True; return False if the connection is closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(text)
        if transport.get_write_buffer_size() > MAX_WRITE_BUFFER:
            log.info("aborted a change stream: its reader is too slow")
            transport.abort()
        return True


class SSEHub:
    """The open streams of one process."""

    def __init__(
        self,
        dispatcher: ChangeDispatcher,
        authorizer: StreamAuthorizer,
        counters: Counters,
        max_missed: int,
    ) -> None:
        self.dispatcher = dispatcher
        self.catch_up = CatchUp(dispatcher, max_missed)
        self.counters = counters
        self._authorizer = authorizer
        self._buckets: list[set[SSEConnection]] = [set() for _ in range(HEARTBEAT_BUCKETS)]
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._heartbeat_at = 0.0
        self._is_draining = False

    def add(self, subscriber: SSEConnection) -> None:
        """Register a stream that has begun."""
        self.counters.gauges["pysync_streams"] += 1
        subscriber.bucket = min(self._buckets, key=len)
        subscriber.bucket.add(subscriber)
        if self._is_draining:
            self._close_stream(subscriber)
        elif self._heartbeat_timer is None:
            self._heartbeat_at = asyncio.get_running_loop().time()
            self._schedule_heartbeat(0)

    def remove(self, subscriber: SSEConnection) -> None:
        """Remove a stream whose connection is lost."""
        self.dispatcher.unsubscribe(subscriber)
        subscriber.bucket.discard(subscriber)
        self.counters.gauges["pysync_streams"] -= 1
        if self._heartbeat_timer is not None and not any(self._buckets):
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None

    def drain(self) -> None:
        """Close all streams gracefully, and those that are still to begin, because the service is about to
        stop."""
        self._is_draining = True
        for subscriber in self._all():
            self._close_stream(subscriber)

    def close(self) -> None:
        """Abort all streams and stop all tasks."""
        for subscriber in self._all():
            subscriber.abort()
        for check in self._checks.values():
            check.cancel()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        self.catch_up.close()
        self.dispatcher.close()

    def _all(self) -> list[SSEConnection]:
        return [subscriber for bucket in self._buckets for subscriber in bucket]

    def _close_stream(self, subscriber: SSEConnection) -> None:
        subscriber.close(b"retry: %d\n\n" % random.randint(*RETRY_MS))  # noqa: S311 (spreads reconnections)

    def _schedule_heartbeat(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        # After a long pause of the loop, at most one round of heartbeats is caught up on.
        self._heartbeat_at = max(
            self._heartbeat_at + HEARTBEAT_S / HEARTBEAT_BUCKETS, loop.time() - HEARTBEAT_S
        )
        self._heartbeat_timer = loop.call_at(self._heartbeat_at, self._send_heartbeats, number)

    def _send_heartbeats(self, number: int) -> None:
        self._schedule_heartbeat((number + 1) % HEARTBEAT_BUCKETS)
        watermark, bucket = self.dispatcher.watermark, list(self._buckets[number])
        for subscriber in bucket:
            subscriber.heartbeat(watermark)
        verified = [subscriber for subscriber in bucket if subscriber.proof is not None]
        if verified and number not in self._checks:
            check = asyncio.get_running_loop().create_task(self._check(verified))
            check.add_done_callback(lambda _: self._checks.pop(number))
            self._checks[number] = check

    async def _check(self, verified: list[SSEConnection]) -> None:
        for subscriber in verified:
            await self._authorizer.check(subscriber)


def _reset_event(cursor: str) -> bytes:
    return b'event: reset\nid: %b\ndata: {"reset":true}\n\n' % cursor.encode()
