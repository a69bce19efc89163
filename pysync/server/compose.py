"""The parts of a service, by subject. Each function builds one of them from those before it: the engine,
access, what handlers share, and change streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pysync.auth.authentication import Authenticator, SignatureBatch
from pysync.auth.certificates import user_id
from pysync.auth.policy import PolicyTable
from pysync.auth.rate_limits import RateLimiter
from pysync.auth.revocation import Ownership, RevocationRegistry
from pysync.auth.spaces import Spaces
from pysync.clock import SteadyClock
from pysync.concurrency import WriteDeadline
from pysync.config import Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.engine.subscriptions import ChangeDispatcher
from pysync.plugins import PluginContext
from pysync.plugins.hooks import Hooks
from pysync.quotas.accounts import Accounts
from pysync.server.api import Service
from pysync.server.authorization import Authorizer
from pysync.server.http.in_flight import BytesInFlight
from pysync.server.http.load import Load, connection_limit
from pysync.server.http.router import Router
from pysync.server.process.logs import RequestLog
from pysync.server.process.metrics import Counters
from pysync.server.process.readiness import Readiness
from pysync.server.routes import owning_collections
from pysync.server.sse import SSEHub, StreamLimits, StreamSource
from pysync.server.stream_authorization import KeyIndex, StreamAuthorizer
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
        set_lag=counters.set_lag,
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
    load: Load
    in_flight: BytesInFlight
    rate_limiter: RateLimiter
    revocations: RevocationRegistry
    streams: SSEHub
    accounts: Accounts | None
    render_metrics: Callable[[], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControl:
    """The components that decide who may do what. `named` are the user ids that the configuration trusts."""

    named: frozenset[str]
    ownership: Ownership
    authenticator: Authenticator
    authorizer: Authorizer


def build_access(config: Config, process: Process, request_log: RequestLog) -> AccessControl:
    """Return what authenticates and authorises requests. While the load says that others follow, signatures
    wait for them."""
    engine, clock, hooks = process.engine, process.clock, process.hooks
    store = engine.store
    ownership = Ownership(config, store)
    authenticator = Authenticator(
        config,
        engine.coordinator,
        process.revocations,
        ownership.owns_data,
        clock.wall_ms,
        SignatureBatch(process.load.others_follow),
        hooks.validate_certificate if hooks.has_certificate_hooks else None,
    )
    authorizer = Authorizer(
        authenticator,
        process.rate_limiter,
        Spaces(config.auth.spaces, store, engine.corruption),
        hooks,
        request_log,
        config.server.mount_path,
        config.server.trusted_proxy_hops,
    )
    return AccessControl(
        named=config.every_named_identity.union(map(user_id, config.every_trusted_issuer)),
        ownership=ownership,
        authenticator=authenticator,
        authorizer=authorizer,
    )


def build_service(
    config: Config, process: Process, access: AccessControl, owners: Sequence[Router]
) -> Service:
    """Return what handlers share."""
    engine = process.engine
    store = engine.store
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
        rate_limiter=process.rate_limiter,
        revocations=process.revocations,
        hooks=process.hooks,
        corruption=engine.corruption,
        in_flight=process.in_flight,
        key_owners=owners,
        write_deadline=WriteDeadline(
            config.server.write_timeout_ms / 1000,
            partial(process.counters.count, "pysync_write_timeouts"),
            cancels_uploads=not store.is_remote,
        ),
    )


def connection_limits(config: Config) -> tuple[int, StreamLimits]:
    """Return how many connections may be open, and how many streams. They share the descriptors that the
    system allows."""
    server = config.server
    wanted = server.max_connections + server.max_streams
    allowed = connection_limit(wanted)
    connections = allowed * server.max_connections // wanted
    return connections, StreamLimits(allowed - connections, server.max_streams_per_caller)


def build_stream_source(service: Service, policies: PolicyTable, process: Process) -> StreamSource:
    """Return what change streams receive, and what authorises their subscribers."""
    pulls, clock = policies.pulls(), process.clock
    authorizer = StreamAuthorizer(service, pulls, clock.wall_ms)
    index = KeyIndex(pulls, service.hooks.stored_files)

    def observe_lag(written_ms: int) -> None:
        process.counters.observe("pysync_stream_lag_seconds", max(0, clock() - written_ms) / 1000)

    dispatcher = ChangeDispatcher(service.outbox.log, index, authorizer.authorize, observe_lag)
    return StreamSource(dispatcher, authorizer, service.config.changes.max_resumed)
