"""The verbs of append-only logs: append, read, sweep."""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import orjson

from pysync import _core
from pysync.changelog import Subject
from pysync.coordinator import IDEMPOTENCY_TTL_MS, Coordinator, withdraw_claim
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log.append import Commits, Waiting, discard
from pysync.engine.append_log.head import Heads, LogRules
from pysync.engine.append_log.read import Bounds, Nodes, Tail
from pysync.engine.append_log.starfish import chunk_key, chunk_names, gathered
from pysync.engine.outbox import Outbox
from pysync.errors import (
    AppendLimitExceeded,
    CoordinatorUnavailable,
    DocumentCorrupt,
    IdempotencyKeyReused,
    NonMonotonicTimestamp,
    PysyncError,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.model import Written
from pysync.store import Etag, EtagMismatch, Object, Store


class Claim(NamedTuple):
    """The claim of the first append under an Idempotency-Key: its mark, the log and the position in it from
    which the mark may be found, and the hash of its data (`""` if an earlier version made the claim)."""

    mark: str
    id: str
    position: int
    hash: str = ""

    def encoded(self) -> bytes:
        return orjson.dumps(list(self))

    @classmethod
    def read(cls, text: bytes) -> Self:
        return cls(*orjson.loads(text))


class Logs:
    """Append-only logs on top of a store; any number of nodes may share it. `now_ms` is the clock of every
    time; `head_bytes` is how large a head may get before its tail is sealed, by default what suits the
    store."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        now_ms: Callable[[], int],
        *,
        head_bytes: int | None = None,
        outbox: Outbox | None = None,
        corruption: CorruptionReporter | None = None,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self.now_ms = now_ms
        self._corruption = corruption or CorruptionReporter()
        self._heads = Heads(store, now_ms, self._corruption)
        self._outbox = outbox or Outbox(store, coordinator)
        self._commits = Commits(
            store,
            self._outbox,
            self._heads,
            now_ms,
            store.light_put_bytes if head_bytes is None else head_bytes,
            self._blame,
            self._corruption,
        )

    async def append(
        self, key: str, element: _core.Append, rules: LogRules, subject: Subject | None = None
    ) -> Written:
        """Add an element to the log at `key`, durably, in an order that all readers see, each with a later
        time than the one before. It is announced as a change of `subject`; of none, nobody hears of it.

        Raises:
            TsTooFarAhead, NonMonotonicTimestamp, AppendLimitExceeded: the element is not added.
            DocumentCorrupt: what is stored there is no log.
            StoreUnavailable: nobody can tell whether it is added.
        """
        if not rules.persist:
            return await self._tell(self._unstored(element), subject)
        return await self._commits.submit(key, Waiting(element, rules, _future(), subject))

    async def append_once(
        self,
        key: str,
        element: _core.Append,
        rules: LogRules,
        request_key: str,
        subject: Subject | None = None,
    ) -> Written:
        """Append, or return the answer of the first append with this `request_key` within ten minutes.

        The first attempt claims the key for its data and a mark of its own. Every attempt appends under that
        mark, to a log that does not have it yet. Of two concurrent attempts one finds the element that the
        other has written. A refused append leaves no claim. The claim records how far a repetition has
        searched for the mark, so that no other searches there again.

        Raises IdempotencyKeyReused if the key was claimed for other data, StoreUnavailable if the search for
        the mark is not finished (repeat the append), and what `append` raises.
        """
        name = hashlib.sha256(f"append {request_key}".encode()).hexdigest()
        if not rules.persist:
            fresh = self._unstored(element)
            value = orjson.dumps([fresh.hash, fresh.timestamp_ms])
            first = Written(*orjson.loads(await self._claim(name, value)))
            if first.hash != fresh.hash:
                raise IdempotencyKeyReused
            return await self._tell(first, subject)
        # Repetitions look through all that came since: an older head would be right, and dear.
        held = await self._heads.recent(key, rules.field)
        id_, count = ("", 0) if held is None else (held.head.id, held.head.count)
        own = Claim(os.urandom(8).hex(), id_, count, hashlib.sha256(element.canonical).hexdigest())
        text = await self._claim(name, own.encoded())
        claim = Claim.read(text)
        if claim.hash not in ("", own.hash):
            raise IdempotencyKeyReused
        waiting = Waiting(element, rules, _future(), subject, claim.mark, (claim.id, claim.position))
        try:
            return await self._commits.submit(key, waiting)
        except (AppendLimitExceeded, NonMonotonicTimestamp, TsTooFarAhead):
            if claim == own:  # what an earlier attempt claimed, that one may have written
                await withdraw_claim(self._coordinator, name, text)
            raise
        finally:
            if waiting.claimed != (claim.id, claim.position):
                now = claim._replace(id=waiting.claimed[0], position=waiting.claimed[1])
                with suppress(CoordinatorUnavailable):
                    await self._coordinator.replace_claim(name, text, now.encoded())

    async def read(self, key: str, bounds: Bounds, rules: LogRules) -> Tail:
        """The elements of the log at `key` within `bounds`, as it is now; none where nothing is stored or it
        has expired. Raises DocumentCorrupt, StoreUnavailable."""
        (tail,) = await self.read_each(key, [bounds], rules)
        return tail

    async def read_each(self, key: str, each: Sequence[Bounds], rules: LogRules) -> list[Tail]:
        """Read the log within each of these bounds, as it is at one moment."""
        held = await self._heads.read(key, rules.field) if rules.persist else None
        if held is None or (rules.ttl_ms is not None and rules.expired(held.head, self.now_ms())):
            return [Tail(key, None, bounds, None, self._corruption) for bounds in each]
        # Elements that several bounds need are read once.
        shelf: dict[str, bytes] | None = {} if len(each) > 1 else None
        tails = []
        for bounds in each:
            head = held.head
            if head.is_chunked:
                with self._corruption.meeting("log", key):
                    head = await gathered(self._store, key, head, bounds.since, bounds.newest)
            nodes = Nodes(self._store, head, bounds, self._blame(key, rules.field), shelf)
            tails.append(Tail(key, head, bounds, nodes, self._corruption))
        return tails

    async def sweep(self, prefix: str, is_log: Callable[[str], bool], rules: LogRules) -> int:
        """Delete the logs below `prefix` that have expired; how many there were."""
        swept = 0
        async for listed in self._store.walk(prefix):
            if rules.ttl_ms is None or listed.modified_ms + rules.ttl_ms >= self.now_ms():
                continue
            if is_log(listed.key):
                swept += await self._sweep_log(listed.key, listed.etag, rules)
        return swept

    async def close(self) -> None:
        """Finish the appends that wait."""
        await self._commits.close()

    def _unstored(self, element: _core.Append) -> Written:
        _, (outcome,) = _core.LogHead("").append([(element, "")], self.now_ms(), None)
        if isinstance(outcome, str):
            raise TsTooFarAhead
        return Written(_core.content_hash(element.canonical), outcome[1])

    async def _tell(self, written: Written, subject: Subject | None) -> Written:
        """Announce what is stored nowhere."""
        if subject is not None:
            await self._outbox.announce([subject.change(written.hash, written.timestamp_ms)])
        return written

    async def _claim(self, name: str, value: bytes) -> bytes:
        return await self._coordinator.claim(name, value, IDEMPOTENCY_TTL_MS)

    async def _sweep_log(self, key: str, etag: str, rules: LogRules) -> int:
        """Delete the log whose head has this etag, if it has expired by what the head says."""
        found = await self._store.get(key)
        if not isinstance(found, Object) or found.etag != etag:
            return 0
        try:
            with self._corruption.meeting("log", key):
                head = _core.LogHead.read(found.body, rules.field)
        except DocumentCorrupt:
            return 0
        if not rules.expired(head, self.now_ms()):
            return 0
        if head.previous is not None:
            await discard(self._store, head.previous)
        try:
            if head.nodes():
                # Another node's clock may be behind: nothing may be appended to what loses its segments, and
                # until they are gone a head must lead to them.
                grave = _core.LogHead(os.urandom(16).hex(), head.id)
                etag = await self._store.put(key, grave.stored(), expect=Etag(etag))
                await discard(self._store, head.id)
            await self._store.delete(key, expect=Etag(etag))
        except EtagMismatch:
            return 0
        if head.id:  # what a crash stored before a head led to it
            await discard(self._store, head.id)
        if head.is_chunked:
            for name in await chunk_names(self._store, key):
                await self._store.delete(chunk_key(key, name))
        return 1

    def _blame(self, key: str, field: str) -> Callable[[_core.LogHead], Awaitable[PysyncError]]:
        """Why an object of the log at `key` is missing."""

        async def blame(head: _core.LogHead) -> PysyncError:
            held = await self._heads.read(key, field)
            if held is not None and held.head.id == head.id:
                return DocumentCorrupt()
            return StoreUnavailable()  # the log has expired meanwhile

        return blame


def _future() -> asyncio.Future[Written]:
    return asyncio.get_running_loop().create_future()
