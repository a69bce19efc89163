"""Authorisation: decides who may read or write a key, for all handlers.

Every route passes through `Authorizer.admit`, the one order of checks. A handler of a key receives an
`Access`, which names the caller and the members of the data that it must not see; there is no other way to
obtain one. `decide` and `decide_event` decide on documents that are read together with others and on events
of change streams, as on single pulls of them.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from aiohttp import hdrs, web

from pysync.auth import field_permissions
from pysync.auth.addresses import forwarded_ip
from pysync.auth.authentication import (
    ANONYMOUS_REQUEST,
    NO_CREDENTIALS,
    AuthenticatedRequest,
    Authenticator,
    AuthorProof,
    Credentials,
    SignedRequest,
)
from pysync.auth.policy import AccessPolicy
from pysync.auth.rate_limits import RateLimiter, counters
from pysync.auth.signing import canonical_host_of_header
from pysync.auth.spaces import Membership, Spaces, add_roles
from pysync.engine.subscriptions import Event
from pysync.errors import Forbidden, PysyncError, Unauthorized
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import PluginRequest, PullResponse
from pysync.plugins.hooks import Hooks
from pysync.server.http.router import Match
from pysync.server.process.logs import RequestLog

D = TypeVar("D")


class Access(NamedTuple):
    """The permission to act on one key. `caller` has its roles for this key, and `hidden` are the top-level
    members of the data that it must not see. `roles` decide which members it may write; they are empty if the
    collection has no field permissions."""

    caller: Caller
    signer: Caller = ANONYMOUS
    """The caller that the credentials identify, without the roles for this key alone."""
    hidden: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    reply: PullResponse | None = None
    """The response of a plugin to a pull, in place of the stored document."""


_OPEN: Final = Access(ANONYMOUS)
Memberships = Mapping[str, Membership | None]
"""The members of spaces, by the keys of their access documents; None if they cannot be determined."""


class Authorizer:
    """The authorisation of one service. `mount` is the prefix of every route. `proxy_hops` is the number of
    trusted proxies, whose X-Forwarded-For is believed."""

    def __init__(
        self,
        authenticator: Authenticator,
        rate_limiter: RateLimiter,
        spaces: Spaces,
        hooks: Hooks,
        request_log: RequestLog,
        mount: str,
        proxy_hops: int,
    ) -> None:
        self.spaces: Final = spaces
        self._authenticator = authenticator
        self._rate_limiter = rate_limiter
        self._hooks = hooks
        self._log = request_log
        self._mount = mount
        self.client_ip: Final = partial(client_ip, proxy_hops)

    async def admit(
        self,
        request: web.BaseRequest,
        namespace: str | None,
        credentials: Credentials,
        body: bytes,
        metered: Callable[[Caller], Iterable[AccessPolicy]],
        decide: Callable[[AuthenticatedRequest], Awaitable[D]],
        author: AuthorProof | None = None,
    ) -> D:
        """Return what `decide` finds that a request may do: the one order of checks, for all routes.

        `credentials` are those of the headers, with a certificate that its issuer has signed. The request is
        to `namespace`, and counts against the limits of the policies that `metered` names for its caller. If
        the caller may do nothing, `decide` raises an error or, as for a batch, which is answered even then,
        returns a false value. The proof of the body's `author` is perhaps verified with the signature.
        Raises as `Authenticator.authenticate`, `RateLimiter.enforce`, `decide` and
        `Authenticator.consume_nonce`.
        """
        # Who the caller is: the signature of the request, the rest of the certificate, and its revocation.
        verified = ANONYMOUS_REQUEST
        if credentials is not NO_CREDENTIALS:
            signed = self._signed_request(request, namespace)
            verified = await self._authenticator.authenticate(credentials, signed, body, author)
            if self._log.logs_requests and verified.certificate is not None:
                self._log.set_identity(verified.caller.identity)
        # How often it may ask.
        if limited := [policy for policy in metered(verified.caller) if policy.limit is not None]:
            ip = partial(self.client_ip, request)
            await self._rate_limiter.enforce(counters(limited, verified.caller.identity, ip))
        # What it may do: roles, scope and restrictions.
        decision = await decide(verified)
        # Once: a request that may do nothing has used up nothing but its place in the rate limit.
        if decision and verified.certificate is not None:
            await self._authenticator.consume_nonce(verified)
        return decision

    async def admit_anyone(
        self,
        request: web.BaseRequest,
        namespace: str | None,
        metered: Callable[[Caller], Iterable[AccessPolicy]],
        decide: Callable[[AuthenticatedRequest], Awaitable[D]],
    ) -> D:
        """Return as `admit` what a request without a body may do, which is anonymous if its credentials are
        invalid."""
        try:
            credentials = self._authenticator.parse_credentials(request.headers)
            return await self.admit(request, namespace, credentials, b"", metered, decide)
        except (Unauthorized, Forbidden) as error:
            self._log.log_ignored_credentials(request, error)
            return await self.admit(request, namespace, NO_CREDENTIALS, b"", metered, decide)

    async def authorize(
        self,
        request: web.BaseRequest,
        match: Match,
        credentials: Credentials | None = None,
        body: bytes = b"",
        *,
        pushes_document: bool = False,
        author: AuthorProof | None = None,
    ) -> Access:
        """Admit a request for the key of its path. `credentials` are those of its headers, if they were read
        before the `body`. Then plugins may veto a pull, or respond to it.

        Raises as `credentials_for` and `admit`; Forbidden; AuthorizationError or RolesUnavailable if the
        roles cannot be determined; and the error with which a plugin rejects the request.
        """
        policy = match.policy
        if policy.is_open and policy.limit is None:
            access = _OPEN
        else:
            if credentials is None:
                credentials = self.credentials_for(request, policy)
            text = body if pushes_document else None
            access = await self.admit(
                request,
                policy.namespace,
                credentials,
                body,
                lambda caller: (policy,),
                lambda verified: self._decide_key(match, verified.caller, text),
                author,
            )
        if self._hooks.has_pull_hooks and policy.action == "pull":
            about = plugin_request(policy, access.caller, match.params, match.key)
            access = access._replace(reply=await self._hooks.run_pull_hooks(about))
        return access

    def credentials_for(self, request: web.BaseRequest, policy: AccessPolicy) -> Credentials:
        """Return the credentials in the headers, checked as far as possible without the body. Raises
        Unauthorized if they are invalid, or if `policy` needs credentials and there are none."""
        if not policy.needs_credentials:
            return NO_CREDENTIALS
        credentials = self._authenticator.parse_credentials(request.headers)
        if credentials is NO_CREDENTIALS and not policy.allows_anonymous:
            raise Unauthorized("no credentials")
        return credentials

    async def _decide_key(self, match: Match, signer: Caller, text: bytes | None) -> Access:
        """Return the access of a caller to the key of a path. `text` is the body of a push of a document.
        Raises Forbidden."""
        policy, caller = match.policy, signer
        if policy.uses_dynamic_roles:
            params, key = match.params, match.key
            if text is not None:
                caller = await self.spaces.add_space_roles_for_push(policy, caller, params, key, text)
            else:
                memberships = await self.spaces.load_membership(policy, caller, params)
                caller = self.spaces.add_space_roles(policy, caller, params, memberships)
            caller = await self._add_plugin_roles(policy, caller, params, key)
        return _decide(policy, caller, match.identity, match.key, signer)

    async def decide(
        self,
        policy: AccessPolicy,
        caller: Caller,
        identity: str | None,
        params: Mapping[str, str],
        key: str,
        memberships: Memberships | None = None,
    ) -> Access | PysyncError:
        """Decide on a document that is read together with others. Return the access that a pull of it would
        get, or the error with which the pull would fail. `caller` is authenticated, and `identity` is the
        `{identity}` of the document's path. `memberships` has the members of its space, if they were read
        already; if None, they are read. Hooks of pulls do not run: see `veto`.

        If plugins are not involved, one decision may cover many documents: `key` is then `""` and the scope
        of `caller` None, and the scope must be checked elsewhere.
        """
        try:
            caller = _presented(policy, caller)
            if policy.shadowing_templates and not policy.owns_key(key):
                raise Forbidden(reason="the key belongs to another collection")
            if policy.uses_space_roles:
                if memberships is None:
                    memberships = await self.spaces.load_membership(policy, caller, params)
                caller = self.spaces.add_space_roles(policy, caller, params, memberships)
            if policy.uses_plugin_roles:
                caller = await self._add_plugin_roles(policy, caller, params, key)
            return _OPEN if policy.is_open else _decide(policy, caller, identity, key)
        except PysyncError as error:
            return error

    def decide_event(
        self, policy: AccessPolicy, caller: Caller, event: Event, memberships: Memberships
    ) -> Access | PysyncError:
        """Decide on an event of a change stream as `decide` does, if no plugin gives roles. An event
        announces a write and not its content, so pull hooks do not run."""
        assert not policy.uses_plugin_roles, "plugins give roles"
        try:
            caller = _presented(policy, caller)
            caller = self.spaces.add_space_roles(policy, caller, event.params, memberships)
            return _decide(policy, caller, event.params.get("identity"), event.key)
        except PysyncError as error:
            return error

    async def veto(
        self, policy: AccessPolicy, access: Access, params: Mapping[str, str], key: str
    ) -> Access | PysyncError:
        """Run the plugins' hooks of pulls for a document that is read together with others. Return `access`;
        or the error if one rejects it, or would respond in its place, since a nested read cannot carry
        that."""
        if self._hooks.has_pull_hooks:
            try:
                await self._hooks.veto_nested_read(plugin_request(policy, access.caller, params, key))
            except PysyncError as error:
                return error
        return access

    async def _add_plugin_roles(
        self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str
    ) -> Caller:
        """Return `caller` with the roles that plugins give. The hooks do not run for a caller that lacks the
        required credentials, because it is rejected anyway."""
        if not policy.uses_plugin_roles or (caller == ANONYMOUS and not policy.allows_anonymous):
            return caller
        return add_roles(caller, await self._hooks.roles(plugin_request(policy, caller, params, key)))

    def _signed_request(self, request: web.BaseRequest, namespace: str | None) -> SignedRequest:
        """Return the parts of a request to `namespace` that its signature covers. A client may have signed
        its target with the mount (a namespaced client, whose base URL is the origin) or without it (any
        other, whose base URL includes the mount)."""
        targets, mount = [request.raw_path], self._mount
        if mount:
            targets.insert(0 if namespace is None else 1, request.raw_path.removeprefix(mount))
        host = canonical_host_of_header(request.headers.get(hdrs.HOST, ""), "http")
        return request.method, targets, host


def client_ip(proxy_hops: int, request: web.BaseRequest) -> str:
    """Return the client's address, as the outermost of this number of trusted proxies saw it."""
    if proxy_hops and request.headers:  # a request that cannot be parsed has none
        forwarded_for = ",".join(request.headers.getall("X-Forwarded-For", ()))
        if (ip := forwarded_ip(forwarded_for, proxy_hops)) is not None:
            return ip
    return request.remote or ""


