"""The coordinator of many nodes: one Redis (7 or newer, or what speaks like it) that they share.

pysync:n:<digest>            a nonce that was seen
pysync:c:<window>:<bucket>   a counter of one window, gone some time after its end
pysync:k:<key>               a claim
pysync:l:<name>              the holder of a lease, for as long as it may last
pysync:changes               the change log, a stream
pysync:intents               prepared writes, a stream: the changes of each are one entry
pysync:ticks                 the last timestamp, a stream of one entry: its id is the timestamp
pysync:since                 the process of Redis that remembers everything, and since when

After Redis lost data, requests that were signed before are rejected, since their nonces may have been seen.
Followers of the change log reset, and prepared writes are gone.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from redis.asyncio import Connection

from pysync._core import ReplayWindow
from pysync.changelog import WAIT_S, Change, ChangePage, OriginFilter, Retention
from pysync.clock import CLOCK_TOLERANCE_MS, MAX_COUNTER, HybridTimestamp, wall_clock_ms
from pysync.coordinator.protocol import (
    AHEAD_MS,
    EPOCH_MS,
    LEASE_MS,
    PreparedWrite,
    Standing,
    window_end_ms,
)
from pysync.coordinator.redis.connection import (
    Command,
    Execute,
    PipelinedConnection,
    ReplyError,
    make_connection,
)
from pysync.coordinator.redis.epoch import EpochGuard, time_ms
from pysync.errors import CoordinatorUnavailable
from pysync.model import Diagnosis, Observe, unobserved

CHANGES: Final = "pysync:changes"
INTENTS: Final = "pysync:intents"
TICKS: Final = "pysync:ticks"
COUNTERS: Final = "pysync:c:"
CLAIMS: Final = "pysync:k:"

NONCE_TTL_MS: Final = EPOCH_MS + AHEAD_MS
"""A signature may hold for 600 s after its nonce came, and a minute longer where nodes' clocks disagree."""

LEEWAY_MS: Final = 2_000
"""After data was lost: how far the clock of a signer may be ahead of Redis'."""

_REPLACE_CLAIM: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] then redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL') else redis.call('DEL', KEYS[1]) end
return 1"""

_BEFORE_ALL: Final = "0-0"
"""The id before all entries."""

_ERASE: Final = """
local changes, entries = cjson.decode(ARGV[1]), redis.call('XRANGE', KEYS[1], '-', '+')
if #entries == 0 then return end
local facts = redis.call('XINFO', 'STREAM', KEYS[1])
for n = 1, #facts, 2 do facts[facts[n]] = facts[n + 1] end
redis.call('DEL', KEYS[1])
for _, entry in ipairs(entries) do
    redis.call('XADD', KEYS[1], entry[1], unpack(changes[entry[1]] or entry[2]))
