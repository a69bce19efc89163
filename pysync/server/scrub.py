"""The background scrub: reads everything that is stored, slowly, and names what is damaged."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import orjson

from pysync._core import PanicException
from pysync.config import ScrubConfig
from pysync.coordinator import Coordinator
from pysync.errors import Unavailable
from pysync.migrate import SCRUBBED, Damage, Verifier
from pysync.store import Object, Store

LOOK_S: Final = 60.0
"""Seconds between two checks whether a scrub is due."""
ASK_S: Final = 1.0
"""Seconds between two checks of a scrubbing process whether it still leads."""
LEAST_BYTES: Final = 16_384
"""The least that an object counts as: a small one costs more than its bytes."""

log = logging.getLogger("pysync.server")


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
