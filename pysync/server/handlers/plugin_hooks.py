"""Documents, logs and files where plugins have a say: handlers that ask hooks, and are routed to only where
there are such hooks."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.engine.keyed_versions import KeyedVersions
from pysync.engine.outbox import Outbox
from pysync.model import Caller, WriteEvent, WriteResult
from pysync.plugins import PluginPush, PluginRequest, PullResponse, PushResponse
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import plugin_request
from pysync.server.handlers.append_log import LogHandlers
from pysync.server.handlers.documents import DocumentHandlers
from pysync.server.handlers.files import FileHandlers, is_document
from pysync.server.request_body import idempotency_key
from pysync.server.responses import NO_STORE, Response, etag_matches
from pysync.server.router import Match


class PluginDispatch:
    """What plugins do to the requests of one service."""

    def __init__(self, hooks: Hooks, outbox: Outbox, versions: KeyedVersions) -> None:
        self._hooks = hooks
        self._versions = versions
        self._outbox = outbox

    async def pull(self, request: web.BaseRequest, match: Match, caller: Caller) -> Response | None:
        """What a plugin answers to a pull that is allowed; None leaves it to the store."""
        reply = await self._hooks.run_pull_hooks(
            plugin_request(match.policy, caller, match.params, match.key)
        )
        return None if reply is None else _plugin_response(request, match, reply)

    async def push(
        self,
        request: web.BaseRequest,
        match: Match,
        caller: Caller,
        body: _core.PushBody | _core.Append,
        make: Callable[[], Awaitable[WriteResult]],
    ) -> Response:
        """Answer a push that is allowed and checked: a plugin takes it, or else `make` stores it. Those who
        want to know are told before it is answered."""
        about = plugin_request(match.policy, caller, match.params, match.key)
        once = idempotency_key(request, caller, match.key)
        data = body.data
        pushed = await self._hooks.run_push_hooks(_push(about, body, data, once))
        params = about.params
        if pushed is None:
            written = await make()
            told = await self._versions.version_for_caller(
                match.policy, caller, match.identity, match.key, written
            )
            text = protocol.write_response_body(told, written.timestamp_ms)
        else:
            written = pushed.written
            text = _response_body(pushed)
            params = params if pushed.params is None else pushed.params
            if not pushed.announced:
                subject = match.document_ref(caller)._replace(params=params, key="")
                await self._outbox.announce([subject.change(written.hash, written.timestamp_ms)])
        await self.after_write(match, caller, written, params, data)
        return Response(200, text, NO_STORE)

    async def after_write(
        self,
        match: Match,
        caller: Caller,
        written: WriteResult,
        params: Mapping[str, str],
        text: bytes | None,
    ) -> None:
        """Tell those who want to know of a push that was made. `text` is the pushed `data`; None: a file."""
        await self._hooks.run_after_write(
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


class PluggedHandlers(DocumentHandlers):
    """`Handlers` of documents, except that plugins are asked, and told."""

    def __init__(self, plugs: PluginDispatch, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def push(self, request: web.BaseRequest, match: Match) -> Response:
        """`Handlers.push`."""
        caller, body = await self._authorize(request, match)
        return await self._plugs.push(
            request, match, caller, body, lambda: self._store(request, match, caller, body)
        )

    async def _respond(
        self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller
    ) -> Response:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._respond(request, match, signer, caller) if answer is None else answer


class PluggedLogs(LogHandlers):
    """`LogHandlers`, except that plugins are asked, and told."""

    def __init__(self, plugs: PluginDispatch, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def append(self, request: web.BaseRequest, match: Match) -> Response:
        """`LogHandlers.append`."""
        caller, element = await self._authorize(request, match)
        return await self._plugs.push(
            request, match, caller, element, lambda: self._append(request, match, caller, element)
        )

    async def _respond(
        self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller
    ) -> Response:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._respond(request, match, signer, caller) if answer is None else answer


class PluggedFiles(FileHandlers):
    """`FileHandlers`, except that plugins are asked, and told: of files they are told only."""

    def __init__(self, plugs: PluginDispatch, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def push(self, request: web.BaseRequest, match: Match) -> Response:
        """`FileHandlers.push`."""
        if is_document(request, match):
            caller, body = await self._authorize(request, match)
            return await self._plugs.push(
                request, match, caller, body, lambda: self._store(request, match, caller, body)
            )
        async with self._begin_upload(request, match) as upload:
            written = await self._store_file(match, upload)
        await self._plugs.after_write(match, upload.caller, written, match.params, None)
        return Response(200, protocol.write_response_body(written.hash, written.timestamp_ms), NO_STORE)

    async def _respond(
        self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller
    ) -> Response:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._respond(request, match, signer, caller) if answer is None else answer


def _push(
    about: PluginRequest, body: _core.PushBody | _core.Append, data: bytes, once: str | None
) -> PluginPush:
    if isinstance(body, _core.PushBody):
        return PluginPush(about, data, body.hash, body.base_hash, once)
    return PluginPush(about, data, _core.content_hash(body.canonical), None, once)


def _response_body(pushed: PushResponse) -> bytes:
    own = {"hash": pushed.written.hash, "timestamp": pushed.written.timestamp_ms}
    return orjson.dumps({**pushed.extras, **own})


def _plugin_response(request: web.BaseRequest, match: Match, reply: PullResponse) -> Response:
    headers = match.route.read_headers
    if reply.version is not None:
        headers += f'ETag: "{reply.version}"\r\n'
        if etag_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), reply.version):
            return Response(304, b"", headers)
    return Response(200, reply.body, headers, content_type=reply.content_type)
