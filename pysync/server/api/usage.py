"""The usage of the caller and its spaces (docs/reference/protocol.md#usage)."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from aiohttp import web

from pysync.auth.policy import AccessPolicy
from pysync.errors import Forbidden, InvalidParams, Unauthorized
from pysync.model import USAGE_NAMES, Usage
from pysync.server.api import Service
from pysync.server.http.responses import NO_STORE, Response, json_response
from pysync.server.http.router import Match
from pysync.store import PAGE, Ledger, Subject, SubjectKind, ledger_of

MAX_SPACES: Final = 100
"""Spaces that one request may name."""


class UsageHandler:
    """Usage in one namespace. `policies` are those of pulls of its collections."""

    def __init__(self, service: Service, policies: Sequence[AccessPolicy]) -> None:
        quotas, ledger = service.config.quotas, ledger_of(service.store)
        assert quotas is not None, "there is no such route without quotas"
        assert ledger is not None
        self._ledger = ledger
        self._limits = quotas.limits()
        self._namespace = policies[0].namespace
        self._authenticator = service.authenticator
        self._authorizer = service.authorizer
        self._spaces = service.authorizer.spaces

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/usage`: what the caller's identity uses, in all namespaces, and each of the spaces
        that `spaces` names.

        Raises:
            Unauthorized: the request is not signed.
            Forbidden: the caller does not belong to one of the spaces.
            InvalidParams: `spaces` names too many.
            Unavailable, AuthorizationError, RolesUnavailable.
        """
        names = list(dict.fromkeys(filter(None, request.query.get("spaces", "").split(","))))
        identity = await self._authorizer.admit(
            request,
            self._namespace,
            self._authenticator.parse_credentials(request.headers),
            b"",
            lambda caller: (),
            lambda verified: self._decide(verified.caller.identity, names),
        )
        own, spaces = Subject("identity", identity), [Subject("space", name) for name in names]
        used = await self._ledger.used([own, *spaces])
        body: dict[str, Any] = {"identity": identity, **self._shown(own, used[own])}
        if spaces:
            body["spaces"] = {space.name: self._shown(space, used[space]) for space in spaces}
        return json_response({**body, "complete": await self._ledger.is_complete()}, NO_STORE)

    async def _decide(self, identity: str, names: Sequence[str]) -> str:
        """Return the identity of a caller that may see its own usage and that of these spaces."""
        if not identity:
            raise Unauthorized("usage: the caller has no identity")
        if len(names) > MAX_SPACES:
            raise InvalidParams
        for name in names:
            if not await self._spaces.is_member(identity, name):
                raise Forbidden(reason=f"usage: not a member of the space {name!a}")
        return identity

    def _shown(self, subject: Subject, used: Usage) -> Mapping[str, Any]:
        limit = self._limits.get(subject.kind, ())
        allowed = {name: most for name, most in zip(USAGE_NAMES, limit, strict=False) if most != inf}
        return {"used": used.as_json(), "allowed": allowed}


LISTED: Final[Mapping[SubjectKind, str]] = {
    "collection": "collections",
    "namespace": "namespaces",
    "identity": "identities",
    "space": "spaces",
    "issuer": "issuers",
}


async def usage_of_all(ledger: Ledger) -> dict[str, Any]:
    """Return what operators see at `/admin/usage`: of each kind the subjects that use the most bytes. Raises
    StoreUnavailable."""
    page: dict[str, Any] = {"complete": await ledger.is_complete()}
    for kind, name in LISTED.items():
        found = await ledger.largest(kind, PAGE)
        page[name] = [{"name": subject, **used.as_json()} for subject, used in found]
    return page