end
redis.call('XSETID', KEYS[1], facts['last-generated-id'],
    'ENTRIESADDED', facts['entries-added'], 'MAXDELETEDID', facts['max-deleted-entry-id'])"""
"""Writes the stream anew, because Redis stores the bytes of a deleted entry for as long as its neighbours."""

_silent_logger = logging.Logger("quiet", logging.CRITICAL)
"""For the connection that waits: the other one logs the failures of Redis."""

_is_change_id = re.compile(r"(?P<since>[0-9]{15})\.(?P<ms>[0-9]{15})-(?P<n>[0-9]{10})").fullmatch


class RedisCoordinator:
    """A `Coordinator` in Redis, for any number of nodes. Make one with `connect`."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        now_ms: Callable[[], int],
        retention: Retention,
        name: str,
        observe: Observe,
    ) -> None:
        self._epoch = EpochGuard(connect(), now_ms, self._on_epoch_change, observe)
        self._waiter = StreamWaiter(connect(), CHANGES)
        self._now_ms = now_ms
        self._retention = retention
        self._name = name
        self._signed_from_ms = 0
        self._newest_ms = 0
        self._leases = set[str]()

    @classmethod
    async def connect(
        cls,
        url: str,
        now_ms: Callable[[], int] = wall_clock_ms,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        random: Callable[[int], bytes] = os.urandom,
        observe: Observe = unobserved,
    ) -> Self:
        """Return the coordinator in the database of `url`: `redis://[[user]:password@]host[:port][/number]`,
        or `rediss://` for TLS, with `?ssl_ca_certs=FILE`, `ssl_certfile` and `ssl_keyfile` if needed.

        Raises ValueError for an unusable URL or Redis, and CoordinatorUnavailable if it cannot be used now.
        Neither contains the password.
        """
        coordinator = cls(lambda: make_connection(url), now_ms, retention, random(16).hex(), observe)
        await coordinator._epoch.open()
        coordinator._signed_from_ms = coordinator._epoch.since_ms
        return coordinator

    async def consume_nonce(
        self,
        presenter: str,
        nonce: str,
        signed_ms: int,
        standing: Standing = Standing.TRUSTED,
        *,
        is_read: bool = False,
    ) -> bool:
        """See `Coordinator.consume_nonce`."""
        key = b"pysync:n:" + ReplayWindow.digest(presenter, nonce)
        ahead_ms = signed_ms - self._now_ms()
        ttl_ms = NONCE_TTL_MS + (ahead_ms if ahead_ms > AHEAD_MS else 0)
        (stored,) = await self._epoch.execute_checked(("SET", key, 1, "NX", "PX", ttl_ms))
        if stored is None:
            return False
        if signed_ms < self._signed_from_ms:
            raise CoordinatorUnavailable
        return True

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> int:
        """See `Coordinator.increment`."""
        now_ms = self._now_ms()
        ends_ms = window_end_ms(now_ms, window_ms)
        key = _counter_key(bucket, window_ms, ends_ms)
        ttl_ms = ends_ms - now_ms + CLOCK_TOLERANCE_MS
        count, _ = await self._epoch.execute(("INCRBY", key, by), ("PEXPIRE", key, ttl_ms, "NX"))
        return int(count)

    async def put_if_absent(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        """See `Coordinator.put_if_absent`."""
        (held,) = await self._epoch.execute(("SET", f"{CLAIMS}{key}", value, "NX", "GET", "PX", ttl_ms))
        return value if held is None else bytes(held)

    async def compare_and_set(self, key: str, expected: bytes, value: bytes | None) -> bool:
        """See `Coordinator.compare_and_set`."""
        given = (expected,) if value is None else (expected, value)
        (replaced,) = await self._epoch.execute(("EVAL", _REPLACE_CLAIM, 1, f"{CLAIMS}{key}", *given))
        return bool(replaced)

    async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
        """See `Coordinator.append`."""
        add = ("XADD", CHANGES, "MAXLEN", "~", max(1, self._retention.count), "*")
        added: list[Command] = [(*add, *_fields(change)) for change in changes]
        # Older than the newest entry that was known before, so that the log never becomes empty.
        trim = ("XTRIM", CHANGES, "MINID", "~", max(0, self._newest_ms - self._retention.age_ms))
        ended: list[Command] = [("XDEL", INTENTS, prepared)] if prepared else []
        replies = await self._epoch.transact(*added, trim, *ended)
        return self._to_id(replies[len(added) - 1])

    async def read(self, after: str, limit: int) -> list[tuple[str, Change]] | None:
        """See `ChangeLog.read`."""
        if not after:
            return self._parse_entries(await self._range("-", limit))
        known = _is_change_id(after)
        if known is None:
            return None
        entry_id = _from_id(known)
        if entry_id == _BEFORE_ALL:
            found = await self._range("-", limit)
            is_kept = not found or await self._is_complete()
        else:
            # With the one that is known: while it is kept, so is all that came after it.
            first, *found = await self._range(entry_id, limit + 1) or [(b"",)]
            is_kept = first[0] == entry_id.encode()
        if not is_kept or int(known["since"]) != self._epoch.since_ms:
            return None
        self._waiter.observe(after)
        return self._parse_entries(found)

    async def read_matching(self, after: str, limit: int, written_by: OriginFilter) -> ChangePage | None:
        """See `ChangeLog.read_matching`."""
        # A stream of Redis has no index, so all changes are read.
        found = await self.read(after, limit)
        if found is None:
            return None
        matching = [(id_, change) for id_, change in found if not change.origin or written_by(change.origin)]
        return ChangePage(matching, found[-1][0] if found else after, len(found) < limit, len(found))

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        """See `ChangeLog.count_after`."""
        return None

    async def newest(self, limit: int) -> list[tuple[str, Change]]:
        """See `ChangeLog.newest`."""
        (found,) = await self._epoch.execute_checked(("XREVRANGE", CHANGES, "+", "-", "COUNT", limit))
        return [entry for entry in self._parse_entries(found) if not entry[1].is_erased]

    async def last_id(self) -> str:
        """See `ChangeLog.last_id`."""
        (found,) = await self._epoch.execute_checked(("XREVRANGE", CHANGES, "+", "-", "COUNT", 1))
        return self._to_id(found[0][0] if found else _BEFORE_ALL.encode())

    async def erase(self, changes: Mapping[str, Change]) -> None:
        """See `ChangeLog.erase`."""
        known = ((_is_change_id(id_), change) for id_, change in changes.items())
        fields = {_from_id(id_): _fields(change) for id_, change in known if id_ is not None}
        if fields:
            await self._epoch.execute_checked(("EVAL", _ERASE, 1, CHANGES, json.dumps(fields)))

    async def begin_epoch(self) -> None:
        """See `ChangeLog.begin_epoch`. Requests that were signed before are rejected, as after a loss of
        memory."""
        await self._epoch.begin(("DEL", CHANGES))

    async def wait_for_change(self, after: str) -> None:
        """See `ChangeLog.wait_for_change`."""
        known = _is_change_id(after)
        await self._waiter.wait(after, _BEFORE_ALL if known is None else _from_id(known))

    async def prepare(self, changes: Sequence[Change]) -> str:
        """See `Coordinator.prepare`."""
        fields = (value for change in changes for value in change[:2])
        added = await self._epoch.execute_checked(("XADD", INTENTS, "*", "at", self._epoch.now_ms, *fields))
        return str(added[0].decode())

    async def abort(self, name: str) -> None:
        """See `Coordinator.abort`."""
        await self._epoch.execute(("XDEL", INTENTS, name))

    async def prepared(self, limit: int) -> list[PreparedWrite]:
        """See `Coordinator.prepared`."""
        (found,) = await self._epoch.execute(("XRANGE", INTENTS, "-", "+", "COUNT", limit))
        return [_prepared_write(id_, fields, self._epoch.now_ms) for id_, fields in found]

    async def next_timestamp(self) -> HybridTimestamp:
        """See `Coordinator.next_timestamp`."""
        # By the clock of Redis. The ids of a stream increase even if that clock is set back.
        tick = await self._next_entry_id("*")
        return tick if tick.counter <= MAX_COUNTER else await self._next_entry_id(f"{tick.ms + 1}-*")

    async def forget(
        self, buckets: Callable[[str], bool], claims: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """See `Coordinator.forget`."""
        counters = await self._delete(COUNTERS, lambda key, value: buckets(key.split(":", 4)[4]))
        return counters, await self._delete(CLAIMS, lambda key, value: claims(value))

    async def purge_deleted(self) -> None:
        """See `Coordinator.purge_deleted`: the files are those of Redis."""

    async def acquire_lease(self, name: str) -> bool:
        """See `Coordinator.acquire_lease`."""
        key = f"pysync:l:{name}"
        (held,) = await self._epoch.execute(("SET", key, self._name, "NX", "GET", "PX", LEASE_MS))
        if held is None:
            self._leases.add(key)
            return True
        return held == self._name.encode() and await self._renew(key)

    async def diagnose(self) -> Diagnosis:
        """See `Coordinator.diagnose`."""
        sent_ms = self._now_ms()
        (time,) = await self._epoch.execute(("TIME",))
        return Diagnosis(skew_ms=(sent_ms + self._now_ms()) // 2 - time_ms(time))

    async def probe(self) -> None:
        """Do nothing: an unavailable Redis affects all nodes, and not requests without a coordinator."""

    async def close(self) -> None:
        """See `Coordinator.close`."""
        with suppress(CoordinatorUnavailable):
            for key in self._leases:
                # Renewed, so that it does not pass to another process before it is deleted.
                if await self._renew(key):
                    await self._epoch.execute(("DEL", key))
        await self._waiter.close()
        await self._epoch.close()

    def _on_epoch_change(self) -> None:
        """Reject requests that were signed before Redis lost data."""
        self._signed_from_ms = self._epoch.since_ms + LEEWAY_MS

    async def _next_entry_id(self, pattern: str) -> HybridTimestamp:
        (added,) = await self._epoch.execute_checked(("XADD", TICKS, "MAXLEN", 1, pattern, "t", ""))
        return HybridTimestamp(*map(int, added.split(b"-")))

    async def _delete(self, prefix: str, is_chosen: Callable[[str, bytes], bool]) -> int:
        """Delete the keys below `prefix` that `is_chosen` selects by key and value. Returns their number."""
        cursor, deleted = b"0", 0
        while True:
            page = ("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000)
            ((cursor, keys),) = await self._epoch.execute(page)
            values = await self._epoch.execute(*(("GET", key) for key in keys)) if keys else []
            for key, value in zip(keys, values, strict=True):
                if value is not None and is_chosen(key.decode(), value):
                    deleted += (await self._epoch.execute(("DEL", key)))[0]
            if cursor == b"0":
                return deleted

    async def _renew(self, key: str) -> bool:
        """Renew the lease, and return True if this process still holds it. Another process that acquired it a
        moment ago renews its own."""
        (held,) = await self._epoch.execute(("GETEX", key, "PX", LEASE_MS))
        return bool(held == self._name.encode())

    async def _range(self, start: str, limit: int) -> list[Any]:
        (found,) = await self._epoch.execute_checked(("XRANGE", CHANGES, start, "+", "COUNT", limit))
        return list(found)

    async def _is_complete(self) -> bool:
        """Return True if the log, which is not empty, contains all changes since it began."""
        (reply,) = await self._epoch.execute_checked(("XINFO", "STREAM", CHANGES))
        facts = dict(zip(reply[::2], reply[1::2], strict=True))
        return bool(facts[b"length"] == facts[b"entries-added"])

    def _parse_entries(self, found: list[Any]) -> list[tuple[str, Change]]:
        return [(self._to_id(entry_id), _change(fields)) for entry_id, fields in found]

    def _to_id(self, entry_id: bytes) -> str:
        """The id of the change at `entry_id` of the stream. It grows from one memory to the next, too."""
        ms, n = map(int, entry_id.split(b"-"))
        self._newest_ms = max(self._newest_ms, ms)
        id_ = f"{self._epoch.since_ms:015d}.{ms:015d}-{n:010d}"
        self._waiter.observe(id_)
        return id_


def _counter_key(bucket: str, window_ms: int, ends_ms: int) -> str:
    """Return the key of a counter. It contains the window, so that a count that comes late finds its own."""
    return f"{COUNTERS}{window_ms}:{ends_ms}:{bucket}"


def _from_id(known: re.Match[str]) -> str:
    """Return the entry id in the stream of the change with this id."""
    return f"{int(known['ms'])}-{int(known['n'])}"


def _fields(change: Change) -> tuple[str, ...]:
    """Return the fields of the stream entry of a change."""
    return "c", change.text.decode(), "i", change.identity, "o", change.origin


def _change(fields: list[bytes]) -> Change:
    """Return the change in a stream entry. Entries of earlier versions have no origin."""
    text, identity, *more = fields[1::2]
    return Change(bytes(text), identity.decode(), more[0].decode() if more else "")


def _prepared_write(entry_id: bytes, fields: list[bytes], now_ms: int) -> PreparedWrite:
    """Return the prepared write in a stream entry."""
    _, at_ms, *changes = fields
    pairs = zip(changes[::2], changes[1::2], strict=True)
    return PreparedWrite(
        entry_id.decode(),
        max(0, now_ms - int(at_ms)),
        [Change(bytes(text), identity.decode()) for text, identity in pairs],
    )


class StreamWaiter:
    """Waits for entries of the stream at `key`, on a connection of its own. Ids of entries increase, compared
    as text."""

    def __init__(self, connection: Connection, key: str) -> None:
        self._connection = PipelinedConnection(connection, _accept_any, log=_silent_logger)
        self._is_open = False
        self._key = key
        self._newest = ""
        self._news = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    def observe(self, id_: str) -> None:
        """Note that there is an entry with this id. Callers that wait for one after an earlier id return."""
        if id_ > self._newest:
            self._newest = id_
            self._news.set()

    async def wait(self, after: str, entry_id: str) -> None:
        """Return when there may be an entry after the id `after`, which is at `entry_id`: at once if this
        process knows of one, as soon as Redis reports one from another process, and after a second in any
        case."""
        if after < self._newest:
            return
        self._news.clear()
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(entry_id))
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._news.wait()

    async def close(self) -> None:
        """See `Coordinator.close`."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        await self._connection.close()

    async def _listen(self, entry_id: str) -> None:
        """Wait in Redis for an entry after `entry_id`, and wake the waiting callers."""
        block_ms = int(WAIT_S * 1000)
        try:
            if not self._is_open:
                await self._connection.open()
                self._is_open = True
            (reply,) = await self._connection.execute(
                ("XREAD", "BLOCK", block_ms, "COUNT", 1, "STREAMS", self._key, entry_id)
            )
            if not isinstance(reply, ReplyError):
                self._news.set()
        except CoordinatorUnavailable:
            pass
        finally:
            self._listening = None


async def _accept_any(ask: Execute) -> None:
    """Accept any connection, without checking the epoch on the other side."""
