"""The pull of a bundle: its members in one answer (wire section 6)."""

import orjson
from aiohttp import web

from pysync import bundles, wire
from pysync.bundles import Bundle
from pysync.documents import Documents
from pysync.server.answer import Answer, json_answer, version_matches
from pysync.server.callers import Callers
from pysync.server.routes import Match
from pysync.spaces import Spaces


class BundlePull:
    """The pull route of one bundle."""

    def __init__(self, bundle: Bundle, documents: Documents, callers: Callers, spaces: Spaces) -> None:
        self._bundle = bundle
        self._documents = documents
        self._callers = callers
        self._spaces = spaces

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        bundle = self._bundle
        caller = await self._callers.reader(request, bundle.gate, *bundle.others)
        caller = await self._spaces.enriched(bundle.gate, caller, match.params)
        members = await bundle.pull(self._documents, caller, match.identity, match.key)
        version = bundles.version(members)
        headers = f'{match.route.read_headers}ETag: "{version}"\r\n'
        if version_matches(request.headers.get(wire.HEADER_IF_NONE_MATCH), version):
            return Answer(304, b"", headers)
        collections = {
            member.name: {"data": orjson.Fragment(member.data), "hash": member.hash} for member in members
        }
        answer = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_answer(200, answer, headers)
