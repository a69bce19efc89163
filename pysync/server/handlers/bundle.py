"""Bundles: documents under one path that are read together, each by rules of its own (wire section 6).

The pull of a bundle: its members in one answer (wire section 6).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.authentication import Access
from pysync.auth.policy import Rule
from pysync.engine.documents import Documents, Known
from pysync.engine.keyed_versions import KeyedVersions
from pysync.errors import PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import Callers, Roles, request_of
from pysync.server.responses import Answer, HeadAnswer, json_answer, version_matches, wants_body
from pysync.server.router import Match


@dataclass(frozen=True, slots=True)
class Member:
    """A member as one reader gets it. `data` is JSON text without the fields named in `hidden`, None if it
    was not read. `hash` is the version for this reader, `""` if the member was never written."""

    name: str
    data: bytes | None
    hash: str
    hidden: frozenset[str]


class Bundle:
    """The members that a bundle has in the configuration: `rules` are those of their pulls, in its order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.gate = replace(
            rules[0],
            examines=any(rule.examines for rule in rules),
            by_space=any(rule.by_space for rule in rules),
            by_plugin=False,
            admits_anonymous=True,
            roles=frozenset(),
        )
        """What a bundle asks of whoever reads any of it: credentials that hold, if any are examined. It
        admits nobody to a document, and has the rate limit of the first member. Plugins are asked for the
        roles of each member."""
        self.others = self.rules[1:]
        """The rules of the other members, whose rate limits count too."""

    def readable(
        self, readers: Sequence[Caller | None], identity: str | None, path: str
    ) -> list[tuple[Rule, Caller]]:
        """The members below `path`, whose `{identity}` is `identity`, that their readers may read: perhaps
        none. `readers` is who asks, with the roles that count for each of `rules`, None where it is refused
        that one."""
        return [
            (rule, reader)
            for rule, reader in zip(self.rules, readers, strict=True)
            if reader is not None
            and rule.owns(key := f"{path}/{rule.collection.name}")
            and rule.answers(reader, identity, key)
        ]

    async def pull(
        self,
        documents: Documents,
        readable: Sequence[tuple[Rule, Caller]],
        identity: str | None,
        path: str,
        *,
        whole: bool = True,
    ) -> list[Member]:
        """The members that `readable` found; `whole`: with their data, also where their versions are known.

        Raises:
            DocumentCorrupt: one of them does not read as a document.
            StoreUnavailable: nobody can tell what one of them holds.
        """
        found = await asyncio.gather(
            *(
                # A member with hidden fields has to be rewritten for the reader, from its data.
                (documents.pull if whole or rule.collection.field_permissions else documents.look)(
                    f"{path}/{rule.collection.name}", rule.collection.ttl_ms
                )
                for rule, _ in readable
            )
        )
        return [
            await _as_read(rule, document, rule.roles_of(reader, identity), path, documents.versions)
            for (rule, reader), document in zip(readable, found, strict=True)
        ]


def version(members: Sequence[Member]) -> str:
    """A text that tells two readings of a bundle apart wherever they differ."""
    told = [[member.name, member.hash, *sorted(member.hidden)] for member in members]
    return _core.content_hash(orjson.dumps(told))


async def _as_read(
    rule: Rule,
    document: _core.Document | Known | None,
    roles: frozenset[str],
    path: str,
    versions: KeyedVersions,
) -> Member:
    name = rule.collection.name
    if document is None:
        return Member(name, b"{}", "", frozenset())
    if isinstance(document, Known):
        return Member(name, None, document.hash, frozenset())
    hidden = field_permissions.hidden(rule.collection.field_permissions, roles)
    data = field_permissions.without(document.data, hidden) if hidden else document.data
    version = await versions.told(f"{path}/{name}", document.hash, document.ts_ms, hidden)
    return Member(name, data, version, hidden)


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
        etag = version(members)
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), etag):
            return Answer(304, b"", headers)
        if request.method == "HEAD":
            return HeadAnswer(headers)
        if any(member.data is None for member in members):
            members = await bundle.pull(self._documents, readable, match.identity, match.key)
            headers = f'{match.route.read_headers}ETag: "{version(members)}"\r\n'
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
