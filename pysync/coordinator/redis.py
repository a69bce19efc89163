"""The coordinator of many nodes: one Redis (7 or newer, or what speaks like it) that they share.

pysync:n:<digest>            a nonce that was seen
pysync:c:<window>:<bucket>   a counter of one window, gone some time after its end
pysync:k:<key>               a claim
pysync:changes               the change log, a stream
pysync:since                 which process of Redis remembers everything, and since when

Redis may lose its memory, all of it or the last moments: it is started again, emptied, followed by a replica.
`pysync:since` tells. It names the process of Redis that has remembered everything since a time. A node that
connects to another process writes it anew, and one that finds it changed trusts no reply until it has
connected anew. What was signed before that time may have been seen by the memory that is gone: it is refused.
"""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self

from redis.asyncio import Connection
from redis.asyncio.connection import parse_url

from pysync._core import ReplayWindow
from pysync.clock import wall_clock_ms
from pysync.coordinator import CHANGES_KEPT, EPOCH_MS, Window, window_end_ms
from pysync.coordinator.redis_link import Ask, Command, Link, ReplyError
from pysync.errors import CoordinatorUnavailable

log = logging.getLogger(__name__)

SINCE: Final = "pysync:since"
CHANGES: Final = "pysync:changes"

NONCE_TTL_MS: Final = 2 * EPOCH_MS + 60_000
"""A signature may hold for 600 s after its nonce came, and a minute longer where nodes' clocks disagree."""

LEEWAY_MS: Final = 2_000
"""After memory was lost: how far the clock of who signs may be ahead of Redis' without a gap."""

LATE_MS: Final = 60_000
"""How long a count may take from a node's clock to Redis, which is more than any reply is waited for."""

OLDEST_VERSION: Final = 7
"""`SET` with both NX and GET, `PEXPIRE` with NX."""

_is_url = re.compile(
    r"redis://[^/?#]+(/[0-9]*)?|rediss://[^/?#]+(/[0-9]*)?(\?(&?ssl_(ca_certs|certfile|keyfile)=[^&#]+)+)?"
).fullmatch
_is_since = re.compile(rb"([!-~]+) ([0-9]{1,15})").fullmatch
_is_change_id = re.compile(r"[0-9]{15}\.(?P<ms>[0-9]{15})-(?P<n>[0-9]{10})").fullmatch


class _Since(NamedTuple):
    """What `pysync:since` holds: `ms` is Redis' time from which `process` remembers everything."""

    process: str
    ms: int

    @classmethod
    def read(cls, text: bytes | None) -> Self | None:
        """None for anything else, too: it is then written anew."""
        found = _is_since(text or b"")
        return None if found is None else cls(found[1].decode(), int(found[2]))

    def text(self) -> bytes:
        return f"{self.process} {self.ms}".encode()


