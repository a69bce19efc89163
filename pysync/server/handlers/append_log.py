"""Append-only logs over HTTP: append, and pulls of their tails (wire section 5)."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping

from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.authentication import Access
from pysync.engine.append_log import Bounds, LogRules, Logs, Tail
from pysync.engine.keyed_versions import KeyedVersions
from pysync.errors import (
    AppendProofMissing,
    BadRequest,
    FullNotAllowed,
    FullWithBounds,
    InvalidCheckpoint,
    InvalidLast,
    InvalidLimit,
    PullBoundRequired,
)
from pysync.model import Caller, Written
from pysync.server.authorization import Callers
from pysync.server.request_body import apply, aside, check_author, check_sealed, receive, request_key
from pysync.server.responses import NO_STORE, Answer, HeadAnswer, version_matches
from pysync.server.router import Match
from pysync.server.streaming import streamed

STRIP_IN_THREAD_ABOVE = 64 * 1024
MAX_BOUND = 2**63 - 1
"""Nothing lies beyond it: neither so late a time nor so many elements."""

_is_bound = re.compile(r"0|[1-9][0-9]*").fullmatch


class LogHandlers:
    """The routes of one append-only collection, whose logs follow `rules`."""

    def __init__(
        self, rules: LogRules, logs: Logs, access: Access, callers: Callers, versions: KeyedVersions
    ) -> None:
        self._rules = rules
        self._logs = logs
        self._versions = versions
        self._access = access
        self._callers = callers

    async def append(self, request: web.BaseRequest, match: Match) -> Answer:
        """`POST {ns}/push/<key>`: one element at the log's end."""
        caller, element = await self._received(request, match)
        written = await self._made(request, match, caller, element)
        told = await self._versions.told_to(match.rule, caller, match.identity, match.key, written)
        return Answer(200, protocol.written_body(told, written.timestamp_ms), NO_STORE)

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/pull/<key>`: the elements within the bounds of the query."""
        signer, caller = await self._callers.reader(request, match)
        return await self._read(request, match, signer, caller)

    async def _received(self, request: web.BaseRequest, match: Match) -> tuple[Caller, _core.Append]:
        """Who appends, with its roles for this log, and what: allowed and checked."""
        rule = match.rule
        permissions = rule.collection.field_permissions
        caller, text = await receive(request, match, self._access, self._callers)
        element = await aside(len(text), _core.decode_append, text)
        if self._rules.require_author_signature:
            if element.author_pubkey is None:
                raise AppendProofMissing
            await aside(len(text), check_author, "append", element, caller, match.key)
        if permissions:
            field_permissions.check_appended(permissions, rule.roles_of(caller, match.identity), element.data)
        if match.route.keyrings is not None:
            await check_sealed(match, element.data)
        if match.route.check is not None:
            await apply(match.route.check, element.data)
        return caller, element

    async def _made(
        self, request: web.BaseRequest, match: Match, caller: Caller, element: _core.Append
    ) -> Written:
        """Make an append that is allowed and checked."""
        subject = match.subject(caller)
        once = request_key(request, caller, match.key)
        if once is None:
            return await self._logs.append(match.key, element, self._rules, subject)
        return await self._logs.append_once(match.key, element, self._rules, once, subject)

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        """The answer to a pull that is allowed."""
        rule = match.rule
        now_ms = self._logs.now_ms()
        query = request.query if "?" in request.raw_path else {}
        tail = await self._logs.read(match.key, bounds(query, self._rules, now_ms), self._rules)
        if not tail.hash:
            return Answer(200, self._pulled(tail, b"", now_ms), match.route.read_headers)
        permissions = rule.collection.field_permissions
        hidden: frozenset[str] = frozenset()
        if permissions:
            hidden = field_permissions.hidden(permissions, rule.roles_of(caller, match.identity))
        version = tail.hash = await self._versions.told(match.key, tail.hash, tail.newest_ms, hidden)
        headers = f'{match.route.read_headers}ETag: "{version}"\r\n'
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), version):
            return Answer(304, b"", headers)
        if request.method == "HEAD":
            return HeadAnswer(headers)
        if await tail.is_long():
            return await streamed(request, self._pieces(tail, hidden, now_ms), headers)
        text = await tail.text()
        if hidden:
            text = await stripped(text, hidden)
        return Answer(200, self._pulled(tail, text, now_ms, hidden), headers)

    def _pulled(self, tail: Tail, text: bytes, now_ms: int, hidden: frozenset[str] = frozenset()) -> bytes:
        """The answer with the elements of `tail`, whose text is `text`."""
        before, after = self._answer_frame(tail, now_ms, hidden)
        return b"".join((before, text, after, _end(tail)))

    async def _pieces(self, tail: Tail, hidden: frozenset[str], now_ms: int) -> AsyncGenerator[bytes, None]:
        """The same, piece by piece."""
        before, after = self._answer_frame(tail, now_ms, hidden)
        comma = b""
        async for chunk in tail.chunks():
            if hidden:
                yield before + comma + await stripped(chunk.removeprefix(b","), hidden)
                comma = b","
            else:
                yield before + chunk if before else chunk
            before = b""
        yield before + after + _end(tail)

    def _answer_frame(self, tail: Tail, now_ms: int, hidden: frozenset[str]) -> tuple[bytes, bytes]:
        """The text of an answer before and after the elements, without its end."""
        before, after = visible_frame(tail, self._rules.field, hidden)
        return b'{"data":' + before, b'%b,"hash":"%b","timestamp":%d' % (after, tail.hash.encode(), now_ms)


def _end(tail: Tail) -> bytes:
    """The end of an answer, after the elements of `tail`: before these it is not known."""
    return b',"hasMore":true}' if tail.has_more else b"}"


def bounds(query: Mapping[str, str], rules: LogRules, now_ms: int) -> Bounds:
    """Parse the bounds of a pull, as far as `rules` allow them: at most `maxPullLimit` elements, the newest
    if a number is asked for, else the oldest, so that a client that continues from the last one misses none.
    A log that stores nothing needs no bounds. With `forceFullFetch` a checkpoint alone asks for the whole
    log.

    Raises:
        InvalidCheckpoint, InvalidLimit, InvalidLast: not an integer in canonical decimal.
        PullBoundRequired, FullWithBounds, FullNotAllowed, CheckpointTooOld.
    """
    if not rules.persist:
        return Bounds()
    since = _bound(query.get("checkpoint", query.get("since")), InvalidCheckpoint)
    limit = _bound(query.get("limit"), _invalid_limit)
    last = _bound(query.get("last"), InvalidLast)
    newest = last if limit is None else limit
    is_full = query.get("full") in ("1", "true")
    if since is None and newest is None:
        if not is_full:
            raise PullBoundRequired
        if not rules.allow_full:
            raise FullNotAllowed
        return Bounds()
    if is_full:
        raise FullWithBounds
    if newest is None and rules.force_full:
        return Bounds(oldest=rules.max_pull_limit)
    rules.check_age(since, now_ms)
    if newest is None:
        return Bounds(since, oldest=rules.max_pull_limit)
    return Bounds(since, newest if rules.max_pull_limit is None else min(newest, rules.max_pull_limit))


def _bound(text: str | None, refused: Callable[[], BadRequest]) -> int | None:
    if text is None:
        return None
    if not _is_bound(text):
        raise refused()
    return MAX_BOUND if len(text) > len(str(MAX_BOUND)) else min(int(text), MAX_BOUND)


def _invalid_limit() -> BadRequest:
    return InvalidLimit("Invalid limit")


def visible_frame(tail: Tail, field: str, hidden: frozenset[str]) -> tuple[bytes, bytes]:
    """What stands before and after the elements in the text of `data`, without the hidden members that
    Starfish kept beside them."""
    before, after = tail.frame(field)
    if not hidden:
        return before, after
    visible = field_permissions.without(before + after, hidden - {field})
    return visible.removesuffix(after), after


async def stripped(elements: bytes, hidden: frozenset[str]) -> bytes:
    """The elements without their hidden members, made beside the event loop where there are many."""
    if len(elements) > STRIP_IN_THREAD_ABOVE:
        return await asyncio.to_thread(field_permissions.without_in_each, elements, hidden)
    return field_permissions.without_in_each(elements, hidden)
