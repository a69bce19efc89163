"""Open change streams: connections that are told of events, and kept alive in between (wire section 9)."""

import asyncio
import logging
import random as random_module
from collections.abc import Callable, Sequence
from typing import Final

from pysync._core import PanicException
from pysync.auth.certificate_cache import Proof
from pysync.changelog import MAX_RESUMED
from pysync.engine.catch_up import CatchUp
from pysync.engine.subscriptions import Event, Feed, Start
from pysync.model import Caller
from pysync.server.connection import Connection
from pysync.server.metrics import Tally
from pysync.server.stream_authorization import Grant, Hearing

log = logging.getLogger("pysync.server")

BEAT_S: Final = 4.0
"""Between two comments: published clients give up on a stream that says nothing for 5 s."""
SLOTS: Final = 16
"""Parts of a beat, each with its share of the streams: they are not all written to at once."""
MAX_HELD_BYTES: Final = 256 * 1024
"""What a connection may hold back before its reader is cut off as too slow."""
STALL_S: Final = 30.0
"""How long who catches up may take to read what the connection holds back."""
RETRY_MS: Final = (1_000, 3_000)
"""When clients come back to a service that has stopped: the earliest, and the latest."""

_COMMENT: Final = b":\n\n"


class Subscriber(asyncio.Protocol):
    """A connection whose answer is a change stream: a `Hearer` of what `grant` gives. While it listens it has
    no task."""

    __slots__ = (
        "_hub", "_is_live", "_resumed", "_task", "_transport", "account", "asked", "asks", "caller",
        "held_at_ms", "interest", "place", "proof", "slot",
    )  # fmt: skip

    def __init__(
        self,
        hub: "Subscribers",
        grant: Grant,
        caller: Caller,
        proof: Proof | None,
        start: Start,
        account: str = "",
    ) -> None:
        self._hub = hub
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._is_live = False
        self.interest, self.asked = grant
        self.asks = bool(grant.asked) or proof is not None
        self.account = account
        self.caller = caller
        self.proof = proof
        self.held_at_ms = 0
        self.place = start.place
        self.slot: set[Subscriber] = set()

    def begin(self, connection: Connection, head: bytes, start: Start) -> None:
        """Write the beginning of the stream, and go on from there. Raises ConnectionResetError."""
        self._transport = connection.hand_over(self)
        if start.is_reset:
            head += _COMMENT + _reset(start.place)
        else:
            # Whoever is cut before the first event resumes from here.
            head += b":\nid: %b\n\n" % start.place.encode()
        self._transport.write(head)
        self._hub.add(self)
        self._is_live = not start.is_resumed and self._hub.feed.join(self)
        if not self._is_live:
            self._task = asyncio.get_running_loop().create_task(self._catch_up())

    def hear(self, events: Sequence[Event]) -> None:
        self.place = events[-1].id
        if self._write(b"".join(event.frame for event in events)):
            for event in events:
                self._hub.tally.count("pysync_events", event.collection)

    def reset(self, place: str) -> None:
        self.place = place
        self._write(_reset(place))

    def beat(self, settled: str) -> None:
        """Say that the stream is alive, and where it is, if that is news: a stream that hears of nothing
        keeps a place from which it can resume."""
        if self._is_live and settled > self.place:
            self.place = settled
            self._write(b":\nid: %b\n\n" % settled.encode())
        elif self.is_free:
            self._write(_COMMENT)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self, last: bytes = b"") -> None:
        """Write `last`, and close in good order."""
        if self._write(last) and self._transport is not None:
            self._transport.close()

    @property
    def is_free(self) -> bool:
        return self._resumed is None

    async def ready(self) -> bool:
        while (resumed := self._resumed) is not None:
            await asyncio.wait([resumed], timeout=STALL_S)
            if not resumed.done():
                self.cut()
                break
        return self._transport is not None and not self._transport.is_closing()

    def pause_writing(self) -> None:
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()
        self._hub.remove(self)

    async def _catch_up(self) -> None:
        try:
            self._is_live = await self._hub.catch_up.bring(self)
        except (Exception, PanicException):
            log.exception("a change stream was cut")
            self.cut()
        self._task = None

    def _write(self, text: bytes) -> bool:
        """Whether the stream is there to be written to."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(text)
        if transport.get_write_buffer_size() > MAX_HELD_BYTES:
            log.info("a change stream was cut: its reader is too slow")
            transport.abort()
        return True


class Subscribers:
    """The open streams of one process. `chance` is random, from 0.0 to 1.0."""

    def __init__(
        self,
        feed: Feed,
        hearing: Hearing,
        tally: Tally,
        most_missed: int = MAX_RESUMED,
        chance: Callable[[], float] = random_module.random,
    ) -> None:
        self.feed = feed
        self.catch_up = CatchUp(feed, most_missed)
        self.tally = tally
        self._hearing = hearing
        self._chance = chance
        self._slots: list[set[Subscriber]] = [set() for _ in range(SLOTS)]
        self._checks: dict[int, asyncio.Task[None]] = {}
        self._beating: asyncio.TimerHandle | None = None
        self._beat_at = 0.0
        self._is_ending = False

    def add(self, subscriber: Subscriber) -> None:
        """Keep a stream that has begun."""
        self.tally.streams += 1
        subscriber.slot = min(self._slots, key=len)
        subscriber.slot.add(subscriber)
        if self._is_ending:
            self._end(subscriber)
        elif self._beating is None:
            self._beat_at = asyncio.get_running_loop().time()
            self._beat_later(0)

    def remove(self, subscriber: Subscriber) -> None:
        """Forget a stream whose connection is gone."""
        self.feed.leave(subscriber)
        subscriber.slot.discard(subscriber)
        self.tally.streams -= 1
        if self._beating is not None and not any(self._slots):
            self._beating.cancel()
            self._beating = None

    def end(self) -> None:
        """End all streams, and those that are still to begin, in good order: the service is about to stop."""
        self._is_ending = True
        for subscriber in self._all():
            self._end(subscriber)

    def close(self) -> None:
        """Let go of everything."""
        for subscriber in self._all():
            subscriber.cut()
        for check in self._checks.values():
            check.cancel()
        if self._beating is not None:
            self._beating.cancel()
        self.catch_up.close()
        self.feed.close()

    def _all(self) -> list[Subscriber]:
        return [subscriber for slot in self._slots for subscriber in slot]

    def _end(self, subscriber: Subscriber) -> None:
        earliest, latest = RETRY_MS
        subscriber.end(b"retry: %d\n\n" % (earliest + self._chance() * (latest - earliest)))

    def _beat_later(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        # After a standstill the beats of one round are made up for, not those of an hour.
        self._beat_at = max(self._beat_at + BEAT_S / SLOTS, loop.time() - BEAT_S)
        self._beating = loop.call_at(self._beat_at, self._beat, number)

    def _beat(self, number: int) -> None:
        self._beat_later((number + 1) % SLOTS)
        settled, slot = self.feed.settled, list(self._slots[number])
        for subscriber in slot:
            subscriber.beat(settled)
        proved = [subscriber for subscriber in slot if subscriber.proof is not None]
        if proved and number not in self._checks:
            check = asyncio.get_running_loop().create_task(self._check(proved))
            check.add_done_callback(lambda _: self._checks.pop(number))
            self._checks[number] = check

    async def _check(self, proved: list[Subscriber]) -> None:
        for subscriber in proved:
            await self._hearing.check(subscriber)


def _reset(place: str) -> bytes:
    return b'event: reset\nid: %b\ndata: {"reset":true}\n\n' % place.encode()