class RedisCoordinator:
    """A `Coordinator` in Redis, for any number of nodes. Make one with `at`."""

    def __init__(self, connection: Connection, now_ms: Callable[[], int], changes_kept: int) -> None:
        self._place = f"redis at {connection.host}:{connection.port}, database {connection.db}"
        self._link = Link(connection, self._greet)
        self._now_ms = now_ms
        self._changes_kept = changes_kept
        self._since: _Since | None = None
        self._signed_from_ms = 0

    @classmethod
    async def at(
        cls,
        url: str,
        now_ms: Callable[[], int] = wall_clock_ms,
        changes_kept: int = CHANGES_KEPT,
    ) -> Self:
        """The coordinator in the database that `url` names: `redis://[[user]:password@]host[:port][/number]`,
        or `rediss://` for TLS, with `?ssl_ca_certs=FILE`, `ssl_certfile` and `ssl_keyfile` if need be.

        Raises ValueError where the URL or that Redis will not do, CoordinatorUnavailable where it cannot be
        used now. Neither tells the password.
        """
        coordinator = cls(_connection(url), now_ms, changes_kept)
        try:
            await coordinator._link.open()
        except CoordinatorUnavailable as error:
            raise CoordinatorUnavailable(f"{coordinator._place}: {error.message}") from error
        return coordinator

    async def remember_nonce(self, presenter: str, nonce: str, signed_ms: int) -> bool:
        key = b"pysync:n:" + ReplayWindow.digest(presenter, nonce)
        (stored,) = await self._recall(("SET", key, 1, "NX", "PX", NONCE_TTL_MS))
        if stored is None:
            return False
        if signed_ms < self._signed_from_ms:
            raise CoordinatorUnavailable
        return True

    async def count(self, bucket: str, window_ms: int) -> Window:
        now_ms = self._now_ms()
        ends_ms = window_end_ms(now_ms, window_ms)
        # Its window is in the key's name: a count that comes late finds those that it belongs to.
        key = f"pysync:c:{window_ms}:{ends_ms}:{bucket}"
        ttl_ms = ends_ms - now_ms + LATE_MS
        count, _ = _granted(await self._link.ask(("INCR", key), ("PEXPIRE", key, ttl_ms, "NX")))
        return Window(count, ends_ms - now_ms)

    async def claim(self, key: str, value: bytes, ttl_ms: int) -> bytes:
        command = ("SET", f"pysync:k:{key}", value, "NX", "GET", "PX", ttl_ms)
        (held,) = _granted(await self._link.ask(command))
        return value if held is None else bytes(held)

    async def announce(self, change: bytes) -> str:
        command = ("XADD", CHANGES, "MAXLEN", "~", self._changes_kept, "*", "c", change)
        (place,) = await self._recall(command)
        return self._change_id(place)

    async def changes(self, after: str, limit: int) -> list[tuple[str, bytes]] | None:
        start = "-"
        if after:
            known = _is_change_id(after)
            if known is None:
                return None
            start = f"({int(known['ms'])}-{int(known['n'])}"
        # The oldest is read last: what is trimmed meanwhile is then missed for certain.
        found, newest, oldest = await self._recall(
            ("XRANGE", CHANGES, start, "+", "COUNT", limit),
            ("XREVRANGE", CHANGES, "+", "-", "COUNT", 1),
            ("XRANGE", CHANGES, "-", "+", "COUNT", 1),
        )
        if after and not (
            newest and oldest and self._change_id(oldest[0][0]) <= after <= self._change_id(newest[0][0])
        ):
            return None
        return [(self._change_id(place), change) for place, (_, change) in found]

    async def skew_ms(self) -> int:
        """How far this machine's clock is ahead of Redis'. Raises CoordinatorUnavailable."""
        asked_ms = self._now_ms()
        ((seconds, micros),) = _granted(await self._link.ask(("TIME",)))
        return (asked_ms + self._now_ms()) // 2 - int(seconds) * 1000 - int(micros) // 1000

    async def close(self) -> None:
        await self._link.close()

    async def _recall(self, *commands: Command) -> list[Any]:
        """The replies to `commands`, where Redis still remembers all that it did when it was connected."""
        *replies, since = _granted(await self._link.ask(*commands, ("GET", SINCE)))
        if self._since is None or since != self._since.text():
            self._link.renew()
            raise CoordinatorUnavailable
        return replies

    async def _greet(self, ask: Ask) -> None:
        """Take a new connection into use: see to it that this Redis will do, and what it remembers.

        Raises ValueError where it will not do, CoordinatorUnavailable where it refuses to tell.
        """
        earlier, self._since = self._since, await self._settled(ask)
        if earlier is None:
            self._signed_from_ms = self._since.ms
        elif earlier != self._since:
            log.warning("redis may have lost its memory: what was signed before is refused")
            self._signed_from_ms = self._since.ms + LEEWAY_MS

    async def _settled(self, ask: Ask) -> _Since:
        """What `pysync:since` holds, written anew where it tells of another memory than this one."""
        while True:
            _, info, *others = await ask(("WATCH", SINCE), ("INFO",), ("TIME",), ("GET", SINCE))
            _granted([info], tell=True)
            facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            if (unfit := _unfit(facts)) is not None:
                raise ValueError(f"{self._place} {unfit}")
            time, text = _granted(others, tell=True)
            since, known = _Since.read(text), self._since
            if since and since.process == facts["run_id"] and (known is None or since.ms >= known.ms):
                return since
            # Written only if nobody did, or flushed, since the time was read: it must not be too early.
            since = _Since(facts["run_id"], int(time[0]) * 1000 + int(time[1]) // 1000)
            *_, written = _granted(await ask(("MULTI",), ("SET", SINCE, since.text()), ("EXEC",)), tell=True)
            if written is not None:
                return since

    def _change_id(self, place: bytes) -> str:
        """The id of the change at `place` in the stream. It grows from one memory to the next, too."""
        assert self._since is not None
        ms, n = map(int, place.split(b"-"))
        return f"{self._since.ms:015d}.{ms:015d}-{n:010d}"


def _connection(url: str) -> Connection:
    """A connection to what `url` names, not opened yet. Raises ValueError."""
    options: dict[str, Any] = {}
    if _is_url(url):
        # Its errors would tell part of a password that is not quoted, taking it for a port.
        with suppress(ValueError):
            options = {"host": "localhost", **parse_url(url)}
    if not options:
        raise ValueError(
            "coordinator: must be redis://[[user]:password@]host[:port][/number], or rediss:// the same and "
            "perhaps ?ssl_ca_certs=FILE; user and password quoted as in any URL"
        )
    kind: type[Connection] = options.pop("connection_class", Connection)
    # As Redis 2 types replies: no greeting that only newer servers know. `Link` sees to timeouts and retries.
    return kind(**options, protocol=2, driver_info=None, socket_timeout=None, socket_connect_timeout=None)


def _unfit(facts: dict[str, str]) -> str | None:
    """What keeps a Redis, by what it says of itself, from being a coordinator."""
    version = facts.get("redis_version", "0")
    if int(version.partition(".")[0]) < OLDEST_VERSION:
        return f"is version {version}; pysync needs {OLDEST_VERSION} or newer"
    if facts.get("redis_mode") == "cluster":
        return "is a node of a cluster; pysync needs a Redis of its own"
    if facts.get("role") != "master":
        return "is a replica, which cannot be written; name its master"
    if "run_id" not in facts:
        return "does not tell its run_id, so nobody can see whether it was started again and what it forgot"
    policy = facts.get("maxmemory_policy")
    if facts.get("maxmemory") != "0" and policy != "noeviction":
        return (
            f"forgets when it is full (maxmemory-policy {policy}), and a nonce that is forgotten can be used "
            "again; set maxmemory-policy noeviction"
        )
    return None


def _granted(replies: list[Any], tell: bool = False) -> list[Any]:
    """`replies`, none of which is an error. Raises CoordinatorUnavailable, with Redis' words if `tell`."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise CoordinatorUnavailable(str(reply) if tell else None) from reply
    return replies
