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
from pysync.auth.authentication import Authenticator
from pysync.auth.policy import AccessPolicy
from pysync.engine.documents import CachedVersion, Documents
from pysync.engine.keyed_versions import KeyedVersions
from pysync.errors import PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import RequestAuthenticator, RoleResolver, plugin_request
from pysync.server.responses import HeadResponse, Response, etag_matches, json_response, wants_body
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

    def authorized_members(
        self, readers: Sequence[Caller | None], identity: str | None, path: str
    ) -> list[tuple[AccessPolicy, Caller]]:
        """The members below `path`, whose `{identity}` is `identity`, that their readers may read: perhaps
        none. `readers` is who asks, with the roles that count for each of `policies`, None where it is
        refused that one."""
        return [
            (rule, reader)
            for rule, reader in zip(self.policies, readers, strict=True)
            if reader is not None
            and rule.owns_key(key := f"{path}/{rule.collection.name}")
            and rule.would_serve(reader, identity, key)
        ]

    async def pull(
        self,
        documents: Documents,
        readable: Sequence[tuple[AccessPolicy, Caller]],
        identity: str | None,
        path: str,
        *,
        whole: bool = True,
    ) -> list[Member]:
        """The members that `authorized_members` found; `whole`: with their data, also where their versions
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
            await _redacted_member(
                rule, document, rule.effective_roles(reader, identity), path, documents.versions
            )
            for (rule, reader), document in zip(readable, found, strict=True)
        ]


def bundle_etag(members: Sequence[Member]) -> str:
    """A text that tells two readings of a bundle apart wherever they differ."""
    told = [[member.name, member.hash, *sorted(member.hidden)] for member in members]
    return _core.content_hash(orjson.dumps(told))


async def _redacted_member(
    rule: AccessPolicy,
    document: _core.Document | CachedVersion | None,
    roles: frozenset[str],
    path: str,
    versions: KeyedVersions,
) -> Member:
    name = rule.collection.name
    if document is None:
        return Member(name, b"{}", "", frozenset())
    if isinstance(document, CachedVersion):
        return Member(name, None, document.hash, frozenset())
    hidden = field_permissions.hidden_fields(rule.collection.field_permissions, roles)
    data = field_permissions.redact(document.data, hidden) if hidden else document.data
    version = await versions.load_and_compute(f"{path}/{name}", document.hash, document.ts_ms, hidden)
    return Member(name, data, version, hidden)


class BundleHandler:
    """The pull route of one bundle."""

    def __init__(
        self,
        bundle: Bundle,
        documents: Documents,
        access: Authenticator,
        callers: RequestAuthenticator,
        roles: RoleResolver,
        hooks: Hooks,
    ) -> None:
        self._bundle = bundle
        self._documents = documents
        self._access = access
        self._callers = callers
        self._roles = roles
        self._hooks = hooks
        self._has_hooks = hooks.has_authorize_hooks or hooks.has_pull_hooks

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """`GET {ns}/pull/<path>`: `{"collections": {name: {"data", "hash"}}, "timestamp"}`."""
        bundle = self._bundle
        credentials = self._access.credentials_for(bundle.policy, request.headers)
        verified = await self._callers.authenticate(
            request, credentials, b"", bundle.policy, *bundle.extra_policies
        )
        if self._hooks.has_pull_hooks:
            await self._access.consume_nonce(verified)  # before plugins are told, which may act on it
        caller = verified.caller
        if bundle.policy.uses_dynamic_roles:
            caller = await self._roles.enrich(bundle.policy, caller, match.params, match.key)
        readers: list[Caller | None] = [caller] * len(bundle.policies)
        if self._has_hooks:
            readers = [await self._reader(rule, caller, match) for rule in bundle.policies]
        readable = bundle.authorized_members(readers, match.identity, match.key)
        if readable and not self._hooks.has_pull_hooks:
            await self._access.consume_nonce(verified)
        members = await bundle.pull(
            self._documents, readable, match.identity, match.key, whole=wants_body(request)
        )
        etag = bundle_etag(members)
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        if etag_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), etag):
            return Response(304, b"", headers)
        if request.method == "HEAD":
            return HeadResponse(headers)
        if any(member.data is None for member in members):
            members = await bundle.pull(self._documents, readable, match.identity, match.key)
            headers = f'{match.route.read_headers}ETag: "{bundle_etag(members)}"\r\n'
        collections = {
            member.name: {"data": orjson.Fragment(member.data or b"{}"), "hash": member.hash}
            for member in members
        }
        answer = {"collections": collections, "timestamp": self._documents.now_ms()}
        return json_response(200, answer, headers)

    async def _reader(self, rule: AccessPolicy, caller: Caller, match: Match) -> Caller | None:
        """`caller`, with what plugins say, as the reader of a member; None where a pull of it alone would be
        refused, or answered by a plugin."""
        key = f"{match.key}/{rule.collection.name}"
        params = match.params
        if not rule.needs_credentials:
            caller = ANONYMOUS
        try:
            caller = await self._roles.add_plugin_roles(rule, caller, params, key)
            if self._hooks.has_pull_hooks and rule.would_serve(caller, match.identity, key):
                await self._hooks.veto_nested_read(plugin_request(rule, caller, params, key))
        except PysyncError as error:
            if error.status >= 500:
                raise
            return None
        return caller
