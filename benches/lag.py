"""A plugin that notes how long the event loop of its server was away: in `events.json` and `streams.json`.

`GET /pull/lag/gaps` answers `{"gaps_ms": [...], "cpu_ms": [...]}`, what was noted since it was asked before.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import orjson

from pysync.plugins import PluginContext, PluginRequest, PullResponse

INTERVAL_S: Final = 0.001
NOTED: Final = 1_000_000
"""The number of gaps that are noted at most, some 16 MB."""


class LoopLag:
    """Asks the loop to be called every millisecond, and notes how long it is from one call to the next: in a
    gap the loop was idle for a millisecond at the most, and busy with other things for the rest. `cpu_ms` is
    the processor's time that the loop's thread used meanwhile: not the time for which it waited for the
    interpreter, or for a processor that others had."""

    name = "lag"

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._gaps_ms, self._cpu_ms = array("d"), array("d")
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()
        self._tick()
        yield
        self._next.cancel()

    def _tick(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if len(self._gaps_ms) < NOTED:
            self._gaps_ms.append((now - self._last) * 1e3)
            self._cpu_ms.append((cpu - self._last_cpu) * 1e3)
        self._last, self._last_cpu = now, cpu
        self._next = self._loop.call_later(INTERVAL_S, self._tick)

    async def intercept_pull(self, request: PluginRequest) -> PullResponse | None:
        if request.collection != "lag":
            return None
        noted = {"gaps_ms": list(self._gaps_ms), "cpu_ms": list(self._cpu_ms)}
        self._gaps_ms, self._cpu_ms = array("d"), array("d")
        return PullResponse(orjson.dumps(noted))
