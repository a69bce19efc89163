"""Pulls of bundles, which are documents below one path, each with its own access policy.

See docs/reference/protocol.md#bundles.

"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from aiohttp import web

from pysync import _core
from pysync.auth import field_permissions
from pysync.auth.policy import AccessPolicy
from pysync.engine.documents import CachedVersion, Documents
from pysync.engine.keyed_versions import KeyedVersions
from pysync.model import Caller
from pysync.server.authorization import Access
from pysync.server.handlers import Service
from pysync.server.responses import Response, bodiless_response, json_response, wants_body
from pysync.server.router import Match


@dataclass(frozen=True, slots=True)
class Member:
    """A member as one reader may see it. `data` is JSON text without the `hidden` members, None if it was not
    read. `hash` is the version for this reader, `""` if the member was never written."""

    name: str
    data: bytes | None
    hash: str
    hidden: frozenset[str]


class Bundle:
    """The members of a bundle in the configuration: `policies` are those of their pulls, in its order."""

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
        """The policy of the bundle as a whole: it requires valid credentials if a member needs any. It grants
        access to no document, and has the rate limit of the first member. Plugins assign roles for each
        member separately."""
        self.extra_policies = self.policies[1:]
        """The policies of the other members, whose rate limits count too."""

    async def pull(
        self,
        documents: Documents,
        readable: Sequence[tuple[AccessPolicy, Access]],
        path: str,
        *,
        whole: bool = True,
    ) -> list[Member]:
        """Return the members below `path` that are `readable`. If `whole`, read the data of all, even of
        those whose version is cached.

        Raises:
            DocumentCorrupt: one of them is not a valid document.
            StoreUnavailable: one of them cannot be read.
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
    """Return a text that differs for any two responses whose members differ."""
    versions = [[member.name, member.hash, *sorted(member.hidden)] for member in members]
    return _core.content_hash(orjson.dumps(versions))


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
        """Serve `GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        bundle, authorizer = self._bundle, self._authorizer
        credentials = authorizer.credentials_for(request, bundle.policy)
        verified = await authorizer.authenticate(
            request, credentials, b"", bundle.policy, *bundle.extra_policies
        )
        if self._hooks.has_pull_hooks:
            await authorizer.consume_nonce(verified)  # hooks of plugins may have effects
        readable = await self._readable_members(verified.caller, match)
        if readable and not self._hooks.has_pull_hooks:
            await authorizer.consume_nonce(verified)
        members = await bundle.pull(self._documents, readable, match.key, whole=wants_body(request))
        etag = bundle_etag(members)
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        response = bodiless_response(request, etag, headers)
        if response is not None:
            return response
        if any(member.data is None for member in members):
            members = await bundle.pull(self._documents, readable, match.key)
            headers = f'{match.route.read_headers}ETag: "{bundle_etag(members)}"\r\n'
        collections = {
            member.name: {"data": orjson.Fragment(member.data or b"{}"), "hash": member.hash}
            for member in members
        }
        content = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_response(200, content, headers)

    async def _readable_members(self, caller: Caller, match: Match) -> list[tuple[AccessPolicy, Access]]:
        """Return the members that the caller may read, possibly none. Members whose own pull would be
        rejected, or served by a plugin, are left out. Raises the error if access cannot be decided."""
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
