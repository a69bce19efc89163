"""Run the hooks of plugins for pushes and writes, and convert their responses."""

from collections.abc import Awaitable, Callable, Mapping

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.model import Caller, WriteEvent, WriteResult
from pysync.plugins import PluginPush, PullResponse
from pysync.server.authorization import Access, plugin_request
from pysync.server.request_body import idempotency_key
from pysync.server.responses import NO_STORE, Response, etag_matches, write_response
from pysync.server.router import Match
from pysync.server.service import Service


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
        version = await service.documents.versions.load_and_compute(
            match.key, written.hash, written.timestamp_ms, access.hidden
        )
        response = write_response(version, written.timestamp_ms)
    else:
        written = pushed.written
        own = {"hash": written.hash, "timestamp": written.timestamp_ms}
        response = Response(200, orjson.dumps({**pushed.extras, **own}), NO_STORE)
        params = params if pushed.params is None else pushed.params
        if not pushed.announced:
            subject = match.document_ref(caller)._replace(params=params, key="")
            await service.outbox.announce([subject.change(written.hash, written.timestamp_ms)])
    await run_after_write(service, match, caller, written, params, data)
    return response


async def run_after_write(
    service: Service,
    match: Match,
    caller: Caller,
    written: WriteResult,
    params: Mapping[str, str],
    text: bytes | None,
) -> None:
    """Run the plugins' hooks that follow a push. `text` is the pushed `data`; None for a file."""
    await service.hooks.run_after_write(
        WriteEvent(
            match.policy.collection.name,
            params,
            written.hash,
            written.timestamp_ms,
            text,
            caller.identity or None,
            match.policy.namespace,
        )
    )


def plugin_response(request: web.BaseRequest, match: Match, reply: PullResponse) -> Response:
    """Return the response to a pull that a plugin serves."""
    headers = match.route.read_headers
    if reply.version is not None:
        headers += f'ETag: "{reply.version}"\r\n'
        if etag_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), reply.version):
            return Response(304, b"", headers)
    return Response(200, reply.body, headers, content_type=reply.content_type)
