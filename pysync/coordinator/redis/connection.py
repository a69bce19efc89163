"""One connection to a Redis server, which many callers share and which reconnects by itself.

Commands that wait at one moment are sent together, and the next ones once all replies have arrived, so that a
hundred concurrent requests cost a few round trips. The queue is bounded, and empty while Redis is
unreachable.
"""

import asyncio
import itertools
import logging
import random as random_module
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from hiredis import pack_command
from redis.asyncio import Connection
from redis.asyncio.connection import parse_url
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from pysync.concurrency import MAX_WAITING
from pysync.errors import CoordinatorUnavailable
from pysync.model import Observe, unobserved

log = logging.getLogger(__name__)

Command = tuple[str | bytes | int, ...]
Execute = Callable[..., Awaitable[list[Any]]]
"""Takes commands and returns their replies, as RESP2 types them. A reply that is an error is a value, too."""

ReplyError = ResponseError
"""The reply of Redis to a command that it rejects. It is returned, not raised."""

TIMEOUT_S: Final = 2.0
"""Limit for connecting and for replies, longer than the pause of a Redis that saves its data."""

MIN_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
"""Seconds between attempts to reconnect: doubled up to the maximum, less up to a half at random."""

_is_url = re.compile(
    r"redis://[^/?#]+(/[0-9]*)?|rediss://[^/?#]+(/[0-9]*)?(\?(&?ssl_(ca_certs|certfile|keyfile)=[^&#]+)+)?"
).fullmatch


class _Request(NamedTuple):
    commands: tuple[Command, ...]
    future: asyncio.Future[list[Any]]


class PipelinedConnection:
    """Commands to one server. `on_connect` is called on each new connection before any command; an error that
    it raises keeps the connection from being used.

    A command whose reply is lost is not sent again: its caller gets `CoordinatorUnavailable` and must assume
    either outcome. Commands that were not sent yet wait for one attempt to reconnect. If it fails they are
    rejected, and all others at once, until an attempt succeeds.
    """

    def __init__(
        self,
        connection: Connection,
        on_connect: Callable[[Execute], Awaitable[None]],
        jitter: Callable[[], float] = random_module.random,
        log: logging.Logger = log,
        observe: Observe = unobserved,
    ) -> None:
        self._connection = connection
        self._on_connect = on_connect
        self._jitter = jitter
        self._log = log
        self._observe = observe
        self._waiting: list[_Request] = []
        self._sent: list[_Request] = []
        self._wake = asyncio.Event()
        self._fault: str | None = "not connected yet"
        self._is_stale = False
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect. Raises what `on_connect` does, and CoordinatorUnavailable with the reason."""
        try:
            await self._connect()
        except (RedisError, OSError) as error:
            await self._disconnect()
            raise CoordinatorUnavailable(_reason(error)) from error
        except BaseException:
            await self._disconnect()
            raise
        self._fault = None
        self._task = asyncio.create_task(self._run())

    def execute(self, *commands: Command) -> asyncio.Future[list[Any]]:
        """Return the replies to `commands`, which are sent together, but not in a transaction. Raises
        CoordinatorUnavailable, immediately if too many callers wait or the server is unreachable. Cancelling
        the future does not cancel the commands."""
        if self._fault is not None or len(self._waiting) >= MAX_WAITING:
            raise CoordinatorUnavailable
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(commands, future))
        self._wake.set()
        return future

    def reconnect(self) -> None:
        """Reconnect before anything else is sent."""
        self._is_stale = True
        self._wake.set()

    async def close(self) -> None:
        """Reject all waiting callers and disconnect."""
        self._fault = "closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._reject(self._sent)
        self._reject(self._waiting)
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            if self._is_stale or not await self._is_connected():
                await self._reconnect()
            self._wake.clear()
            self._sent, self._waiting = self._waiting, []
            if self._sent:
                await self._execute_group(self._sent)

    async def _execute_group(self, group: list[_Request]) -> None:
        since = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                replies = await self._execute_raw(
                    *(command for request in group for command in request.commands)
                )
        except Exception as error:
            self._reject(group, error)
            if isinstance(error, TimeoutError):
                # The server hangs, so the callers that wait by now would time out, too.
                self._mark_down(error)
            self.reconnect()
            return
        finally:
            self._observe("pysync_coordinator_seconds", time.monotonic() - since, "round_trip")
        rest = iter(replies)
        for request in group:
            own = [next(rest) for _ in request.commands]
            if not request.future.done():
                request.future.set_result(own)
        if any(isinstance(reply, ReadOnlyError) for reply in replies):
            # The server has become a replica. The address may lead to its successor.
            self.reconnect()

    async def _execute_raw(self, *commands: Command) -> list[Any]:
        """Do as `Execute` says, on the present connection. Raises RedisError if it breaks."""
        # The types of `pack_command` are too narrow.
        packed = b"".join(pack_command(command) for command in commands)  # type: ignore[arg-type]
        await self._connection.send_packed_command(packed, check_health=False)
        return [await self._read() for _ in commands]

    async def _read(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    async def _is_connected(self) -> bool:
        """Return True if the connection can take commands. A connection that was closed while idle is noticed
        here, before a command is sent whose outcome would be unknown."""
        try:
            return self._connection.is_connected and not await self._connection.can_read()
        except RedisError:
            return False

    async def _connect(self) -> None:
        await self._disconnect()
        async with asyncio.timeout(TIMEOUT_S):
            await self._connection.connect()  # type: ignore[no-untyped-call]
            await self._on_connect(self._execute_raw)
        self._is_stale = False

    async def _disconnect(self) -> None:
        await self._connection.disconnect(nowait=True)

    async def _reconnect(self) -> None:
        """Try to connect until it succeeds."""
        for failures in itertools.count():
            try:
                await self._connect()
            except Exception as error:
                self._mark_down(error)
            else:
                break
            wait_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(failures, 10))
            await asyncio.sleep(wait_s * (1 - self._jitter() / 2))
        if self._fault is not None:
            self._log.warning("redis is back")
            self._fault = None

    def _mark_down(self, error: Exception) -> None:
        """Reject the waiting callers, and all others until an attempt to reconnect succeeds."""
        fault = _reason(error)
        if fault != self._fault:
            self._log.error("redis cannot be used: %s", fault)
        self._fault = fault
        self._reject(self._waiting, error)
        self._waiting = []

    def _reject(self, requests: list[_Request], error: Exception | None = None) -> None:
        for request in requests:
            if not request.future.done():
                failure = CoordinatorUnavailable()
                failure.__cause__ = error
                request.future.set_exception(failure)


def make_connection(url: str) -> Connection:
    """Return a connection to `url`, not opened yet. Raises ValueError."""
    options: dict[str, Any] = {}
    if _is_url(url):
        # Its errors would quote part of an unquoted password, mistaken for a port.
        with suppress(ValueError):
            options = {"host": "localhost", **parse_url(url)}
    if not options:
        raise ValueError(
            "coordinator: must be redis://[[user]:password@]host[:port][/number], or rediss:// the same and "
            "perhaps ?ssl_ca_certs=FILE; user and password quoted as in any URL"
        )
    kind: type[Connection] = options.pop("connection_class", Connection)
    # RESP2 needs no greeting. `PipelinedConnection` implements timeouts and retries.
    return kind(**options, protocol=2, driver_info=None, socket_timeout=None, socket_connect_timeout=None)


def _reason(error: Exception) -> str:
    """Return the cause for the log. The library's texts contain hosts, but no passwords."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    return str(error) or type(error).__name__
