"""The parts of a process that serves, whatever its configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import RevocationRegistry
from pysync.clock import SteadyClock
from pysync.config import Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.plugins import PluginContext
from pysync.plugins.hooks import Hooks
from pysync.quotas.accounts import Accounts
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.load import Load, connection_limit
from pysync.server.http.router import Router
from pysync.server.process.metrics import Counters
from pysync.server.process.readiness import Readiness
from pysync.server.process.watchdog import LoopMonitor
from pysync.server.routes import owning_collections
from pysync.server.sse import SSEHub, StreamLimits
from pysync.store import Store


def build_engine(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    clock: SteadyClock,
    counters: Counters,
    owners: Callable[[], Sequence[Router]],
    *,
    sweeps: bool,
) -> PluginContext:
    """Return what reads and writes documents, logs and files. `owners` returns those of the `Service` in
    force."""
    outbox = outbox_of(store, coordinator)
    corruption = CorruptionReporter(
        counters.count, lambda key: owning_collections(owners(), key), counters.remember
    )
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
        set_gauge=counters.set_gauge,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The parts of a service that last as long as its process, whatever the configuration."""

    engine: PluginContext
    clock: SteadyClock
    plugins: Sequence[object]
    hooks: Hooks
    counters: Counters
    readiness: Readiness
    loop_monitor: LoopMonitor
    load: Load
    in_flight: BytesInFlight
    rate_limiter: RateLimiter
    revocations: RevocationRegistry
    streams: SSEHub
    accounts: Accounts | None
    render_metrics: Callable[[], bytes]


def connection_limits(config: Config) -> tuple[int, StreamLimits]:
    """Return how many connections may be open, and how many streams. They share the descriptors that the
    system allows."""
    server = config.server
    wanted = server.max_connections + server.max_streams
    allowed = connection_limit(wanted)
    connections = allowed * server.max_connections // wanted
    return connections, StreamLimits(allowed - connections, server.max_streams_per_caller)
