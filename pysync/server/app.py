"""The composition of a service: start reading here. `create_app` builds all components from the
configuration.

A request passes through aiohttp -> `connection` -> `middleware` -> `router` -> a handler of `handlers` ->
`authorization` -> `engine` -> the store. `routes` defines which route leads to which handler.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from pysync.auth.authentication import Authenticator, SignatureBatch
from pysync.auth.certificates import user_id
from pysync.auth.policy import PolicyTable
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import Ownership, RevocationRegistry
from pysync.auth.spaces import Spaces
from pysync.changelog import Retention
from pysync.clock import SteadyClock, wall_clock_ms
from pysync.concurrency import every
from pysync.config import Config
from pysync.coordinator import Coordinator, open_coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.engine.subscriptions import ChangeDispatcher
from pysync.erase import Eraser, EraseReport, EraseRequest
from pysync.migrate import Damage
from pysync.plugins import HOOK_TIMEOUT_S, PluginContext
from pysync.plugins.events import events_of
from pysync.plugins.hooks import Hooks, request_id
from pysync.plugins.loader import load_plugins
from pysync.plugins.projection import projections_in, projections_of
from pysync.quotas.recount import Tracked, track_usage
from pysync.server.admin import AdminPages
from pysync.server.authorization import Authorizer
from pysync.server.background import HistorySweeper, OutboxRelay, Scrubber, resume_erasure
from pysync.server.erasure import ErasureEndpoint
from pysync.server.expiry import TtlSweeper
from pysync.server.handlers import Service
from pysync.server.handlers.health import ServiceHandlers
from pysync.server.handlers.manifest import CallerResolver
from pysync.server.handlers.plugin_hooks import ProjectionWaiter
from pysync.server.handlers.usage import usage_of_all
from pysync.server.http_server import HttpServer
from pysync.server.in_flight import BytesInFlight
from pysync.server.load import Load, connection_limit
from pysync.server.logs import RequestLog
from pysync.server.metrics import Counters, MultiprocessCounters
from pysync.server.middleware import Middleware
from pysync.server.openapi import OpenApi
from pysync.server.readiness import PROBE_EVERY_S, CoordinatorMonitor, Readiness
from pysync.server.router import Router
from pysync.server.routes import RouteBuilder, key_owner_tables, owning_collections
from pysync.server.sse import SSEHub, StreamLimits
from pysync.server.stream_authorization import KeyIndex, StreamAuthorizer
from pysync.server.write_deadline import WriteDeadline
from pysync.store import Store, ledger_of, open_store

if TYPE_CHECKING:
    from pysync.server.backup_process import BackupProcess

log = logging.getLogger("pysync.server")

COUNT_EVERY_S: Final = 5.0
"""Seconds between two checks whether something stored is not counted."""


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
        store: Store,
        coordinator: Coordinator,
        clock: SteadyClock,
        worker: Worker | None = None,
        plugins: Sequence[object] = (),
        hook_s: float = HOOK_TIMEOUT_S,
        tracked: Tracked | None = None,
    ) -> None:
        self.store = store
        self._coordinator = coordinator
        server = config.server
        counters = Counters()
        self._shared_counters = (
            None if worker is None else MultiprocessCounters(counters, worker.counters_dir, worker.number)
        )
        snapshot = counters.copy if self._shared_counters is None else self._shared_counters.total
        self._snapshot: Final = snapshot
        self.readiness = Readiness([store.probe, coordinator.probe])
        self._hooks = hooks = Hooks(
            plugins,
            partial(counters.count, "pysync_plugin_failures"),
            hook_s,
            partial(counters.count, "pysync_plugin_rejections"),
        )
        outbox = outbox_of(store, coordinator)
        policies = PolicyTable(config, uses_plugin_roles=hooks.has_authorize_hooks)
        tables = key_owner_tables(policies)
        corruption = CorruptionReporter(counters.count, partial(owning_collections, tables))
        documents = Documents(store, coordinator, clock, outbox, corruption)
        files = Files(store, clock, outbox, corruption)
        self._logs = AppendLogs(store, coordinator, clock, outbox=outbox, corruption=corruption)
        ownership = Ownership(config, store)
        trusted = {*map(user_id, config.every_trusted_issuer), *config.every_named_identity}
        revocations = RevocationRegistry(store, clock, trusted, ownership.owns_data)
        validate_certificate = hooks.validate_certificate if hooks.has_certificate_hooks else None
        descriptors = server.max_connections + server.max_streams
        connections = connection_limit(descriptors) * server.max_connections // descriptors
        self.load = Load(server.max_queue_ms / 1000, connections, counters)
        authenticator = Authenticator(
            config,
            coordinator,
            revocations,
            ownership.owns_data,
            clock.wall_ms,
            SignatureBatch(self.load.others_follow),
            validate_certificate,
        )
        request_log = RequestLog(
            request_id, logs_refusals=server.log_refusals, logs_requests=server.access_log
        )
        self._rate_limiter = rate_limiter = RateLimiter(coordinator, clock)
        authorizer = Authorizer(
            authenticator,
            rate_limiter,
            Spaces(config.auth.spaces, store, corruption),
            hooks,
            request_log,
            server.mount_path,
            server.trusted_proxy_hops,
        )
        self.in_flight = BytesInFlight(server.max_bytes_in_flight, authorizer.client_ip, counters)
        service = Service(
            config=config,
            store=store,
            coordinator=coordinator,
            documents=documents,
            logs=self._logs,
            files=files,
            outbox=outbox,
            authenticator=authenticator,
            authorizer=authorizer,
            rate_limiter=rate_limiter,
            revocations=revocations,
            hooks=hooks,
            corruption=corruption,
            in_flight=self.in_flight,
            key_owners=tables,
            write_deadline=WriteDeadline(
                server.write_timeout_ms / 1000,
                partial(counters.count, "pysync_write_timeouts"),
                cancels_uploads=not store.is_remote,
            ),
        )
        rules = policies.pulls()
        stream_authorizer = StreamAuthorizer(service, rules, clock.wall_ms)
        dispatcher = ChangeDispatcher(
            outbox.log, KeyIndex(rules, hooks.stored_files), stream_authorizer.authorize
        )
        limits = StreamLimits(connection_limit(descriptors) - connections, server.max_streams_per_caller)
        self.subscribers = SSEHub(dispatcher, stream_authorizer, counters, config.changes.max_resumed, limits)
        routes = Router()
        self.openapi = openapi = OpenApi(config, routes, policies, CallerResolver(config, authorizer))
        RouteBuilder(
            service=service,
            policies=policies,
            routes=routes,
            projection_waiter=ProjectionWaiter(config, plugins, outbox, counters),
            stream_authorizer=stream_authorizer,
            sse_hub=self.subscribers,
            ops=ServiceHandlers(self.readiness, self.render_metrics, authorizer, clock.wall_ms),
            openapi=openapi,
            accounts=None if tracked is None else tracked.accounts,
        ).add_all()
        request_id_var = request_id if hooks.has_hooks or request_log.needs_id else None
        ledger = ledger_of(store)
        self.admin_pages = AdminPages(
            self.readiness,
            self.render_metrics,
            snapshot,
            openapi.complete,
            clock.wall_ms,
            None if worker is None else worker.number,
            None if ledger is None else partial(usage_of_all, ledger),
            ErasureEndpoint(self._erase),
            config.auth.admin_token,
            () if server.admin is None else server.admin.hosts,
        )
        self._middleware = Middleware(
            routes,
            counters,
            origins=server.cors.origins,
            hosts=server.public_hosts,
            request_id_var=request_id_var,
            request_log=request_log,
            load=self.load,
            in_flight=self.in_flight,
        )
        self.make_http_server: Final = partial(
            HttpServer,
            self._middleware.handle,
            self.load,
        )
        """Returns a server of the requests of this service, which listens once it is started."""
        sweeps = worker is None or worker.runs_background_jobs
        self.ttl_sweeper = TtlSweeper(store, documents, self._logs, routes, clock, sweeps=sweeps)
        kept = [found for _, _, found in config.each_collection()]
        self.history_sweeper = HistorySweeper(store, documents.history, kept, tables, clock, sweeps=sweeps)
        self._outbox_relay = OutboxRelay(outbox, sweeps=sweeps)
        loop = asyncio.get_running_loop()
        self._revocation_sweeper = (
            loop.create_task(revocations.delete_expired_periodically()) if sweeps else None
        )

        def report(damage: Damage) -> None:
            corruption.report(damage.kind, damage.key, damage.why, "scrub")

        repair = None
        self._backup: BackupProcess | None = None
        if config.backup is not None and config.store.url != "memory:":
            from pysync.server import backup_process  # most services do without

            repair = partial(backup_process.repair_from, config.backup, store)
            self._backup = backup_process.start(config.store, config.backup, coordinator, counters, clock)
        self.scrubber: Scrubber | None = None
        if config.scrub is not False and config.store.url != "memory:":
            self.scrubber = Scrubber(store, coordinator, config.scrub, report, clock, repair=repair)
            self.scrubber.start()
        monitor = CoordinatorMonitor(coordinator.diagnose, self.readiness, counters.gauges)
        monitoring = every(PROBE_EVERY_S, monitor.check, "cannot query the coordinator", log)
        self._monitoring = loop.create_task(monitoring)
        self.usage_count = None if tracked is None else tracked.counter
        self._counting: asyncio.Task[None] | None = None
        if self.usage_count is not None and (sweeps or store.transactional is None):
            count = self.usage_count.run_if_needed
            counting = every(COUNT_EVERY_S, count, "failed to count what is stored", log)
            self._counting = loop.create_task(counting)
        self._services = PluginContext(
            config=config,
            store=store,
            coordinator=coordinator,
            outbox=outbox,
            documents=documents,
            files=files,
            logs=self._logs,
            now_ms=clock,
            sweeps=sweeps,
            count=counters.count,
            corruption=corruption,
            set_lag=counters.set_lag,
        )
        self.eraser = Eraser(self._services, projections_in(plugins), hooks.stored_files)
        self.erasure = loop.create_task(resume_erasure(self.eraser)) if sweeps else None

    async def open(self) -> None:
        """Enter the plugins' lifespans. Raises ValueError if one of them fails."""
        await self._hooks.open(self._services)

    async def _erase(self, request: EraseRequest, is_dry_run: bool) -> EraseReport:
        return await (self.eraser.dry_run(request) if is_dry_run else self.eraser.run(request))

    def render_metrics(self) -> bytes:
        """Return the metrics in the Prometheus text format. Any thread may call this."""
        from pysync.server.exposition import Metrics  # 1 MB that a service without scrapes does not need

        return Metrics(self._snapshot).render()

    def drain(self) -> None:
        """Begin a graceful shutdown: fail readiness checks, close change streams, and send `Connection:
        close` with every response."""
        self.readiness.draining = True
        self._middleware.draining = True
        self.subscribers.drain()

    async def close(self) -> None:
        """Leave the plugins' lifespans, finish pending writes, and close the store and the coordinator."""
        await self._hooks.close()
        self.ttl_sweeper.close()
        self.history_sweeper.close()
        if self._revocation_sweeper is not None:
            self._revocation_sweeper.cancel()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.wait({self._counting})
        self._outbox_relay.close()
        self._monitoring.cancel()
        await asyncio.wait({self._monitoring})
        if self.erasure is not None:
            self.erasure.cancel()
            await asyncio.wait({self.erasure})
        if self.scrubber is not None:
            await self.scrubber.close()
        if self._backup is not None:
            await self._backup.close()
        self.subscribers.close()
        await self._logs.close()
        await self._rate_limiter.close()
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
    clock = SteadyClock(now_ms)
    hooked = load_plugins(config, (*plugins, *events_of(config), *projections_of(config)))
    async with AsyncExitStack() as opened:
        url = config.store.url
        retention = Retention(config.changes.max_count, config.changes.max_age_ms)
        if store is None:
            store = await open_store(config.store, clock, shared=config.is_multi_process, retention=retention)
            opened.push_async_callback(store.close)
        if coordinator is None:
            folder = url.removeprefix("file:") if url.startswith("file:") else None
            coordinator = await open_coordinator(config.effective_coordinator, folder, clock, retention)
            opened.push_async_callback(coordinator.close)
        tracked = await track_usage(config, store, coordinator, hooked, clock)
        app = App(config, tracked.store, coordinator, clock, worker, hooked, hook_s, tracked)
        opened.pop_all()
        opened.push_async_callback(app.close)
        await app.open()
        opened.pop_all()
        return app
