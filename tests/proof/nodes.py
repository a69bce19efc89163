"""Servers that are killed while they serve: workers on one folder, machines on one bucket and one Redis."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from components import RedisServer, S3Server
from support.injected_faults import s3_error
from support.s3_fault_proxy import FaultProxy

from proof.history import Kind
from proof.service import COLLECTIONS, EVENTS
from pysync.coordinator import PreparedWrite
from pysync.coordinator.redis.coordinator import RedisCoordinator

WORKERS: Final = 4
MACHINES: Final = 3
CHAOS: Final = {"abort": 0.02, "lose_reply": 0.03, "throttle": 0.02, "delay": 0.05, "delay_s": 0.2}
"""The shares of the requests to S3 that fail."""
ODD: Final = 0.01
"""The share of the puts that is done and answered 500, and of those that is not done and answered 409."""
START_LIMIT_S: Final = 600.0
"""Passes only if a server hangs: on a busy machine one starts for a minute."""
STARTS: Final = 5
"""Of a server whose store may not answer just then: whatever supervises it starts it again."""
STALL_S: Final = 3.0
STOP_LIMIT_S: Final = 600.0
MAX_INTENTS: Final = 10_000
"""More than there are when the clients have ended."""


class Server:
    """A `pysync serve` with a configuration of its own, on a free port; what it logs is in `folder`."""

    def __init__(self, name: str, folder: Path, members: dict[str, Any]) -> None:
        self.address: tuple[str, int] | None = None
        self._settings = folder / f"{name}.json"
        settings = {"version": 1, "collections": COLLECTIONS, "events": EVENTS, **members}
        self._settings.write_text(json.dumps(settings))
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises RuntimeError where it does not, however often it is started."""
        for _ in range(STARTS):
            if await self._listens():
                return
        raise RuntimeError(f"a node does not start: {self._log.read_text()[-2000:]}")

    async def _listens(self) -> bool:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pysync", "serve", "--config", str(self._settings), "--port", "0",
                stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(START_LIMIT_S):
            first = (await self._process.stdout.readline()).decode()
        if " at http://" not in first:
            await self._process.wait()
            return False
        url = urlsplit(first.split(" at ")[1].strip())
        assert url.hostname is not None
        assert url.port is not None
        self.address = url.hostname, url.port
        return True

    async def kill(self) -> None:
        """End it with SIGKILL. Nothing where it has ended."""
        self.address = None
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """End it with SIGTERM. Raises RuntimeError where it does not end in good order."""
        assert self._process is not None
        self.address = None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_LIMIT_S):
            status = await self._process.wait()
        if status != 0:
            raise RuntimeError(f"a node ended with {status}: {self._log.read_text()[-2000:]}")

    def workers(self) -> set[int]:
        """The ids of its processes that serve."""
        assert self._process is not None
        pid = self._process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


Disturb = Callable[[Random], Awaitable[tuple[Kind, int]]]
"""Returns when all serve again: what happened, to which server."""


class Nodes(Protocol):
    """Servers that make one service together."""

    servers: list[Server]
    is_ordered: bool
    """Whether batches of events come to light in the order of their names."""
    remembers: bool
    """Whether a feed of changes begins with the oldest and never forgets."""

    def faults(self) -> Counter[str]:
        """How often the way to the store has failed, by fault."""

    def disturbances(self) -> Sequence[Disturb]:
        """What befalls them in a run, in this order."""

    async def flush(self) -> None:
        """Return when all that was written is announced."""


class Workers:
    """One server with many workers."""

    is_ordered = True
    remembers = True

    def __init__(self, server: Server) -> None:
        self.servers = [server]

    def faults(self) -> Counter[str]:
        return Counter()

    def disturbances(self) -> Sequence[Disturb]:
        return self._kill, self._kill

    async def flush(self) -> None:
        """A write and its change are one here."""

    async def _kill(self, random: Random) -> tuple[Kind, int]:
        (server,) = self.servers
        before = server.workers()
        killed = random.choice(sorted(before))
        os.kill(killed, signal.SIGKILL)
        await _until(lambda: len(server.workers() - {killed}) == len(before))
        return "kill", 0


