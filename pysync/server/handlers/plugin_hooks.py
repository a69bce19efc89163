"""Documents, logs and files where plugins have a say: handlers that ask hooks, and are routed to only where
there are such hooks."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.engine.keyed_versions import KeyedVersions
from pysync.engine.outbox import Outbox
from pysync.model import Caller, WriteEvent, Written
from pysync.plugins import Push, Pushed, Reply, Request
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import request_of
from pysync.server.handlers.append_log import LogHandlers
from pysync.server.handlers.documents import Handlers
from pysync.server.handlers.files import FileHandlers, is_document
from pysync.server.request_body import request_key
from pysync.server.responses import NO_STORE, Answer, version_matches
from pysync.server.router import Match


class Plugs:
    """What plugins do to the requests of one service."""

    def __init__(self, hooks: Hooks, outbox: Outbox, versions: KeyedVersions) -> None:
        self._hooks = hooks
        self._versions = versions
        self._outbox = outbox

    async def pull(self, request: web.BaseRequest, match: Match, caller: Caller) -> Answer | None:
        """What a plugin answers to a pull that is allowed; None leaves it to the store."""
        reply = await self._hooks.pulled(request_of(match.rule, caller, match.params, match.key))
        return None if reply is None else _answer(request, match, reply)

    async def push(
        self,
        request: web.BaseRequest,
        match: Match,
        caller: Caller,
        body: _core.PushBody | _core.Append,
        make: Callable[[], Awaitable[Written]],
    ) -> Answer:
        """Answer a push that is allowed and checked: a plugin takes it, or else `make` stores it. Those who
        want to know are told before it is answered."""
        about = request_of(match.rule, caller, match.params, match.key)
        once = request_key(request, caller, match.key)
        data = body.data
        pushed = await self._hooks.pushed(_push(about, body, data, once))
        params = about.params
        if pushed is None:
            written = await make()
            told = await self._versions.told_to(match.rule, caller, match.identity, match.key, written)
            text = protocol.written_body(told, written.timestamp_ms)
        else:
            written = pushed.written
            text = _pushed_body(pushed)
            params = params if pushed.params is None else pushed.params
            if not pushed.announced:
                subject = match.subject(caller)._replace(params=params, key="")
                await self._outbox.announce([subject.change(written.hash, written.timestamp_ms)])
        await self.tell(match, caller, written, params, data)
        return Answer(200, text, NO_STORE)

    async def tell(
        self,
        match: Match,
        caller: Caller,
        written: Written,
        params: Mapping[str, str],
        text: bytes | None,
    ) -> None:
        """Tell those who want to know of a push that was made. `text` is the pushed `data`; None: a file."""
        await self._hooks.written(
            WriteEvent(
                match.rule.collection.name,
                params,
                written.hash,
                written.timestamp_ms,
                text,
                caller.identity or None,
                match.rule.namespace,
            )
        )


class PluggedHandlers(Handlers):
    """`Handlers` of documents, except that plugins are asked, and told."""

    def __init__(self, plugs: Plugs, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def push(self, request: web.BaseRequest, match: Match) -> Answer:
        """`Handlers.push`."""
        caller, body = await self._received(request, match)
        return await self._plugs.push(
            request, match, caller, body, lambda: self._made(request, match, caller, body)
        )

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._read(request, match, signer, caller) if answer is None else answer


class PluggedLogs(LogHandlers):
    """`LogHandlers`, except that plugins are asked, and told."""

    def __init__(self, plugs: Plugs, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def append(self, request: web.BaseRequest, match: Match) -> Answer:
        """`LogHandlers.append`."""
        caller, element = await self._received(request, match)
        return await self._plugs.push(
            request, match, caller, element, lambda: self._made(request, match, caller, element)
        )

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._read(request, match, signer, caller) if answer is None else answer


class PluggedFiles(FileHandlers):
    """`FileHandlers`, except that plugins are asked, and told: of files they are told only."""

    def __init__(self, plugs: Plugs, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def push(self, request: web.BaseRequest, match: Match) -> Answer:
        """`FileHandlers.push`."""
        if is_document(request, match):
            caller, body = await self._received(request, match)
            return await self._plugs.push(
                request, match, caller, body, lambda: self._made(request, match, caller, body)
            )
        async with self._uploaded(request, match) as upload:
            written = await self._kept(match, upload)
        await self._plugs.tell(match, upload.caller, written, match.params, None)
        return Answer(200, protocol.written_body(written.hash, written.timestamp_ms), NO_STORE)

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._read(request, match, signer, caller) if answer is None else answer


def _push(about: Request, body: _core.PushBody | _core.Append, data: bytes, once: str | None) -> Push:
    if isinstance(body, _core.PushBody):
        return Push(about, data, body.hash, body.base_hash, once)
    return Push(about, data, _core.content_hash(body.canonical), None, once)


def _pushed_body(pushed: Pushed) -> bytes:
    own = {"hash": pushed.written.hash, "timestamp": pushed.written.timestamp_ms}
    return orjson.dumps({**pushed.extras, **own})


def _answer(request: web.BaseRequest, match: Match, reply: Reply) -> Answer:
    headers = match.route.read_headers
    if reply.version is not None:
        headers += f'ETag: "{reply.version}"\r\n'
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), reply.version):
            return Answer(304, b"", headers)
    return Answer(200, reply.body, headers, content_type=reply.content_type)
