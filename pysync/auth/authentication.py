"""Authentication: callers from certificates, signatures and nonces.

Cheap checks come before expensive ones, in three steps. `Authorizer.admit` has steps between them:

1. `parse_credentials` reads the credentials from the headers. It checks their form and time, and the
   issuer's signature of a certificate that is not cached.
2. `authenticate` verifies the request's own signature, once the body is there. Only then is the certificate
   parsed: its shape, its paths, its roles. It must not be revoked.
3. `consume_nonce` records the nonce of an allowed request, and caches its certificate.

See docs/reference/protocol.md#authentication.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, NamedTuple

from pysync import _core, protocol
from pysync.auth import certificates
from pysync.auth.certificates import SKEW_S, Certificate, CertificateSummary
from pysync.auth.revocation import RevocationRegistry
from pysync.auth.verification import (
    CertificateVerifier,
    SignedCertificate,
    VerifiedCertificate,
    make_certificate_cache,
    open_certificate,
    signed_certificate,
)
from pysync.clock import elapsed_of
from pysync.concurrency import CORE_IN_THREAD_ABOVE
from pysync.config import Config
from pysync.coordinator import Coordinator, ReplayMemoryFull, Standing
from pysync.errors import Forbidden, Unauthorized
from pysync.model import ANONYMOUS, ANONYMOUS_ROLES, Caller

BEARER = "Bearer "
"""The prefix of an admin token in the header."""
MAX_BATCH: Final = 16
"""Signatures that are verified at once. More save little, and keep the first of them waiting for longer."""
SINGLY_AFTER_FAILURE: Final = 8
"""For each signature of a batch that failed, how many of the next are verified one by one. So wrong ones cost
at most a ninth more than if each were verified alone."""

SignedRequest = tuple[str, list[str], str]
"""The parts of a request that its signature covers, apart from the body: the method; the forms of path and
query that may have been signed, the likeliest first; and the canonical form of the Host header. A Python
function would make a named tuple, and would take longer than to find these parts."""
RequestParts = tuple[_core.PublicKey, str, str, list[str], bytes, str, int, str]
"""The arguments of `_core.verify_request`."""
ProofParts = tuple[str, str, bytes, _core.PublicKey, str]
"""The arguments of `_core.verify_author`, with a key that is parsed."""

_READS: Final = frozenset({"GET", "HEAD"})


class Credentials(NamedTuple):
    """The credentials in the headers of a request. Without a certificate nothing is signed, and `caller` is
    final; with one, `Authenticator.authenticate` returns the caller."""

    caller: Caller | None = None
    certificate: VerifiedCertificate | SignedCertificate | None = None
    signature: str = ""
    timestamp_ms: int = 0
    nonce: str = ""


NO_CREDENTIALS = Credentials(ANONYMOUS)
ADMIN_CALLER = Caller(roles=ANONYMOUS_ROLES | {"admin"})
ADMIN_CREDENTIALS = Credentials(ADMIN_CALLER)


class AdminTokens:
    """The admin tokens of a service, as `auth.adminToken` has them: one, several while one is rotated, or
    none."""

    def __init__(self, tokens: str | Iterable[str] | None) -> None:
        tokens = [tokens] if isinstance(tokens, str) else tokens or ()
        self._headers = [(BEARER + token).encode() for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._headers)

    def accept(self, authorization: str) -> bool:
        """Return True if the header `Authorization` has one of the tokens. Each is compared in constant
        time."""
        sent = authorization.encode(errors="surrogateescape")
        return sum(hmac.compare_digest(sent, header) for header in self._headers) > 0


class AuthenticatedRequest(NamedTuple):
    """The caller of a request whose signature was verified. `certificate` is None if nothing was signed.
    `is_read` is True if the request changes nothing."""

    caller: Caller
    certificate: VerifiedCertificate | None = None
    credentials: Credentials = NO_CREDENTIALS
    is_read: bool = False


ANONYMOUS_REQUEST = AuthenticatedRequest(ANONYMOUS)


class AuthorProof:
    """The author proof of a request's body: its tag, document key, canonical data, author's key (hex) and
    signature. `is_verified` becomes True if it was verified together with the signature of the request."""

    __slots__ = ("data", "document_key", "is_verified", "pubkey", "signature", "tag")

    def __init__(self, tag: str, document_key: str, data: bytes, pubkey: str, signature: str) -> None:
        self.tag = tag
        self.document_key = document_key
        self.data = data
        self.pubkey = pubkey
        self.signature = signature
        self.is_verified = False

    def parts(self, key: _core.PublicKey) -> ProofParts:
        """Return all parts, with the author's key as it was parsed before."""
        return self.tag, self.document_key, self.data, key, self.signature


