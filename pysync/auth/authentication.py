"""Authentication and rate limits: callers from certificates, signatures and nonces.

Nothing dear happens before something cheap could refuse the request, in four steps:

1. `credentials_for` reads the credentials of the headers: their form and time, and of a certificate the
issuer's
   signature.
2. `authenticate` checks the request's own signature, once the body is there. Only then is the certificate
read:
   its shape, its paths, its roles; what is made of it is remembered for the caller's next request.
3. `enforce_rate_limits` counts the request against its rate limits. What the caller may do is then
`pysync.policy`'s to say. 4. `consume_nonce` takes the nonce of a request that is allowed, and asks whether
its certificate was revoked.

See docs/reference/protocol.md#authentication.
"""

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from pysync import _core, protocol
from pysync.auth import certificates
from pysync.auth.certificate_cache import CertificateCache, VerifiedCertificate
from pysync.auth.certificates import SKEW_S, Certificate, CertificateError
from pysync.auth.policy import AccessPolicy
from pysync.auth.revocation import RevocationRegistry
from pysync.config import Config, Limit, every_named_identity, every_role, every_trusted_issuer, trust_of
from pysync.coordinator import Coordinator, ReplayMemoryFull, Standing
from pysync.errors import Forbidden, RateLimited, Unauthorized
from pysync.model import ANONYMOUS, ANONYMOUS_ROLES, Caller, Claims

log = logging.getLogger(__name__)

BEARER = "Bearer "
"""The prefix of an admin token in the header."""
SKEW_MS = SKEW_S * 1000
VERIFY_IN_THREAD_ABOVE = 256 * 1024
"""Bytes of a body that are hashed in about 1 ms, without the interpreter's lock."""
MAX_DENIES = 64
"""The most deny entries of a certificate: each is matched against every key of a batch."""

_is_timestamp = re.compile(r"-?[0-9]{1,16}").fullmatch
_is_nonce = re.compile(r"[A-Za-z0-9+/]{21}[AQgw]==").fullmatch


class SignedRequest(NamedTuple):
    """A request as access sees it. `targets` are the forms of path and query that its signature may cover,
    likeliest first; `host` is the Host header as it is signed."""

    method: str
    targets: list[str]
    host: str


class SignedCertificate(NamedTuple):
    """A certificate with a valid issuer's signature, of which only the parts are known that the check of a
    request's signature needs. `cache_key` is the key of its proof in the cache."""

    text: bytes
    key: _core.PublicKey
    nbf: int
    exp: int
    cache_key: tuple[str, str]


class Credentials(NamedTuple):
    """The credentials in the headers of a request. Without a certificate nothing was signed, and the caller
    is final; with one `Authenticator.authenticate` returns the caller."""

    caller: Caller | None = None
    certificate: VerifiedCertificate | SignedCertificate | None = None
    signature: str = ""
    timestamp_ms: int = 0
    nonce: str = ""


class AuthenticatedRequest(NamedTuple):
    """The caller of a request whose signature was checked. `certificate` is None if nothing was signed."""

    caller: Caller
    certificate: VerifiedCertificate | None = None
    timestamp_ms: int = 0
    nonce: str = ""


NO_CREDENTIALS = Credentials(ANONYMOUS)
ANONYMOUS_REQUEST = AuthenticatedRequest(ANONYMOUS)
ADMIN_CALLER = Caller(roles=ANONYMOUS_ROLES | {"admin"})
ADMIN_CREDENTIALS = Credentials(ADMIN_CALLER)


