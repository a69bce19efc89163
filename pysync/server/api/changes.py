"""`GET {ns}/changes`: pages of the latest change of each document.

See docs/reference/protocol.md#changes.
"""

from collections.abc import Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from pysync.auth.policy import AccessPolicy
from pysync.changelog import Cursor
from pysync.engine.append_log import LogSettings
from pysync.engine.changes import DocumentRef, ParsedChange
from pysync.engine.restored import restored_ms
from pysync.engine.subscriptions import Event, Slices
from pysync.erase.record import ErasureRecord
from pysync.errors import InvalidSince, RolesUnavailable
from pysync.feed import LatestChange, ResetReason
from pysync.model import Caller
from pysync.server.api import Service
from pysync.server.api.listing import MAX_SCANNED, parse_flag, parse_limit
from pysync.server.api.topics import TopicRequests
from pysync.server.http.responses import NO_STORE, Response, json_response
from pysync.server.http.router import Match
from pysync.server.sse import StreamSource
from pysync.server.stream_authorization import StreamGrant, topic_of

DEFAULT_LIMIT: Final = 500
_ANY: Final = DocumentRef("", {})
"""A document of no collection in particular."""


class ChangesHandler:
    """The feed of one namespace."""

    def __init__(
        self,
        service: Service,
        policies: Sequence[AccessPolicy],
        requests: TopicRequests,
        source: StreamSource,
    ) -> None:
        self._service = service
        self._store = service.store
        self._logs = {
            topic_of(policy): LogSettings.from_collection(policy.collection)
            for policy in policies
            if policy.collection.append_only is not None
        }
        self._paths = {topic_of(each): each.collection.path_template.text for each in policies}
        self._requests = requests
        self._authorizer = source.authorizer
        self._keys = source.keys
        self._feed = source.feed
        self._log = source.dispatcher.log

    async def page(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `{"changes", "cursor", "hasMore"?}`, or `{"reset", "cursor"}`, and the `storagePaths` of the
        collections if they are requested. Raises as `TopicRequests.admit`; BadRequest,
        InvalidLimit and InvalidSince; RolesUnavailable if the rights to a document of the page cannot be
        determined."""
        limit = parse_limit(request.query.get("limit"), DEFAULT_LIMIT)
        with_paths = parse_flag(request, "storagePaths")
        since, cursor = request.query.get("since"), None
        if since is not None and since != "now":
            try:
                cursor = Cursor.parse(since)
            except ValueError:
                raise InvalidSince from None
        verified, grant = await self._requests.admit(request)
        if since == "now":
            found: dict[str, Any] = {"cursor": await self._log.last_id()}
        else:
            found = await self._read(_Reader(verified.caller, grant), cursor, limit)
        if with_paths:
            found["storagePaths"] = {topic[1]: self._paths[topic] for topic in grant.filter}
        return json_response(found, NO_STORE)

    async def _read(self, reader: "_Reader", cursor: Cursor | None, limit: int) -> dict[str, Any]:
        """Return the body of a response."""
        folders = self._keys.folders(reader.filter)
        entries: dict[str, orjson.Fragment] = {}
        since, size, left, is_end = "" if cursor is None else str(cursor), limit, MAX_SCANNED, False
        while not is_end and left > 0 and len(entries) < limit:
            page = await self._feed.latest(folders, since, min(size, left))
            if isinstance(page, ResetReason):
                return await self._reset(cursor)
            room, size, left = limit - len(entries), max(limit, DEFAULT_LIMIT), left - page.scanned
            since, is_end = page.cursor, page.is_end
            found = await self._authorized(reader, page.changes)
            if len(found) > room:
                since, is_end = page.cursor_after(found[room - 1][0]), False
            for _, event in found[:room]:
                entries.pop(event.key, None)  # it has changed again since
                entries[event.key] = orjson.Fragment(event.data)
        # At the newest id nothing was erased since. A bucket then saves a request.
        may_miss = cursor if cursor is not None and since != str(cursor) else None
        if may_miss and (await ErasureRecord.load(self._store)).covers(may_miss.first, reader.filter):
            return await self._reset(cursor)
        return {"changes": list(entries.values()), "cursor": since, **({} if is_end else {"hasMore": True})}

    async def _reset(self, cursor: Cursor | None) -> dict[str, Any]:
        """Return the body of a reset for a reader at this cursor."""
        at_ms = None if cursor is None else await restored_ms(self._store, cursor.latest)
        found = {"reset": True, "cursor": await self._log.last_id()}
        return found if at_ms is None else found | {"restored": at_ms}

    async def _authorized(
        self, reader: "_Reader", changes: Sequence[LatestChange]
    ) -> list[tuple[LatestChange, Event]]:
        """Return the changes that the reader may receive, as the collection that it asked for sees them."""
        slices, found = Slices(), list[tuple[LatestChange, Event]]()
        for change in changes:
            for match in self._keys.matches(_ANY._replace(key=change.key)):
                wanted = reader.filter.get(match.topic)
                if wanted is None or not wanted.items() <= match.params.items():
                    continue
                hash_, timestamp_ms = change.hash, change.timestamp_ms
                if hash_ is None or timestamp_ms is None:
                    log = self._logs.get(match.topic)
                    stored = await self._service.stored_version(change.key, log)
                    hash_, timestamp_ms = stored or (None, 0)
                if hash_ is not None:
                    parsed = ParsedChange(_ANY, hash_, timestamp_ms, change.removed)
                    found.append((change, Event.of(change.id, parsed, match)))
            await slices.share()
        if reader.restricted:
            authorize = await self._authorizer.authorize([(event, [reader]) for _, event in found])
            decided = [(change, authorize(reader, event)) for change, event in found]
            if reader.is_undecided:
                raise RolesUnavailable
            found = [(change, event) for change, event in decided if event is not None]
        return found


class _Reader:
    """The caller of a request, as one that receives events. It has just been authenticated."""

    proof = None
    verified_at_ms = 0
    is_undecided = False

    def __init__(self, caller: Caller, grant: StreamGrant) -> None:
        self.caller = caller
        self.filter, self.restricted = grant

    def abort(self) -> None:
        """See `Recipient.abort`."""
        self.is_undecided = True
