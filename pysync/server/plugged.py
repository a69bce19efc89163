"""Documents and logs where plugins have a say: handlers that ask hooks, and are routed to only where there
are such hooks."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from pysync import _core, wire
from pysync.model import Caller, WriteEvent, Written
from pysync.outbox import Outbox
from pysync.plugins import Push, Pushed, Reply, Request
from pysync.plugins.hooks import Hooks
from pysync.server.answer import NO_STORE, Answer, version_matches
from pysync.server.applogs import LogHandlers
from pysync.server.handlers import Handlers
from pysync.server.roles import request_of
from pysync.server.routes import Match


class Plugs:
    """What plugins do to the requests of one service."""

    def __init__(self, hooks: Hooks, outbox: Outbox) -> None:
        self._hooks = hooks
        self._outbox = outbox

    async def pull(self, request: web.BaseRequest, match: Match, caller: Caller) -> Answer | None:
        """What a plugin answers to a pull that is allowed; None leaves it to the store."""
        reply = await self._hooks.pulled(request_of(match.rule, caller, match.params, match.key))
        return None if reply is None else _answer(request, match, reply)

    async def push(
        self,
        match: Match,
        caller: Caller,
        body: _core.PushBody | _core.Append,
        make: Callable[[], Awaitable[Written]],
    ) -> Answer:
        """Answer a push that is allowed and checked: a plugin takes it, or else `make` stores it. Those who
        want to know are told before it is answered."""
        about = request_of(match.rule, caller, match.params, match.key)
        pushed = await self._hooks.pushed(_push(about, body))
        if pushed is None:
            written = await make()
            text = wire.written_body(written.hash, written.timestamp_ms)
        else:
            written = pushed.written
            text = _pushed_body(pushed)
            change = match.subject(caller).change(written.hash, written.timestamp_ms)
            await self._outbox.announce([change])
        await self._hooks.written(
            WriteEvent(
                about.collection,
                about.params,
                written.hash,
                written.timestamp_ms,
                body.data,
                caller.identity or None,
                about.namespace,
            )
        )
        return Answer(200, text, NO_STORE)


class PluggedHandlers(Handlers):
    """`Handlers` of documents, except that plugins are asked, and told."""

    def __init__(self, plugs: Plugs, *parts: Any) -> None:
        super().__init__(*parts)
        self._plugs = plugs

    async def push(self, request: web.BaseRequest, match: Match) -> Answer:
        """`Handlers.push`."""
        caller, body = await self._received(request, match)
        return await self._plugs.push(match, caller, body, lambda: self._made(request, match, caller, body))

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
            match, caller, element, lambda: self._made(request, match, caller, element)
        )

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        answer = await self._plugs.pull(request, match, caller)
        return await super()._read(request, match, signer, caller) if answer is None else answer


def _push(about: Request, body: _core.PushBody | _core.Append) -> Push:
    if isinstance(body, _core.PushBody):
        return Push(about, body.data, body.hash, body.base_hash)
    return Push(about, body.data, _core.content_hash(body.canonical), None)


def _pushed_body(pushed: Pushed) -> bytes:
    own = {"hash": pushed.written.hash, "timestamp": pushed.written.timestamp_ms}
    return orjson.dumps({**pushed.extras, **own})


def _answer(request: web.BaseRequest, match: Match, reply: Reply) -> Answer:
    headers = match.route.read_headers
    if reply.version is not None:
        headers += f'ETag: "{reply.version}"\r\n'
        if version_matches(request.headers.get(wire.HEADER_IF_NONE_MATCH), reply.version):
            return Answer(304, b"", headers)
    return Answer(200, reply.body, headers, content_type=reply.content_type)
