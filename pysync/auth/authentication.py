"""Authentication: callers from certificates, signatures and nonces.

Cheap checks come before expensive ones, in three steps:

1. `credentials_for` reads the credentials of the headers: their form and time, and the issuer's signature of
   a certificate.
2. `authenticate` checks the request's own signature, once the body is there. Only then is the certificate
   parsed: its shape, its paths, its roles. The result is cached for the caller's next request.
3. `consume_nonce` takes the nonce of an allowed request, and checks that its certificate was not revoked.

Between 2 and 3 the request is counted against its rate limits (`RateLimiter`), and `Authorizer` decides what
the caller may do.

See docs/reference/protocol.md#authentication.
"""

import asyncio
import hmac
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from pysync import _core, protocol
from pysync.auth import certificates
from pysync.auth.certificates import SKEW_S, Certificate
from pysync.auth.policy import AccessPolicy
from pysync.auth.revocation import RevocationRegistry
from pysync.auth.verification import (
    CertificateVerifier,
    SignedCertificate,
    VerifiedCertificate,
    open_certificate,
    signed_certificate,
)
from pysync.config import Config
from pysync.coordinator import Coordinator, ReplayMemoryFull, Standing
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, ANONYMOUS_ROLES, Caller

BEARER = "Bearer "
"""The prefix of an admin token in the header."""
SKEW_MS = SKEW_S * 1000
VERIFY_IN_THREAD_ABOVE = 256 * 1024
"""Bytes of a body that are hashed in about 1 ms, without the interpreter's lock."""

MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes of the cache for callers whom the configuration trusts, and again for all others: some 8,000 callers
each."""
MAX_IDENTITY_BYTES: Final = 64 * 1024
"""The share of it that one identity may hold."""

_is_timestamp = re.compile(r"-?[0-9]{1,16}").fullmatch
_is_nonce = re.compile(r"[A-Za-z0-9+/]{21}[AQgw]==").fullmatch


class SignedRequest(NamedTuple):
    """A request as access sees it. `targets` are the forms of path and query that its signature may cover,
    likeliest first; `host` is the Host header as it is signed."""

    method: str
    targets: list[str]
    host: str


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
    """Authentication of one service. `owns_data` returns True if a user id owns anything that
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
        self._admin_token = None if auth.admin_token is None else auth.admin_token.encode()
        self._coordinator = coordinator
        self._revocations = revocations
        self._owns_data = owns_data
        self._now_ms = now_ms
        self._verifier = CertificateVerifier(config, now_ms, validate_certificate)
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
        proof = presented if isinstance(presented, VerifiedCertificate) else self._verifier.verify(presented)
        if proof.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        return AuthenticatedRequest(proof.caller, proof, credentials.timestamp_ms, credentials.nonce)

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
            text, opened = open_certificate(authorization)
            if not (opened[0] or presenter):
                certificate = self._verifier.parse(text)
                if await self._revocations.is_revoked(certificate):
                    raise Unauthorized("revoked")
                return self._verifier.caller_of(certificate, "")
            known = self._verifier.verify(signed_certificate(authorization, presenter, text, opened))
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
        return self._cache.get(authorization, presenter) or signed_certificate(
            authorization, presenter, *open_certificate(authorization)
        )


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


class CertificateCache:
    """Spares callers the check of their certificate. Strangers take no room from callers whom the
    configuration trusts, no identity takes more than its share, and the least recently used proof is evicted
    first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._trusted = _LruCache(max_bytes)
        self._others = _LruCache(max_bytes)

    def get(self, authorization: str, presenter: str) -> VerifiedCertificate | None:
        """The proof that was put for this header, by anybody or by this presenter."""
        return self._trusted.get((authorization, "")) or (
            self._others.get((authorization, ""))
            or (self._others.get((authorization, presenter)) if presenter else None)
        )

    def put(self, certificate: VerifiedCertificate) -> None:
        """Remember a proof, once a request under it was allowed."""
        (self._trusted if certificate.is_trusted else self._others).put(certificate)


class _LruCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], VerifiedCertificate] = OrderedDict()
        self._by_identity: dict[str, OrderedDict[tuple[str, str], VerifiedCertificate]] = {}

    def get(self, cache_key: tuple[str, str]) -> VerifiedCertificate | None:
        proof = self._entries.get(cache_key)
        if proof is not None:
            self._entries.move_to_end(cache_key)
        return proof

    def put(self, certificate: VerifiedCertificate) -> None:
        if certificate.cache_key in self._entries:
            return
        own = self._by_identity.setdefault(certificate.caller.identity, OrderedDict())
        self._entries[certificate.cache_key] = own[certificate.cache_key] = certificate
        self._bytes += certificate.size
        if len(own) > 1:
            held = sum(each.size for each in own.values())
            while held > MAX_IDENTITY_BYTES:
                oldest = next(iter(own.values()))
                held -= oldest.size
                self._evict(oldest)
        while self._bytes > self._max_bytes:
            self._evict(next(iter(self._entries.values())))

    def _evict(self, certificate: VerifiedCertificate) -> None:
        del self._entries[certificate.cache_key]
        self._bytes -= certificate.size
        own = self._by_identity[certificate.caller.identity]
        del own[certificate.cache_key]
        if not own:
            del self._by_identity[certificate.caller.identity]
