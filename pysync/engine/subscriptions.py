"""The feed: one follower of the change log for all who listen to a process (wire section 9).

A change is read once, and serialised once for each collection that could pull the written document, however
many subscribers there are. Subscribers are found by collection and parameters, so the cost of a write depends
on its own subscribers alone. `pysync.catch_up` first brings a subscriber that begins in the past up to the
follower's place. Every event has its place in the log, so none is missed or delivered twice at the handover.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import orjson

from pysync._core import PanicException
from pysync.changelog import Change, ChangeLog, Subject, Told, WrittenBy, read_change
from pysync.errors import Unavailable

log = logging.getLogger(__name__)

PAGE: Final = 128
"""Changes that are read at a time."""
RETRY_S: Final = 1.0
"""After which a log that could not be read is asked again."""
PAUSE_WRITES: Final = 500
PAUSE_BYTES: Final = 32 * 1024
"""What is handed out, to all and to each, before others have their turn."""

Topic = tuple[str | None, str]
"""A namespace (None: the root) and the name of a collection in it."""

Interest = Mapping[Topic, Mapping[str, str]]
"""The collections that somebody listens to, each with the values that parameters must have."""


class KeyMatch(NamedTuple):
    """The name of a document in one collection: the parameters of that collection's path, and the key that
    they make."""

    topic: Topic
    params: Mapping[str, str]
    key: str


class Event(NamedTuple):
    """A change at its place in the log, as one collection knows it. `frame` is the text that listeners are
    sent."""

    id: str
    topic: Topic
    params: Mapping[str, str]
    key: str
    frame: bytes
    hash: str = ""
    timestamp_ms: int = 0

    def told(self, version: str) -> "Event":
        """The event for those who are told a `version` in place of the hash."""
        text = self.frame.partition(b"data: ")[2]
        told = orjson.dumps({**orjson.loads(text), "hash": version})
        return self._replace(frame=b"id: %b\ndata: %b\n\n" % (self.id.encode(), told), hash=version)

    @property
    def collection(self) -> str:
        """Its collection, as metrics name it."""
        namespace, name = self.topic
        return name if namespace is None else f"{namespace}/{name}"


class Listener(Protocol):
    """A subscriber of changes. It has been told of everything up to `place` that concerns it. `account` is
    its identity or address."""

    place: str
    account: str
    interest: Interest
    asks: bool
    """Whether it may hear of an event depends on more than its interest."""

    def hear(self, events: Sequence[Event]) -> None: ...

    def reset(self, place: str) -> None:
        """Changes are lost: go on from `place`."""

    def cut(self) -> None:
        """What comes next cannot be told. Who comes back begins at its place again."""

    @property
    def is_free(self) -> bool:
        """Whether more can be taken without being held back."""

    async def ready(self) -> bool:
        """Return when it is free, False where it never will be."""


class Start(NamedTuple):
    """Where somebody begins to listen. `is_resumed`: in the past, so that there may be something to tell;
    `is_reset`: now, as what was asked for is gone."""

    place: str
    is_resumed: bool = False
    is_reset: bool = False


Plan = list[tuple[Event, list[Listener]]]
Permit = Callable[[Listener, Event], Event | None]
"""The event as a listener may hear of it; None: not at all."""
Permits = Callable[[Plan], Awaitable[Permit]]
"""Finds out who may hear of what is planned, as things are now. Who cannot be decided on is cut."""


class Keys(Protocol):
    """Which collections have which keys."""

    def matches(self, subject: Subject) -> Sequence[KeyMatch]:
        """Return the collections that could pull the document of a change: at most one in each namespace, so
        that a stream, which belongs to one namespace, delivers the change once."""

    def may_write_to(self, topics: Iterable[Topic]) -> WrittenBy:
        """Returns True if collections with this origin write documents that one of `topics` pulls."""


class Feed:
    """The changes of `log`, for all listeners of this process."""

    def __init__(self, log: ChangeLog, keys: Keys, permits: Permits) -> None:
        self.log = log
        self.keys = keys
        self.permits = permits
        self._index = ListenerIndex()
        self._place = ""
        self._follower: asyncio.Task[None] | None = None
        self.settled = ""
        """Whoever listens has been told of everything up to here."""

    async def begin(self, after: str) -> Start:
        """Return the position to listen from: `after` if it is given (not `""`) and the changes since are
        still known. Raises Unavailable."""
        if after and await self.log.changes(after, 1) is not None:
            return Start(after, is_resumed=True)
        return Start(await self.log.newest(), is_reset=bool(after))

    def join(self, listener: Listener) -> bool:
        """Have the listener hear of everything after its place. False where the follower is past that."""
        if self._follower is None:
            self._place = self.settled = listener.place
            self._follower = asyncio.get_running_loop().create_task(self._follow())
        elif listener.place < self._place:
            return False
        self._index.add(listener)
        return True

    def leave(self, listener: Listener) -> None:
        """Tell the listener nothing more. Fine for one that never joined."""
        if self._index.discard(listener) and not self._index.listeners:
            self.close()

    def close(self) -> None:
        """Follow no more."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

    async def _follow(self) -> None:
        try:
            while True:
                page = await self._read_on()
                if page is None:
                    self._place = await self.log.newest()
                    for listener in list(self._index.listeners):
                        listener.reset(self._place)
                elif page:
                    # Whoever joins from now on is told of what comes after this page, and of it by `bring`.
                    self._place = page[-1][0]
                    await self._tell(self.plan(page, self._index))
                self.settled = self._place
                await _turn()
        except (Exception, PanicException):
            log.exception("changes could not be told")
            self._follower = None
            for listener in list(self._index.listeners):
                listener.cut()

    async def _read_on(self) -> list[tuple[str, Change]] | None:
        """What comes next, perhaps nothing yet."""
        while True:
            try:
                await self.log.wait(self._place)
                return await self.log.changes(self._place, PAGE)
            except Unavailable as error:
                log.warning("changes cannot be read: %s", error.why)
                await asyncio.sleep(RETRY_S)

    def plan(self, page: Sequence[tuple[str, Change]], index: "ListenerIndex") -> Plan:
        """The events of a page that anybody of an index listens for, and who that is."""
        plan: Plan = []
        for id_, change in page:
            told = read_change(change)
            for match in self.keys.matches(told.subject):
                listeners = index.concerned(match)
                if listeners:
                    frame = b"id: %b\ndata: %b\n\n" % (id_.encode(), _text(told, match))
                    plan.append((Event(id_, *match, frame, told.hash, told.timestamp_ms), listeners))
        return plan

    async def _tell(self, plan: Plan) -> None:
        """Hand out the events, first to those about whom there is no question: they wait for nobody."""
        await _hand_out([(event, [who for who in listeners if not who.asks]) for event, listeners in plan])
        asking = [(event, [who for who in listeners if who.asks]) for event, listeners in plan]
        asking = [(event, listeners) for event, listeners in asking if listeners]
        if asking:
            await _hand_out(asking, await self.permits(asking))


