"""The list route: pages of the values of the last path parameter of a collection.

See docs/reference/protocol.md#list.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from pysync import _core
from pysync.auth.policy import AccessPolicy
from pysync.config.key_templates import KeyTemplate, are_parameters, is_parameter
from pysync.engine.append_log import LogSettings
from pysync.engine.subscriptions import Slices
from pysync.errors import BadRequest, Forbidden, HashesNotAvailable, InvalidAfter, InvalidLimit
from pysync.model import Caller
from pysync.plugins import FileBackedCollection
from pysync.protocol import HASH_DIGITS, MAX_HASHED_PAGE_SIZE, MAX_PAGE_SIZE, clamped_int
from pysync.server.api import Service
from pysync.server.authorization import unless_server_error
from pysync.server.http.responses import Response, json_response
from pysync.server.http.router import Match
from pysync.store import PAGE, Store

DEFAULT_LIMIT = 100
MAX_SCANNED = 5_000
"""Number of names, or of changes, that one request examines of which the caller may not see all."""


class ListPage(NamedTuple):
    """Names in code-point order, and True if there are more after the last."""

    items: list[str]
    has_more: bool


async def list_page(
    store: Store,
    prefix: str,
    after: str | None,
    limit: int,
    filter_names: Callable[[list[str]], list[str]],
    max_scanned: int | None = None,
) -> ListPage:
    """Return the first `limit` names directly under `prefix` that follow `after` and pass `filter_names`.

    The store lists one name more than the page, and lists again only if names were filtered out, so the cost
    depends on the page and not on its position. No document is read: one older than its `ttlMs` is listed
    until it is swept. If `max_scanned` names were examined and some passed, the page ends early.

    Raises:
        Forbidden: none of `max_scanned` names passed.
        StoreUnavailable: the store cannot list its keys.
    """
    items: list[str] = []
    size, scanned = limit + 1, 0
    while len(items) <= limit:
        names = await store.list(prefix, after, size)
        items += filter_names(names)
        if len(names) < size:
            break
        after = names[-1]
        if max_scanned is not None and len(items) <= limit:
            scanned += len(names)
            if scanned >= max_scanned:
                if not items:
                    raise Forbidden
                return ListPage(items, has_more=True)
            size = MAX_PAGE_SIZE + 1
            await asyncio.sleep(0)
    return ListPage(items[:limit], len(items) > limit)


_is_limit = re.compile(r"[1-9][0-9]*").fullmatch


class ListHandler:
    """The list routes of one collection. `pulls` is its policy for pulls."""

    def __init__(self, service: Service, pulls: AccessPolicy) -> None:
        self._service = service
        self._store = service.store
        self._authorizer = service.authorizer
        self._pulls = pulls
        log = pulls.collection.append_only
        self._log = None if log is None else LogSettings.from_collection(pulls.collection)

    async def list(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/list/<prefix>`: `{"items", "hasMore", "hashes"?}`."""
        access = await self._authorizer.authorize(request, match)
        scope = access.caller.scope
        scope = scope if scope is not None and scope.has_denies else None
        limit, after, with_hashes = DEFAULT_LIMIT, None, False
        if "?" in request.raw_path:
            with_hashes = parse_flag(request, "hashes")
            most = MAX_HASHED_PAGE_SIZE if with_hashes else MAX_PAGE_SIZE
            limit = parse_limit(request.query.get("limit"), DEFAULT_LIMIT, most)
            after = _after(request.query.get("after"))
        if with_hashes:
            await self._check_pull(match, access.signer)
        items, has_more = await self._page(match, after, limit, scope)
        page: dict[str, Any] = {"items": items, "hasMore": has_more}
        if with_hashes:
            page["hashes"] = await self._hashes(match, access.signer.scope, items)
        return json_response(page, match.route.read_headers)

    async def _check_pull(self, match: Match, caller: Caller) -> None:
        """Raise HashesNotAvailable unless a pull would show the caller the hash of whatever is listed."""
        policy, anywhere = self._pulls, replace(caller, scope=None)
        if self._store.is_remote or policy.collection.push_only or policy.uses_plugin_roles:
            raise HashesNotAvailable
        decision = await self._authorizer.decide(policy, anywhere, match.identity, match.params, "")
        access = unless_server_error(decision)
        if access is None or access.hidden:
            raise HashesNotAvailable

    async def _hashes(
        self, match: Match, scope: _core.Scope | None, names: Sequence[str]
    ) -> Sequence[str | None]:
        """Return the first digits of the hash of each of `names`. None stands for what is damaged, gone or
        outside `scope`."""
        hashes, slices = list[str | None](), Slices()
        for start in range(0, len(names), PAGE):
            keys = {self._key(match, name): name for name in names[start : start + PAGE]}
            versions = await self._service.known_versions(keys)
            for key, name in keys.items():
                version = None
                if scope is None or scope.allows(f"{match.key}/{name}"):
                    version = versions.get(key) or await self._service.stored_version(key, self._log)
                hashes.append(None if version is None else version.hash[:HASH_DIGITS] or None)
                await slices.share()
        return hashes

    def _key(self, match: Match, name: str) -> str:
        """Return the key at which the item with this name is stored."""
        return f"{match.key}/{name}".removeprefix("/")

    async def _page(self, match: Match, after: str | None, limit: int, scope: _core.Scope | None) -> ListPage:
        """Return the names that the caller may see, whose `scope` is None if it denies none."""
        policy = match.policy
        prefix = f"{match.key}/" if match.key else ""

        def admitted(names: list[str]) -> list[str]:
            if policy.shadowing_templates or not are_parameters(names):
                names = [name for name in names if is_parameter(name) and policy.owns_key(prefix + name)]
            return names if scope is None else scope.undenied(prefix, names)

        max_scanned = None if scope is None else MAX_SCANNED
        return await list_page(self._store, match.key, after, limit, admitted, max_scanned)


