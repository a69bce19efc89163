"""Requests in which plugins take part: hooks of pushes and writes, responses of plugins, and pushes that wait
until projections contain them (`"wait": true` of a projection)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from aiohttp import web

from pysync import _core
from pysync.concurrency import MAX_WAITING
from pysync.config import Collection, Config
from pysync.config.key_templates import KeyTemplate
from pysync.engine.outbox import Outbox
from pysync.errors import Unavailable
from pysync.model import Caller, WriteEvent, WriteResult
from pysync.plugins import PluginPush, PullResponse
from pysync.plugins.projection import ProjectionsPlugin, projections_plugins_in
from pysync.plugins.projection.sources import KeyResolver
from pysync.server.api import Service
from pysync.server.authorization import Access, plugin_request
from pysync.server.http.request_body import idempotency_key
from pysync.server.http.responses import NO_STORE, Response, etag_matches, json_response, write_response
from pysync.server.http.router import Handler, Match
from pysync.server.process.metrics import Counters


async def push_with_plugins(
    service: Service,
    request: web.BaseRequest,
    match: Match,
    access: Access,
    body: _core.PushBody | _core.Append,
    store: Callable[[], Awaitable[WriteResult]],
) -> Response:
    """Serve a push that is authorised and validated. A plugin stores it, or else `store` does. The hooks that
    follow a write run before the response is sent."""
    caller, data = access.caller, body.data
    about = plugin_request(match.policy, caller, match.params, match.key)
    once = idempotency_key(request, caller, match.key)
    if isinstance(body, _core.PushBody):
        push = PluginPush(about, data, body.hash, body.base_hash, once)
    else:
        push = PluginPush(about, data, _core.content_hash(body.canonical), None, once)
    pushed = await service.hooks.run_push_hooks(push)
    params = about.params
    if pushed is None:
        written = await store()
        version = await service.visible_version(match, access, *written)
        response = write_response(version, written.timestamp_ms)
    else:
        written = pushed.written
        own = {"hash": written.hash, "timestamp": written.timestamp_ms}
        response = json_response({**pushed.extras, **own}, NO_STORE)
        params = params if pushed.params is None else pushed.params
        if not pushed.announced:
            ref = match.write_context(caller).ref._replace(params=params, key="")
            change = ref.change(written.hash, written.timestamp_ms, caller.identity)
            await service.outbox.announce([change])
    await run_after_write(service, match, caller, written, params, data)
    return response


async def run_after_write(
    service: Service,
    match: Match,
    caller: Caller,
    written: WriteResult,
    params: Mapping[str, str],
    text: bytes | None,
    *,
    removed: bool = False,
) -> None:
    """Run the plugins' hooks that follow a push or a delete. `text` is the pushed `data`; None for a file and
    a delete, of which `written` has the hash of the removed version."""
    await service.hooks.run_after_write(
        WriteEvent(
            match.policy.collection.name,
            params,
            written.hash,
            written.timestamp_ms,
            text,
            caller.identity or None,
            match.policy.namespace,
            removed,
        )
    )


def plugin_response(request: web.BaseRequest, match: Match, reply: PullResponse) -> Response:
    """Return the response to a pull that a plugin serves."""
    headers = match.route.read_headers
    if reply.version is not None:
        headers += f'ETag: "{reply.version}"\r\n'
        if etag_matches(request, reply.version):
            return Response(304, b"", headers)
    return Response(200, reply.body, headers, content_type=reply.content_type)


MAX_WAIT_S: Final = 5.0
"""Longest time that a response waits for lists, in seconds."""
_NOT_PROJECTED: Final = b',"projected":false}'


class ProjectionWaiter:
    """Delays the responses to pushes until lists are updated; `plugins` contain the projections that maintain
    them."""

    def __init__(self, config: Config, plugins: Iterable[object], outbox: Outbox, counters: Counters) -> None:
        self._outbox = outbox
        self._counters = counters
        self._waiting = 0
        self._keys = keys = KeyResolver(config)
        self._awaited: list[tuple[KeyTemplate, ProjectionsPlugin]] = []
        for plugin in projections_plugins_in(plugins):
            for projection in plugin.projections:
                for _, collection in keys.sources(projection) if projection.wait else ():
                    self._awaited.append((keys.stored_at(collection)[0], plugin))

    def wrap_push(self, collection: Collection, push: Handler) -> Handler:
        """Return `push`, the handler of pushes to a collection, wrapped so that its responses wait if a
        projection with `wait` reads what is written there."""
        path = self._keys.stored_at(collection)[0]
        waited_plugins = list(
            dict.fromkeys(plugin for source, plugin in self._awaited if path.overlaps(source))
        )
        if not waited_plugins:
            return push

        async def push_and_wait(request: web.BaseRequest, match: Match) -> Response:
            response = await push(request, match)
            if response.status == 200 and not await self._wait_until_folded(waited_plugins):
                self._counters.count("pysync_projection_unawaited")
                response.content = response.content[:-1] + _NOT_PROJECTED
            return response

        return push_and_wait

    async def _wait_until_folded(self, plugins: list[ProjectionsPlugin]) -> bool:
        """Wait until the lists contain everything written until now. Returns False if that takes longer than
        `MAX_WAIT_S`, the change log is unavailable, or too many wait."""
        if self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                last_id = await self._outbox.log.last_id()
                for plugin in plugins:
                    await plugin.wait_until_folded(last_id)
        except (TimeoutError, Unavailable):
            return False
        finally:
            self._waiting -= 1
        return self._outbox.is_flushed
