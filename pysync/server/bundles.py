"""The pull of a bundle: its members in one answer (wire section 6)."""

import orjson
from aiohttp import web

from pysync import bundles, protocol
from pysync.auth.authentication import Access
from pysync.auth.policy import Rule
from pysync.bundles import Bundle
from pysync.engine.documents import Documents
from pysync.errors import PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.answer import Answer, HeadAnswer, json_answer, version_matches, wants_body
from pysync.server.callers import Callers
from pysync.server.roles import Roles, request_of
from pysync.server.routes import Match


class BundlePull:
    """The pull route of one bundle."""

    def __init__(
        self,
        bundle: Bundle,
        documents: Documents,
        access: Access,
        callers: Callers,
        roles: Roles,
        hooks: Hooks,
    ) -> None:
        self._bundle = bundle
        self._documents = documents
        self._access = access
        self._callers = callers
        self._roles = roles
        self._hooks = hooks
        self._asks = hooks.authorizes or hooks.pulls

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        bundle = self._bundle
        credentials = self._access.present(bundle.gate, request.headers)
        verified = await self._callers.verified(request, credentials, b"", bundle.gate, *bundle.others)
        if self._hooks.pulls:
            await self._access.consume(verified)  # before plugins are told, which may act on it
        caller = verified.caller
        if bundle.gate.by_request:
            caller = await self._roles.enriched(bundle.gate, caller, match.params, match.key)
        readers: list[Caller | None] = [caller] * len(bundle.rules)
        if self._asks:
            readers = [await self._reader(rule, caller, match) for rule in bundle.rules]
        readable = bundle.readable(readers, match.identity, match.key)
        if readable and not self._hooks.pulls:
            await self._access.consume(verified)
        members = await bundle.pull(
            self._documents, readable, match.identity, match.key, whole=wants_body(request)
        )
        version = bundles.version(members)
        headers = f'{match.route.read_headers}ETag: "{version}"\r\n'
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), version):
            return Answer(304, b"", headers)
        if request.method == "HEAD":
            return HeadAnswer(headers)
        if any(member.data is None for member in members):
            members = await bundle.pull(self._documents, readable, match.identity, match.key)
            headers = f'{match.route.read_headers}ETag: "{bundles.version(members)}"\r\n'
        collections = {
            member.name: {"data": orjson.Fragment(member.data or b"{}"), "hash": member.hash}
            for member in members
        }
        answer = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_answer(200, answer, headers)

    async def _reader(self, rule: Rule, caller: Caller, match: Match) -> Caller | None:
        """`caller`, with what plugins say, as the reader of a member; None where a pull of it alone would be
        refused, or answered by a plugin."""
        key = f"{match.key}/{rule.collection.name}"
        params = match.params
        if not rule.examines:
            caller = ANONYMOUS
        try:
            caller = await self._roles.by_plugins(rule, caller, params, key)
            if self._hooks.pulls and rule.answers(caller, match.identity, key):
                await self._hooks.leave(request_of(rule, caller, params, key))
        except PysyncError as error:
            if error.status >= 500:
                raise
            return None
        return caller
