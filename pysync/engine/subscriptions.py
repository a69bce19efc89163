"""The feed: one follower of the change log for all who listen to a process.

A change is read once, and serialised once for each collection that could pull the written document, however
many subscribers there are. Subscribers are found by collection and parameters, so the cost of a write depends
on its own subscribers alone. `pysync.catch_up` first brings a subscriber that begins in the past up to the
follower's place. Every event has its place in the log, so none is missed or delivered twice at the handover.

See docs/reference/protocol.md#change-stream.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import orjson

from pysync._core import PanicException
from pysync.changelog import Change, ChangeLog, DocumentRef, OriginFilter, ParsedChange, parse_change
from pysync.errors import Unavailable

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 128
"""Changes that are read at a time."""
RETRY_S: Final = 1.0
"""After which a log that could not be read is asked again."""
YIELD_AFTER_WRITES: Final = 500
YIELD_AFTER_BYTES: Final = 32 * 1024
"""What is handed out, to all and to each, before others have their turn."""

Topic = tuple[str | None, str]
"""A namespace (None: the root) and the name of a collection in it."""

SubscriptionFilter = Mapping[Topic, Mapping[str, str]]
"""The collections that somebody listens to, each with the values that parameters must have."""


class KeyMatch(NamedTuple):
    """The name of a document in one collection: the parameters of that collection's path, and the key that
    they make."""

    topic: Topic
    params: Mapping[str, str]
    key: str


class Event(NamedTuple):
    """A change at its place in the log, as one collection knows it. `sse_bytes` is the text that listeners
    are sent."""

    id: str
    topic: Topic
    params: Mapping[str, str]
    key: str
    sse_bytes: bytes
    hash: str = ""
    timestamp_ms: int = 0

    def with_version(self, version: str) -> "Event":
        """The event for those who are told a `version` in place of the hash."""
        text = self.sse_bytes.partition(b"data: ")[2]
        told = orjson.dumps({**orjson.loads(text), "hash": version})
        return self._replace(sse_bytes=b"id: %b\ndata: %b\n\n" % (self.id.encode(), told), hash=version)

    @property
    def collection(self) -> str:
        """Its collection, as metrics name it."""
        namespace, name = self.topic
        return name if namespace is None else f"{namespace}/{name}"


class Subscriber(Protocol):
    """A subscriber of changes. It has been told of everything up to `cursor` that concerns it. `account` is
    its identity or address."""

    cursor: str
    account: str
    filter: SubscriptionFilter
    needs_authorization: bool
    """Whether it may hear of an event depends on more than its interest."""

    def deliver(self, events: Sequence[Event]) -> None: ...

    def reset(self, cursor: str) -> None:
        """Changes are lost: go on from `cursor`."""

    def abort(self) -> None:
        """What comes next cannot be told. Who comes back begins at its place again."""

    @property
    def is_writable(self) -> bool:
        """Whether more can be taken without being held back."""

    async def drained(self) -> bool:
        """Return when it is free, False where it never will be."""


class StartPosition(NamedTuple):
    """Where somebody begins to listen. `is_resumed`: in the past, so that there may be something to tell;
    `is_reset`: now, as what was asked for is gone."""

    cursor: str
    is_resumed: bool = False
    is_reset: bool = False


Deliveries = list[tuple[Event, list[Subscriber]]]
Authorize = Callable[[Subscriber, Event], Event | None]
"""The event as a listener may hear of it; None: not at all."""
AuthorizeDeliveries = Callable[[Deliveries], Awaitable[Authorize]]
"""Finds out who may hear of what is planned, as things are now. Who cannot be decided on is cut."""


class KeyMatcher(Protocol):
    """Which collections have which keys."""

    def matches(self, subject: DocumentRef) -> Sequence[KeyMatch]:
        """Return the collections that could pull the document of a change: at most one in each namespace, so
        that a stream, which belongs to one namespace, delivers the change once."""

    def may_write_to(self, topics: Iterable[Topic]) -> OriginFilter:
        """Returns True if collections with this origin write documents that one of `topics` pulls."""


class ChangeDispatcher:
    """The changes of `log`, for all listeners of this process."""

    def __init__(self, log: ChangeLog, keys: KeyMatcher, authorize_deliveries: AuthorizeDeliveries) -> None:
        self.log = log
        self.keys = keys
        self.authorize_deliveries = authorize_deliveries
        self._index = SubscriberIndex()
        self._cursor = ""
        self._follower: asyncio.Task[None] | None = None
        self.watermark = ""
        """Whoever listens has been told of everything up to here."""

    async def resolve_start(self, after: str) -> StartPosition:
        """Return the position to listen from: `after` if it is given (not `""`) and the changes since are
        still known. Raises Unavailable."""
        if after and await self.log.read(after, 1) is not None:
            return StartPosition(after, is_resumed=True)
        return StartPosition(await self.log.last_id(), is_reset=bool(after))

    def subscribe(self, subscriber: Subscriber) -> bool:
        """Have the listener hear of everything after its place. False where the follower is past that."""
        if self._follower is None:
            self._cursor = self.watermark = subscriber.cursor
            self._follower = asyncio.get_running_loop().create_task(self._follow())
        elif subscriber.cursor < self._cursor:
            return False
        self._index.add(subscriber)
        return True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Tell the listener nothing more. Fine for one that never joined."""
        if self._index.discard(subscriber) and not self._index.subscribers:
            self.close()

    def close(self) -> None:
        """Follow no more."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

    async def _follow(self) -> None:
        try:
            while True:
                page = await self._read_next()
                if page is None:
                    self._cursor = await self.log.last_id()
                    for listener in list(self._index.subscribers):
                        listener.reset(self._cursor)
                elif page:
                    # Whoever joins from now on is told of what comes after this page, and of it by `bring`.
                    self._cursor = page[-1][0]
                    await self._deliver_page(self.plan_deliveries(page, self._index))
                self.watermark = self._cursor
                await _yield_to_loop()
        except (Exception, PanicException):
            log.exception("changes could not be told")
            self._follower = None
            for listener in list(self._index.subscribers):
                listener.abort()

    async def _read_next(self) -> list[tuple[str, Change]] | None:
        """What comes next, perhaps nothing yet."""
        while True:
            try:
                await self.log.wait_for_change(self._cursor)
                return await self.log.read(self._cursor, PAGE_SIZE)
            except Unavailable as error:
                log.warning("changes cannot be read: %s", error.detail)
                await asyncio.sleep(RETRY_S)

    def plan_deliveries(self, page: Sequence[tuple[str, Change]], index: "SubscriberIndex") -> Deliveries:
        """The events of a page that anybody of an index listens for, and who that is."""
        plan: Deliveries = []
        for id_, change in page:
            told = parse_change(change)
            for match in self.keys.matches(told.ref):
                listeners = index.matching(match)
                if listeners:
                    frame = b"id: %b\ndata: %b\n\n" % (id_.encode(), _event_json(told, match))
                    plan.append((Event(id_, *match, frame, told.hash, told.timestamp_ms), listeners))
        return plan

    async def _deliver_page(self, plan: Deliveries) -> None:
        """Hand out the events, first to those about whom there is no question: they wait for nobody."""
        await _fan_out(
            [(event, [who for who in listeners if not who.needs_authorization]) for event, listeners in plan]
        )
        asking = [(event, [who for who in listeners if who.needs_authorization]) for event, listeners in plan]
        asking = [(event, listeners) for event, listeners in asking if listeners]
        if asking:
            await _fan_out(asking, await self.authorize_deliveries(asking))


def allow_all(subscriber: Subscriber, event: Event) -> Event | None:
    return event


async def _fan_out(plan: Deliveries, authorize: Authorize = allow_all) -> None:
    writes = size = 0
    for event, listeners in plan:
        for listener in listeners:
            _deliver(listener, event, authorize)
        writes, size = writes + len(listeners), size + len(event.sse_bytes)
        if writes > YIELD_AFTER_WRITES or size > YIELD_AFTER_BYTES:
            writes = size = 0
            await asyncio.sleep(0)


async def _yield_to_loop() -> None:
    """Let others have their turn after a page: a log may answer at once, and of 100,000 changes none be for
    anybody to hear."""
    await asyncio.sleep(0)


def _deliver(subscriber: Subscriber, event: Event, authorize: Authorize) -> None:
    if event.id > subscriber.cursor and (heard := authorize(subscriber, event)) is not None:
        subscriber.deliver([heard])


def _event_json(told: ParsedChange, match: KeyMatch) -> bytes:
    """The event as the followers of the matching collection receive it."""
    namespace, name = match.topic
    text = {"collection": name, "params": match.params, "hash": told.hash, "timestamp": told.timestamp_ms}
    return orjson.dumps(text if namespace is None else text | {"namespace": namespace})


def _matches(subscriber: Subscriber, match: KeyMatch) -> bool:
    wanted = subscriber.filter.get(match.topic)
    return wanted is not None and wanted.items() <= match.params.items()


class SubscriberIndex:
    """Listeners by what they listen for: a whole collection, or one of the values that they name."""

    def __init__(self) -> None:
        self.subscribers: set[Subscriber] = set()
        self._by_key: dict[tuple[str | None, ...], set[Subscriber]] = {}

    def add(self, subscriber: Subscriber) -> None:
        self.subscribers.add(subscriber)
        for topic, wanted in subscriber.filter.items():
            # Of several values the one that fewest listen for.
            place = min(_index_keys(topic, wanted), key=lambda place: len(self._by_key.get(place, ())))
            self._by_key.setdefault(place, set()).add(subscriber)

    def discard(self, subscriber: Subscriber) -> bool:
        """Whether it was there."""
        if subscriber not in self.subscribers:
            return False
        self.subscribers.discard(subscriber)
        for topic, wanted in subscriber.filter.items():
            for place in _index_keys(topic, wanted):
                held = self._by_key.get(place, set())
                held.discard(subscriber)
                if not held:
                    self._by_key.pop(place, None)
        return True

    def matching(self, match: KeyMatch) -> list[Subscriber]:
        """The listeners for changes of the match."""
        topic = match.topic
        found = list(self._by_key.get(topic, ()))
        for pair in match.params.items():
            for listener in self._by_key.get((*topic, *pair), ()):
                if _matches(listener, match):
                    found.append(listener)
        return found


def _index_keys(topic: Topic, wanted: Mapping[str, str]) -> list[tuple[str | None, ...]]:
    """Where the index may have a listener who wants these values."""
    if not wanted:
        return [topic]
    return [(*topic, *pair) for pair in wanted.items()]
