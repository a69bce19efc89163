"""Who sends a request: callers from certificates and signatures, rates and nonces (wire section 3).

A request passes in two steps, so that nothing dear happens before something cheap could refuse it:
`present` reads the credentials of the headers (form, time and the certificate's own signature, which is
remembered), then, once the body is there, `admit` checks the request's signature, counts it, takes its
nonce. What the caller may do is `pysync.rule`'s to say.
"""

import asyncio
import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pysync import _core, caps, wire
from pysync.caps import SKEW_S, CapError, Certificate
from pysync.config import Config, Limit, trust_of
from pysync.coordinator import Coordinator
from pysync.errors import Forbidden, RateLimited, Unauthorized
from pysync.model import ANONYMOUS, ANONYMOUS_ROLES, Caller, Claims
from pysync.revocation import Revocations
from pysync.rule import Rule

log = logging.getLogger(__name__)

SKEW_MS = SKEW_S * 1000
MAX_REMEMBERED_CHARS = 16 * 1024 * 1024
"""Of Authorization headers: some 20,000 callers, whose proofs take a few times that in memory."""
VERIFY_IN_THREAD_ABOVE = 256 * 1024
"""Bytes of a body that are hashed in about 1 ms, without the interpreter's lock."""
MAX_DENIES = 64
"""Of a certificate's paths: each is held against every key of a batch before its signature is checked."""

_is_timestamp = re.compile(r"-?[0-9]{1,16}").fullmatch
_is_nonce = re.compile(r"[A-Za-z0-9+/]{21}[AQgw]==").fullmatch


class Inbound(NamedTuple):
    """A request as access sees it. `targets` are the forms of path and query that its signature may cover,
    likeliest first; `host` is the Host header as it is signed; `address` is the client's, and only needed
    where the rule has a limit."""

    method: str
    targets: list[str]
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Proof:
    """A verified certificate with its presenter's key, and who that makes the caller. `excluded`: it names
    its audience, and the presenter is not in it."""

    certificate: Certificate
    key: _core.PublicKey
    caller: Caller
    excluded: bool
    known_as: tuple[str, str]


class Credentials(NamedTuple):
    """What the headers of a request present. Without a proof nothing was signed, and the caller is final."""

    caller: Caller
    proof: Proof | None = None
    signature: str = ""
    timestamp_ms: int = 0
    nonce: str = ""


NOBODY = Credentials(ANONYMOUS)
ADMIN = Credentials(Caller(roles=ANONYMOUS_ROLES | {"admin"}))