class SignatureBatch:
    """Verifies the signatures of requests that are handled in the same tick of the event loop at once, with
    the author proofs of their bodies. That takes about half as long as one by one. `others_follow` returns
    True if the loop is about to handle further requests in this tick; without them a request waits for
    nothing. `verify_one` and `verify_together` are as in the core. See
    docs/reference/protocol.md#request-signature."""

    def __init__(
        self,
        others_follow: Callable[[], bool],
        verify_one: Callable[..., bool] = _core.verify_request,
        verify_together: Callable[[list[RequestParts], list[ProofParts]], bool] = _core.verify_requests,
    ) -> None:
        self._others_follow = others_follow
        self._verify_one = verify_one
        self._verify_together = verify_together
        self._waiting: list[tuple[RequestParts, AuthorProof | None, asyncio.Future[bool]]] = []
        self._singly = 0

    async def verify(self, request: RequestParts, proof: AuthorProof | None = None) -> bool:
        """Return True if the signature of a request is valid. `proof` is by the key of the request. It is
        left unverified if it, or a signature that waited with it, is wrong."""
        if self._singly > 0:
            self._singly -= 1
            return self._verify_one(*request)
        follow = self._others_follow()
        if not (follow or self._waiting or proof):
            return self._verify_one(*request)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # Not all that follow have a signature.
            loop.call_soon(self._verify_waiting)
        are_valid: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((request, proof, are_valid))
        if not follow or len(self._waiting) == MAX_BATCH:
            self._verify_waiting()
        return await are_valid or self._verify_one(*request)

    def _verify_waiting(self) -> None:
        """Verify what waits. If one signature is wrong, each request verifies its own."""
        waiting, self._waiting = self._waiting, []
        are_valid = False
        try:
            proofs = [(proof, request[0]) for request, proof, _ in waiting if proof is not None]
            if len(waiting) + len(proofs) > 1:
                requests = [request for request, _, _ in waiting]
                are_valid = self._verify_together(requests, [proof.parts(key) for proof, key in proofs])
                if not are_valid:
                    self._singly = SINGLY_AFTER_FAILURE * (len(waiting) + len(proofs))
            for proof, _ in proofs:
                proof.is_verified = are_valid
        finally:
            for _, _, verified in waiting:
                if not verified.done():
                    verified.set_result(are_valid)


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
        self._admin_tokens = AdminTokens(auth.admin_token)
        self._coordinator = coordinator
        self._revocations = revocations
        self._owns_data = owns_data
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._verifier = CertificateVerifier(config, now_ms, validate_certificate)
        self._signatures = signatures
        self._cache = make_certificate_cache()

    def parse_credentials(self, headers: Mapping[str, str]) -> Credentials:
        """Return the credentials in `headers`, checked as far as possible without the body; `NO_CREDENTIALS`
        if there are none. Raises Unauthorized if they are invalid."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is not None and authorization.startswith(BEARER):
            return self._check_admin_token(authorization)
        if authorization is None or not authorization.startswith(certificates.SCHEME):
            return NO_CREDENTIALS
        timestamp = headers.get(protocol.HEADER_TIMESTAMP, "")
        nonce = headers.get(protocol.HEADER_NONCE, "")
        timestamp_ms = _core.signed_time(timestamp, nonce)
        if timestamp_ms is None:
            raise Unauthorized("no timestamp or nonce of the right form")
        presenter = headers.get(protocol.HEADER_PUB, "")
        presented: VerifiedCertificate | SignedCertificate | None
        cache_key = _cache_key(authorization, presenter)
        presented = self._cache.get(cache_key)
        if presented is None:
            presented = signed_certificate(cache_key, presenter, *open_certificate(authorization))
        _check_is_current(presented, timestamp_ms, self._now_ms())
        return Credentials(None, presented, headers.get(protocol.HEADER_SIGNATURE, ""), timestamp_ms, nonce)

    async def authenticate(
        self, credentials: Credentials, request: SignedRequest, body: bytes, author: AuthorProof | None = None
    ) -> AuthenticatedRequest:
        """Return the caller that the credentials identify, once the request's signature, which covers `body`,
        is verified. If `author` is the presenter, that proof is perhaps verified with it.

        Raises Unauthorized if the signature is wrong, the certificate is malformed or revoked, or a plugin
        rejects it; Forbidden if its audience excludes the presenter, or it lacks paths and is not a device's;
        and StoreUnavailable if revocations cannot be read."""
        _, presented, signature, timestamp_ms, nonce = credentials
        if presented is None:
            assert credentials.caller is not None, "without a certificate the caller is final"
            return AuthenticatedRequest(credentials.caller)
        method, targets, host = request
        parts = presented.key, signature, method, targets, body, host, timestamp_ms, nonce
        if len(body) > CORE_IN_THREAD_ABOVE:
            is_signed = await asyncio.to_thread(_core.verify_request, *parts)
        elif isinstance(presented, SignedCertificate):
            # Strangers cannot make others verify their signatures one by one.
            is_signed = _core.verify_request(*parts)
        else:
            own = author if author is not None and author.pubkey == presented.key.hex else None
            is_signed = await self._signatures.verify(parts, own)
        if not is_signed:
            signed = f"{method} {protocol.path_of(targets[0])} at {host}"
            raise Unauthorized(f"signature: not of {signed}, or of another query or body")
        if isinstance(presented, SignedCertificate):
            presented = self._verifier.verify(presented)
        if presented.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        if not self._is_unlisted(presented) and await self._revocations.is_revoked(presented):
            raise Unauthorized("revoked")
        return AuthenticatedRequest(presented.caller, presented, credentials, method in _READS)

    async def consume_nonce(self, verified: AuthenticatedRequest) -> None:
        """Record the nonce of an allowed request, and cache its certificate. Raises Unauthorized if the nonce
        was used before, or the request or its certificate became too old meanwhile; and
        CoordinatorUnavailable."""
        certificate, credentials = verified.certificate, verified.credentials
        if certificate is None:
            return
        # The earlier steps may have taken time, so check again. From here on the nonce reveals a replay.
        _check_is_current(certificate, credentials.timestamp_ms, self._now_ms())
        if not await self._is_new(certificate, credentials, is_read=verified.is_read):
            raise Unauthorized("replay: the nonce was seen before")
        if certificate is not credentials.certificate:
            self._cache.put(certificate.cache_key, certificate)

    async def _is_new(
        self, certificate: VerifiedCertificate, credentials: Credentials, *, is_read: bool
    ) -> bool:
        """Record the nonce and return True if it is new. Looks up whether an untrusted identity owns data
        only if the share of strangers is full."""
        nonce = certificate.caller.presenter, credentials.nonce, credentials.timestamp_ms
        standing = Standing.TRUSTED if certificate.is_trusted else Standing.STRANGER
        try:
            return await self._coordinator.consume_nonce(*nonce, standing, is_read=is_read)
        except ReplayMemoryFull:
            if certificate.is_trusted or not await self._owns_data(certificate.caller.identity):
                raise
            return await self._coordinator.consume_nonce(*nonce, Standing.OWNER, is_read=is_read)

    def has_expired(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate has expired. Streams get no allowance for clock skew."""
        return self._now_ms() > certificate.exp * 1000

    async def is_still_valid(self, certificate: VerifiedCertificate) -> bool:
        """Return True if the certificate of an authenticated caller has neither expired nor been revoked.
        Raises StoreUnavailable if revocations cannot be read."""
        return not self.has_expired(certificate) and not await self._is_revoked(certificate)

    async def _is_revoked(self, certificate: CertificateSummary) -> bool:
        """Return True if the certificate is revoked. Raises StoreUnavailable if revocations cannot be
        read."""
        return not self._is_unlisted(certificate) and await self._revocations.is_revoked(certificate)

    def _is_unlisted(self, certificate: CertificateSummary) -> bool:
        """Return True if the issuer is known to have no list of revocations, as most have none."""
        until_ms = self._revocations.unlisted_until_ms.get(certificate.iss_user_id)
        return until_ms is not None and self._elapsed_ms() <= until_ms

    async def identify_unverified(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller that `headers` claim, by a certificate or token alone. No request signature is
        checked, so the result may decide what to display, never what to allow. An audience certificate needs
        no presenter here. Raises Unauthorized, Forbidden, and StoreUnavailable."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is None:
            return ANONYMOUS
        if authorization.startswith(BEARER):
            self._check_admin_token(authorization)
            return ADMIN_CALLER
        presenter = headers.get(protocol.HEADER_PUB, "")
        cache_key = _cache_key(authorization, presenter)
        certificate = self._cache.get(cache_key)
        if certificate is None:
            text, opened = open_certificate(authorization)
            if not (opened[0] or presenter):
                parsed = self._verifier.parse(text)
                if await self._is_revoked(parsed):
                    raise Unauthorized("revoked")
                return self._verifier.caller_of(parsed, "")
            certificate = self._verifier.verify(signed_certificate(cache_key, presenter, text, opened))
        if certificate.not_in_audience:
            raise Forbidden(reason="audience: the certificate is for other keys")
        _check_validity_period(certificate, self._now_ms())
        if await self._is_revoked(certificate):
            raise Unauthorized("revoked")
        return certificate.caller

    def _check_admin_token(self, authorization: str) -> Credentials:
        if not self._admin_tokens.accept(authorization):
            raise Unauthorized("admin token")
        return ADMIN_CREDENTIALS


def _cache_key(authorization: str, presenter: str) -> str:
    """Return the key in the cache of the certificate in a header, which `presenter` presents: the text of
    X-Starfish-Pub, on which the caller depends if the certificate has no subject."""
    return f"{authorization}\n{presenter}" if presenter else authorization


def _check_is_current(
    presented: VerifiedCertificate | SignedCertificate, timestamp_ms: int, now_ms: int
) -> None:
    """Raise Unauthorized if the request was not signed just now, or its certificate is not valid now."""
    if abs(timestamp_ms - now_ms) > SKEW_S * 1000:
        raise Unauthorized(f"clock: signed {(timestamp_ms - now_ms) / 1000:+.0f} s from now")
    _check_validity_period(presented, now_ms)


def _check_validity_period(presented: VerifiedCertificate | SignedCertificate, now_ms: int) -> None:
    """Raise Unauthorized if the certificate is not valid now."""
    now_s = now_ms // 1000
    if now_s > presented.exp + SKEW_S:
        raise Unauthorized(f"expired: {now_s - presented.exp} s ago")
    if now_s < presented.nbf - SKEW_S:
        raise Unauthorized(f"not valid yet: for {presented.nbf - now_s} s")
