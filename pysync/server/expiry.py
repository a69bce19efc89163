"""Deletes documents, logs and files that have outlived their `ttlMs`; reads never show them anyway."""

import asyncio
import logging
from collections.abc import Callable
from itertools import takewhile

from pysync._core import PanicException
from pysync.clock import is_settled
from pysync.config import Collection
from pysync.engine.append_log import LogRules, Logs
from pysync.engine.documents import Documents
from pysync.errors import PysyncError
from pysync.server.routes import Route, RouteTable

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
