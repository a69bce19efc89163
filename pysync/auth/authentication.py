"""Authentication and rate limits: callers from certificates, signatures and nonces (wire section 3).

Nothing dear happens before something cheap could refuse the request, in four steps:

1. `present` reads the credentials of the headers: their form and time, and of a certificate the issuer's
   signature.
2. `verify` checks the request's own signature, once the body is there. Only then is the certificate read:
   its shape, its paths, its roles; what is made of it is remembered for the caller's next request.
3. `meter` counts the request against its rate limits. What the caller may do is then `pysync.rule`'s to say.
4. `consume` takes the nonce of a request that is allowed, and asks whether its certificate was revoked.
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
from pysync.auth.certificate_cache import Proof, ProofCache
from pysync.auth.certificates import SKEW_S, CapError, Certificate
from pysync.auth.policy import Rule
from pysync.auth.revocation import Revocations
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


class Inbound(NamedTuple):
    """A request as access sees it. `targets` are the forms of path and query that its signature may cover,
    likeliest first; `host` is the Host header as it is signed."""

    method: str
    targets: list[str]
    host: str


class SignedCertificate(NamedTuple):
    """A certificate with a valid issuer's signature, of which only the parts are known that the check of a
    request's signature needs. `known_as` is the key of its proof in the cache."""

    text: bytes
    key: _core.PublicKey
    nbf: int
    exp: int
    known_as: tuple[str, str]


class Credentials(NamedTuple):
    """The credentials in the headers of a request. Without a certificate nothing was signed, and the caller
    is final; with one `Access.verify` returns the caller."""

    caller: Caller | None = None
    presented: Proof | SignedCertificate | None = None
    signature: str = ""
    timestamp_ms: int = 0
    nonce: str = ""


class Verified(NamedTuple):
    """The caller of a request whose signature was checked. `proof` is None if nothing was signed."""

    caller: Caller
    proof: Proof | None = None
    timestamp_ms: int = 0
    nonce: str = ""


NOBODY = Credentials(ANONYMOUS)
ANYBODY = Verified(ANONYMOUS)
ADMIN_CALLER = Caller(roles=ANONYMOUS_ROLES | {"admin"})
ADMIN = Credentials(ADMIN_CALLER)


