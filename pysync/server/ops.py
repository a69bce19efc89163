"""What operators ask: is it alive, is it ready, how much, which version."""

from collections.abc import Callable

from aiohttp import web

from pysync import __version__
from pysync.errors import Unavailable
from pysync.server.answer import NO_STORE, Answer, json_answer
from pysync.server.metrics import Metrics
from pysync.server.routes import Match
from pysync.store import Store

PROBE_EVERY_MS = 1000
"""A probe writes to the disk: anybody may ask, and not more often than this."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Ops:
    """The operators' routes. `draining` is set when the service is about to stop."""

    def __init__(self, store: Store, metrics: Metrics, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._metrics = metrics
        self._now_ms = now_ms
        self._probed_at_ms = 0
        self.draining = False

    async def health(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /health`: the process answers."""
        return json_answer(200, {"ok": True, "ts": self._now_ms()}, NO_STORE)

    async def ready(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /health/ready`: the store can be read and written, and the service is not stopping."""
        if self.draining:
            raise Unavailable("Draining")
        if self._now_ms() - self._probed_at_ms > PROBE_EVERY_MS:
            await self._store.probe()
            self._probed_at_ms = self._now_ms()
        return json_answer(200, {"ok": True, "ts": self._now_ms()}, NO_STORE)

    async def metrics(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /metrics`, in Prometheus' text format."""
        return Answer(200, self._metrics.exposition(), NO_STORE, content_type=METRICS_TYPE)

    async def version(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /version`."""
        return json_answer(200, {"name": "pysync", "version": __version__, "protocol": "3.0"}, NO_STORE)