def anybody(listener: Listener, event: Event) -> Event | None:
    return event


async def _hand_out(plan: Plan, permit: Permit = anybody) -> None:
    writes = size = 0
    for event, listeners in plan:
        for listener in listeners:
            _hand(listener, event, permit)
        writes, size = writes + len(listeners), size + len(event.frame)
        if writes > PAUSE_WRITES or size > PAUSE_BYTES:
            writes = size = 0
            await asyncio.sleep(0)


async def _turn() -> None:
    """Let others have their turn after a page: a log may answer at once, and of 100,000 changes none be for
    anybody to hear."""
    await asyncio.sleep(0)


def _hand(listener: Listener, event: Event, permit: Permit) -> None:
    if event.id > listener.place and (heard := permit(listener, event)) is not None:
        listener.hear([heard])


def _text(told: Told, match: KeyMatch) -> bytes:
    """The event as the followers of the matching collection receive it."""
    namespace, name = match.topic
    text = {"collection": name, "params": match.params, "hash": told.hash, "timestamp": told.timestamp_ms}
    return orjson.dumps(text if namespace is None else text | {"namespace": namespace})


def _concerns(listener: Listener, match: KeyMatch) -> bool:
    wanted = listener.interest.get(match.topic)
    return wanted is not None and wanted.items() <= match.params.items()


class ListenerIndex:
    """Listeners by what they listen for: a whole collection, or one of the values that they name."""

    def __init__(self) -> None:
        self.listeners: set[Listener] = set()
        self._at: dict[tuple[str | None, ...], set[Listener]] = {}

    def add(self, listener: Listener) -> None:
        self.listeners.add(listener)
        for topic, wanted in listener.interest.items():
            # Of several values the one that fewest listen for.
            place = min(_places(topic, wanted), key=lambda place: len(self._at.get(place, ())))
            self._at.setdefault(place, set()).add(listener)

    def discard(self, listener: Listener) -> bool:
        """Whether it was there."""
        if listener not in self.listeners:
            return False
        self.listeners.discard(listener)
        for topic, wanted in listener.interest.items():
            for place in _places(topic, wanted):
                held = self._at.get(place, set())
                held.discard(listener)
                if not held:
                    self._at.pop(place, None)
        return True

    def concerned(self, match: KeyMatch) -> list[Listener]:
        """The listeners for changes of the match."""
        topic = match.topic
        found = list(self._at.get(topic, ()))
        for pair in match.params.items():
            for listener in self._at.get((*topic, *pair), ()):
                if _concerns(listener, match):
                    found.append(listener)
        return found


def _places(topic: Topic, wanted: Mapping[str, str]) -> list[tuple[str | None, ...]]:
    """Where the index may have a listener who wants these values."""
    if not wanted:
        return [topic]
    return [(*topic, *pair) for pair in wanted.items()]