class PluginFileListHandler(ListHandler):
    """The list routes of a collection whose files a plugin stores. Lists leave out the suffix of names."""

    def __init__(self, service: Service, pulls: AccessPolicy, files: FileBackedCollection) -> None:
        super().__init__(service, pulls)
        self._suffix = files.suffix
        self._folder = KeyTemplate(files.template.rpartition("/")[0])
        self._visible_before = files.visible_before

    async def _page(self, match: Match, after: str | None, limit: int, scope: _core.Scope | None) -> ListPage:
        suffix, hidden = self._suffix, [self._visible_before()]

        def admitted(names: list[str]) -> list[str]:
            bare = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
            bare = [name for name in bare if is_parameter(name)]
            return bare if scope is None else scope.undenied(f"{match.key}/", bare)

        folder = self._folder.fill(match.params)
        max_scanned = None if scope is None else MAX_SCANNED
        after = after and after + suffix
        items, has_more = await list_page(self._store, folder, after, limit, admitted, max_scanned)
        hidden.append(self._visible_before())  # files begun meanwhile may be missing too
        end = min((name for name in hidden if name is not None), default=None)
        if end is not None and items and items[-1] >= end:
            return ListPage([name for name in items if name < end], has_more=False)
        return ListPage(items, has_more)

    def _key(self, match: Match, name: str) -> str:
        return f"{self._folder.fill(match.params)}/{name}{self._suffix}"


def parse_flag(request: web.BaseRequest, name: str) -> bool:
    """Return the `true` or `false` of a query; False without one. Raises BadRequest."""
    text = request.query.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"Invalid {name} parameter")
    return text == "true"


def parse_limit(text: str | None, default: int, most: int = MAX_PAGE_SIZE) -> int:
    """Return the `limit` of a query, at most `most`. Raises InvalidLimit."""
    if text is None:
        return default
    if not _is_limit(text):
        raise InvalidLimit
    return clamped_int(text, most)


def _after(text: str | None) -> str | None:
    if text is not None and not is_parameter(text):
        raise InvalidAfter
    return text
