"""What operators ask: is it alive, is it ready, how much, which version."""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from pysync import __version__
from pysync.coordinator import Coordinator
from pysync.errors import Unavailable
from pysync.server.answer import NO_STORE, Answer, json_answer
from pysync.server.metrics import Metrics
from pysync.server.routes import Match
from pysync.store import Store

PROBE_EVERY_S = 1.0
"""A probe writes to the disk: anybody may ask, and not more often than this."""

READY_S = 2.0
"""Seconds after which an unfinished probe means that the service is not ready."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("pysync.server")


class Ops:
    """The operators' routes. `draining` is set when the service is about to stop."""

    def __init__(
        self, store: Store, coordinator: Coordinator, metrics: Metrics, now_ms: Callable[[], int]
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._metrics = metrics
        self._now_ms = now_ms
        self._probing: asyncio.Task[Unavailable | None] | None = None
        self._probed_at = 0.0
        self.draining = False

    async def health(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /health`: the process answers."""
        return json_answer(200, {"ok": True, "ts": self._now_ms()}, NO_STORE)

    async def ready(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /health/ready`: what requests read and write can be, and the service is not stopping."""
        if self.draining:
            raise Unavailable("Draining")
        if (error := await self._probed()) is not None:
            raise error.with_traceback(None)
        return json_answer(200, {"ok": True, "ts": self._now_ms()}, NO_STORE)

    async def _probed(self) -> Unavailable | None:
        """The outcome of the last probe. At most one probe runs; it is not cancelled, since a flush cannot
        be."""
        loop = asyncio.get_running_loop()
        task = self._probing
        if task is None or (task.done() and loop.time() - self._probed_at > PROBE_EVERY_S):
            self._probed_at = loop.time()
            task = self._probing = loop.create_task(self._probe())
        await asyncio.wait({task}, timeout=max(0.0, self._probed_at + READY_S - loop.time()))
        return task.result() if task.done() else Unavailable(f"No answer from the disk in {READY_S:g} s")

    async def _probe(self) -> Unavailable | None:
        try:
            await self._store.probe()
            await self._coordinator.probe()
        except Unavailable as error:
            return error
        except Exception:
            log.exception("the probe for readiness failed")
            return Unavailable()
        return None

    async def metrics(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /metrics`, in Prometheus' text format."""
        return Answer(200, self._metrics.exposition(), NO_STORE, content_type=METRICS_TYPE)

    async def version(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /version`."""
        return json_answer(200, {"name": "pysync", "version": __version__, "protocol": "3.0"}, NO_STORE)
