"""Earlier versions of documents: their list, and pulls of one (docs/reference/protocol.md#history)."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from pysync import _core
from pysync.auth import field_permissions
from pysync.auth.policy import AccessPolicy
from pysync.config import HistoryConfig
from pysync.engine.history import Entry
from pysync.errors import NotFound, VersionNotFound
from pysync.model import WriteResult
from pysync.server.api import Service
from pysync.server.api.documents import DocumentHandlers
from pysync.server.authorization import Access
from pysync.server.http.responses import NO_STORE, Response, json_response
from pysync.server.http.router import Match


class _Version(NamedTuple):
    """A version: the current one, or an earlier one that was replaced at `replaced_ms`."""

    document: _core.Document
    replaced_ms: int | None


class HistoryHandlers(DocumentHandlers):
    """The reads of one collection with `history`. `policy` is that of its history route, and `headers` are
    the caching headers that it allows."""

    def __init__(self, service: Service, history: HistoryConfig, policy: AccessPolicy, headers: str) -> None:
        super().__init__(service)
        self._history = history
        self._policy = policy
        self._headers = headers

    async def list(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/history/<key>`: the versions of a document, the newest first."""
        access = await self._authorize(request, match)
        writers: dict[tuple[str, int], str] = {}
        versions: dict[tuple[str, int], dict[str, Any]] = {}
        async for each in self._each(match.key, writers):
            version = each.document.hash, each.document.ts_ms
            if version not in versions:
                versions[version] = await self._describe(match, access, each)
        for version, described in versions.items():
            if writers.get(version):
                described["identity"] = writers[version]
        return json_response(
            {"versions": list(versions.values()), "timestamp": self._documents.now_ms()}, NO_STORE
        )

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/pull/<key>`, with `version` that version of the document."""
        wanted = request.query.get("version") if "?" in request.raw_path else None
        if wanted is None:
            return await super().pull(request, match)
        route = replace(match.route, policy=self._policy, read_headers=self._headers)
        match = match._replace(route=route, policy=self._policy)
        access = await self._authorize(request, match)
        async for each in self._each(match.key, {}):
            if await self._version(match, access, each.document) == wanted:
                return await self.document_response(request, match, access, each.document)
        raise VersionNotFound

    async def _authorize(self, request: web.BaseRequest, match: Match) -> Access:
        """Return the access of a reader of history. Raises NotFound if a plugin would respond to a pull, as
        for a document that is read together with others."""
        access = await self._authorizer.authorize(request, match)
        if access.reply is not None:
            raise NotFound
        return access

    async def _each(self, key: str, writers: dict[tuple[str, int], str]) -> AsyncIterator[_Version]:
        """Yield the versions of a document, the current one first. `writers` receives the identities of those
        who wrote them."""
        current = await self._documents.pull(key)
        if current is not None:
            yield _Version(current, None)
        entry: Entry
        async for entry in self._documents.history.entries(key, self._history):
            writers[entry.hash, entry.at_ms] = entry.identity
            if entry.replaced is not None:
                yield _Version(entry.replaced, entry.at_ms)

    async def _version(self, match: Match, access: Access, document: _core.Document) -> str:
        return await self.visible_version(match, access, WriteResult(document.hash, document.ts_ms))

    async def _describe(self, match: Match, access: Access, version: _Version) -> dict[str, Any]:
        document, data = version.document, version.document.data
        if access.hidden:
            data = field_permissions.redact(data, access.hidden)
        described = {
            "hash": await self._version(match, access, document),
            "timestamp": document.ts_ms,
            "size": len(data),
        }
        if version.replaced_ms is not None:
            described["replaced"] = version.replaced_ms
        if document.author_pubkey is not None and not access.hidden:
            described["authorPubkey"] = document.author_pubkey
        return described