class Authenticator:
    """Authentication and rate limits of one service. `owns_data` returns True if a user id owns anything that
    is stored (`pysync.ownership`), and `now_ms` is the clock. `validate_certificate` returns the code with
    which plugins refuse a valid certificate, None if they accept it."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        revocations: RevocationRegistry,
        owns_data: Callable[[str], Awaitable[bool]],
        now_ms: Callable[[], int],
        validate_certificate: Callable[[Certificate], str | None] | None = None,
    ) -> None:
        auth = config.auth
        self._trust = trust_of(config)
        self._trusted_issuers = every_trusted_issuer(config)
        self._named_identities = every_named_identity(config)
        self._configured_roles = _roles_by_name(every_role(config))
        self._admin_token = None if auth.admin_token is None else auth.admin_token.encode()
        self._coordinator = coordinator
        self._revocations = revocations
        self._owns_data = owns_data
        self._now_ms = now_ms
        self._validate_certificate = validate_certificate
        self._cache = CertificateCache()

    def credentials_for(self, policy: AccessPolicy, headers: Mapping[str, str]) -> Credentials:
        """The credentials in `headers`, as far as they can be told without the body.

        Raises:
            Unauthorized: none where `policy` needs them, or bad ones.
            Forbidden: a member or audience certificate without paths.
        """
        if not policy.needs_credentials:
            return NO_CREDENTIALS
        credentials = self.parse_credentials(headers)
        if credentials is NO_CREDENTIALS and not policy.allows_anonymous:
            raise Unauthorized("no credentials")
        return credentials

    def parse_credentials(self, headers: Mapping[str, str]) -> Credentials:
        """`credentials_for`, whatever they are for: `NO_CREDENTIALS` where there are none. Raises as it does
        for bad ones."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is not None and authorization.startswith(BEARER):
            return self._check_admin_token(authorization.removeprefix(BEARER))
        if authorization is None or not authorization.startswith(certificates.SCHEME):
            return NO_CREDENTIALS
        timestamp = headers.get(protocol.HEADER_TIMESTAMP, "")
        nonce = headers.get(protocol.HEADER_NONCE, "")
        if not (_is_timestamp(timestamp) and _is_nonce(nonce)):
            raise Unauthorized("no timestamp or nonce of the right form")
        presented = self._find_certificate(authorization, headers.get(protocol.HEADER_PUB, ""))
        timestamp_ms = int(timestamp)
        self._check_is_current(presented, timestamp_ms)
        signature = headers.get(protocol.HEADER_SIGNATURE, "")
        return Credentials(None, presented, signature, timestamp_ms, nonce)

    async def authenticate(
        self, credentials: Credentials, request: SignedRequest, body: bytes
    ) -> AuthenticatedRequest:
        """Return the caller that the credentials identify, once the request's signature is verified. `body`
        is what it covers.

        Raises:
            Unauthorized: a wrong signature, a certificate of the wrong form, or one that a plugin refuses.
            Forbidden: the certificate is meant for others, or is a member's or audience's without paths.
        """
        presented = credentials.certificate
        if presented is None:
            assert credentials.caller is not None, "without a certificate the caller is final"
            return AuthenticatedRequest(credentials.caller)
        if len(body) > VERIFY_IN_THREAD_ABOVE:
            await asyncio.to_thread(_check_signature, presented.key, credentials, request, body)
        else:
            _check_signature(presented.key, credentials, request, body)
        proof = (
            presented if isinstance(presented, VerifiedCertificate) else self._verify_certificate(presented)
        )
        if proof.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        return AuthenticatedRequest(proof.caller, proof, credentials.timestamp_ms, credentials.nonce)

    async def enforce_rate_limits(
        self, identity: str, client_ip: str, policies: Iterable[AccessPolicy]
    ) -> None:
        """Count a request against the limits of `policies`. Raises RateLimited, CoordinatorUnavailable."""
        for rule in policies:
            if rule.limit is not None:
                for limit, bucket in _rate_limit_buckets(rule, identity, client_ip):
                    await self.enforce_rate_limit(limit, bucket)

    async def consume_nonce(self, verified: AuthenticatedRequest) -> None:
        """Take the nonce of a request that is allowed, and make sure that its certificate holds.

        Raises:
            Unauthorized: the nonce was seen before, the certificate is revoked, or has expired meanwhile.
            CoordinatorUnavailable, StoreUnavailable.
        """
        proof = verified.certificate
        if proof is None:
            return
        # The steps before may have taken time: check it again. From now on the nonce shows a replay.
        self._check_is_current(proof, verified.timestamp_ms)
        if not await self._is_new(proof, verified):
            raise Unauthorized("replay: the nonce was seen before")
        if await self._revocations.is_revoked(proof):
            raise Unauthorized("revoked")
        self._cache.put(proof)

    async def _is_new(self, proof: VerifiedCertificate, verified: AuthenticatedRequest) -> bool:
        """Take the nonce and return True if it is new. Asks who may be a stranger only if the share of
        strangers is full."""
        remember = partial(
            self._coordinator.consume_nonce, proof.caller.presenter, verified.nonce, verified.timestamp_ms
        )
        if proof.is_trusted:
            return await remember(Standing.TRUSTED)
        try:
            return await remember(Standing.STRANGER)
        except ReplayMemoryFull:
            if not await self._owns_data(proof.caller.identity):
                raise
            return await remember(Standing.OWNER)

    def has_expired(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate has expired by this clock. A stream gets no allowance for clocks
        that differ."""
        return self._now_ms() > certificate.exp * 1000

    async def is_still_valid(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate of an admitted caller is still valid: neither expired nor revoked.
        Raises StoreUnavailable if nobody can tell."""
        if self.has_expired(certificate):
            return False
        return not await self._revocations.is_revoked(certificate)

    async def identify_unverified(self, headers: Mapping[str, str]) -> Caller:
        """Whom `headers` claim to come from, by a certificate or token alone. Nothing is signed, so this is
        good for what to show and never for what to do. An audience certificate needs no presenter here.

        Raises:
            Unauthorized, Forbidden: bad credentials.
            StoreUnavailable: nobody can tell whether they are revoked.
        """
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is None:
            return ANONYMOUS
        if authorization.startswith(BEARER):
            self._check_admin_token(authorization.removeprefix(BEARER))
            return ADMIN_CALLER
        presenter = headers.get(protocol.HEADER_PUB, "")
        known = self._cache.get(authorization, presenter)
        if known is None:
            text, opened = _open_certificate(authorization)
            if not (opened[0] or presenter):
                certificate = self._parse_certificate(text)
                if await self._revocations.is_revoked(certificate):
                    raise Unauthorized("revoked")
                return self._caller_of(certificate, "")
            known = self._verify_certificate(_signed_certificate(authorization, presenter, text, opened))
        if known.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        _check_validity_period(known, self._now_ms())
        if await self._revocations.is_revoked(known):
            raise Unauthorized("revoked")
        return known.caller

    def _check_admin_token(self, token: str) -> Credentials:
        if self._admin_token is None or not hmac.compare_digest(
            token.encode(errors="surrogateescape"), self._admin_token
        ):
            raise Unauthorized("admin token")
        return ADMIN_CREDENTIALS

    def _check_is_current(
        self, presented: VerifiedCertificate | SignedCertificate, timestamp_ms: int
    ) -> None:
        """Refuse a signature, or a certificate, that does not hold now."""
        now_ms = self._now_ms()
        if abs(timestamp_ms - now_ms) > SKEW_MS:
            raise Unauthorized(f"clock: signed {(timestamp_ms - now_ms) / 1000:+.0f} s from now")
        _check_validity_period(presented, now_ms)

    def _find_certificate(
        self, authorization: str, presenter: str
    ) -> VerifiedCertificate | SignedCertificate:
        """Return the cached proof of the certificate in a header, or verify its issuer's signature, which
        costs one Ed25519 verification. `_check_is_current` decides whether it is valid now."""
        return self._cache.get(authorization, presenter) or _signed_certificate(
            authorization, presenter, *_open_certificate(authorization)
        )

    def _verify_certificate(self, signed: SignedCertificate) -> VerifiedCertificate:
        """Parse the whole certificate and return what it proves. Raises as `_parse_certificate` does."""
        certificate = self._parse_certificate(signed.text)
        key = signed.key
        is_device = certificate.kind == "device"
        identity = certificate.iss_user_id if is_device else key.user_id
        return VerifiedCertificate(
            iss=certificate.iss,
            iss_user_id=certificate.iss_user_id,
            sub=certificate.sub,
            nonce=certificate.nonce,
            nbf=certificate.nbf,
            exp=certificate.exp,
            key=key,
            caller=replace(
                self._caller_of(certificate, identity),
                presenter=key.hex,
                ops=certificate.ops,
                scope=_core.Scope(list(certificate.paths), identity) if certificate.paths else None,
            ),
            not_in_audience=certificate.aud is not None and key.hex not in certificate.aud,
            is_trusted=certificate.kind != "audience" and self._is_trusted(certificate, identity),
            cache_key=signed.cache_key,
        )

    def _parse_certificate(self, text: bytes) -> Certificate:
        """Parse a certificate that its issuer signed, check its form and validity period, and have plugins
        accept it. Raises Unauthorized, or Forbidden if it names no paths."""
        try:
            certificate = certificates.parse(text)
            certificates.check_validity_period(certificate, self._now_ms() // 1000)
            if certificate.kind != "device" and not certificate.paths:
                raise Forbidden(reason="scope: a certificate for others needs paths")
            if sum(path.startswith("!") for path in certificate.paths or ()) > MAX_DENIES:
                raise Unauthorized(f"certificate: more than {MAX_DENIES} denies")
            certificates.check_delegation(certificate)
        except CertificateError as error:
            raise Unauthorized(f"certificate: {error.reason}") from None
        except ValueError:
            raise Unauthorized("certificate: malformed") from None
        code = None if self._validate_certificate is None else self._validate_certificate(certificate)
        if code is not None:
            log.info("cap-cert plugin reject: %s", code)
            raise Unauthorized(f"certificate: a plugin refuses it: {code}")
        return certificate

    def _is_trusted(self, certificate: Certificate, identity: str) -> bool:
        """True if the configuration names this caller, so that it is no stranger."""
        return identity in self._named_identities or certificate.iss in self._trusted_issuers

    def _caller_of(self, certificate: Certificate, identity: str) -> Caller:
        """`identity` with the roles that `certificate` gives it."""
        issuer, own = certificate.iss_user_id, {"public"}
        kinds = [f"cap:{op}" for op in certificate.ops]
        if certificate.kind != "device":
            kinds.append(f"delegated:{issuer}")
        else:
            own.add(f"admin:{issuer}")
        if certificate.is_root_device:
            own.add("device:root")
        names = frozenset(certificate.collections)
        asked = [
            (kind, self._configured_roles[kind].keys() & names)
            for kind in kinds
            if kind in self._configured_roles
        ]
        yielded = frozenset(f"{kind}:{name}" for kind, known in asked for name in known)
        claims = Claims(certificate.iss, frozenset(own), yielded)
        return Caller(identity, claims.roles(identity, *self._trust), claims=claims)

    async def enforce_rate_limit(self, limit: Limit, bucket: str) -> None:
        """Count one request in `bucket`. Raises RateLimited where it is one too many."""
        window = await self._coordinator.increment(bucket, limit.window_ms)
        if window.count > limit.max_requests:
            raise _rate_limited(limit, window.resets_in_ms)


def _roles_by_name(roles: Iterable[str]) -> Mapping[str, Mapping[str, None]]:
    """The names in roles `cap:<op>:<name>` and `delegated:<issuer>:<name>`, by what precedes them."""
    found: dict[str, dict[str, None]] = {}
    for role in roles:
        kind, _, rest = role.partition(":")
        scope, has_name, name = rest.partition(":")
        if has_name and kind in ("cap", "delegated"):
            found.setdefault(f"{kind}:{scope}", {})[name] = None
    return found


def _open_certificate(authorization: str) -> tuple[bytes, tuple[str, int, int]]:
    """Decode the certificate of a header and open it with `open_certificate`. Raises Unauthorized."""
    try:
        text = certificates.decode_authorization(authorization)
    except CertificateError as error:
        raise Unauthorized(f"certificate: {error.reason}") from None
    opened = _core.open_certificate(text)
    if opened is None:
        raise Unauthorized("certificate: malformed, or its issuer did not sign it")
    return text, opened


def _signed_certificate(
    authorization: str, presenter: str, text: bytes, opened: tuple[str, int, int]
) -> SignedCertificate:
    subject, nbf, exp = opened
    try:
        key = _core.PublicKey(subject or presenter)
    except ValueError:
        raise Unauthorized("certificate: not a public key") from None
    return SignedCertificate(text, key, nbf, exp, (authorization, "" if subject else presenter))


def _check_validity_period(presented: VerifiedCertificate | SignedCertificate, now_ms: int) -> None:
    """Refuse a certificate that does not hold now."""
    now_s = now_ms // 1000
    if now_s > presented.exp + SKEW_S:
        raise Unauthorized(f"expired: {now_s - presented.exp} s ago")
    if now_s < presented.nbf - SKEW_S:
        raise Unauthorized(f"not valid yet: for {presented.nbf - now_s} s")


def _check_signature(
    key: _core.PublicKey, credentials: Credentials, request: SignedRequest, body: bytes
) -> None:
    if not _core.verify_request(
        key,
        credentials.signature,
        request.method,
        request.targets,
        body,
        request.host,
        credentials.timestamp_ms,
        credentials.nonce,
    ):
        asked = f"{request.method} {protocol.path_of(request.targets[0])} at {request.host}"
        raise Unauthorized(f"signature: not of {asked}, or of another query or body")


def _rate_limit_buckets(policy: AccessPolicy, identity: str, client_ip: str) -> list[tuple[Limit, str]]:
    """The limits that a request counts against, each with the name of its counter."""
    asked = policy.limit
    if asked is None:
        return []
    who = f"identity={identity}" if identity else f"ip={client_ip}"
    buckets = {"identity": who, "ip": f"ip={client_ip}", "identity+ip": f"{who},ip={client_ip}"}
    prefix = f"{policy.namespace or ''}/{policy.collection.name}/{policy.action}"
    counters = []
    if asked.window_ms is not None and asked.max_requests is not None:
        limit = Limit(window_ms=asked.window_ms, max_requests=asked.max_requests)
        counters.append((limit, f"{prefix}:{buckets[asked.bucket or 'identity']}"))
    if asked.identity is not None:
        counters.append((asked.identity, f"{prefix}:each {buckets['identity']}"))
    if asked.ip is not None:
        counters.append((asked.ip, f"{prefix}:each {buckets['ip']}"))
    return counters


def _rate_limited(limit: Limit, resets_in_ms: int) -> RateLimited:
    wait_s = max(1, -(-resets_in_ms // 1000))
    window_s = max(1, -(-limit.window_ms // 1000))
    return RateLimited(
        headers={
            "Retry-After": str(wait_s),
            "RateLimit": f'"default";r=0;t={wait_s}',
            "RateLimit-Policy": f'"default";q={limit.max_requests};w={window_s}',
        }
    )
