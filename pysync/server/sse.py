"""Open change streams: connections that are written to as changes happen, and heartbeats in between.

See docs/reference/protocol.md#change-stream and docs/reference/protocol.md#keep-alive.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pysync._core import PanicException
from pysync.auth.verification import VerifiedCertificate
from pysync.engine.subscriptions import ChangeDispatcher, Event, StartPosition
from pysync.errors import Overloaded
from pysync.feed import Feed
from pysync.model import Caller
from pysync.server.http.connection import Connection
from pysync.server.http.responses import STALL_S
from pysync.server.process.metrics import Counters
from pysync.server.stream_authorization import KeyIndex, StreamAuthorizer, StreamGrant

log = logging.getLogger("pysync.server")

HEARTBEAT_S: Final = 4.0
"""Seconds between two heartbeats. Published clients give up on a stream that is silent for 5 s."""
HEARTBEAT_BUCKETS: Final = 16
"""Number of groups of streams. Heartbeats of different groups are spread over the interval."""
MAX_WRITE_BUFFER: Final = 256 * 1024
"""Bytes buffered by a connection above which it is aborted because its reader is too slow."""
MAX_UNREAD: Final = 32 * 1024 * 1024
"""Bytes buffered by all connections above which those with the most of them are aborted."""
RETRY_AFTER_S: Final = 10
"""Seconds after which a client for which there is no room may try again."""
RETRY_MS: Final = (1_000, 3_000)
"""Bounds of the delay, in milliseconds, after which clients reconnect to a service that has stopped."""

_COMMENT: Final = b":\n\n"


class SSEConnection(asyncio.Protocol):
    """A connection whose response is a change stream: an `AuthorizedRecipient` of the events of `grant`.
    While it waits for events it has no task."""

    __slots__ = (
        "_hub",
        "_idle_heartbeats",
        "_is_live",
        "_resumed",
        "_start",
        "_taken",
        "_task",
        "_transport",
        "_written",
        "account",
        "bucket",
        "caller",
        "cursor",
        "filter",
        "needs_authorization",
        "proof",
        "restricted",
        "source",
        "verified_at_ms",
    )  # fmt: skip

    def __init__(
        self,
        hub: "SSEHub",
        source: "StreamSource",
        grant: StreamGrant,
        caller: Caller,
        proof: VerifiedCertificate | None,
        start: StartPosition,
        account: str = "",
    ) -> None:
        self._hub = hub
        self.source = source
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._is_live = False
        self._written = self._taken = self._idle_heartbeats = 0
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
            head += _COMMENT + self._hub.reset_event(start.cursor)
        else:
            # A subscriber that disconnects before the first event resumes from here.
            head += b":\nid: %b\n\n" % start.cursor.encode()
        self._transport.write(head)
        self._hub.add(self)
        self._is_live = not start.is_resumed and self.source.dispatcher.subscribe(self)
        if not self._is_live:
            self._task = asyncio.get_running_loop().create_task(self._catch_up())

    def deliver(self, events: Sequence[Event]) -> None:
        """See `Subscriber.deliver`."""
        self.cursor = events[-1].id
        text, collections = self._hub.page.render(events)
        if self._write(text):
            for collection, number in collections.items():
                self._hub.counters.count("pysync_events", collection, by=number)

    def reset(self, cursor: str) -> None:
        """See `Subscriber.reset`."""
        self.cursor = cursor
        self._write(self._hub.reset_event(cursor))

    def heartbeat(self, watermark: str) -> None:
        """Write a heartbeat, with the watermark if it has advanced. A stream without events thus has a recent
        cursor from which it can resume. A stream whose client has stopped reading is aborted."""
        taken = self._written - self.unread
        self._idle_heartbeats = self._idle_heartbeats + 1 if self.unread and taken == self._taken else 0
        self._taken = taken
        if (self._idle_heartbeats - 1) * HEARTBEAT_S > STALL_S:
            self.abort_unread("stalled")
        elif self._is_live and watermark > self.cursor:
            self.cursor = watermark
            self._write(b":\nid: %b\n\n" % watermark.encode())
        elif self.is_writable:
            self._write(_COMMENT)

    @property
    def unread(self) -> int:
        """The number of bytes that the connection has buffered, because the client does not read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort_unread(self, reason: str) -> None:
        """Abort the stream because its client does not read. It can resume from the last event it has."""
        self._hub.counters.count("pysync_aborted_streams", reason)
        log.info("aborted a change stream: its reader is too slow: %s", reason)
        self.abort()

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
                self.abort_unread("stalled")
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
            self._is_live = await self.source.dispatcher.catch_up(self, self.source.max_missed)
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
        self._written += len(text)
        unread = transport.get_write_buffer_size()
        if unread > MAX_WRITE_BUFFER:
            self.abort_unread("stream")
        elif unread:
            self._hub.unread.note(self, unread)
        return True


@dataclass(slots=True)
class StreamSource:
    """The changes of one configuration, as streams receive them and as `feed`, the keys that they are of, and
    what authorises them. A stream that has missed more than `max_missed` gets a reset. No stream begins once
    it `is_retired`."""

    dispatcher: ChangeDispatcher
    feed: Feed
    keys: KeyIndex
    authorizer: StreamAuthorizer
    max_missed: int
    is_retired: bool = False


class StreamLimits(NamedTuple):
    """The number of streams that may be open, in all and for one caller."""

    streams: int
    per_caller: int


