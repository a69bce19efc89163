"""Subscriptions: one follower of the change log serves all subscribers of a process.

A change is read once, and serialised once for each collection that could pull the written document, however
many subscribers there are. Subscribers are found by collection and parameters, so the cost of a write depends
on its own subscribers alone. A subscriber that resumes from the past first reads the changes that it has
missed. Every event has a position in the log, so none is missed or delivered twice at the handover.

See docs/reference/protocol.md#change-stream.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

import orjson

from pysync._core import PanicException
from pysync.changelog import Change, ChangeLog, OriginFilter
from pysync.engine.changes import DocumentRef, ParsedChange, parse_change
from pysync.errors import Unavailable

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 128
"""The number of changes that are read at a time."""
MAX_READERS: Final = 4
"""The number of subscribers that read a page of what they have missed at one time. Others wait their turn."""
RETRY_S: Final = 1.0
"""Seconds after which a failed read of the change log is retried."""
SLICE_S: Final = 0.002
SLICE_WRITES: Final = 200
"""Seconds, and subscribers, for which events are delivered before other tasks run. The loop sends what was
written when it turns, which takes several times longer than the delivery."""
MAX_AUTHORIZED: Final = 1_000
"""Deliveries above which no further event is authorised with them."""
REST_PER_WRITE_S: Final = 0.000_015
"""After a page the follower rests as long as sending its writes takes. It then delivers the changes of that
time together, so that thousands of streams leave half of the time to requests."""

Topic = tuple[str | None, str]
"""A namespace (None: the root) and the name of a collection in it."""

SubscriptionFilter = Mapping[Topic, Mapping[str, str]]
"""The collections of a subscription, each with the values that parameters must have."""


class KeyMatch(NamedTuple):
    """The name of a document in one collection: the parameters of the collection's path, and the key that
    they make."""

    topic: Topic
    params: Mapping[str, str]
    key: str


class Event(NamedTuple):
    """A change at its position in the log, as one collection sees it. `sse_bytes` is the text that
    subscribers receive."""

    id: str
    topic: Topic
    params: Mapping[str, str]
    key: str
    sse_bytes: bytes
    hash: str = ""
    timestamp_ms: int = 0
    removed: bool = False

    @classmethod
    def of(cls, id_: str, change: ParsedChange, match: KeyMatch) -> "Event":
        """Return a change as the matching collection sees it."""
        frame = b"id: %b\ndata: %b\n\n" % (id_.encode(), event_json(change, match))
        return cls(id_, *match, frame, *change[1:4])

    @property
    def data(self) -> bytes:
        """The JSON object of the event."""
        return self.sse_bytes.partition(b"data: ")[2].rstrip()

    def with_version(self, version: str) -> "Event":
        """Return the event for subscribers that receive `version` in place of the hash."""
        data = orjson.dumps({**orjson.loads(self.data), "hash": version})
        return self._replace(sse_bytes=b"id: %b\ndata: %b\n\n" % (self.id.encode(), data), hash=version)

    @property
    def collection(self) -> str:
        """The name of its collection, as metrics have it."""
        namespace, name = self.topic
        return name if namespace is None else f"{namespace}/{name}"


class Recipient(Protocol):
    """Somebody for whom events are authorised: a subscriber, or a request for a page of changes."""

    def abort(self) -> None:
        """Fail, because the next events cannot be authorised or delivered. A stream ends, and its client
        resumes from its cursor."""


class Subscriber(Recipient, Protocol):
    """A subscriber of changes. It has received every matching event up to `cursor`. `account` is its identity
    or address."""

    cursor: str
    account: str
    filter: SubscriptionFilter
    needs_authorization: bool
    """True if an event that matches the filter must also be authorised."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Send the events to the client, in this order."""

    def reset(self, cursor: str) -> None:
        """Report that changes are lost; the stream continues from `cursor`."""

    @property
    def is_writable(self) -> bool:
        """True if more events can be written without being buffered."""

    async def drained(self) -> bool:
        """Return True once the subscriber is writable, or False if it never will be again."""


