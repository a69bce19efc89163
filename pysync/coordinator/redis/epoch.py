"""A Redis whose memory is watched: what it answers counts only as long as it remembers all that it was told.

Redis may lose its memory, all of it or the last moments: it is started again, emptied, followed by a replica.
`pysync:since` tells. It names the process of Redis that has remembered everything since a time. A node that
connects to another process writes it anew, and one that finds it changed trusts no reply until it has
connected anew.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from redis.asyncio import Connection

from pysync.clock import elapsed_of
from pysync.coordinator.redis.connection import Ask, Command, Link, ReplyError
from pysync.errors import CoordinatorUnavailable

log = logging.getLogger(__name__)

SINCE: Final = "pysync:since"

OLDEST_VERSION: Final = 7
"""`SET` with both NX and GET, `PEXPIRE` with NX, streams that tell how much was added to them."""

_is_since = re.compile(rb"([!-~]+) ([0-9]{1,15})").fullmatch


class Since(NamedTuple):
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


class Memory:
    """What one Redis remembers. `forgot` is called when it was found to be another memory than before."""

    def __init__(self, connection: Connection, now_ms: Callable[[], int], forgot: Callable[[], None]) -> None:
        self.place = f"redis at {connection.host}:{connection.port}, database {connection.db}"
        self._link = Link(connection, self._greet)
        self._now_ms = elapsed_of(now_ms)
        self._forgot = forgot
        self._behind_ms = 0
        self._since: Since | None = None

    @property
    def since_ms(self) -> int:
        """Redis' time from which it remembers everything, as far as this node knows."""
        assert self._since is not None
        return self._since.ms

    @property
    def now_ms(self) -> int:
        """Redis' time: this node's, and what it was behind when it connected."""
        return self._now_ms() + self._behind_ms

    async def open(self) -> None:
        """Connect. Raises ValueError where that Redis will not do, CoordinatorUnavailable where it cannot be
        used now, with the reason."""
        try:
            await self._link.open()
        except CoordinatorUnavailable as error:
            raise CoordinatorUnavailable(f"{self.place}: {error.message}") from error

    async def ask(self, *commands: Command) -> list[Any]:
        """The replies to `commands`, sent in one piece, whatever is remembered. Raises
        CoordinatorUnavailable, too, where Redis refuses one."""
        return granted(await self._link.ask(*commands))

    async def recall(self, *commands: Command) -> list[Any]:
        """As `ask`, where Redis still remembers all that it did when it was connected. Raises
        CoordinatorUnavailable where it does not: the commands may have been done nevertheless."""
        *replies, since = await self.ask(*commands, ("GET", SINCE))
        if self._since is None or since != self._since.text():
            self._link.renew()
            raise CoordinatorUnavailable
        return replies

    async def transact(self, *commands: Command) -> list[Any]:
        """As `recall`, the commands done together: all or none, and nothing in between."""
        *_, replies = await self.recall(("MULTI",), *commands, ("EXEC",))
        return granted(replies)

    async def close(self) -> None:
        await self._link.close()

    async def _greet(self, ask: Ask) -> None:
        """Take a new connection into use: see to it that this Redis will do, and what it remembers.

        Raises ValueError where it will not do, CoordinatorUnavailable where it refuses to tell.
        """
        earlier, self._since = self._since, await self._settled(ask)
        if earlier is not None and earlier != self._since:
            log.warning("redis may have lost its memory: what was signed before is refused")
            self._forgot()

    async def _settled(self, ask: Ask) -> Since:
        """What `pysync:since` holds, written anew where it tells of another memory than this one."""
        while True:
            _, info, *others = await ask(("WATCH", SINCE), ("INFO",), ("TIME",), ("GET", SINCE))
            granted([info], tell=True)
            facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            if (unfit := _unfit(facts)) is not None:
                raise ValueError(f"{self.place} {unfit}")
            time, text = granted(others, tell=True)
            self._behind_ms = time_ms(time) - self._now_ms()
            since, known = Since.read(text), self._since
            if since and since.process == facts["run_id"] and (known is None or since.ms >= known.ms):
                return since
            # Written only if nobody did, or flushed, since the time was read: it must not be too early.
            since = Since(facts["run_id"], time_ms(time))
            *_, written = granted(await ask(("MULTI",), ("SET", SINCE, since.text()), ("EXEC",)), tell=True)
            if written is not None:
                return since


def time_ms(reply: list[bytes]) -> int:
    """What Redis answers to `TIME`, in milliseconds."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def granted(replies: list[Any], tell: bool = False) -> list[Any]:
    """`replies`, none of which is an error. Raises CoordinatorUnavailable, with Redis' words if `tell`."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise CoordinatorUnavailable(str(reply) if tell else None) from reply
    return replies


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