class Machines:
    """Servers that have nothing in common but what they are configured with, each behind a proxy."""

    is_ordered = False
    remembers = False

    def __init__(
        self, servers: list[Server], proxies: list[FaultProxy], redis: RedisServer, *, forgets: bool
    ) -> None:
        self.servers = servers
        self._forgets = forgets
        self._proxies = proxies
        self._redis = redis

    def faults(self) -> Counter[str]:
        return sum((proxy.met for proxy in self._proxies), Counter())

    def disturbances(self) -> Sequence[Disturb]:
        return self._kill, self._lose if self._forgets else self._stall, self._kill

    async def flush(self) -> None:
        """Start a server anew: it announces what nobody has."""
        redis = await RedisCoordinator.connect(self._redis.url)
        try:
            before, left = await redis.last_id(), await redis.prepared(MAX_INTENTS)
            if left:
                await self.servers[0].kill()
                await self.servers[0].start()
            async with asyncio.timeout(START_LIMIT_S):
                while not await _are_announced(left, before, redis):
                    await redis.wait_for_change(await redis.last_id())
        finally:
            await redis.close()

    async def _kill(self, random: Random) -> tuple[Kind, int]:
        node = random.randrange(len(self.servers))
        await self.servers[node].kill()
        await self.servers[node].start()
        return "kill", node

    async def _stall(self, random: Random) -> tuple[Kind, int]:
        """Redis stands still, for longer than anybody waits for it, and then does what it was asked."""
        self._redis.pause()
        await asyncio.sleep(STALL_S)
        self._redis.resume()
        return "stall", -1

    async def _lose(self, random: Random) -> tuple[Kind, int]:
        """Redis dies, and comes back with nothing."""
        self._redis.kill()
        await asyncio.to_thread(self._redis.start)
        return "loss", -1


@asynccontextmanager
async def workers_on_a_folder(folder: Path) -> AsyncIterator[Nodes]:
    """Four workers on one machine, with a store in `folder`."""
    members = {"store": f"file:{folder}/data", "server": {"workers": WORKERS}}
    async with _serving([Server("workers", folder, members)]) as servers:
        yield Workers(servers[0])


@asynccontextmanager
async def machines_on_s3(
    folder: Path, s3: S3Server, redis: RedisServer, random: Random, *, forgets: bool = False
) -> AsyncIterator[Nodes]:
    """Three servers on one bucket and one Redis; what is between each of them and S3 fails now and then, as
    `random` has it, and Redis stands still or `forgets`: then limits do not hold, nor does what an
    Idempotency-Key promises. `folder` holds what they log."""
    prefix = f"proof-{random.randbytes(4).hex()}"
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(s3.endpoint)) for _ in range(MACHINES)]
        apart = []
        for n, proxy in enumerate(proxies):
            _unsettle(proxy, Random(random.random()))
            store = {
                "url": f"s3://{s3.bucket}/{prefix}",
                "endpoint": proxy.url,
                "region": s3.region,
                "forcePathStyle": True,
                "accessKeyId": s3.access_key_id,
                "secretAccessKey": s3.secret_access_key,
            }
            apart.append(Server(f"machine-{n}", folder, {"store": store, "coordinator": redis.url}))
        yield Machines(await stack.enter_async_context(_serving(apart)), proxies, redis, forgets=forgets)


def _unsettle(proxy: FaultProxy, random: Random) -> None:
    """Have the proxy fail now and then, in every way in which S3 does."""

    def odd(_: object) -> bool:
        return random.random() < ODD

    proxy.chaos(random, **CHAOS)
    proxy.respond("PUT", status=500, body=s3_error("InternalError"), forwarded=True, when=odd, times=None)
    proxy.respond("PUT", status=409, body=s3_error("ConditionalRequestConflict"), when=odd, times=None)


@asynccontextmanager
async def _serving(servers: list[Server]) -> AsyncIterator[list[Server]]:
    """The servers, started; stopped when all went well, and in any case ended."""
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.kill)
        await asyncio.gather(*(server.start() for server in servers))
        yield servers
        await asyncio.gather(*(server.stop() for server in servers))


async def _are_announced(intents: Sequence[PreparedWrite], before: str, redis: RedisCoordinator) -> bool:
    """Whether these have ended, or been announced since the id `before`."""
    page = await redis.read(before, MAX_INTENTS)
    assert page is not None
    texts = {change.text for _, change in page}
    open_ = {intent.name for intent in await redis.prepared(MAX_INTENTS)}
    return all(
        intent.name not in open_ or texts.issuperset(change.text for change in intent.changes)
        for intent in intents
    )


async def _until(holds: Callable[[], bool]) -> None:
    """Returns when it holds. Raises TimeoutError."""
    deadline = time.monotonic() + START_LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.02)
