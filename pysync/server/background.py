"""The background scrub: reads everything that is stored, slowly, and names what is damaged.

Deletes documents, logs and files that have outlived their `ttlMs`; reads never show them anyway.

Announces writes whose announcement was lost: their process ended, or the coordinator was out of reach.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Final

import orjson

from pysync._core import PanicException
from pysync.clock import is_settled
from pysync.config import Collection, ScrubConfig
from pysync.coordinator import Coordinator
from pysync.engine.append_log import LogRules, Logs
from pysync.engine.documents import Documents
from pysync.engine.outbox import Outbox
from pysync.errors import CoordinatorUnavailable, PysyncError, Unavailable
from pysync.migrate import SCRUBBED, Damage, Verifier
from pysync.server.router import Route, RouteTable
from pysync.store import Object, Store

SWEEP_EVERY_S = 60.0

log = logging.getLogger("pysync.server")


class Expiry:
    """The background sweep of one service, under way from the first collection that has a `ttlMs`, unless
    another process `sweeps`."""

    def __init__(
        self,
        documents: Documents,
        logs: Logs,
        routes: RouteTable,
        clock: Callable[[], int],
        *,
        sweeps: bool = True,
    ) -> None:
        self._clock = clock
        self._documents = documents
        self._logs = logs
        self._routes = routes
        self._expiring = [
            (method, route, route.rule.collection, route.rule.collection.ttl_ms)
            for method, route in routes
            if route.rule is not None
            and route.action in ("pull", "push", "append")
            and not route.alias
            and route.rule.collection.ttl_ms is not None
        ]
        sweeping = sweeps and bool(self._expiring)
        self._task = asyncio.get_running_loop().create_task(self._run()) if sweeping else None

    def close(self) -> None:
        """Sweep no more."""
        if self._task is not None:
            self._task.cancel()

    async def sweep(self) -> int:
        """Delete what has expired, and return the number of documents, logs and files. None within ten
        minutes of a step of the clock."""
        if not is_settled(self._clock):
            return 0
        return sum([await self._sweep_route(*expiring) for expiring in self._expiring])

    async def _sweep_route(self, method: str, route: Route, collection: Collection, ttl_ms: int) -> int:
        head = "/" + "/".join(route.template[: route.key_from])
        template = route.template[route.key_from :]
        is_kept = None
        if route.files is not None and route.files.template is not None:
            template, is_kept = route.files.template, route.files.keeps

        def is_owned(key: str) -> bool:
            if is_kept is not None:
                return is_kept(key)
            try:
                return self._routes.match(method, f"{head}/{key}").route is route
            except PysyncError:
                return False

        prefix = "/".join(takewhile(lambda part: not part.startswith("{"), template[:-1]))
        if collection.append_only is not None:
            return await self._logs.sweep(prefix, is_owned, LogRules.of(collection))
        return await self._documents.sweep(prefix, is_owned, ttl_ms)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self.sweep()
            except PysyncError as error:
                log.warning("failed to delete expired data: %s", error)
            except (Exception, PanicException):
                log.exception("failed to delete expired data; will retry")


HEAL_EVERY_S = 5.0
FIRST_TURNS = 2
"""The last of them comes when all that was there at the start has become old enough to be announced early."""


class Healing:
    """The background healer of one service. Every few seconds it settles what this process could not, and, if
    it `sweeps`, announces what nobody else can be expected to; in its first turns what an earlier process may
    have left behind. It rests where writes and their changes cannot come apart."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        sweeps: bool = True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._outbox = outbox
        self._sleep = sleep
        self._sweeps = sweeps
        self._task = asyncio.create_task(self._run()) if outbox.needs_healing else None

    def close(self) -> None:
        """Heal no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        first, was_told = FIRST_TURNS, False
        while True:
            try:
                await self._turn(early=first > 0)
            except CoordinatorUnavailable as error:
                if not was_told:
                    log.warning("changes of writes wait to be announced: %s", error.why)
                was_told = True
            else:
                first, was_told = first - 1, False
            await self._sleep(HEAL_EVERY_S)

    async def _turn(self, *, early: bool) -> None:
        if not self._sweeps:
            await self._outbox.settle()
        elif healed := await self._outbox.heal(early=early):
            log.info("announced %d writes that may have been announced by nobody", healed)


LOOK_S: Final = 60.0
"""Seconds between two checks whether a scrub is due."""
ASK_S: Final = 1.0
"""Seconds between two checks of a scrubbing process whether it still leads."""
LEAST_BYTES: Final = 16_384
"""The least that an object counts as: a small one costs more than its bytes."""


class Scrub:
    """Verifies the whole store at intervals, in one of all processes that share the coordinator. `tell` is
    called for each damaged object; the store no longer serves damaged files."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        config: ScrubConfig,
        tell: Callable[[Damage], None],
        now_ms: Callable[[], int],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._config = config
        self._tell = tell
        self._now_ms = now_ms
        self._sleep = sleep
        self._clock_s = clock_s
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Scrub whenever it is due, until `close`. Needs a running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Scrub no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def look(self) -> None:
        """Scrub if it is due and this process leads. Raises StoreUnavailable, CoordinatorUnavailable."""
        if await self._is_due() and await self._leads() and await self._is_due():
            try:
                await self.round()
            except _LeadsNoMore:
                log.info("another process continues the scrub")

    async def round(self) -> None:
        """Verify everything, and note when that was. Raises StoreUnavailable, CoordinatorUnavailable."""
        verifier = Verifier(self._store, self._tell, self._pace)
        self._asked_at = self._clock_s()
        async for listed in self._store.walk(""):
            await verifier.verify(listed.key)
        counted = verifier.verified
        note = {
            "finishedMs": self._now_ms(),
            "objects": counted.objects,
            "damaged": counted.damaged,
            "bytes": counted.bytes,
        }
        await self._store.put(SCRUBBED, orjson.dumps(note))
        log.info(
            "scrub finished: %d objects, %d damaged, %d bytes",
            counted.objects,
            counted.damaged,
            counted.bytes,
        )

    async def _run(self) -> None:
        while True:
            await self._sleep(LOOK_S)
            try:
                await self.look()
            except Unavailable as error:
                log.warning("the scrub is paused: %s", error.why)
            except (Exception, PanicException):
                log.exception("the scrub failed and will start again")

    async def _is_due(self) -> bool:
        found = await self._store.get(SCRUBBED)
        try:
            finished_ms = int(orjson.loads(found.body)["finishedMs"]) if isinstance(found, Object) else 0
        except (ValueError, KeyError, TypeError):
            finished_ms = 0
        # A note from the future was made by a clock that has been set back.
        return not 0 <= self._now_ms() - finished_ms < self._config.every_ms

    async def _leads(self) -> bool:
        self._asked_at = self._clock_s()
        return await self._coordinator.leads("scrub")

    async def _pace(self, size: int) -> None:
        """Let requests come first for as long as reading this many bytes may take."""
        await self._sleep(max(size, LEAST_BYTES) / self._config.max_bytes_per_second)
        if self._clock_s() - self._asked_at >= ASK_S and not await self._leads():
            raise _LeadsNoMore


class _LeadsNoMore(Exception):
    """Another process leads."""
