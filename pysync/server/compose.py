"""The parts of a service, by subject. Each function builds one of them from those before it: the engine,
access, what handlers share, change streams, and the background jobs.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pysync.auth.authentication import Authenticator, SignatureBatch
from pysync.auth.certificates import user_id
from pysync.auth.policy import PolicyTable
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import Ownership, RevocationRegistry
from pysync.auth.spaces import Spaces
from pysync.clock import SteadyClock
from pysync.concurrency import Job, WriteDeadline, every
from pysync.config import Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.engine.subscriptions import ChangeDispatcher
from pysync.erase import Eraser
from pysync.migrate import Damage
from pysync.plugins import PluginContext
from pysync.plugins.hooks import Hooks
from pysync.quotas.recount import Tracked
from pysync.server.api import Service
from pysync.server.authorization import Authorizer
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.load import Load, connection_limit
from pysync.server.http.router import Router
from pysync.server.process.background import (
    HistorySweeper,
    OutboxRelay,
    Scrubber,
    TtlSweeper,
    resume_erasure,
)
from pysync.server.process.logs import RequestLog
from pysync.server.process.metrics import Counters
from pysync.server.process.readiness import PROBE_EVERY_S, CoordinatorMonitor, Readiness
from pysync.server.routes import owning_collections
from pysync.server.sse import SSEHub, StreamLimits
from pysync.server.stream_authorization import KeyIndex, StreamAuthorizer
from pysync.store import Store

log = logging.getLogger("pysync.server")

COUNT_EVERY_S: Final = 5.0
"""Seconds between two checks whether something stored is not counted."""


def build_engine(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    clock: SteadyClock,
    counters: Counters,
    owners: Sequence[Router],
    *,
    sweeps: bool,
) -> PluginContext:
    """Return what reads and writes documents, logs and files. `owners` are those of `Service`."""
    outbox = outbox_of(store, coordinator)
    corruption = CorruptionReporter(counters.count, partial(owning_collections, owners))
    return PluginContext(
        config=config,
        store=store,
        coordinator=coordinator,
        outbox=outbox,
        documents=Documents(store, coordinator, clock, outbox, corruption),
        files=Files(store, clock, outbox, corruption),
        logs=AppendLogs(store, coordinator, clock, outbox=outbox, corruption=corruption),
        now_ms=clock,
        sweeps=sweeps,
        count=counters.count,
        corruption=corruption,
        set_lag=counters.set_lag,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControl:
    """The components that decide who may do what, and how often."""

    revocations: RevocationRegistry
    authenticator: Authenticator
    authorizer: Authorizer
    rate_limiter: RateLimiter


def build_access(
    engine: PluginContext, clock: SteadyClock, hooks: Hooks, load: Load, request_log: RequestLog
) -> AccessControl:
    """Return what authenticates and authorises requests. While `load` says that others follow, signatures
    wait for them."""
    config, store, coordinator = engine.config, engine.store, engine.coordinator
    ownership = Ownership(config, store)
    trusted = {*map(user_id, config.every_trusted_issuer), *config.every_named_identity}
    revocations = RevocationRegistry(store, clock, trusted, ownership.owns_data)
    authenticator = Authenticator(
        config,
        coordinator,
        revocations,
        ownership.owns_data,
        clock.wall_ms,
        SignatureBatch(load.others_follow),
        hooks.validate_certificate if hooks.has_certificate_hooks else None,
    )
    rate_limiter = RateLimiter(coordinator, clock)
    authorizer = Authorizer(
        authenticator,
        rate_limiter,
        Spaces(config.auth.spaces, store, engine.corruption),
        hooks,
        request_log,
        config.server.mount_path,
        config.server.trusted_proxy_hops,
    )
    return AccessControl(
        revocations=revocations,
        authenticator=authenticator,
        authorizer=authorizer,
        rate_limiter=rate_limiter,
    )


def build_service(
    engine: PluginContext, access: AccessControl, hooks: Hooks, counters: Counters, owners: Sequence[Router]
) -> Service:
    """Return what handlers share."""
    config, store = engine.config, engine.store
    return Service(
        config=config,
        store=store,
        coordinator=engine.coordinator,
        documents=engine.documents,
        logs=engine.logs,
        files=engine.files,
        outbox=engine.outbox,
        authenticator=access.authenticator,
        authorizer=access.authorizer,
        rate_limiter=access.rate_limiter,
        revocations=access.revocations,
        hooks=hooks,
        corruption=engine.corruption,
        in_flight=BytesInFlight(config.server.max_bytes_in_flight, access.authorizer.client_ip, counters),
        key_owners=owners,
        write_deadline=WriteDeadline(
            config.server.write_timeout_ms / 1000,
            partial(counters.count, "pysync_write_timeouts"),
            cancels_uploads=not store.is_remote,
        ),
    )


def build_load(config: Config, counters: Counters) -> tuple[Load, StreamLimits]:
    """Return what limits requests and connections, and what limits streams. They share the descriptors that
    the system allows."""
    server = config.server
    wanted = server.max_connections + server.max_streams
    allowed = connection_limit(wanted)
    connections = allowed * server.max_connections // wanted
    streams = StreamLimits(allowed - connections, server.max_streams_per_caller)
    return Load(server.max_queue_ms / 1000, connections, counters), streams


def build_streams(
    service: Service, policies: PolicyTable, clock: SteadyClock, counters: Counters, limits: StreamLimits
) -> tuple[StreamAuthorizer, SSEHub]:
    """Return what authorises the subscribers of change streams, and what serves them."""
    pulls = policies.pulls()
    authorizer = StreamAuthorizer(service, pulls, clock.wall_ms)
    index = KeyIndex(pulls, service.hooks.stored_files)
    dispatcher = ChangeDispatcher(service.outbox.log, index, authorizer.authorize)
    return authorizer, SSEHub(dispatcher, authorizer, counters, service.config.changes.max_resumed, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The background jobs of a process: all of them, and those that can also be run by hand."""

    all: Sequence[Job]
    ttl_sweeper: TtlSweeper
    history_sweeper: HistorySweeper
    scrubber: Scrubber | None
    erasure: Job