class StartPosition(NamedTuple):
    """The position at which a subscription starts. With `is_resumed` it lies in the past, so there may be
    events to deliver. With `is_reset` it is the current end, because the requested position is gone."""

    cursor: str
    is_resumed: bool = False
    is_reset: bool = False


Deliveries = list[tuple[Event, list[Subscriber]]]
PlannedDeliveries = Sequence[tuple[Event, Sequence[Recipient]]]
Authorize = Callable[[Recipient, Event], Event | None]
"""Returns the event as the recipient may receive it; None if it may not."""
AuthorizeDeliveries = Callable[[PlannedDeliveries], Awaitable[Authorize]]
"""Decides which planned deliveries are authorised now. Aborts recipients for which that cannot be decided."""


class KeyMatcher(Protocol):
    """Maps keys to the collections that have them."""

    def matches(self, subject: DocumentRef) -> Sequence[KeyMatch]:
        """Return the collections that could pull the document of a change: at most one in each namespace, so
        that a stream, which belongs to one namespace, delivers the change once."""

    def may_write_to(self, topics: Iterable[Topic]) -> OriginFilter:
        """Return a filter that is True for the origins whose collections write documents that one of `topics`
        pulls."""


class ChangeDispatcher:
    """Delivers the changes of `log` to all subscribers of this process."""

    def __init__(
        self,
        log: ChangeLog,
        keys: KeyMatcher,
        authorize_deliveries: AuthorizeDeliveries,
        on_delivered: Callable[[int], None] = lambda written_ms: None,
    ) -> None:
        """`on_delivered` gets the time of the oldest change of those that were just delivered together."""
        self.log = log
        self._on_delivered = on_delivered
        self.keys = keys
        self.authorize_deliveries = authorize_deliveries
        self._index = SubscriberIndex()
        self._cursor = ""
        self._follower: asyncio.Task[None] | None = None
        self._readers = asyncio.Semaphore(MAX_READERS)
        self.watermark = ""
        """All subscribers have received everything up to this id."""

    async def resolve_start(self, after: str) -> StartPosition:
        """Return the position to start at: `after` if it is given (not `""`) and the log still has all
        changes since, or else the current end. Raises Unavailable."""
        if after and await self.log.read(after, 1) is not None:
            return StartPosition(after, is_resumed=True)
        return StartPosition(await self.log.last_id(), is_reset=bool(after))

    async def catch_up(self, subscriber: Subscriber, max_missed: int) -> bool:
        """Deliver the changes that the subscriber has missed, then subscribe it. It gets a reset if it has
        missed more than `max_missed` changes of its collections.

        Returns True if it is subscribed, False if its connection is closed or the change log cannot be read;
        the latter aborts its stream.
        """
        written_by = self.keys.may_write_to(subscriber.filter)
        index = SubscriberIndex()
        index.add(subscriber)
        try:
            async with self._readers:
                missed = await self.log.count_after(subscriber.cursor, max_missed, written_by)
                if missed is not None and missed > max_missed:
                    subscriber.reset(await self.log.last_id())
            left = max_missed if missed is None else inf
            while await subscriber.drained():
                async with self._readers:
                    page = await self.log.read_matching(subscriber.cursor, PAGE_SIZE, written_by)
                    left -= 0 if page is None else page.scanned
                    is_gap = page is None or not _erased_from(page.changes).isdisjoint(subscriber.filter)
                    if page is None or is_gap or left < 0:
                        subscriber.reset(await self.log.last_id())
                        left = max_missed if missed is None else inf
                        continue
                    await self.deliver(await self.plan_deliveries(page.changes, index))
                    subscriber.cursor = max(subscriber.cursor, page.last)
                    if page.is_end and self.subscribe(subscriber):
                        return True
                await asyncio.sleep(0)  # the log may return at once
        except Unavailable as error:
            log.warning("aborted a change stream: failed to read changes: %s", error.detail)
            subscriber.abort()
        return False

    def subscribe(self, subscriber: Subscriber) -> bool:
        """Deliver everything after its cursor to the subscriber. Returns False if the follower is past that
        cursor already."""
        if self._follower is None:
            self._cursor = self.watermark = subscriber.cursor
            self._follower = asyncio.get_running_loop().create_task(self._follow())
        elif subscriber.cursor < self._cursor:
            return False
        self._index.add(subscriber)
        return True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Deliver nothing more to the subscriber. Has no effect for one that never subscribed."""
        if self._index.discard(subscriber) and not self._index.subscribers:
            self.close()

    def close(self) -> None:
        """Stop following the change log."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

    async def _follow(self) -> None:
        try:
            while True:
                page, writes = await self._read_next(), 0
                if page is None:
                    self._cursor = await self.log.last_id()
                    for subscriber in list(self._index.subscribers):
                        subscriber.reset(self._cursor)
                elif page:
                    # A new subscriber receives the later pages here, and this one from `catch_up`.
                    self._cursor = page[-1][0]
                    if erased := _erased_from(page):
                        for subscriber in list(self._index.subscribers):
                            if subscriber.cursor < self._cursor and not erased.isdisjoint(subscriber.filter):
                                subscriber.reset(self._cursor)
                    plan = await self.plan_deliveries(page, self._index)
                    writes = await self.deliver(plan)
                    if plan:
                        self._on_delivered(plan[0][0].timestamp_ms)
                self.watermark = self._cursor
                # A log may return at once, and 100,000 changes may have no subscriber.
                await asyncio.sleep(writes * REST_PER_WRITE_S)
        except (Exception, PanicException):
            log.exception("failed to deliver changes to subscribers")
            self._follower = None
            for subscriber in list(self._index.subscribers):
                subscriber.abort()

    async def _read_next(self) -> list[tuple[str, Change]] | None:
        """Wait for changes, and return the next ones, perhaps none; None if the log no longer has them."""
        while True:
            try:
                await self.log.wait_for_change(self._cursor)
                return await self.log.read(self._cursor, PAGE_SIZE)
            except Unavailable as error:
                log.warning("failed to read changes, will retry: %s", error.detail)
                await asyncio.sleep(RETRY_S)

    async def plan_deliveries(
        self, page: Sequence[tuple[str, Change]], index: "SubscriberIndex"
    ) -> Deliveries:
        """Return the events of a page that have subscribers in `index`, each with these subscribers. Other
        tasks run every few milliseconds."""
        slices, plan = Slices(), Deliveries()
        for id_, change in page:
            parsed = parse_change(change)
            for match in self.keys.matches(parsed.ref):
                subscribers = index.matching(match)
                if subscribers:
                    plan.append((Event.of(id_, parsed, match), subscribers))
            await slices.share()
        return plan

    async def deliver(self, plan: Deliveries) -> int:
        """Deliver the events to each subscriber in one write, first to those that need no authorisation, so
        that these do not wait for it. Other tasks run every few milliseconds. Return the number of writes."""
        slices, restricted = Slices(), Deliveries()
        events: dict[Subscriber, list[Event]] = {}
        for event, matching in plan:
            to_authorize = []
            for subscriber in matching:
                if event.id > subscriber.cursor:
                    if subscriber.needs_authorization:
                        to_authorize.append(subscriber)
                    else:
                        events.setdefault(subscriber, []).append(event)
            if to_authorize:
                restricted.append((event, to_authorize))
            await slices.share()
        await _fan_out(events, slices)
        allowed: dict[Subscriber, list[Event]] = {}
        for part in _parts(restricted):
            authorize = await self.authorize_deliveries(part)
            for event, matching in part:
                for subscriber in matching:
                    if (authorized := authorize(subscriber, event)) is not None:
                        allowed.setdefault(subscriber, []).append(authorized)
                    await slices.share()
        await _fan_out(allowed, slices)
        return slices.writes


