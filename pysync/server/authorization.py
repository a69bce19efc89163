"""Authorisation: decides who may read or write a key, for all handlers.

Single requests, lists, batches, bundles, keyring folds and change streams are all authorised here. A handler
receives an `Access`, which names the caller and the members of the data that it must not see; there is no
other way to obtain one. The decision takes into account the credentials, the rate limits, the roles that a
space or a plugin gives for this request alone, the collection's policy, the plugins' veto and the field
permissions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from aiohttp import hdrs, web

from pysync.auth import field_permissions
from pysync.auth.addresses import forwarded_ip
from pysync.auth.authentication import (
    ANONYMOUS_REQUEST,
    NO_CREDENTIALS,
    VERIFY_IN_THREAD_ABOVE,
    AuthenticatedRequest,
    Authenticator,
    Credentials,
    SignedRequest,
)
from pysync.auth.policy import AccessPolicy
from pysync.auth.rate_limits import Counter, RateLimiter, counters
from pysync.auth.signature_batch import AuthorProof
from pysync.auth.signing import canonical_host_of_header
from pysync.auth.spaces import Membership, Spaces, add_roles
from pysync.auth.verification import VerifiedCertificate
from pysync.engine.subscriptions import Event
from pysync.errors import Forbidden, PysyncError, Unauthorized
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import PluginRequest, PullResponse
from pysync.plugins.hooks import Hooks
from pysync.server.logs import RequestLog
from pysync.server.router import Match


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
    trusted proxies, whose X-Forwarded-For is believed.

    The order of checks is always the same: the signature, rate limits, roles and scope, and the nonce last,
    so that a rejected request takes no replay memory. Then plugins may veto a pull, or respond to it.
    """

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
        self.consume_nonce: Final = authenticator.consume_nonce
        self._authenticator = authenticator
        self._rate_limiter = rate_limiter
        self._hooks = hooks
        self._log = request_log
        self._mount = mount
        self._proxy_hops = proxy_hops

    def credentials_for(self, request: web.BaseRequest, policy: AccessPolicy) -> Credentials:
        """Return the credentials in the headers, checked as far as possible without the body. Raises
        Unauthorized if they are invalid, or if `policy` needs credentials and there are none."""
        if not policy.needs_credentials:
            return NO_CREDENTIALS
        credentials = self.parse_credentials(request)
        if credentials is NO_CREDENTIALS and not policy.allows_anonymous:
            raise Unauthorized("no credentials")
        return credentials

    def parse_credentials(self, request: web.BaseRequest) -> Credentials:
        """Return the credentials in the headers as `Authenticator.parse_credentials`."""
        return self._authenticator.parse_credentials(request.headers)

    async def identify_unverified(self, request: web.BaseRequest) -> Caller:
        """Return the caller that the headers claim as `Authenticator.identify_unverified`."""
        return await self._authenticator.identify_unverified(request.headers)

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
        """Authorise a request for the key of its path. `credentials` are those of its headers, if they were
        read before the `body`. The proof of its `author` is perhaps verified with its signature.

        Raises as `credentials_for`, `authenticate` and `Authenticator.consume_nonce`; Forbidden;
        AuthorizationError or RolesUnavailable if the roles cannot be determined; and the error with which a
        plugin rejects the request.
        """
        policy = match.policy
        if policy.is_open:
            if policy.limit is not None:
                await self._rate_limiter.enforce(self._counters(request, ANONYMOUS, (policy,)))
            access = _OPEN
        else:
            if credentials is None:
                credentials = self.credentials_for(request, policy)
            known = self._access_if_signed(policy, match, credentials)
            if known is not None and len(body) <= VERIFY_IN_THREAD_ABOVE:
                signed = self._signed_request(request, policy.namespace)
                await self._authenticator.admit(credentials, signed, body, author)
                access = known
            else:
                access = await self._authorize_in_steps(request, match, credentials, body, pushes_document)
        if self._hooks.has_pull_hooks and policy.action == "pull":
            about = plugin_request(policy, access.caller, match.params, match.key)
            access = access._replace(reply=await self._hooks.run_pull_hooks(about))
        return access

    def _access_if_signed(
        self, policy: AccessPolicy, match: Match, credentials: Credentials
    ) -> Access | None:
        """Return the access of a request with a known certificate, if its signature alone is left to check.
        None if more is, and if it would be rejected, since only its signer may be told why."""
        certificate = credentials.certificate
        if (
            policy.uses_dynamic_roles
            or policy.limit is not None
            or self._log.logs_requests
            or not isinstance(certificate, VerifiedCertificate)
            or certificate.not_in_audience
        ):
            return None
        decision = _decide(policy, certificate.caller, match.identity, match.key, certificate.caller)
        return decision if isinstance(decision, Access) else None

    async def _authorize_in_steps(
        self,
        request: web.BaseRequest,
        match: Match,
        credentials: Credentials,
        body: bytes,
        pushes_document: bool,
    ) -> Access:
        """Authorise any request, as `authorize` does before the plugins' hooks."""
        policy = match.policy
        verified = await self.authenticate(request, credentials, body, policy)
        caller = verified.caller
        if policy.uses_dynamic_roles:
            params, key = match.params, match.key
            if pushes_document:
                caller = await self.spaces.add_space_roles_for_push(policy, caller, params, key, body)
            else:
                memberships = await self.spaces.load_membership(policy, caller, params)
                caller = self.spaces.add_space_roles(policy, caller, params, memberships)
            caller = await self._add_plugin_roles(policy, caller, params, key)
        decision = _decide(policy, caller, match.identity, match.key, verified.caller)
        if isinstance(decision, Forbidden):
            raise decision
        if verified.certificate is not None:
            await self.consume_nonce(verified)
        return decision

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
        already; if None, they are read.

        If a plugin would respond to the pull, the decision is an error, because a nested read cannot carry
        its response. If plugins are not involved, one decision may cover many documents: `key` is then `""`
        and the scope of `caller` None, and the scope must be checked elsewhere.
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
            access = _OPEN if policy.is_open else _decide(policy, caller, identity, key)
            if self._hooks.has_pull_hooks and isinstance(access, Access):
                await self._hooks.veto_nested_read(plugin_request(policy, caller, params, key))
        except PysyncError as error:
            return error
        return access

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

    async def decide_event_with_plugins(
        self, policy: AccessPolicy, caller: Caller, event: Event, memberships: Memberships
    ) -> Access | PysyncError:
        """Decide as `decide_event`, if plugins give roles or reject callers."""
        try:
            caller = _presented(policy, caller)
            caller = self.spaces.add_space_roles(policy, caller, event.params, memberships)
            caller = await self._add_plugin_roles(policy, caller, event.params, event.key)
            return _decide(policy, caller, event.params.get("identity"), event.key)
        except PysyncError as error:
            return error

    async def may_read_nested(
        self,
        policy: AccessPolicy,
        caller: Caller,
        identity: str | None,
        params: Mapping[str, str],
        key: str,
        memberships: Memberships | None = None,
    ) -> Access | None:
        """Return the access of `decide`; None if a pull would be rejected. Raises errors of the server."""
        decision = await self.decide(policy, caller, identity, params, key, memberships)
        if isinstance(decision, Access):
            return decision
        if decision.status >= 500:
            raise decision
        return None

    async def _add_plugin_roles(
        self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str
    ) -> Caller:
        """Return `caller` with the roles that plugins give. The hooks do not run for a caller that lacks the
        required credentials, because it is rejected anyway."""
        if not policy.uses_plugin_roles or (caller == ANONYMOUS and not policy.allows_anonymous):
            return caller
        return add_roles(caller, await self._hooks.roles(plugin_request(policy, caller, params, key)))

    async def authenticate(
        self,
        request: web.BaseRequest,
        credentials: Credentials,
        body: bytes,
        policy: AccessPolicy,
        *others: AccessPolicy,
    ) -> AuthenticatedRequest:
        """Return the caller of a request after verifying its signature and counting it against the limits of
        these policies. The nonce is not recorded yet: call `consume_nonce` once the request is allowed.
        Raises as `Authenticator.authenticate` and `RateLimiter.enforce`."""
        verified = ANONYMOUS_REQUEST
        if credentials is not NO_CREDENTIALS:
            signed = self._signed_request(request, policy.namespace)
            verified = await self._authenticator.authenticate(credentials, signed, body)
            if self._log.logs_requests and verified.certificate is not None:
                self._log.set_identity(verified.caller.identity)
        if policy.limit is not None or others:
            await self._rate_limiter.enforce(self._counters(request, verified.caller, [policy, *others]))
        return verified

    async def authenticate_optional(
        self, request: web.BaseRequest, namespace: str | None
    ) -> AuthenticatedRequest:
        """Return the caller of a request without a body that anyone may send; `ANONYMOUS_REQUEST` if its
        credentials are invalid. The request is not counted, and its nonce is not recorded."""
        try:
            credentials = self.parse_credentials(request)
            if credentials is NO_CREDENTIALS:
                return ANONYMOUS_REQUEST
            signed = self._signed_request(request, namespace)
            verified = await self._authenticator.authenticate(credentials, signed, b"")
        except (Unauthorized, Forbidden) as error:
            self._log.log_ignored_credentials(request, error)
            return ANONYMOUS_REQUEST
        if self._log.logs_requests:
            self._log.set_identity(verified.caller.identity)
        return verified

    async def enforce_rate_limits(
        self, request: web.BaseRequest, caller: Caller, policies: list[AccessPolicy]
    ) -> None:
        """Count a request once for each of `policies` that has a limit. Raises as `RateLimiter.enforce`."""
        await self._rate_limiter.enforce(self._counters(request, caller, policies))

    def _counters(
        self, request: web.BaseRequest, caller: Caller, policies: Iterable[AccessPolicy]
    ) -> list[Counter]:
        """Return the limits of `policies` for a request of `caller`."""
        return list(counters(policies, caller.identity, partial(self.client_ip, request)))

    async def consume_optional_nonce(self, request: web.BaseRequest, verified: AuthenticatedRequest) -> bool:
        """Record the nonce of a request that anyone may send. Return False if its credentials are invalid."""
        try:
            await self.consume_nonce(verified)
        except Unauthorized as error:
            self._log.log_ignored_credentials(request, error)
            return False
        return True

    def client_ip(self, request: web.BaseRequest) -> str:
        """Return the client's address, as the outermost trusted proxy saw it."""
        if self._proxy_hops and request.headers:  # a request that cannot be parsed has none
            forwarded_for = ",".join(request.headers.getall("X-Forwarded-For", ()))
            if (ip := forwarded_ip(forwarded_for, self._proxy_hops)) is not None:
                return ip
        return request.remote or ""

    def _signed_request(self, request: web.BaseRequest, namespace: str | None) -> SignedRequest:
        """Return the parts of a request to `namespace` that its signature covers. A client may have signed
        its target with the mount (a namespaced client, whose base URL is the origin) or without it (any
        other, whose base URL includes the mount)."""
        targets, mount = [request.raw_path], self._mount
        if mount:
            targets.insert(0 if namespace is None else 1, request.raw_path.removeprefix(mount))
        host = canonical_host_of_header(request.headers.get(hdrs.HOST, ""), "http")
        return request.method, targets, host


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
) -> Access | Forbidden:
    """Return the decision on a caller that has all its roles for this key."""
    reason = policy.denial_reason(caller, identity, key)
    if reason is not None:
        return Forbidden(reason=reason)
    permissions = policy.collection.field_permissions
    if not permissions:
        return Access(caller, signer)
    roles = policy.effective_roles(caller, identity)
    return Access(caller, signer, field_permissions.hidden_fields(permissions, roles), roles)
