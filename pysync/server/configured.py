"""What one configuration makes of the parts of a process: routes, policies and whatever answers requests."""

from typing import Final

from pysync.auth.policy import PolicyTable
from pysync.config import Config
from pysync.plugins.hooks import request_id
from pysync.server.api.health import ServiceHandlers
from pysync.server.api.manifest import CallerResolver
from pysync.server.api.plugin_hooks import ProjectionWaiter
from pysync.server.compose import Process, build_access, build_service, build_stream_source
from pysync.server.http.middleware import Middleware
from pysync.server.http.router import Router
from pysync.server.openapi import OpenApi
from pysync.server.process.logs import RequestLog
from pysync.server.routes import RouteBuilder, key_owner_tables


class ConfiguredService:
    """Answers requests as `config` says, with the parts of `process`. Its making changes nothing, so several
    may exist beside each other. Raises ValueError for a configuration that cannot be served."""

    def __init__(self, config: Config, process: Process) -> None:
        server, hooks = config.server, process.hooks
        self.config: Final = config
        request_log = RequestLog(
            request_id,
            process.counters.remember,
            logs_refusals=server.log_refusals,
            logs_requests=server.access_log,
        )
        policies = PolicyTable(config, uses_plugin_roles=hooks.has_authorize_hooks)
        self.owners: Final = key_owner_tables(policies)
        self.access: Final = build_access(config, process, request_log)
        service = build_service(config, process, self.access, self.owners)
        self.stream_source: Final = build_stream_source(service, policies, process)
        self.routes: Final = Router()
        callers = CallerResolver(config, self.access.authenticator)
        self.openapi: Final = OpenApi(config, self.routes, policies, callers)
        RouteBuilder(
            service=service,
            policies=policies,
            routes=self.routes,
            projection_waiter=ProjectionWaiter(
                config, process.plugins, process.engine.outbox, process.counters
            ),
            stream_source=self.stream_source,
            sse_hub=process.streams,
            ops=ServiceHandlers(
                process.readiness,
                process.render_metrics,
                self.access.authenticator,
                process.clock.wall_ms,
                self.access.authorizer.client_ip,
            ),
            openapi=self.openapi,
            accounts=None if process.accounts is None else process.accounts.of(config),
        ).add_all()
        self.middleware: Final = Middleware(
            self.routes,
            process.counters,
            origins=server.cors.origins,
            hosts=server.public_hosts,
            request_id_var=request_id,
            request_log=request_log,
            load=process.load,
            in_flight=process.in_flight,
        )