def _erased_from(page: Sequence[tuple[str, Change]]) -> set[Topic]:
    """Return the collections from which an erasure took changes of a page, so that their readers reset."""
    return {topic for _, change in page if change.is_erased for topic in change.erased_from}


def _parts(plan: Deliveries) -> Iterator[Deliveries]:
    """Yield the plan in parts of about `MAX_AUTHORIZED` deliveries."""
    part, size = Deliveries(), 0
    for event, matching in plan:
        part.append((event, matching))
        size += len(matching)
        if size >= MAX_AUTHORIZED:
            yield part
            part, size = [], 0
    if part:
        yield part


class Slices:
    """Lets other tasks run whenever a slice of time or of writes is used up. `writes` counts all writes."""

    def __init__(self) -> None:
        self.writes = 0
        self._time = asyncio.get_running_loop().time
        self._ends_at, self._ends_after = self._time() + SLICE_S, SLICE_WRITES

    async def share(self) -> None:
        """Let other tasks run if the slice is used up."""
        if self.writes >= self._ends_after or self._time() > self._ends_at:
            await asyncio.sleep(0)
            self._ends_at, self._ends_after = self._time() + SLICE_S, self.writes + SLICE_WRITES


async def _fan_out(events: Mapping[Subscriber, Sequence[Event]], slices: Slices) -> None:
    for subscriber, deliverable in events.items():
        subscriber.deliver(deliverable)
        slices.writes += 1
        await slices.share()