class Access:
    """Authentication and rate limits of one service. `now_ms` is its clock. `refusal` tells the code by which
    a certificate is refused that holds otherwise, None where it is not."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        revocations: Revocations,
        now_ms: Callable[[], int],
        refusal: Callable[[Certificate], str | None] | None = None,
    ) -> None:
        auth = config.auth
        self._trust = trust_of(config)
        self._asked = _roles_asked(config)
        self._admin = None if auth.admin_token is None else auth.admin_token.encode()
        self._coordinator = coordinator
        self._revocations = revocations
        self._now_ms = now_ms
        self._refusal = refusal
        self._known: OrderedDict[tuple[str, str], Proof] = OrderedDict()
        self._known_chars = 0

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
            raise Unauthorized
        return credentials

    def credentials(self, headers: Mapping[str, str]) -> Credentials:
        """`present`, whatever they are for: `NOBODY` where there are none. Raises as it does for bad ones."""
        authorization = headers.get(wire.HEADER_AUTHORIZATION)
        if authorization is not None and authorization.startswith("Bearer "):
            return self._present_admin(authorization.removeprefix("Bearer "))
        if authorization is None or not authorization.startswith(caps.SCHEME):
            return NOBODY
        timestamp = headers.get(wire.HEADER_TIMESTAMP, "")
        nonce = headers.get(wire.HEADER_NONCE, "")
        if not (_is_timestamp(timestamp) and _is_nonce(nonce)):
            raise Unauthorized
        proof = self._prove(authorization, headers.get(wire.HEADER_PUB, ""))
        signature = headers.get(wire.HEADER_SIGNATURE, "")
        credentials = Credentials(proof.caller, proof, signature, int(timestamp), nonce)
        self._check_time(credentials)
        return credentials

    async def admit(
        self, rule: Rule, credentials: Credentials, request: Inbound, body: bytes, *others: Rule
    ) -> Caller:
        """The caller, once the request's signature holds, its rate is within limits and its nonce is new.
        `body` is what the signature covers. The request counts against the limits of `others` too.

        Raises:
            Unauthorized: a wrong signature, a nonce seen before, a revoked certificate.
            Forbidden: the certificate is meant for others.
            RateLimited, CoordinatorUnavailable, StoreUnavailable.
        """
        proof = credentials.proof
        if proof is not None:
            if len(body) > VERIFY_IN_THREAD_ABOVE:
                await asyncio.to_thread(self._check_signature, proof, credentials, request, body)
            else:
                self._check_signature(proof, credentials, request, body)
            self._remember(proof)
        for counted in (rule, *others):
            if counted.limit is not None:
                for limit, bucket in _counters(counted, credentials.caller.identity, request.address):
                    await self.count(limit, bucket)
        if proof is not None:
            if body:
                # It may have taken its time; from now on the nonce tells a replay.
                self._check_time(credentials)
            if not await self._coordinator.remember_nonce(
                proof.caller.presenter, credentials.nonce, credentials.timestamp_ms
            ):
                raise Unauthorized
            if await self._revocations.revoked(proof.certificate):
                raise Unauthorized
        return credentials.caller

    async def holds(self, proof: Proof) -> bool:
        """Whether the certificate of somebody who was admitted holds still: it has neither expired nor been
        taken back. Raises StoreUnavailable where nobody can tell."""
        certificate = proof.certificate
        if self._now_ms() // 1000 > certificate.exp + SKEW_S:
            return False
        return not await self._revocations.revoked(certificate)

    async def introduced(self, headers: Mapping[str, str]) -> Caller:
        """Whom `headers` claim to come from, by a certificate or token alone. Nothing is signed, so this is
        good for what to show and never for what to do. An audience certificate needs no presenter here.

        Raises:
            Unauthorized, Forbidden: bad credentials.
            StoreUnavailable: nobody can tell whether they are revoked.
        """
        authorization = headers.get(wire.HEADER_AUTHORIZATION)
        if authorization is None:
            return ANONYMOUS
        if authorization.startswith("Bearer "):
            return self._present_admin(authorization.removeprefix("Bearer ")).caller
        now_s, presenter = self._now_ms() // 1000, headers.get(wire.HEADER_PUB, "")
        certificate = self._certificate(authorization, now_s)
        if certificate.kind == "audience" and not presenter:
            caller = self._holder(certificate, "")
        else:
            proof = self._prove(authorization, presenter)
            if proof.excluded:
                raise Forbidden
            caller = proof.caller
        if await self._revocations.revoked(certificate):
            raise Unauthorized
        return caller

    def _present_admin(self, token: str) -> Credentials:
        if self._admin is None or not hmac.compare_digest(
            token.encode(errors="surrogateescape"), self._admin
        ):
            raise Unauthorized
        return ADMIN

    def _check_time(self, credentials: Credentials) -> None:
        """Refuse a signature, or a certificate, that does not hold now."""
        proof = credentials.proof
        assert proof is not None
        now_ms = self._now_ms()
        certificate = proof.certificate
        if abs(credentials.timestamp_ms - now_ms) > SKEW_MS:
            raise Unauthorized
        if not certificate.nbf - SKEW_S <= now_ms // 1000 <= certificate.exp + SKEW_S:
            raise Unauthorized

    def _prove(self, authorization: str, presenter: str) -> Proof:
        """The proof in a certificate, remembered by its header text. Met for the first time it costs one
        Ed25519 verification. Whether it holds now is `_check_time`'s to tell."""
        known = self._known.get((authorization, presenter)) or self._known.get((authorization, ""))
        if known is not None:
            return known
        certificate = self._certificate(authorization, self._now_ms() // 1000)
        is_audience = certificate.kind == "audience"
        try:
            key = _core.PublicKey(presenter if is_audience else certificate.sub)
        except ValueError:
            raise Unauthorized from None
        return Proof(
            certificate,
            key,
            self._caller(certificate, key),
            excluded=certificate.aud is not None and key.hex not in certificate.aud,
            known_as=(authorization, presenter if is_audience else ""),
        )

    def _certificate(self, authorization: str, now_s: int) -> Certificate:
        """The certificate of a header, verified, as plugins accept it too. Raises as `_certificate` does."""
        certificate = _certificate(authorization, now_s)
        code = None if self._refusal is None else self._refusal(certificate)
        if code is not None:
            log.info("cap-cert plugin reject: %s", code)
            raise Unauthorized
        return certificate

    def _remember(self, proof: Proof) -> None:
        """Spare the caller's next request the check of the certificate's own signature. Only who has signed a
        request gets here: nobody fills the memory with certificates that they cannot use."""
        if proof.known_as not in self._known:
            self._known[proof.known_as] = proof
            self._known_chars += len(proof.known_as[0])
            while self._known_chars > MAX_REMEMBERED_CHARS:
                (oldest, _), _ = self._known.popitem(last=False)
                self._known_chars -= len(oldest)

    def _caller(self, certificate: Certificate, key: _core.PublicKey) -> Caller:
        """Who presents `certificate` with `key` (clients-and-crypto section 1.5)."""
        identity = certificate.iss_user_id if certificate.kind == "device" else key.user_id
        return replace(
            self._holder(certificate, identity),
            presenter=key.hex,
            ops=certificate.ops,
            scope=_core.Scope(list(certificate.paths), identity) if certificate.paths else None,
        )

    def _holder(self, certificate: Certificate, identity: str) -> Caller:
        """`identity` with the roles that `certificate` gives it."""
        issuer, own = certificate.iss_user_id, {"public"}
        yielded = {f"cap:{op}:{name}" for op in certificate.ops for name in certificate.collections}
        if certificate.kind != "device":
            yielded |= {f"delegated:{issuer}:{name}" for name in certificate.collections}
        else:
            own.add(f"admin:{issuer}")
        if certificate.is_root_device:
            own.add("device:root")
        claims = Claims(certificate.iss, frozenset(own), frozenset(yielded & self._asked))
        return Caller(identity, claims.roles(identity, *self._trust), claims=claims)

    def _check_signature(self, proof: Proof, credentials: Credentials, request: Inbound, body: bytes) -> None:
        if not _core.verify_request(
            proof.key,
            credentials.signature,
            request.method,
            request.targets,
            body,
            request.host,
            credentials.timestamp_ms,
            credentials.nonce,
        ):
            raise Unauthorized
        if proof.excluded:
            raise Forbidden

    async def count(self, limit: Limit, bucket: str) -> None:
        """Count one request in `bucket`. Raises RateLimited where it is one too many."""
        window = await self._coordinator.count(bucket, limit.window_ms)
        if window.count > limit.max_requests:
            raise _rate_limited(limit, window.resets_in_ms)


def _roles_asked(config: Config) -> frozenset[str]:
    """Every role that the configuration names: of a certificate's roles only these can matter."""
    asked: set[str] = set()
    for _, _, collections in config.each_namespace():
        for collection in collections:
            asked.update(collection.read_roles, collection.write_roles)
            for permission in collection.field_permissions.values():
                asked.update(permission.read_roles or (), permission.write_roles or ())
    return frozenset(asked)


def _certificate(authorization: str, now_s: int) -> Certificate:
    """The certificate of a header, verified. Raises Unauthorized, or Forbidden where it names no paths."""
    try:
        certificate = caps.decode(authorization)
        caps.verify(certificate, now_s)
        if certificate.kind != "device" and not certificate.paths:
            raise Forbidden
        if sum(path.startswith("!") for path in certificate.paths or ()) > MAX_DENIES:
            raise Unauthorized
        caps.check_sharing(certificate)
    except (CapError, ValueError):
        raise Unauthorized from None
    return certificate


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
