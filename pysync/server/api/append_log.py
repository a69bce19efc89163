"""Appends to append-only logs, and pulls of their elements.

See docs/reference/protocol.md#append-only-logs.
"""

import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial

from aiohttp import web

from pysync import _core
from pysync.auth import field_permissions
from pysync.concurrency import PYTHON_IN_THREAD_ABOVE, run_heavy
from pysync.engine.append_log import LogRange, LogSettings, LogSlice
from pysync.engine.idempotency import IdempotentRequest
from pysync.errors import (
    BadRequest,
    FullNotAllowed,
    FullWithBounds,
    InvalidCheckpoint,
    InvalidLast,
    InvalidLimit,
    PullBoundRequired,
)
from pysync.model import Caller, WriteResult
from pysync.protocol import clamped_int
from pysync.server.api import Service
from pysync.server.api.plugin_hooks import plugin_response, push_with_plugins
from pysync.server.authorization import Access
from pysync.server.http.in_flight import hold_until
from pysync.server.http.request_body import (
    check_sealed,
    idempotency_key,
    read_authorized_body,
    validate,
)
from pysync.server.http.responses import Response, bodiless_response, write_response
from pysync.server.http.router import Match
from pysync.server.http.streaming import streaming_response

_is_bound = re.compile(r"0|[1-9][0-9]*").fullmatch


