"""A guard against Redis losing data: replies count only while Redis remembers everything since a known time.

Redis may lose all of its data, or the last moments: after a restart, a flush or a failover to a replica. The
key `pysync:since` detects that. It names the process of Redis that has remembered everything since a time. A
node that connects to another process rewrites it, and a node that finds it changed trusts no reply until it
has reconnected.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from redis.asyncio import Connection

from pysync.clock import elapsed_of
from pysync.coordinator.redis.connection import Command, Execute, PipelinedConnection, ReplyError
from pysync.errors import CoordinatorUnavailable
from pysync.model import Observe

log = logging.getLogger(__name__)

EPOCH_KEY: Final = "pysync:since"

MIN_VERSION: Final = 7
"""The first version with `SET` NX GET, `PEXPIRE` NX, and streams that count their entries."""

_is_epoch = re.compile(rb"([!-~]+) ([0-9]{1,15})").fullmatch


class Epoch(NamedTuple):
    """The content of `pysync:since`: `process` remembers everything since `ms`, in Redis' time."""

    process: str
    ms: int

    @classmethod
    def parse(cls, text: bytes | None) -> Self | None:
        """Return the epoch in a stored text, None if there is none."""
        found = _is_epoch(text or b"")
        return None if found is None else cls(found[1].decode(), int(found[2]))

    def text(self) -> bytes:
        """Return the text that is stored."""
        return f"{self.process} {self.ms}".encode()


class EpochGuard:
    """Commands to a Redis that is known to have lost no data. `on_data_loss` is called if it has."""

    def __init__(
        self,
        connection: Connection,
        now_ms: Callable[[], int],
        on_data_loss: Callable[[], None],
        observe: Observe,
    ) -> None:
        self.address = f"redis at {connection.host}:{connection.port}, database {connection.db}"
        self._connection = PipelinedConnection(connection, self._on_connect, observe=observe)
        self._now_ms = elapsed_of(now_ms)
        self._on_data_loss = on_data_loss
        self._clock_offset_ms = 0
        self._epoch: Epoch | None = None

    @property
    def since_ms(self) -> int:
        """The time, by Redis' clock, since which it remembers everything."""
        assert self._epoch is not None
        return self._epoch.ms

    @property
    def now_ms(self) -> int:
        """The time by Redis' clock, measured when this node connected."""
        return self._now_ms() + self._clock_offset_ms

    async def open(self) -> None:
        """Connect. Raises ValueError if this Redis is unsupported, else CoordinatorUnavailable."""
        try:
            await self._connection.open()
        except CoordinatorUnavailable as error:
            raise CoordinatorUnavailable(f"{self.address}: {error.message}") from error

    async def execute(self, *commands: Command) -> list[Any]:
        """Return the replies to `commands`, which are sent together, whether data was lost or not. Raises
        CoordinatorUnavailable, also if Redis rejects one."""
        return raise_for_errors(await self._connection.execute(*commands))

    async def execute_checked(self, *commands: Command) -> list[Any]:
        """Do as `execute`, and raise CoordinatorUnavailable if Redis has lost data since it was connected.
        The commands may have been executed nevertheless."""
        *replies, since = await self.execute(*commands, ("GET", EPOCH_KEY))
        if self._epoch is None or since != self._epoch.text():
            self._connection.reconnect()
            raise CoordinatorUnavailable
        return replies

    async def transact(self, *commands: Command) -> list[Any]:
        """Do as `execute_checked`, with the commands in one transaction."""
        *_, replies = await self.execute_checked(("MULTI",), *commands, ("EXEC",))
        return raise_for_errors(replies)

    async def begin(self, *commands: Command) -> None:
        """Begin a new epoch, together with `commands`: every process then does as if Redis had lost its
        data."""
        assert self._epoch is not None
        (time,) = await self.execute(("TIME",))
        since = Epoch(self._epoch.process, max(time_ms(time), self._epoch.ms + 1))
        await self.execute(("MULTI",), ("SET", EPOCH_KEY, since.text()), *commands, ("EXEC",))
        self._epoch = since
        self._on_data_loss()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _on_connect(self, execute: Execute) -> None:
        """Check that the Redis of a new connection is supported, and since when it remembers everything.
        Raises ValueError if it is unsupported, CoordinatorUnavailable if it rejects the query."""
        earlier, self._epoch = self._epoch, await self._establish(execute)
        if earlier is not None and earlier != self._epoch:
            log.warning("redis may have lost its memory: what was signed before is refused")
            self._on_data_loss()

    async def _establish(self, execute: Execute) -> Epoch:
        """Return the content of `pysync:since`, rewritten if it belongs to other data than this."""
        while True:
            _, info, *others = await execute(("WATCH", EPOCH_KEY), ("INFO",), ("TIME",), ("GET", EPOCH_KEY))
            raise_for_errors([info], with_detail=True)
            facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            if (unfit := _unsupported_reason(facts)) is not None:
                raise ValueError(f"{self.address} {unfit}")
            time, text = raise_for_errors(others, with_detail=True)
            self._clock_offset_ms = time_ms(time) - self._now_ms()
            since, known = Epoch.parse(text), self._epoch
            if since and since.process == facts["run_id"] and (known is None or since.ms >= known.ms):
                return since
            # Written only if the key is unchanged since the time was read, which must not be too early.
            since = Epoch(facts["run_id"], time_ms(time))
            *_, written = raise_for_errors(
                await execute(("MULTI",), ("SET", EPOCH_KEY, since.text()), ("EXEC",)), with_detail=True
            )
            if written is not None:
                return since


def time_ms(reply: list[bytes]) -> int:
    """Return the reply to `TIME` in milliseconds."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def raise_for_errors(replies: list[Any], with_detail: bool = False) -> list[Any]:
    """Return `replies`. Raises CoordinatorUnavailable, with Redis' text if `with_detail`, for an error."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise CoordinatorUnavailable(str(reply) if with_detail else None) from reply
    return replies


def _unsupported_reason(facts: dict[str, str]) -> str | None:
    """Return the reason why a Redis, by its own description, cannot be a coordinator; None if it can."""
    version = facts.get("redis_version", "0")
    if int(version.partition(".")[0]) < MIN_VERSION:
        return f"is version {version}; pysync needs {MIN_VERSION} or newer"
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
