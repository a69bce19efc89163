"""The list route: what a collection holds under a prefix, page by page (wire section 7)."""

import re

from aiohttp import web

from pysync import listing
from pysync.config.template import are_parameters, is_parameter
from pysync.errors import InvalidAfter, InvalidLimit
from pysync.server.answer import Answer, json_answer
from pysync.server.callers import Callers
from pysync.server.roles import Roles
from pysync.server.routes import Match
from pysync.store import Store

_is_limit = re.compile(r"[1-9][0-9]*").fullmatch
_LIMIT_DIGITS = len(str(listing.MAX_LIMIT))


class Lists:
    """The list routes of one service."""

    def __init__(self, store: Store, callers: Callers, roles: Roles) -> None:
        self._store = store
        self._callers = callers
        self._roles = roles

    async def list(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/list/<prefix>`: `{"items", "hasMore"}`."""
        rule = match.rule
        caller = await self._callers.reader(request, rule)
        if rule.by_request:
            caller = await self._roles.enriched(rule, caller, match.params, match.key)
        rule.authorize(caller, match.identity, match.key)
        limit, after = listing.DEFAULT_LIMIT, None
        if "?" in request.raw_path:
            limit = _limit(request.query.get("limit"))
            after = _after(request.query.get("after"))
        prefix = f"{match.key}/" if match.key else ""

        def admitted(names: list[str]) -> list[str]:
            if not rule.rivals and are_parameters(names):
                return names
            return [name for name in names if is_parameter(name) and rule.owns(prefix + name)]

        items, has_more = await listing.page(self._store, match.key, after, limit, admitted)
        return json_answer(200, {"items": items, "hasMore": has_more}, match.route.read_headers)


def _limit(text: str | None) -> int:
    if text is None:
        return listing.DEFAULT_LIMIT
    if not _is_limit(text):
        raise InvalidLimit
    return listing.MAX_LIMIT if len(text) > _LIMIT_DIGITS else min(int(text), listing.MAX_LIMIT)


def _after(text: str | None) -> str | None:
    if text is not None and not is_parameter(text):
        raise InvalidAfter
    return text