def build_jobs(
    engine: PluginContext,
    access: AccessControl,
    clock: SteadyClock,
    counters: Counters,
    readiness: Readiness,
    routes: Router,
    owners: Sequence[Router],
    eraser: Eraser,
    tracked: Tracked | None,
) -> Jobs:
    """Return the background jobs of a process, which are not started. Those that one process of a machine
    does for all are among them if the engine sweeps."""
    config, store, coordinator = engine.config, engine.store, engine.coordinator
    ttl_sweeper = TtlSweeper(store, engine.documents, engine.logs, routes, clock)
    collections = [found for _, _, found in config.each_collection()]
    history_sweeper = HistorySweeper(store, engine.documents.history, collections, owners, clock)
    monitor = CoordinatorMonitor(coordinator.diagnose, readiness, counters.gauges)
    erasure = Job(partial(resume_erasure, eraser))
    jobs = [
        Job(OutboxRelay(engine.outbox, sweeps=engine.sweeps).run),
        _periodic(PROBE_EVERY_S, monitor.check, "cannot query the coordinator"),
    ]
    if engine.sweeps:
        jobs += [
            Job(ttl_sweeper.run),
            Job(history_sweeper.run),
            Job(access.revocations.delete_expired_periodically),
            erasure,
        ]
    counter = None if tracked is None else tracked.counter
    if counter is not None and (engine.sweeps or store.transactional is None):
        jobs.append(_periodic(COUNT_EVERY_S, counter.run_if_needed, "failed to count what is stored"))
    repair = None
    if config.backup is not None and config.store.url != "memory:":
        from pysync.server.process import backup_process  # most services do without

        repair = partial(backup_process.repair_from, config.backup, store)
        process = backup_process.of_config(config.store, config.backup, coordinator, counters, clock)
        jobs.append(Job(process.run))
    scrubber: Scrubber | None = None
    if config.scrub is not False and config.store.url != "memory:":

        def report(damage: Damage) -> None:
            engine.corruption.report(damage.kind, damage.key, damage.why, "scrub")

        scrubber = Scrubber(store, coordinator, config.scrub, report, clock, repair=repair)
        jobs.append(Job(scrubber.run))
    return Jobs(
        all=jobs,
        ttl_sweeper=ttl_sweeper,
        history_sweeper=history_sweeper,
        scrubber=scrubber,
        erasure=erasure,
    )


def _periodic(seconds: float, work: Callable[[], Awaitable[object]], failed: str) -> Job:
    return Job(partial(every, seconds, work, failed, log))