class LogHandlers:
    """The routes of one append-only collection, whose logs follow `settings`."""

    def __init__(self, service: Service, settings: LogSettings) -> None:
        self._service = service
        self._settings = settings
        self._logs = service.logs
        self._versions = service.documents.versions
        self._authorizer = service.authorizer
        self._hooks = service.hooks

    async def append(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `POST {ns}/push/<key>`: append one element to the log."""
        # Read, authorise, decode.
        access, element = await read_authorized_body(
            request,
            match,
            self._authorizer,
            self._service.in_flight,
            "append",
            _core.decode_append,
            needs_author=self._settings.require_author_signature,
        )
        await self._check_append(match, access, element)
        # Store.
        store = partial(self._store, request, match, access.caller, element)
        if self._hooks.has_push_hooks:
            return await push_with_plugins(self._service, request, match, access, element, store)
        written = await store()
        # Respond.
        version = written.hash
        if access.hidden:
            version = await self._service.visible_version(match, access, *written)
        return write_response(version, written.timestamp_ms)

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/pull/<key>`: the elements within the bounds of the query."""
        access = await self._authorizer.authorize(request, match)
        if access.reply is not None:
            return plugin_response(request, match, access.reply)
        return await self._respond(request, match, access)

    async def _check_append(self, match: Match, access: Access, element: _core.Append) -> None:
        """Raise the error of an element that the collection rejects."""
        permissions = match.policy.collection.field_permissions
        if permissions:
            field_permissions.check_append(permissions, access.roles, element.data)
        if match.route.keyrings is not None:
            await check_sealed(match, element.data)
        if match.route.validator is not None:
            await validate(match.route.validator, element.data)

    async def _store(
        self, request: web.BaseRequest, match: Match, caller: Caller, element: _core.Append
    ) -> WriteResult:
        """Store an append that was authorised and checked."""
        context = match.write_context(caller)
        once = idempotency_key(request, caller, match.key)
        idempotent = None
        if once is not None:
            idempotent = IdempotentRequest(once, hashlib.sha256(element.canonical).hexdigest())
        return await self._service.write_deadline.run(
            self._logs.append(match.key, element, self._settings, context, idempotent),
            partial(hold_until, request),
        )

    async def _respond(self, request: web.BaseRequest, match: Match, access: Access) -> Response:
        """Return the response to an authorised pull."""
        now_ms = self._logs.now_ms()
        query = request.query if "?" in request.raw_path else {}
        tail = await self._logs.read(
            match.key, parse_log_range(query, self._settings, now_ms), self._settings
        )
        if not tail.hash:
            return Response(200, self._render(tail, b"", now_ms, access.hidden), match.route.read_headers)
        hidden = access.hidden
        version = tail.hash = await self._versions.load_and_compute(
            match.key, tail.hash, tail.newest_ms, hidden
        )
        headers = f'{match.route.read_headers}ETag: "{version}"\r\n'
        response = bodiless_response(request, version, headers)
        if response is not None:
            return response
        if await tail.is_long():
            return await streaming_response(request, self._stream(tail, hidden, now_ms), headers)
        text = await tail.text()
        if hidden:
            text = await redact_in_thread(text, hidden)
        return Response(200, self._render(tail, text, now_ms, hidden), headers)

    def _render(self, tail: LogSlice, text: bytes, now_ms: int, hidden: frozenset[str]) -> bytes:
        """Return the body with the elements of `tail`, whose text is `text`."""
        before, after = self._response_envelope(tail, now_ms, hidden)
        return b"".join((before, text, after, _end(tail)))

    async def _stream(
        self, tail: LogSlice, hidden: frozenset[str], now_ms: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of `_render` in chunks."""
        before, after = self._response_envelope(tail, now_ms, hidden)
        comma = b""
        async for chunk in tail.chunks():
            if hidden:
                yield before + comma + await redact_in_thread(chunk.removeprefix(b","), hidden)
                comma = b","
            else:
                yield before + chunk if before else chunk
            before = b""
        yield before + after + _end(tail)

    def _response_envelope(self, tail: LogSlice, now_ms: int, hidden: frozenset[str]) -> tuple[bytes, bytes]:
        """Return the text of a body before and after the elements, without its end."""
        before, after = visible_envelope(tail, self._settings.field, hidden)
        return b'{"data":' + before, b'%b,"hash":"%b","timestamp":%d' % (after, tail.hash.encode(), now_ms)


def _end(tail: LogSlice) -> bytes:
    """Return the end of a body. It is known only after the elements of `tail` were read."""
    return b',"hasMore":true}' if tail.has_more else b"}"


def parse_log_range(query: Mapping[str, str], settings: LogSettings, now_ms: int) -> LogRange:
    """Parse the bounds of a pull as the `settings` allow: at most `maxPullLimit` elements, the newest if a
    number is requested, else the oldest, so that a client that continues from the last one misses none. A log
    that stores nothing needs no bounds. With `forceFullFetch` a checkpoint alone requests the whole log.

    Raises:
        InvalidCheckpoint, InvalidLimit, InvalidLast: not an integer in canonical decimal.
        PullBoundRequired, FullWithBounds, FullNotAllowed, CheckpointTooOld.
    """
    if not settings.persist:
        return LogRange()
    since = _bound(query.get("checkpoint", query.get("since")), InvalidCheckpoint)
    limit = _bound(query.get("limit"), _invalid_limit)
    last = _bound(query.get("last"), InvalidLast)
    newest = last if limit is None else limit
    is_full = query.get("full") in ("1", "true")
    if since is None and newest is None:
        if not is_full:
            raise PullBoundRequired
        if not settings.allow_full:
            raise FullNotAllowed
        return LogRange()
    if is_full:
        raise FullWithBounds
    if newest is None and settings.force_full:
        return LogRange(oldest=settings.max_pull_limit)
    settings.check_checkpoint_age(since, now_ms)
    if newest is None:
        return LogRange(since, oldest=settings.max_pull_limit)
    return LogRange(
        since, newest if settings.max_pull_limit is None else min(newest, settings.max_pull_limit)
    )


def _bound(text: str | None, make_error: Callable[[], BadRequest]) -> int | None:
    if text is None:
        return None
    if not _is_bound(text):
        raise make_error()
    return clamped_int(text)


def _invalid_limit() -> BadRequest:
    return InvalidLimit("Invalid limit")


def visible_envelope(tail: LogSlice, field: str, hidden: frozenset[str]) -> tuple[bytes, bytes]:
    """Return the text of `data` before and after the elements, without the hidden members that Starfish
    stored beside them."""
    before, after = tail.envelope(field)
    if not hidden:
        return before, after
    visible = field_permissions.redact(before + after, hidden - {field})
    return visible.removesuffix(after), after


async def redact_in_thread(elements: bytes, hidden: frozenset[str]) -> bytes:
    """Return the elements without their hidden members. Large texts are redacted in the thread for heavy
    work."""
    if len(elements) > PYTHON_IN_THREAD_ABOVE:
        return await run_heavy(field_permissions.redact_elements, elements, hidden)
    return field_permissions.redact_elements(elements, hidden)