def unless_server_error(decision: Access | PysyncError) -> Access | None:
    """Return the access of a decision; None if the caller has none. Raises errors of the server."""
    if isinstance(decision, Access):
        return decision
    if decision.status >= 500:
        raise decision
    return None


def may_read(policy: AccessPolicy, caller: Caller, identity: str | None) -> bool:
    """Return True if `caller`, whose scope is None, may read documents of `identity` with its roles."""
    try:
        return policy.denial_reason(_presented(policy, caller), identity, "") is None
    except Forbidden:
        return False


def plugin_request(
    policy: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str
) -> PluginRequest:
    """Return a request in the form that plugins receive."""
    if policy.trust is not None:
        caller = replace(caller, roles=policy.trusted_roles(caller))
    return PluginRequest(policy.action, policy.collection.name, policy.namespace, params, key, caller)


def _presented(policy: AccessPolicy, caller: Caller) -> Caller:
    """Return the caller of a request to this collection, which is anonymous if the collection ignores
    credentials. Raises Forbidden for an anonymous caller if the collection requires credentials."""
    if not policy.needs_credentials:
        return ANONYMOUS
    if caller == ANONYMOUS and not policy.allows_anonymous:
        raise Forbidden(reason="no credentials")
    return caller


def _decide(
    policy: AccessPolicy, caller: Caller, identity: str | None, key: str, signer: Caller = ANONYMOUS
) -> Access:
    """Return the access of a caller that has all its roles for this key. Raises Forbidden."""
    reason = policy.denial_reason(caller, identity, key)
    if reason is not None:
        raise Forbidden(reason=reason)
    permissions = policy.collection.field_permissions
    if not permissions:
        return Access(caller, signer)
    roles = policy.effective_roles(caller, identity)
    return Access(caller, signer, field_permissions.hidden_fields(permissions, roles), roles)
