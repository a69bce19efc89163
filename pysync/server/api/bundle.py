"""Pulls of bundles, which are documents below one path, each with its own access policy.

See docs/reference/protocol.md#bundles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson
from aiohttp import web

from pysync import _core
from pysync.auth import field_permissions
from pysync.auth.policy import AccessPolicy
from pysync.engine.documents import CachedVersion
from pysync.model import Caller
from pysync.server.api import Service
from pysync.server.authorization import Access, unless_server_error
from pysync.server.http.responses import Response, bodiless_response, json_response, wants_body
from pysync.server.http.router import Match


class Member(NamedTuple):
    """A member as one reader may see it. `data` is JSON text without the `hidden` members, None if it was not
    read. `hash` is the version for this reader, `""` if the member was never written."""

    name: str
    data: bytes | None
    hash: str
    hidden: frozenset[str]


class BundleHandler:
    """The pull route of one bundle. `policies` are those of pulls of its members, in the order of the
    configuration."""

    def __init__(self, service: Service, policies: Sequence[AccessPolicy]) -> None:
        self._documents = service.documents
        self._authorizer = service.authorizer
        self._hooks = service.hooks
        self.policies = tuple(policies)
        self.policy = replace(
            policies[0],
            needs_credentials=any(policy.needs_credentials for policy in policies),
            uses_space_roles=any(policy.uses_space_roles for policy in policies),
            uses_plugin_roles=False,
            allows_anonymous=True,
            roles=frozenset(),
        )
        """The policy of the bundle as a whole: it requires valid credentials if a member needs any. It grants
        access to no document, and has the rate limit of the first member. Plugins assign roles for each
        member separately."""

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        authorizer = self._authorizer
        credentials = authorizer.credentials_for(request, self.policy)
        readable = await authorizer.admit(
            request,
            self.policy.namespace,
            credentials,
            b"",
            lambda caller: self.policies,
            lambda verified: self._readable_members(verified.caller, match),
        )
        if self._hooks.has_pull_hooks:
            readable = await self._without_vetoed(readable, match)
        members = await self._read(readable, match.key, whole=wants_body(request))
        etag = _etag(members)
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        response = bodiless_response(request, etag, headers)
        if response is not None:
            return response
        if any(member.data is None for member in members):
            members = await self._read(readable, match.key, whole=True)
            headers = f'{match.route.read_headers}ETag: "{_etag(members)}"\r\n'
        collections = {
            member.name: {"data": orjson.Fragment(member.data or b"{}"), "hash": member.hash}
            for member in members
        }
        content = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_response(content, headers)

    async def _readable_members(self, caller: Caller, match: Match) -> list[tuple[AccessPolicy, Access]]:
        """Return the members that the caller may read, possibly none. Members whose own pull would be
        rejected are left out. Raises the error if access cannot be decided."""
        params, spaces = match.params, self._authorizer.spaces
        memberships = await spaces.load_membership(self.policy, caller, params)
        readable = []
        for policy in self.policies:
            key = f"{match.key}/{policy.collection.name}"
            access = unless_server_error(
                await self._authorizer.decide(policy, caller, match.identity, params, key, memberships)
            )
            if access is not None:
                readable.append((policy, access))
        return readable

    async def _without_vetoed(
        self, readable: Sequence[tuple[AccessPolicy, Access]], match: Match
    ) -> list[tuple[AccessPolicy, Access]]:
        """Return the members without those whose own pull a plugin would reject or serve."""
        left = []
        for policy, access in readable:
            key = f"{match.key}/{policy.collection.name}"
            vetoed = await self._authorizer.veto(policy, access, match.params, key)
            if unless_server_error(vetoed) is not None:
                left.append((policy, access))
        return left

    async def _read(
        self, readable: Sequence[tuple[AccessPolicy, Access]], path: str, *, whole: bool
    ) -> list[Member]:
        """Return the members below `path` that are `readable`. If `whole`, read the data of all, even of
        those whose version is cached.

        Raises:
            DocumentCorrupt: one of them is not a valid document.
            StoreUnavailable: one of them cannot be read.
        """
        return await asyncio.gather(
            *(self._read_member(policy, access.hidden, path, whole=whole) for policy, access in readable)
        )

    async def _read_member(
        self, policy: AccessPolicy, hidden: frozenset[str], path: str, *, whole: bool
    ) -> Member:
        documents, name = self._documents, policy.collection.name
        key = f"{path}/{name}"
        read = documents.pull if whole else documents.get_version
        document = await read(key, policy.collection.ttl_ms)
        if document is None:
            return Member(name, b"{}", "", frozenset())
        version = await documents.versions.load_and_compute(key, document.hash, document.ts_ms, hidden)
        if isinstance(document, CachedVersion):
            return Member(name, None, version, hidden)
        data = field_permissions.redact(document.data, hidden) if hidden else document.data
        return Member(name, data, version, hidden)


def _etag(members: Sequence[Member]) -> str:
    """Return a text that differs for any two responses whose members differ."""
    versions = [[member.name, member.hash, *sorted(member.hidden)] for member in members]
    return _core.content_hash(orjson.dumps(versions))
