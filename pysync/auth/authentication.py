"""Authentication: callers from certificates, signatures and nonces.

Cheap checks come before expensive ones, in three steps:

1. `parse_credentials` reads the credentials from the headers. It checks their form and time, and the
   issuer's signature of a certificate.
2. `authenticate` verifies the request's own signature, once the body is there. Only then is the certificate
   parsed: its shape, its paths, its roles. The result is cached for the caller's next request.
3. `consume_nonce` records the nonce of an allowed request, and checks that its certificate is not revoked.

Between 2 and 3 the request is counted against its rate limits (`RateLimiter`), and `Authorizer` decides
whether the caller may perform the action.

See docs/reference/protocol.md#authentication.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from pysync import _core, protocol
from pysync.auth import certificates
from pysync.auth.certificate_cache import CertificateCache
from pysync.auth.certificates import SKEW_S, Certificate, CertificateSummary
from pysync.auth.revocation import RevocationRegistry
from pysync.auth.signature_batch import AuthorProof, RequestParts, SignatureBatch
from pysync.auth.verification import (
    CertificateVerifier,
    SignedCertificate,
    VerifiedCertificate,
    open_certificate,
    signed_certificate,
)
from pysync.clock import elapsed_of
from pysync.config import Config
from pysync.coordinator import Coordinator, ReplayMemoryFull, Standing
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, ANONYMOUS_ROLES, Caller

BEARER = "Bearer "
"""The prefix of an admin token in the header."""
SKEW_MS = SKEW_S * 1000
VERIFY_IN_THREAD_ABOVE = 256 * 1024
"""Bytes of a body above which it is hashed in a thread. Hashing as many takes about 1 ms."""


SignedRequest = tuple[str, list[str], str]
"""The parts of a request that its signature covers, apart from the body: the method; the forms of path and
query that may have been signed, the likeliest first; and the canonical form of the Host header. A Python
function would make a named tuple, and would take longer than to find these parts."""

_STANDINGS: Final = (Standing.STRANGER, Standing.TRUSTED)
"""The standing of a caller, by whether it is trusted."""
_READS: Final = frozenset({"GET", "HEAD"})


class Credentials(NamedTuple):
    """The credentials in the headers of a request. Without a certificate nothing is signed, and `caller` is
    final; with one, `Authenticator.authenticate` returns the caller."""

    caller: Caller | None = None
    certificate: VerifiedCertificate | SignedCertificate | None = None
    signature: str = ""
    timestamp_ms: int = 0
    nonce: str = ""


class AuthenticatedRequest(NamedTuple):
    """The caller of a request whose signature was verified. `certificate` is None if nothing was signed,
    `is_cached` is True if it was in the cache already, and `is_read` if the request changes nothing."""

    caller: Caller
    certificate: VerifiedCertificate | None = None
    timestamp_ms: int = 0
    nonce: str = ""
    is_cached: bool = False
    is_read: bool = False


NO_CREDENTIALS = Credentials(ANONYMOUS)
ANONYMOUS_REQUEST = AuthenticatedRequest(ANONYMOUS)
ADMIN_CALLER = Caller(roles=ANONYMOUS_ROLES | {"admin"})
ADMIN_CREDENTIALS = Credentials(ADMIN_CALLER)


class Authenticator:
    """The authentication of one service. `owns_data` returns True if a user id owns stored data
    (`Ownership`), and `now_ms` is the clock. `signatures` verifies the signatures of requests, and
    `validate_certificate` returns the code with which plugins reject a valid certificate, None if they accept
    it."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        revocations: RevocationRegistry,
        owns_data: Callable[[str], Awaitable[bool]],
        now_ms: Callable[[], int],
        signatures: SignatureBatch,
        validate_certificate: Callable[[Certificate], str | None] | None = None,
    ) -> None:
        auth = config.auth
        self._admin_token = None if auth.admin_token is None else auth.admin_token.encode()
        self._coordinator = coordinator
        self._revocations = revocations
        self._owns_data = owns_data
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._verifier = CertificateVerifier(config, now_ms, validate_certificate)
        self._signatures = signatures
        self._cache = CertificateCache()

    def parse_credentials(self, headers: Mapping[str, str]) -> Credentials:
        """Return the credentials in `headers`, checked as far as possible without the body; `NO_CREDENTIALS`
        if there are none. Raises Unauthorized if they are invalid."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is not None and authorization.startswith(BEARER):
            return self._check_admin_token(authorization.removeprefix(BEARER))
        if authorization is None or not authorization.startswith(certificates.SCHEME):
            return NO_CREDENTIALS
        timestamp = headers.get(protocol.HEADER_TIMESTAMP, "")
        nonce = headers.get(protocol.HEADER_NONCE, "")
        timestamp_ms = _core.signed_time(timestamp, nonce)
        if timestamp_ms is None:
            raise Unauthorized("no timestamp or nonce of the right form")
        presenter = headers.get(protocol.HEADER_PUB, "")
        now_ms = self._now_ms()
        signature = headers.get(protocol.HEADER_SIGNATURE, "")
        presented: VerifiedCertificate | SignedCertificate | None
        presented = self._cache.get(authorization, presenter, now_ms)
        if presented is None:
            presented = signed_certificate(authorization, presenter, *open_certificate(authorization))
        _check_is_current(presented, timestamp_ms, now_ms)
        return Credentials(None, presented, signature, timestamp_ms, nonce)

    async def authenticate(
        self, credentials: Credentials, request: SignedRequest, body: bytes
    ) -> AuthenticatedRequest:
        """Return the caller that the credentials identify, once the request's signature, which covers `body`,
        is verified. Raises Unauthorized if it is wrong, the certificate is malformed, or a plugin rejects it;
        and Forbidden if its audience excludes the presenter, or it lacks paths and is not a device's."""
        presented = credentials.certificate
        if presented is None:
            assert credentials.caller is not None, "without a certificate the caller is final"
            return AuthenticatedRequest(credentials.caller)
        parts = _signed_parts(presented.key, credentials, request, body)
        is_large = len(body) > VERIFY_IN_THREAD_ABOVE
        if is_large:
            _check(await asyncio.to_thread(_core.verify_request, *parts), request)
        is_cached = isinstance(presented, VerifiedCertificate)
        if isinstance(presented, VerifiedCertificate):
            proof = presented
            if not is_large:
                is_signed, _ = await self._signatures.verify(parts)
                _check(is_signed, request)
        else:
            if not is_large:
                _check(_core.verify_request(*parts), request)
            proof = self._verifier.verify(presented)
        if proof.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        method, *_ = request
        return AuthenticatedRequest(
            proof.caller, proof, credentials.timestamp_ms, credentials.nonce, is_cached, method in _READS
        )

    async def admit(
        self, credentials: Credentials, request: SignedRequest, body: bytes, author: AuthorProof | None = None
    ) -> None:
        """Do as `authenticate`, and then as `consume_nonce`, for a request with a known certificate that is
        allowed if its signature is valid. Waits only once for both. If `author` is the presenter, that proof
        is perhaps verified together with the signature."""
        proof = credentials.certificate
        assert isinstance(proof, VerifiedCertificate), "other certificates are verified first"
        _, _, signature, timestamp_ms, nonce_text = credentials
        method, targets, host = request
        is_read = method in _READS
        presenter = proof.caller.presenter
        if author is not None and author.pubkey != presenter:
            author = None
        digest = _core.ReplayWindow.digest(presenter, nonce_text)
        is_signed, is_new = await self._signatures.verify(
            (proof.key, signature, method, targets, body, host, timestamp_ms, nonce_text),
            (digest, timestamp_ms, _STANDINGS[proof.is_trusted], is_read),
            author,
        )
        _check(is_signed, request)
        if is_new is None or isinstance(is_new, ReplayMemoryFull):
            verified = AuthenticatedRequest(
                proof.caller, proof, timestamp_ms, nonce_text, is_cached=True, is_read=is_read
            )
            await self.consume_nonce(verified)
            return
        if isinstance(is_new, Exception):
            raise is_new
        _check_is_current(proof, timestamp_ms, self._now_ms())
        if not is_new:
            raise _replayed()
        if not self._is_unlisted(proof) and await self._revocations.is_revoked(proof):
            raise Unauthorized("revoked")

    async def consume_nonce(self, verified: AuthenticatedRequest) -> None:
        """Record the nonce of an allowed request, and check that its certificate is still valid. Raises
        Unauthorized if the nonce was used before or the certificate is revoked or has expired meanwhile;
        CoordinatorUnavailable; and StoreUnavailable if revocations cannot be read."""
        proof = verified.certificate
        if proof is None:
            return
        # The earlier steps may have taken time, so check again. From here on the nonce reveals a replay.
        now_ms = self._now_ms()
        _check_is_current(proof, verified.timestamp_ms, now_ms)
        if not await self._is_new(proof, verified):
            raise _replayed()
        if await self._is_revoked(proof):
            raise Unauthorized("revoked")
        if not verified.is_cached:
            self._cache.put(proof, now_ms)

    async def _is_new(self, proof: VerifiedCertificate, verified: AuthenticatedRequest) -> bool:
        """Record the nonce and return True if it is new. Looks up whether an untrusted identity owns data
        only if the share of strangers is full."""
        presenter, nonce, signed_ms = proof.caller.presenter, verified.nonce, verified.timestamp_ms
        standing = _STANDINGS[proof.is_trusted]
        record = self._coordinator.consume_nonce
        try:
            return await record(presenter, nonce, signed_ms, standing, is_read=verified.is_read)
        except ReplayMemoryFull:
            if proof.is_trusted or not await self._owns_data(proof.caller.identity):
                raise
            return await record(presenter, nonce, signed_ms, Standing.OWNER, is_read=verified.is_read)

    def has_expired(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate has expired. Streams get no allowance for clock skew."""
        return self._now_ms() > certificate.exp * 1000

    async def is_still_valid(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate of an authenticated caller has neither expired nor been revoked.
        Raises StoreUnavailable if revocations cannot be read."""
        if self.has_expired(certificate):
            return False
        return not await self._is_revoked(certificate)

    async def _is_revoked(self, certificate: CertificateSummary) -> bool:
        """Return True if the certificate is revoked. Raises StoreUnavailable if revocations cannot be
        read."""
        return not self._is_unlisted(certificate) and await self._revocations.is_revoked(certificate)

    def _is_unlisted(self, certificate: CertificateSummary) -> bool:
        """Return True if the issuer is known to have no list of revocations, as most have none."""
        return self._elapsed_ms() <= self._revocations.unlisted_until_ms.get(certificate.iss_user_id, -1)

    async def identify_unverified(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller that `headers` claim, by a certificate or token alone. No request signature is
        checked, so the result may decide what to display, never what to allow. An audience certificate needs
        no presenter here. Raises Unauthorized, Forbidden, and StoreUnavailable."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is None:
            return ANONYMOUS
        if authorization.startswith(BEARER):
            self._check_admin_token(authorization.removeprefix(BEARER))
            return ADMIN_CALLER
        presenter = headers.get(protocol.HEADER_PUB, "")
        now_ms = self._now_ms()
        known = self._cache.get(authorization, presenter, now_ms)
        if known is None:
            text, opened = open_certificate(authorization)
            if not (opened[0] or presenter):
                certificate = self._verifier.parse(text)
                if await self._is_revoked(certificate):
                    raise Unauthorized("revoked")
                return self._verifier.caller_of(certificate, "")
            known = self._verifier.verify(signed_certificate(authorization, presenter, text, opened))
        if known.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        _check_validity_period(known, now_ms)
        if await self._is_revoked(known):
            raise Unauthorized("revoked")
        return known.caller

    def _check_admin_token(self, token: str) -> Credentials:
        if self._admin_token is None or not hmac.compare_digest(
            token.encode(errors="surrogateescape"), self._admin_token
        ):
            raise Unauthorized("admin token")
        return ADMIN_CREDENTIALS


def _replayed() -> Unauthorized:
    return Unauthorized("replay: the nonce was seen before")


def _check_is_current(
    presented: VerifiedCertificate | SignedCertificate, timestamp_ms: int, now_ms: int
) -> None:
    """Raise Unauthorized if the request was not signed just now, or its certificate is not valid now."""
    if abs(timestamp_ms - now_ms) > SKEW_MS:
        raise Unauthorized(f"clock: signed {(timestamp_ms - now_ms) / 1000:+.0f} s from now")
    if not presented.nbf - SKEW_S <= now_ms // 1000 <= presented.exp + SKEW_S:
        _check_validity_period(presented, now_ms)


def _check_validity_period(presented: VerifiedCertificate | SignedCertificate, now_ms: int) -> None:
    """Raise Unauthorized if the certificate is not valid now."""
    now_s = now_ms // 1000
    if now_s > presented.exp + SKEW_S:
        raise Unauthorized(f"expired: {now_s - presented.exp} s ago")
    if now_s < presented.nbf - SKEW_S:
        raise Unauthorized(f"not valid yet: for {presented.nbf - now_s} s")


def _signed_parts(
    key: _core.PublicKey, credentials: Credentials, request: SignedRequest, body: bytes
) -> RequestParts:
    """Return all parts of a request that its signature depends on."""
    method, targets, host = request
    _, _, signature, timestamp_ms, nonce = credentials
    return key, signature, method, targets, body, host, timestamp_ms, nonce


def _check(is_signed: bool, request: SignedRequest) -> None:
    """Raise Unauthorized unless the request is signed."""
    if not is_signed:
        method, targets, host = request
        signed = f"{method} {protocol.path_of(targets[0])} at {host}"
        raise Unauthorized(f"signature: not of {signed}, or of another query or body")
