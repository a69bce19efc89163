"""Handle pulls of bundles: documents below one path, each with rules of its own.

See docs/reference/protocol.md#bundles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.policy import AccessPolicy
from pysync.engine.documents import CachedVersion, Documents
from pysync.engine.keyed_versions import KeyedVersions
from pysync.model import Caller
from pysync.server.authorization import Access
from pysync.server.responses import HeadResponse, Response, etag_matches, json_response, wants_body
from pysync.server.router import Match
from pysync.server.service import Service


@dataclass(frozen=True, slots=True)
class Member:
    """A member as one reader gets it. `data` is JSON text without the fields named in `hidden`, None if it
    was not read. `hash` is the version for this reader, `""` if the member was never written."""

    name: str
    data: bytes | None
    hash: str
    hidden: frozenset[str]


class Bundle:
    """The members that a bundle has in the configuration: `policies` are those of their pulls, in its
    order."""

    def __init__(self, rules: Sequence[AccessPolicy]) -> None:
        self.policies = tuple(rules)
        self.policy = replace(
            rules[0],
            needs_credentials=any(rule.needs_credentials for rule in rules),
            uses_space_roles=any(rule.uses_space_roles for rule in rules),
            uses_plugin_roles=False,
            allows_anonymous=True,
            roles=frozenset(),
        )
        """What a bundle asks of whoever reads any of it: credentials that hold, if any are examined. It
        admits nobody to a document, and has the rate limit of the first member. Plugins are asked for the
        roles of each member."""
        self.extra_policies = self.policies[1:]
        """The rules of the other members, whose rate limits count too."""

    async def pull(
        self,
        documents: Documents,
        readable: Sequence[tuple[AccessPolicy, Access]],
        path: str,
        *,
        whole: bool = True,
    ) -> list[Member]:
        """The members below `path` that are `readable`; `whole`: with their data, also where their versions
        are known.

        Raises:
            DocumentCorrupt: one of them does not read as a document.
            StoreUnavailable: nobody can tell what one of them holds.
        """
        found = await asyncio.gather(
            *(
                # A member with hidden fields has to be rewritten for the reader, from its data.
                (documents.pull if whole or rule.collection.field_permissions else documents.get_version)(
                    f"{path}/{rule.collection.name}", rule.collection.ttl_ms
                )
                for rule, _ in readable
            )
        )
        return [
            await _redacted_member(rule.collection.name, document, access.hidden, path, documents.versions)
            for (rule, access), document in zip(readable, found, strict=True)
        ]


def bundle_etag(members: Sequence[Member]) -> str:
    """A text that tells two readings of a bundle apart wherever they differ."""
    told = [[member.name, member.hash, *sorted(member.hidden)] for member in members]
    return _core.content_hash(orjson.dumps(told))


async def _redacted_member(
    name: str,
    document: _core.Document | CachedVersion | None,
    hidden: frozenset[str],
    path: str,
    versions: KeyedVersions,
) -> Member:
    if document is None:
        return Member(name, b"{}", "", frozenset())
    if isinstance(document, CachedVersion):
        return Member(name, None, document.hash, frozenset())
    data = field_permissions.redact(document.data, hidden) if hidden else document.data
    version = await versions.load_and_compute(f"{path}/{name}", document.hash, document.ts_ms, hidden)
    return Member(name, data, version, hidden)


class BundleHandler:
    """The pull route of one bundle."""

    def __init__(self, service: Service, bundle: Bundle) -> None:
        self._bundle = bundle
        self._documents = service.documents
        self._authorizer = service.authorizer
        self._hooks = service.hooks

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """`GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        bundle, authorizer = self._bundle, self._authorizer
        credentials = authorizer.credentials_for(request, bundle.policy)
        verified = await authorizer.authenticate(
            request, credentials, b"", bundle.policy, *bundle.extra_policies
        )
        if self._hooks.has_pull_hooks:
            await authorizer.consume_nonce(verified)  # before plugins are told, which may act on it
        readable = await self._readable_members(verified.caller, match)
        if readable and not self._hooks.has_pull_hooks:
            await authorizer.consume_nonce(verified)
        members = await bundle.pull(self._documents, readable, match.key, whole=wants_body(request))
        etag = bundle_etag(members)
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        if etag_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), etag):
            return Response(304, b"", headers)
        if request.method == "HEAD":
            return HeadResponse(headers)
        if any(member.data is None for member in members):
            members = await bundle.pull(self._documents, readable, match.key)
            headers = f'{match.route.read_headers}ETag: "{bundle_etag(members)}"\r\n'
        collections = {
            member.name: {"data": orjson.Fragment(member.data or b"{}"), "hash": member.hash}
            for member in members
        }
        answer = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_response(200, answer, headers)

    async def _readable_members(self, caller: Caller, match: Match) -> list[tuple[AccessPolicy, Access]]:
        """The members that the caller may read, perhaps none: not those whose own pull would be refused, or
        answered by a plugin. Raises the error if nobody can tell."""
        params, spaces = match.params, self._authorizer.spaces
        memberships = await spaces.load_membership(self._bundle.policy, caller, params)
        readable = []
        for policy in self._bundle.policies:
            key = f"{match.key}/{policy.collection.name}"
            access = await self._authorizer.may_read_nested(
                policy, caller, match.identity, params, key, memberships
            )
            if access is not None:
                readable.append((policy, access))
        return readable
