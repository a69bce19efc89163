"""Verification of certificates: from the header that presents one to the caller that it identifies, and their
cache."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pysync import _core
from pysync.auth import certificates
from pysync.auth.certificates import Certificate, CertificateError, CertificateSummary
from pysync.cache import CACHED_BYTES, BoundedCache
from pysync.config import Config
from pysync.config.roles import SHARED
from pysync.errors import Forbidden, Unauthorized
from pysync.model import Caller, Claims

log = logging.getLogger("pysync.auth.authentication")

MAX_DENIES = 64
"""Maximum number of deny entries of a certificate, since each is matched against every key of a batch."""


class SignedCertificate(NamedTuple):
    """A certificate whose issuer's signature is valid, parsed only as far as verifying a request's signature
    needs. `cache_key` is its key in the certificate cache."""

    text: bytes
    key: _core.PublicKey
    nbf: int
    exp: int
    cache_key: str


@dataclass(frozen=True, slots=True)
class VerifiedCertificate(CertificateSummary):
    """A verified certificate with its presenter's key, and the caller that it identifies. `not_in_audience`
    is True if it names an audience without the presenter. `is_trusted` is True if the configuration names the
    identity or, unless anyone may present the certificate, the issuer."""

    key: _core.PublicKey
    caller: Caller
    not_in_audience: bool
    is_trusted: bool
    cache_key: str


def make_certificate_cache() -> BoundedCache[str, VerifiedCertificate]:
    """Return an empty cache of the certificates of callers, by `VerifiedCertificate.cache_key`: about 16,000.
    Each takes four bytes or so for a character of its header, with what is parsed of it."""
    return BoundedCache(CACHED_BYTES, lambda certificate: len(certificate.cache_key))


class CertificateVerifier:
    """Verifies the certificates that one service receives. `now_ms` is the clock. `validate_certificate`
    returns the code with which plugins reject a valid certificate, None if they accept it."""

    def __init__(
        self,
        config: Config,
        now_ms: Callable[[], int],
        validate_certificate: Callable[[Certificate], str | None] | None,
    ) -> None:
        self._trust = config.trust_of()
        self._trusted_issuers = config.every_trusted_issuer
        self._named_identities = config.every_named_identity
        self._configured_roles = _roles_by_name(config.every_role)
        self._now_ms = now_ms
        self._validate_certificate = validate_certificate

    def verify(self, signed: SignedCertificate) -> VerifiedCertificate:
        """Parse the whole certificate and return it verified, with its caller. Raises as `parse`."""
        certificate = self.parse(signed.text)
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
                self.caller_of(certificate, identity),
                presenter=key.hex,
                ops=certificate.ops,
                scope=_core.Scope(list(certificate.paths), identity) if certificate.paths else None,
            ),
            not_in_audience=certificate.aud is not None and key.hex not in certificate.aud,
            is_trusted=certificate.kind != "audience"
            and (identity in self._named_identities or certificate.iss in self._trusted_issuers),
            cache_key=signed.cache_key,
        )

    def parse(self, text: bytes) -> Certificate:
        """Parse a certificate that its issuer signed, check its form and validity period, and run the plugins
        on it. Raises Unauthorized, or Forbidden if it names no paths."""
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

    def caller_of(self, certificate: Certificate, identity: str) -> Caller:
        """Return the caller `identity` with the roles that `certificate` gives it."""
        issuer, own = certificate.iss_user_id, {"public"}
        kinds = [f"cap:{op}" for op in certificate.ops]
        if certificate.kind != "device":
            kinds.append(f"delegated:{issuer}")
        else:
            own.add(f"admin:{issuer}")
        if certificate.is_root_device:
            own.add("device:root")
        yielded = self._named_roles(kinds, certificate)
        shared = self._named_roles([] if certificate.kind == "device" else [SHARED], certificate)
        claims = Claims(certificate.iss, issuer, frozenset(own), yielded, shared)
        return Caller(identity, claims.roles(identity, *self._trust), claims=claims)

    def _named_roles(self, kinds: Iterable[str], certificate: Certificate) -> frozenset[str]:
        """Return the configured roles of these kinds that name a collection of the certificate."""
        names, roles = frozenset(certificate.collections), self._configured_roles
        return frozenset(f"{kind}:{name}" for kind in kinds for name in roles.get(kind, {}).keys() & names)


def _roles_by_name(roles: Iterable[str]) -> Mapping[str, Mapping[str, None]]:
    """Return the names in roles `cap:<op>:<name>` and `delegated:<issuer>:<name>` by the part before them."""
    found: dict[str, dict[str, None]] = {}
    for role in roles:
        kind, _, rest = role.partition(":")
        scope, has_name, name = rest.partition(":")
        if has_name and kind in ("cap", "delegated"):
            found.setdefault(f"{kind}:{scope}", {})[name] = None
    return found


def open_certificate(authorization: str) -> tuple[bytes, tuple[str, int, int]]:
    """Decode the certificate of a header and verify its issuer's signature. Return its text, subject and
    validity period (s). Raises Unauthorized."""
    try:
        text = certificates.decode_authorization(authorization)
    except CertificateError as error:
        raise Unauthorized(f"certificate: {error.reason}") from None
    opened = _core.open_certificate(text)
    if opened is None:
        raise Unauthorized("certificate: malformed, or its issuer did not sign it")
    return text, opened


def signed_certificate(
    cache_key: str, presenter: str, text: bytes, opened: tuple[str, int, int]
) -> SignedCertificate:
    """Return a certificate that `open_certificate` has opened. Raises Unauthorized if its subject, or else
    the presenter, is not a public key."""
    subject, nbf, exp = opened
    try:
        key = _core.PublicKey(subject or presenter)
    except ValueError:
        raise Unauthorized("certificate: not a public key") from None
    return SignedCertificate(text, key, nbf, exp, cache_key)