class Access:
    """Authentication and rate limits of one service. `owns` returns True if a user id owns anything that is
    stored (`pysync.ownership`), and `now_ms` is the clock. `refusal` returns the code with which plugins
    refuse a valid certificate, None if they accept it."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        revocations: Revocations,
        owns: Callable[[str], Awaitable[bool]],
        now_ms: Callable[[], int],
        refusal: Callable[[Certificate], str | None] | None = None,
    ) -> None:
        auth = config.auth
        self._trust = trust_of(config)
        self._trusted_issuers = every_trusted_issuer(config)
        self._named_identities = every_named_identity(config)
        self._yields = _roles_by_name(every_role(config))
        self._admin = None if auth.admin_token is None else auth.admin_token.encode()
        self._coordinator = coordinator
        self._revocations = revocations
        self._owns = owns
        self._now_ms = now_ms
        self._refusal = refusal
        self._proofs = ProofCache()

    def present(self, rule: Rule, headers: Mapping[str, str]) -> Credentials:
        """The credentials in `headers`, as far as they can be told without the body.

        Raises:
            Unauthorized: none where `rule` needs them, or bad ones.
            Forbidden: a member or audience certificate without paths.
        """
        if not rule.examines:
            return NOBODY
        credentials = self.credentials(headers)
        if credentials is NOBODY and not rule.admits_anonymous:
            raise Unauthorized("no credentials")
        return credentials

    def credentials(self, headers: Mapping[str, str]) -> Credentials:
        """`present`, whatever they are for: `NOBODY` where there are none. Raises as it does for bad ones."""
        authorization = headers.get(protocol.HEADER_AUTHORIZATION)
        if authorization is not None and authorization.startswith(BEARER):
            return self._present_admin(authorization.removeprefix(BEARER))
        if authorization is None or not authorization.startswith(certificates.SCHEME):
            return NOBODY
        timestamp = headers.get(protocol.HEADER_TIMESTAMP, "")
        nonce = headers.get(protocol.HEADER_NONCE, "")
        if not (_is_timestamp(timestamp) and _is_nonce(nonce)):
            raise Unauthorized("no timestamp or nonce of the right form")
        presented = self._presented(authorization, headers.get(protocol.HEADER_PUB, ""))
        timestamp_ms = int(timestamp)
        self._check_time(presented, timestamp_ms)
        signature = headers.get(protocol.HEADER_SIGNATURE, "")
        return Credentials(None, presented, signature, timestamp_ms, nonce)

    async def verify(self, credentials: Credentials, request: Inbound, body: bytes) -> Verified:
        """Return the caller that the credentials identify, once the request's signature is verified. `body`
        is what it covers.

        Raises:
            Unauthorized: a wrong signature, a certificate of the wrong form, or one that a plugin refuses.
            Forbidden: the certificate is meant for others, or is a member's or audience's without paths.
        """
        presented = credentials.presented
        if presented is None:
            assert credentials.caller is not None, "without a certificate the caller is final"
            return Verified(credentials.caller)
        if len(body) > VERIFY_IN_THREAD_ABOVE:
            await asyncio.to_thread(_check_signature, presented.key, credentials, request, body)
        else:
            _check_signature(presented.key, credentials, request, body)
        proof = presented if isinstance(presented, Proof) else self._accept(presented)
        if proof.excluded:
            raise Forbidden(reason="audience: the certificate is for other keys")
        return Verified(proof.caller, proof, credentials.timestamp_ms, credentials.nonce)

    async def meter(self, identity: str, address: str, rules: Iterable[Rule]) -> None:
        """Count a request against the limits of `rules`. Raises RateLimited, CoordinatorUnavailable."""
        for rule in rules:
            if rule.limit is not None:
                for limit, bucket in _counters(rule, identity, address):
                    await self.count(limit, bucket)

    async def consume(self, verified: Verified) -> None:
        """Take the nonce of a request that is allowed, and make sure that its certificate holds.

        Raises:
            Unauthorized: the nonce was seen before, the certificate is revoked, or has expired meanwhile.
            CoordinatorUnavailable, StoreUnavailable.
        """
        proof = verified.proof
        if proof is None:
            return
        # The steps before may have taken time: check it again. From now on the nonce shows a replay.
        self._check_time(proof, verified.timestamp_ms)
        if not await self._is_new(proof, verified):
            raise Unauthorized("replay: the nonce was seen before")
        if await self._revocations.revoked(proof):
            raise Unauthorized("revoked")
        self._proofs.put(proof)

    async def _is_new(self, proof: Proof, verified: Verified) -> bool:
        """Take the nonce and return True if it is new. Asks who may be a stranger only if the share of
        strangers is full."""
        remember = partial(
            self._coordinator.remember_nonce, proof.caller.presenter, verified.nonce, verified.timestamp_ms
        )
        if proof.is_trusted:
            return await remember(Standing.TRUSTED)
        try:
            return await remember(Standing.STRANGER)
        except ReplayMemoryFull:
            if not await self._owns(proof.caller.identity):
                raise
            return await remember(Standing.OWNER)

    def has_expired(self, proof: Proof) -> bool:
        """Return True if the certificate has expired by this clock. A stream gets no allowance for clocks
        that differ."""
        return self._now_ms() > proof.exp * 1000

    async def holds(self, proof: Proof) -> bool:
        """Return True if the certificate of an admitted caller is still valid: neither expired nor revoked.
        Raises StoreUnavailable if nobody can tell."""
        if self.has_expired(proof):
            return False
        return not await self._revocations.revoked(proof)

    async def introduced(self, headers: Mapping[str, str]) -> Caller:
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
            self._present_admin(authorization.removeprefix(BEARER))
            return ADMIN_CALLER
        presenter = headers.get(protocol.HEADER_PUB, "")
        known = self._proofs.get(authorization, presenter)
        if known is None:
            text, opened = _opened(authorization)
            if not (opened[0] or presenter):
                certificate = self._certificate(text)
                if await self._revocations.revoked(certificate):
                    raise Unauthorized("revoked")
                return self._holder(certificate, "")
            known = self._accept(_signed_certificate(authorization, presenter, text, opened))
        if known.excluded:
            raise Forbidden(reason="audience: the certificate is for other keys")
        _check_window(known, self._now_ms())
        if await self._revocations.revoked(known):
            raise Unauthorized("revoked")
        return known.caller

    def _present_admin(self, token: str) -> Credentials:
        if self._admin is None or not hmac.compare_digest(
            token.encode(errors="surrogateescape"), self._admin
        ):
            raise Unauthorized("admin token")
        return ADMIN

    def _check_time(self, presented: Proof | SignedCertificate, timestamp_ms: int) -> None:
        """Refuse a signature, or a certificate, that does not hold now."""
        now_ms = self._now_ms()
        if abs(timestamp_ms - now_ms) > SKEW_MS:
            raise Unauthorized(f"clock: signed {(timestamp_ms - now_ms) / 1000:+.0f} s from now")
        _check_window(presented, now_ms)

    def _presented(self, authorization: str, presenter: str) -> Proof | SignedCertificate:
        """Return the cached proof of the certificate in a header, or verify its issuer's signature, which
        costs one Ed25519 verification. `_check_time` decides whether it is valid now."""
        return self._proofs.get(authorization, presenter) or _signed_certificate(
            authorization, presenter, *_opened(authorization)
        )

    def _accept(self, signed: SignedCertificate) -> Proof:
        """Parse the whole certificate and return what it proves. Raises as `_certificate` does."""
        certificate = self._certificate(signed.text)
        key = signed.key
        is_device = certificate.kind == "device"
        identity = certificate.iss_user_id if is_device else key.user_id
        return Proof(
            iss=certificate.iss,
            iss_user_id=certificate.iss_user_id,
            sub=certificate.sub,
            nonce=certificate.nonce,
            nbf=certificate.nbf,
            exp=certificate.exp,
            key=key,
            caller=replace(
                self._holder(certificate, identity),
                presenter=key.hex,
                ops=certificate.ops,
                scope=_core.Scope(list(certificate.paths), identity) if certificate.paths else None,
            ),
            excluded=certificate.aud is not None and key.hex not in certificate.aud,
            is_trusted=certificate.kind != "audience" and self._is_trusted(certificate, identity),
            known_as=signed.known_as,
        )

    def _certificate(self, text: bytes) -> Certificate:
        """Parse a certificate that its issuer signed, check its form and validity period, and have plugins
        accept it. Raises Unauthorized, or Forbidden if it names no paths."""
        try:
            certificate = certificates.read(text)
            certificates.check_window(certificate, self._now_ms() // 1000)
            if certificate.kind != "device" and not certificate.paths:
                raise Forbidden(reason="scope: a certificate for others needs paths")
            if sum(path.startswith("!") for path in certificate.paths or ()) > MAX_DENIES:
                raise Unauthorized(f"certificate: more than {MAX_DENIES} denies")
            certificates.check_sharing(certificate)
        except CapError as error:
            raise Unauthorized(f"certificate: {error.reason}") from None
        except ValueError:
            raise Unauthorized("certificate: malformed") from None
        code = None if self._refusal is None else self._refusal(certificate)
        if code is not None:
            log.info("cap-cert plugin reject: %s", code)
            raise Unauthorized(f"certificate: a plugin refuses it: {code}")
        return certificate

    def _is_trusted(self, certificate: Certificate, identity: str) -> bool:
        """True if the configuration names this caller, so that it is no stranger."""
        return identity in self._named_identities or certificate.iss in self._trusted_issuers

    def _holder(self, certificate: Certificate, identity: str) -> Caller:
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
        asked = [(kind, self._yields[kind].keys() & names) for kind in kinds if kind in self._yields]
        yielded = frozenset(f"{kind}:{name}" for kind, known in asked for name in known)
        claims = Claims(certificate.iss, frozenset(own), yielded)
        return Caller(identity, claims.roles(identity, *self._trust), claims=claims)

    async def count(self, limit: Limit, bucket: str) -> None:
        """Count one request in `bucket`. Raises RateLimited where it is one too many."""
        window = await self._coordinator.count(bucket, limit.window_ms)
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


def _opened(authorization: str) -> tuple[bytes, tuple[str, int, int]]:
    """Decode the certificate of a header and open it with `open_certificate`. Raises Unauthorized."""
    try:
        text = certificates.decode_header(authorization)
    except CapError as error:
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


def _check_window(presented: Proof | SignedCertificate, now_ms: int) -> None:
    """Refuse a certificate that does not hold now."""
    now_s = now_ms // 1000
    if now_s > presented.exp + SKEW_S:
        raise Unauthorized(f"expired: {now_s - presented.exp} s ago")
    if now_s < presented.nbf - SKEW_S:
        raise Unauthorized(f"not valid yet: for {presented.nbf - now_s} s")


def _check_signature(key: _core.PublicKey, credentials: Credentials, request: Inbound, body: bytes) -> None:
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


def _counters(rule: Rule, identity: str, address: str) -> list[tuple[Limit, str]]:
    """The limits that a request counts against, each with the name of its counter."""
    asked = rule.limit
    if asked is None:
        return []
    who = f"identity={identity}" if identity else f"ip={address}"
    buckets = {"identity": who, "ip": f"ip={address}", "identity+ip": f"{who},ip={address}"}
    prefix = f"{rule.namespace or ''}/{rule.collection.name}/{rule.action}"
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
