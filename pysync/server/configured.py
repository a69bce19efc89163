"""The parts of a service that one configuration defines: routes, policies and all that answers requests."""

from functools import partial
from typing import Final

from pysync.auth.authentication import Authenticator, SignatureBatch
from pysync.auth.certificates import user_id
from pysync.auth.policy import PolicyTable
from pysync.auth.revocation import Ownership
from pysync.auth.spaces import Spaces
from pysync.concurrency import WriteDeadline
from pysync.config import Config
from pysync.engine.feed import feed_of
from pysync.engine.subscriptions import ChangeDispatcher
from pysync.plugins.hooks import request_id
from pysync.server.api import Service
from pysync.server.api.health import ServiceHandlers
from pysync.server.api.manifest import CallerResolver
from pysync.server.api.plugin_hooks import ProjectionWaiter
from pysync.server.authorization import Authorizer
from pysync.server.compose import Process
from pysync.server.http.middleware import Middleware
from pysync.server.http.router import Router
from pysync.server.openapi import OpenApi
from pysync.server.process.logs import RequestLog
from pysync.server.routes import RouteBuilder, key_owner_tables
from pysync.server.sse import StreamSource
from pysync.server.stream_authorization import KeyIndex, StreamAuthorizer


class ConfiguredService:
    """Answers requests as `config` says, with the parts of `process`. Its making changes nothing, so several
    may exist beside each other. Raises ValueError for a configuration that cannot be served."""

    def __init__(self, config: Config, process: Process) -> None:
        server, hooks, engine, counters = config.server, process.hooks, process.engine, process.counters
        self.config: Final = config
        self.trusted: Final = config.every_named_identity.union(map(user_id, config.every_trusted_issuer))
        """The user ids that the configuration trusts."""
        self.ownership: Final = Ownership(config, engine.store)
        request_log = RequestLog(
            request_id,
            counters.remember,
            logs_refusals=server.log_refusals,
            logs_requests=server.access_log,
        )
        policies = PolicyTable(config, uses_plugin_roles=hooks.has_authorize_hooks)
        self.owners: Final = key_owner_tables(policies)
        authenticator = Authenticator(
            config,
            engine.coordinator,
            process.revocations,
            self.ownership.owns_data,
            process.clock.wall_ms,
            SignatureBatch(process.load.others_follow),  # then signatures wait for them
            hooks.validate_certificate if hooks.has_certificate_hooks else None,
        )
        self.authorizer: Final = Authorizer(
            authenticator,
            process.rate_limiter,
            Spaces(config.auth.spaces, engine.store, engine.corruption),
            hooks,
            request_log,
            server.mount_path,
            server.trusted_proxy_hops,
        )
        service = Service(
            config=config,
            store=engine.store,
            coordinator=engine.coordinator,
            documents=engine.documents,
            logs=engine.logs,
            files=engine.files,
            outbox=engine.outbox,
            authenticator=authenticator,
            authorizer=self.authorizer,
            rate_limiter=process.rate_limiter,
            revocations=process.revocations,
            hooks=hooks,
            corruption=engine.corruption,
            in_flight=process.in_flight,
            key_owners=self.owners,
            write_deadline=WriteDeadline(
                server.write_timeout_ms / 1000,
                partial(counters.count, "pysync_write_timeouts"),
                cancels_uploads=not engine.store.is_remote,
            ),
        )
        self.stream_source: Final = _stream_source(service, policies, process)
        self.routes: Final = Router()
        self.openapi: Final = OpenApi(config, self.routes, policies, CallerResolver(config, authenticator))
        RouteBuilder(
            service=service,
            policies=policies,
            routes=self.routes,
            projection_waiter=ProjectionWaiter(config, process.plugins, engine.outbox, counters),
            stream_source=self.stream_source,
            sse_hub=process.streams,
            ops=ServiceHandlers(
                process.readiness,
                process.render_metrics,
                authenticator,
                process.clock.wall_ms,
                self.authorizer.client_ip,
            ),
            openapi=self.openapi,
            accounts=None if process.accounts is None else process.accounts.of(config),
        ).add_all()
        self.middleware: Final = Middleware(
            self.routes,
            counters,
            origins=server.cors.origins,
            hosts=server.public_hosts,
            request_id_var=request_id,
            request_log=request_log,
            load=process.load,
            in_flight=process.in_flight,
        )


def _stream_source(service: Service, policies: PolicyTable, process: Process) -> StreamSource:
    """Return what change streams receive, and what authorises their subscribers."""
    pulls, clock = policies.pulls(), process.clock
    authorizer = StreamAuthorizer(service, pulls, clock.wall_ms)
    index = KeyIndex(pulls, service.hooks.stored_files)

    def observe_lag(written_ms: int) -> None:
        process.counters.observe("pysync_stream_lag_seconds", max(0, clock() - written_ms) / 1000)

    dispatcher = ChangeDispatcher(service.outbox.log, index, authorizer.authorize, observe_lag)
    feed = feed_of(service.store, service.coordinator, index.key_of)
    return StreamSource(dispatcher, feed, index, authorizer, service.config.changes.max_resumed)
