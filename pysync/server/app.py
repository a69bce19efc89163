"""A service: start reading here. `create_app` builds it: the parts of the process (`compose`), what one
configuration makes of them (`configured`), and background jobs (`jobs`).

A request passes through aiohttp -> `connection` -> `middleware` -> `router` -> a handler of `api` ->
`authorization` -> `engine` -> the store. `routes` defines which route leads to which handler.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Final

from pysync.auth.authentication import AdminTokens
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import RevocationRegistry
from pysync.changelog import Retention
from pysync.clock import SteadyClock, wall_clock_ms
from pysync.config import Config, ConfigError, Problem
from pysync.config.changes import changes
from pysync.coordinator import Coordinator, open_coordinator
from pysync.erase import Eraser, EraseReport, EraseRequest
from pysync.plugins import HOOK_TIMEOUT_S
from pysync.plugins.events import events_of
from pysync.plugins.hooks import Hooks
from pysync.plugins.loader import file_problems, load_plugins
from pysync.plugins.projection import projections_in, projections_of
from pysync.quotas.recount import Tracked, track_usage
from pysync.server.api.usage import usage_of_all
from pysync.server.authorization import client_ip
from pysync.server.compose import Process, build_engine, connection_limits
from pysync.server.configured import ConfiguredService
from pysync.server.http.connection import HttpServer
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.load import Load
from pysync.server.http.middleware import EntryPoint
from pysync.server.jobs import Jobs
from pysync.server.process.admin_pages import AdminPages, MakePage
from pysync.server.process.erasure import ERASE_PATH, erase_action
from pysync.server.process.inspection import Inspection, describe_collections
from pysync.server.process.metrics import Counters, MultiprocessCounters, snapshot
from pysync.server.process.readiness import Readiness
from pysync.server.process.watchdog import LoopMonitor
from pysync.server.sse import SSEHub, StreamLimits
from pysync.store import Store, ledger_of, open_store
from pysync.webhooks import Webhooks


@dataclass(frozen=True, slots=True)
class Worker:
    """The number of this worker process, from 1, and the folder in which workers share their counters."""

    number: int
    counters_dir: Path

    @property
    def runs_background_jobs(self) -> bool:
        """True for the one worker that runs the jobs that need one process only."""
        return self.number == 1


class App(AbstractAsyncContextManager["App"]):
    """A running service without a socket. `make_http_server` returns what serves requests, `close` stops
    it."""

    def __init__(
        self,
        config: Config,
        tracked: Tracked,
        coordinator: Coordinator,
        clock: SteadyClock,
        counters: Counters,
        worker: Worker | None,
        plugins: Sequence[object],
        hook_s: float,
    ) -> None:
        self.store = store = tracked.store
        self._coordinator = coordinator
        self._shared_counters = (
            None if worker is None else MultiprocessCounters(counters, worker.counters_dir, worker.number)
        )
        self._hooks = Hooks(
            plugins,
            partial(counters.count, "pysync_plugin_failures"),
            hook_s,
            partial(counters.count, "pysync_plugin_rejections"),
        )
        self.readiness = readiness = Readiness([store.probe, coordinator.probe])
        self._snapshot: Final = partial(
            snapshot, counters, self._shared_counters, config.store.url, lambda: readiness.is_ready
        )
        self.loop_monitor = LoopMonitor(counters.observe)
        self.engine = build_engine(
            config,
            store,
            coordinator,
            clock,
            counters,
            lambda: self.current.owners,
            sweeps=worker is None or worker.runs_background_jobs,
        )
        self.load = Load(counters=counters)
        self.in_flight = BytesInFlight(inf, partial(client_ip, 0), counters)
        self.subscribers = SSEHub(counters, StreamLimits(0, 0))
        self._process = Process(
            engine=self.engine,
            clock=clock,
            plugins=plugins,
            hooks=self._hooks,
            counters=counters,
            readiness=self.readiness,
            loop_monitor=self.loop_monitor,
            load=self.load,
            in_flight=self.in_flight,
            rate_limiter=RateLimiter(coordinator, clock),
            revocations=RevocationRegistry(store, clock),
            streams=self.subscribers,
            accounts=tracked.accounts,
            render_metrics=self.render_metrics,
        )
        self.current = ConfiguredService(config, self._process)
        self._entry_point = EntryPoint(self.current.middleware)
        self.make_http_server: Final = partial(HttpServer, self._entry_point.handle, self.load)
        """Returns a server of the requests of this service, which listens once it is started."""
        self.eraser = Eraser(self.engine, projections_in(plugins), self._hooks.stored_files)
        ledger = ledger_of(store)
        inspection = Inspection(self.engine, lambda: self.current.owners, self._snapshot)
        on_loop: dict[str, MakePage] = {
            "/admin/changes": inspection.changes,
            "/admin/object": inspection.object,
            "/admin/damage": inspection.damage,
        }
        if ledger is not None:
            on_loop["/admin/usage"] = lambda query: usage_of_all(ledger)
        self.admin_pages = AdminPages(
            self.readiness,
            self.render_metrics,
            self._snapshot,
            lambda: self.current.openapi.complete(),
            clock.wall_ms,
            self.loop_monitor,
            None if worker is None else worker.number,
            lambda: describe_collections(self.current.config),
            on_loop,
            () if config.server.admin is None else config.server.admin.hosts,
        )
        self.admin_pages.actions[ERASE_PATH] = erase_action(self._erase)
        self.webhooks = Webhooks(self.engine)
        self.usage_count = tracked.counter
        self.jobs = Jobs(self._process, self.current, self.eraser, tracked.counter)
        self._hand_over()

    async def open(self) -> None:
        """Enter the plugins' lifespans and start the background jobs. Raises ValueError if a plugin does not
        start."""
        for job in self.jobs.all:
            job.start()
        await self._hooks.open(self.engine)
        await self.webhooks.update(self.engine.config)

    def prepare(self, config: Config) -> ConfiguredService:
        """Return what another configuration makes of this process, for `apply`. Nothing changes. Any thread
        may call this. Raises ConfigError with all problems, among them each changed member that needs a
        restart, and ValueError."""
        problems = [
            Problem(change.path, "has changed, and needs a restart")
            for change in changes(self.current.config, config)
            if change.needs_restart
        ]
        named = [(f"plugin {getattr(plugin, 'name', '')}", plugin) for plugin in self._process.plugins]
        problems += file_problems(config, named)
        if problems:
            raise ConfigError(problems)
        return ConfiguredService(config, self._process)

    async def apply(self, configured: ConfiguredService) -> None:
        """Answer requests with another configuration from now on. Those under way end with the one with which
        they began, and streams end: their clients resume with the new one, without a gap. Return once
        webhooks follow it too."""
        before, self.current = self.current, configured
        self._hand_over()
        self.subscribers.retire(before.stream_source)
        await self.webhooks.update(configured.config)

    def _hand_over(self) -> None:
        """Give the parts of the process the configuration in force."""
        process, current = self._process, self.current
        config, server = current.config, current.config.server
        self.engine.config = config
        if process.accounts is not None:
            process.accounts.use(config)
        process.revocations.use(current.trusted, current.ownership.owns_data)
        self.load.max_wait_s = server.max_queue_ms / 1000
        self.load.max_connections, self.subscribers.limits = connection_limits(config)
        self.in_flight.limit(server.max_bytes_in_flight, current.authorizer.client_ip)
        self.admin_pages.admin_tokens = AdminTokens(config.auth.admin_token)
        self.jobs.use(current)
        self._entry_point.middleware = current.middleware

    async def _erase(self, request: EraseRequest, is_dry_run: bool) -> EraseReport:
        return await (self.eraser.dry_run(request) if is_dry_run else self.eraser.run(request))

    def render_metrics(self) -> bytes:
        """Return the metrics in the Prometheus text format, and probe for the next ones. Any thread may call
        this."""
        from pysync.server.process.exposition import (
            Metrics,  # 1 MB that a service without scrapes does not need
        )

        with suppress(RuntimeError):  # the loop is closed
            self.loop_monitor.loop.call_soon_threadsafe(self.readiness.begin_check)
        return Metrics(self._snapshot).render()

    def drain(self) -> None:
        """Begin a graceful shutdown: fail readiness checks, close change streams, and send `Connection:
        close` with every response."""
        self.readiness.draining = self.load.draining = True
        self.subscribers.drain()

    async def close(self) -> None:
        """Leave the plugins' lifespans, finish pending writes, and close the store and the coordinator."""
        await self.webhooks.close()
        await self._hooks.close()
        for job in reversed(self.jobs.all):
            await job.close()
        self.subscribers.close()
        await self.engine.logs.close()
        await self._process.rate_limiter.close()
        await self._coordinator.close()
        await self.store.close()
        if self._shared_counters is not None:
            self._shared_counters.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def create_app(
    config: Config,
    store: Store | None = None,
    coordinator: Coordinator | None = None,
    plugins: Sequence[object] = (),
    *,
    now_ms: Callable[[], int] = wall_clock_ms,
    worker: Worker | None = None,
    hook_s: float = HOOK_TIMEOUT_S,
) -> App:
    """Return the service of `config`, with the store and coordinator that it names unless others are given.
    `worker` is given if it is one of several processes. The service has `plugins` and, after them, those that
    `config` names; their hooks may take `hook_s` seconds for one request.

    Raises ValueError if a store or coordinator does not exist or a plugin does not start, StoreUnavailable or
    CoordinatorUnavailable if one cannot be opened, and ConfigError with all errors of the plugins.
    """
    clock, counters = SteadyClock(now_ms), Counters()
    hooked = load_plugins(config, (*plugins, *events_of(config), *projections_of(config)))
    async with AsyncExitStack() as opened:
        url = config.store.url
        retention = Retention(config.changes.max_count, config.changes.max_age_ms, config.changes.removals_ms)
        if store is None:
            store = await open_store(
                config.store,
                clock,
                shared=config.is_multi_process,
                retention=retention,
                observe=counters.observe,
            )
            opened.push_async_callback(store.close)
        if coordinator is None:
            folder = url.removeprefix("file:") if url.startswith("file:") else None
            coordinator = await open_coordinator(
                config.effective_coordinator, folder, clock, retention, counters.observe
            )
            opened.push_async_callback(coordinator.close)
        tracked = await track_usage(config, store, coordinator, hooked, clock)
        app = App(config, tracked, coordinator, clock, counters, worker, hooked, hook_s)
        opened.pop_all()
        opened.push_async_callback(app.close)
        await app.open()
        opened.pop_all()
        return app
