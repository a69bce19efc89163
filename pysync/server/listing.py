"""The list route: what a collection holds under a prefix, page by page (wire section 7)."""

import re
from typing import Any

from aiohttp import web

from pysync import _core, listing
from pysync.config.key_templates import are_parameters, document_key, is_parameter
from pysync.errors import InvalidAfter, InvalidLimit
from pysync.plugins import StoredFiles
from pysync.server.answer import Answer, json_answer
from pysync.server.callers import Callers
from pysync.server.routes import Match
from pysync.store import Store

_is_limit = re.compile(r"[1-9][0-9]*").fullmatch
_LIMIT_DIGITS = len(str(listing.MAX_LIMIT))


class Lists:
    """The list routes of one service."""

    def __init__(self, store: Store, callers: Callers) -> None:
        self._store = store
        self._callers = callers

    async def list(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/list/<prefix>`: `{"items", "hasMore"}`."""
        rule = match.rule
        limit, after, scope = await self._asked(request, match)
        prefix = f"{match.key}/" if match.key else ""

        def admitted(names: list[str]) -> list[str]:
            if rule.rivals or not are_parameters(names):
                names = [name for name in names if is_parameter(name) and rule.owns(prefix + name)]
            return names if scope is None else scope.undenied(prefix, names)

        most = None if scope is None else listing.MOST_DENIED
        items, has_more = await listing.page(self._store, match.key, after, limit, admitted, most)
        return json_answer(200, {"items": items, "hasMore": has_more}, match.route.read_headers)

    async def _asked(
        self, request: web.BaseRequest, match: Match
    ) -> tuple[int, str | None, _core.Scope | None]:
        """The limit of a list that is allowed, the name that it is to begin after, and the caller's scope if
        that denies any names."""
        _, caller = await self._callers.reader(request, match)
        scope = caller.scope if caller.scope is not None and caller.scope.has_denies else None
        if "?" not in request.raw_path:
            return listing.DEFAULT_LIMIT, None, scope
        return _limit(request.query.get("limit")), _after(request.query.get("after")), scope


class StoredLists(Lists):
    """The list routes of a collection whose files a plugin keeps."""

    def __init__(self, files: StoredFiles, *parts: Any) -> None:
        super().__init__(*parts)
        self._suffix = files.suffix
        self._folder = tuple(files.template.split("/")[:-1])
        self._hidden_from = files.hidden_from

    async def list(self, request: web.BaseRequest, match: Match) -> Answer:
        """`Lists.list`: the names of the files, without their suffix."""
        limit, after, scope = await self._asked(request, match)
        suffix, hidden = self._suffix, [self._hidden_from()]

        def admitted(names: list[str]) -> list[str]:
            bare = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
            bare = [name for name in bare if is_parameter(name)]
            return bare if scope is None else scope.undenied(f"{match.key}/", bare)

        folder = document_key(self._folder, match.params)
        most = None if scope is None else listing.MOST_DENIED
        after = after and after + suffix
        items, has_more = await listing.page(self._store, folder, after, limit, admitted, most)
        hidden.append(self._hidden_from())  # what has begun meanwhile may be missing, too
        end = min((name for name in hidden if name is not None), default=None)
        if end is not None and items and items[-1] >= end:
            items, has_more = [name for name in items if name < end], False
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