def event_json(change: ParsedChange, match: KeyMatch) -> bytes:
    """Return the event as subscribers of the matching collection receive it. The hash of a removal is that
    of a pull afterwards, so that subscribers who do not know `removed` pull."""
    namespace, name = match.topic
    hash_ = "" if change.removed else change.hash
    text = {"collection": name, "params": match.params, "hash": hash_, "timestamp": change.timestamp_ms}
    if namespace is not None:
        text["namespace"] = namespace
    if change.removed:
        text["removed"] = True
    return orjson.dumps(text)


class SubscriberIndex:
    """Subscribers, indexed by whole collections or by one of the parameter values that they filter by."""

    def __init__(self) -> None:
        self.subscribers: set[Subscriber] = set()
        self._by_key: dict[tuple[str | None, ...], set[Subscriber]] = {}

    def add(self, subscriber: Subscriber) -> None:
        """Add a subscriber."""
        self.subscribers.add(subscriber)
        for topic, wanted in subscriber.filter.items():
            # Of several values, use the one with the fewest subscribers.
            index_key = min(_index_keys(topic, wanted), key=lambda each: len(self._by_key.get(each, ())))
            self._by_key.setdefault(index_key, set()).add(subscriber)

    def discard(self, subscriber: Subscriber) -> bool:
        """Remove a subscriber. Returns True if it was in the index."""
        if subscriber not in self.subscribers:
            return False
        self.subscribers.discard(subscriber)
        for topic, wanted in subscriber.filter.items():
            for index_key in _index_keys(topic, wanted):
                indexed = self._by_key.get(index_key, set())
                indexed.discard(subscriber)
                if not indexed:
                    self._by_key.pop(index_key, None)
        return True

    def matching(self, match: KeyMatch) -> list[Subscriber]:
        """Return the subscribers of changes to this document."""
        topic, values = match.topic, match.params.items()
        found = list(self._by_key.get(topic, ()))
        for pair in values:
            indexed = self._by_key.get((*topic, *pair), ())
            found += [each for each in indexed if each.filter[topic].items() <= values]
        return found


def _index_keys(topic: Topic, wanted: Mapping[str, str]) -> list[tuple[str | None, ...]]:
    """Return the keys under which the index may have a subscriber with these values."""
    if not wanted:
        return [topic]
    return [(*topic, *pair) for pair in wanted.items()]