class UnreadBytes:
    """The bytes that wait in streams whose clients do not read them, as counted when they were last written
    to. If there are too many, those streams are aborted that have the most. `total` is their number."""

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[SSEConnection, int] = {}

    def note(self, subscriber: SSEConnection, size: int) -> None:
        """Note that `size` bytes wait in a stream."""
        self.total += size - self._sizes.get(subscriber, 0)
        self._sizes[subscriber] = size
        if self.total > MAX_UNREAD:
            self._make_room()

    def forget(self, subscriber: SSEConnection) -> None:
        """Forget a stream that has ended."""
        self.total -= self._sizes.pop(subscriber, 0)

    def refresh(self) -> None:
        """Count again what was not read meanwhile."""
        self._sizes = {each: unread for each in self._sizes if (unread := each.unread)}
        self.total = sum(self._sizes.values())

    def _make_room(self) -> None:
        """Abort streams until a tenth is free, so that this is seldom needed."""
        self.refresh()
        for subscriber in sorted(self._sizes, key=self._sizes.__getitem__, reverse=True):
            if self.total <= 0.9 * MAX_UNREAD:
                break
            self.forget(subscriber)
            subscriber.abort_unread("total")


class RenderedPage:
    """The text of the events that were delivered last. Streams often receive the same ones, and their text
    is made once."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._rendered: tuple[bytes, Mapping[str, int]] = b"", {}

    def render(self, events: Sequence[Event]) -> tuple[bytes, Mapping[str, int]]:
        """Return the text of the events, and their number by collection."""
        if events != self._events:
            text = b"".join(event.sse_bytes for event in events)
            self._events, self._rendered = list(events), (text, Counter(each.collection for each in events))
        return self._rendered


class SSEHub:
    """The open streams of one process, whatever their source."""

    def __init__(self, counters: Counters, limits: StreamLimits) -> None:
        self.counters = counters
        self.unread = UnreadBytes()
        self.page = RenderedPage()
        self.limits = limits
        self._streams = 0
        self._accounts: Counter[str] = Counter()
        self._buckets: list[set[SSEConnection]] = [set() for _ in range(HEARTBEAT_BUCKETS)]
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._heartbeat_at = 0.0
        self._is_draining = False

    def require_room(self, account: str | None = None) -> None:
        """Raise Overloaded if no other stream may begin, in all or for this account."""
        if self._streams >= self.limits.streams:
            limit = "maxStreams"
        elif account is not None and self._accounts[account] >= self.limits.per_caller:
            limit = "maxStreamsPerCaller"
        else:
            return
        self.counters.count("pysync_rejected_streams", limit)
        raise Overloaded(retry_after_s=RETRY_AFTER_S)

    def add(self, subscriber: SSEConnection) -> None:
        """Register a stream that has begun. It is closed at once if the last room was taken meanwhile."""
        try:
            self.require_room(subscriber.account)
            is_welcome = not (self._is_draining or subscriber.source.is_retired)
        except Overloaded:
            is_welcome = False
        self._streams += 1
        self._accounts[subscriber.account] += 1
        self._report()
        subscriber.bucket = min(self._buckets, key=len)
        subscriber.bucket.add(subscriber)
        if not is_welcome:
            self._close_stream(subscriber)
        elif self._heartbeat_timer is None:
            self._heartbeat_at = asyncio.get_running_loop().time()
            self._schedule_heartbeat(0)

    def remove(self, subscriber: SSEConnection) -> None:
        """Remove a stream whose connection is lost."""
        subscriber.source.dispatcher.unsubscribe(subscriber)
        subscriber.bucket.discard(subscriber)
        self.unread.forget(subscriber)
        self._streams -= 1
        self._accounts[subscriber.account] -= 1
        if not self._accounts[subscriber.account]:
            del self._accounts[subscriber.account]
        self._report()
        if self._heartbeat_timer is not None and not any(self._buckets):
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None

    def reset_event(self, cursor: str) -> bytes:
        """Return the event that reports that changes are lost, and count it."""
        self.counters.count("pysync_stream_resets")
        return b'event: reset\nid: %b\ndata: {"reset":true}\n\n' % cursor.encode()

    def drain(self) -> None:
        """Close all streams gracefully, and those that are still to begin, because the service is about to
        stop."""
        self._is_draining = True
        for subscriber in self._all():
            self._close_stream(subscriber)

    def retire(self, source: StreamSource) -> None:
        """Close all streams gracefully, and those of `source` that are still to begin. Their clients resume
        from the source that has taken its place."""
        source.is_retired = True
        for subscriber in self._all():
            self._close_stream(subscriber)

    def close(self) -> None:
        """Abort all streams and stop all tasks."""
        for subscriber in self._all():
            subscriber.abort()
            subscriber.source.dispatcher.close()
        for check in self._checks.values():
            check.cancel()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()

    def _report(self) -> None:
        self.counters.gauges["pysync_streams"] = self._streams
        self.counters.gauges["pysync_stream_unread_bytes"] = self.unread.total

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
        bucket = list(self._buckets[number])
        for subscriber in bucket:
            subscriber.heartbeat(subscriber.source.dispatcher.watermark)
        self.unread.refresh()
        self._report()
        verified = [subscriber for subscriber in bucket if subscriber.proof is not None]
        if verified and number not in self._checks:
            check = asyncio.get_running_loop().create_task(self._check(verified))
            check.add_done_callback(lambda _: self._checks.pop(number))
            self._checks[number] = check

    async def _check(self, verified: list[SSEConnection]) -> None:
        for subscriber in verified:
            await subscriber.source.authorizer.check(subscriber)
