"""Capability certificates and revocation lists: parsing and checks (docs/reference/protocol.md#certificates).

All functions are pure; the clock is an argument. `from_authorization` parses a certificate and checks its
form, `verify` checks its validity period and signature, and `check_delegation` applies the rules for
certificates that are issued to others.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from pysync import _core
from pysync._core import PublicKey, Revoked, Scope, canonicalize
from pysync.errors import BadRequest, BadSignature, InvalidRevocation

SCHEME: Final = "Cap "
MAX_HEADER_CHARS: Final = 8192
SKEW_S: Final = 300
OPS: Final = frozenset({"read", "write", "list"})
CERTIFICATE_TAG: Final = b"starfish-capcert-v1\n"
REVOCATION_TAG: Final = b"starfish-revlist-v1\n"

_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_AUDIENCE = 64

Kind = Literal["device", "member", "audience"]


class CertificateError(Exception):
    """An invalid certificate. `reason` is a code of docs/reference/protocol.md#certificate-checks, for logs
    and for the certificate's owner. Callers never receive it, since it could help them to forge one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CertificateSummary:
    """The members that identify a certificate and limit its validity. `sub` is `""` for an audience
    certificate. `nbf` and `exp` are seconds since the epoch."""

    iss: str
    iss_user_id: str
    sub: str
    nonce: str
    nbf: int
    exp: int


@dataclass(frozen=True, slots=True)
class Certificate(CertificateSummary):
    """A well-formed certificate. `paths` and `aud` are None if absent. `text` is its canonical JSON."""

    kind: Kind
    sub_user_id: str | None
    ops: frozenset[str]
    collections: tuple[str, ...]
    paths: tuple[str, ...] | None
    aud: tuple[str, ...] | None
    sig: str
    text: bytes

    @property
    def signed(self) -> bytes:
        """The bytes that `sig` signs."""
        return signing_input(CERTIFICATE_TAG, orjson.loads(self.text))

    @property
    def is_root_device(self) -> bool:
        """True for the certificate that a root key issues to itself."""
        return self.kind == "device" and self.iss == self.sub

    @property
    def authorization(self) -> str:
        """The `Authorization` header that presents this certificate."""
        return SCHEME + base64.b64encode(self.text).decode()


def user_id(key: str) -> str:
    """Return the user id of an Ed25519 public key (64 hex digits): the first half of its SHA-256, in hex."""
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()[:32]


is_user_id = re.compile("[0-9a-f]{32}").fullmatch
"""Matches a user id."""


def from_authorization(authorization: str) -> Certificate:
    """Return the certificate of an `Authorization` header. Its form is checked, its validity period and
    signature are not. Raises CertificateError."""
    return parse(decode_authorization(authorization))


def decode_authorization(authorization: str) -> bytes:
    """Return the text of the certificate in an `Authorization` header. Raises CertificateError."""
    if len(authorization) > MAX_HEADER_CHARS or not authorization.startswith(SCHEME):
        raise CertificateError("malformed")
    text = decode_base64(authorization[len(SCHEME) :])
    if text is None:
        raise CertificateError("malformed")
    return text


def parse(text: bytes) -> Certificate:
    """Return the certificate of a JSON text. Its form is checked, its validity period and signature are not.
    Raises CertificateError."""
    try:
        canonical = canonicalize(text)
    except BadRequest as error:
        raise CertificateError("malformed") from error
    members = orjson.loads(canonical)
    if not isinstance(members, dict):
        raise CertificateError("malformed-shape")
    return _parse_members(members, canonical)


def verify(certificate: Certificate, now_s: float) -> None:
    """Check the validity period at `now_s`, then the signature. Raises CertificateError."""
    check_validity_period(certificate, now_s)
    try:
        is_signed = PublicKey(certificate.iss).verify(certificate.signed, certificate.sig)
    except ValueError:  # a small-order key would accept any signature
        is_signed = False
    if not is_signed:
        raise CertificateError("bad-signature")


def check_validity_period(certificate: Certificate, now_s: float) -> None:
    """Raise CertificateError if `now_s` is outside the validity period by more than 300 seconds."""
    if certificate.exp <= certificate.nbf:
        raise CertificateError("inverted-window")
    if now_s < certificate.nbf - SKEW_S:
        raise CertificateError("not-yet-valid")
    if now_s > certificate.exp + SKEW_S:
        raise CertificateError("expired")


def check_delegation(certificate: Certificate) -> None:
    """Check that a member or audience certificate does not grant more than one collection, the issuer's
    private paths, the member list, or writing the keyring. A certificate without paths reaches everything and
    fails as `members-not-denied`; callers that report it with another status check `paths` first. Raises
    CertificateError."""
    kind, collections = certificate.kind, certificate.collections
    if kind == "device":
        return
    if kind == "member":
        if certificate.sub_user_id is None:
            raise CertificateError("member-missing-sub-userid")
        if certificate.sub_user_id == certificate.iss_user_id:
            raise CertificateError("member-self")
    if "*" in collections:
        raise CertificateError(f"{kind}-wildcard-collections")
    if len(collections) != 1:
        raise CertificateError(f"{kind}-multi-collection")
    if any(_is_private(path, certificate.iss_user_id) for path in certificate.paths or ()):
        raise CertificateError(f"{kind}-private-path")
    scope = Scope(list(certificate.paths or ()), certificate.iss_user_id)
    if scope.allows(f"{collections[0]}/_members"):
        raise CertificateError(f"{kind}-members-not-denied")
    if "write" in certificate.ops and scope.allows(f"{collections[0]}/_keyring"):
        raise CertificateError(f"{kind}-keyring-not-denied")


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The revocations of one issuer, whose signature was checked. The list with the larger `generation`
    replaces the other. `text` is its canonical JSON."""

    iss: str
    iss_user_id: str
    generation: int
    revoked: Revoked
    text: bytes

    def revokes(self, certificate: CertificateSummary) -> bool:
        """Return True if the issuer revoked the certificate, or everything issued to its subject. The `exp`
        of an entry only says when the issuer may drop the entry; until it does, the entry applies."""
        return certificate.iss == self.iss and self.revoked.contains(certificate.sub, certificate.nonce)


def parse_revocation_list(text: bytes) -> RevocationList:
    """Return the revocation list of a JSON text. Costs one Ed25519 verification. Raises InvalidRevocation if
    it is malformed, and BadSignature if its issuer did not sign it."""
    parsed = _core.RevocationList.parse(text)
    revoked = None if parsed is None else parsed.revoked()
    if parsed is None or revoked is None:
        raise InvalidRevocation
    if not parsed.is_signed():
        raise BadSignature
    return RevocationList(parsed.iss, parsed.iss_user_id, parsed.generation, revoked, parsed.text)


def signing_input(tag: bytes, members: Mapping[str, Any]) -> bytes:
    """Return the bytes that the signature of a certificate or revocation list covers: `tag`, then the
    canonical text of all members except `sig`."""
    return tag + canonicalize(orjson.dumps({name: members[name] for name in members if name != "sig"}))


def _parse_members(members: dict[str, Any], canonical: bytes) -> Certificate:
    kind = members.get("kind")
    scope = members.get("scope")
    if kind not in ("device", "member", "audience") or not isinstance(scope, dict):
        raise CertificateError("malformed-shape")
    nbf, exp = _integer(members.get("nbf")), _integer(members.get("exp"))
    nonce = members.get("nonce")
    if nbf is None or exp is None or not isinstance(nonce, str) or len(decode_base64(nonce) or b"") != 16:
        raise CertificateError("malformed-shape")
    ops, collections = _string_list(scope.get("ops")), _string_list(scope.get("collections"))
    paths = _string_list(scope["paths"]) if "paths" in scope else None
    if not OPS.issuperset(ops):
        raise CertificateError("malformed-shape")
    sub = _audience_subject(members) if kind == "audience" else _subject(members)
    aud = _audience(members) if "aud" in members else None
    iss, iss_user_id = _string(members, "iss"), _string(members, "issUserId")
    if not _is_key(iss) or (sub and not _is_key(sub)):
        raise CertificateError("malformed")
    if iss_user_id != user_id(iss):
        raise CertificateError("iss-userid-mismatch")
    sub_user_id = members.get("subUserId")
    if sub_user_id is not None and sub_user_id != user_id(sub):
        raise CertificateError("sub-userid-mismatch")
    sig = members.get("sig")
    return Certificate(
        kind=kind,
        iss=iss,
        iss_user_id=iss_user_id,
        sub=sub,
        sub_user_id=sub_user_id,
        ops=frozenset(ops),
        collections=collections,
        paths=paths,
        aud=aud,
        nbf=nbf,
        exp=exp,
        nonce=nonce,
        sig=sig if isinstance(sig, str) else "",
        text=canonical,
    )


def _subject(members: dict[str, Any]) -> str:
    _string(members, "subKem")
    if "subUserId" in members:
        _string(members, "subUserId")
    if "aud" in members:
        raise CertificateError("non-audience-has-aud")
    return _string(members, "sub")


def _audience_subject(members: dict[str, Any]) -> str:
    if not members.keys().isdisjoint(("sub", "subKem", "subUserId")):
        raise CertificateError("audience-has-sub")
    return ""


def _audience(members: dict[str, Any]) -> tuple[str, ...]:
    keys = members["aud"]
    if not isinstance(keys, list):
        raise CertificateError("audience-aud-bad-entry")
    if not keys:
        raise CertificateError("audience-empty-aud")
    if len(keys) > _MAX_AUDIENCE:
        raise CertificateError("audience-aud-too-large")
    if not all(map(_is_key, keys)):
        raise CertificateError("audience-aud-bad-entry")
    if len(set(keys)) != len(keys):
        raise CertificateError("audience-aud-dup")
    return tuple(keys)


def _string(members: dict[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise CertificateError("malformed-shape")
    return value


def _string_list(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise CertificateError("malformed-shape")
    return tuple(value)


def _integer(value: object) -> int | None:
    """Return a JSON integer as an int, None if it is not one. `1e21` is an integer too, although canonical
    text does not write its digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return None
    return int(value)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def _is_private(path: str, iss_user_id: str) -> bool:
    home = f"users/{iss_user_id}"
    return (path.replace("{identity}", iss_user_id) + "/").startswith(home + "/")


def decode_base64(text: str) -> bytes | None:
    """Return the bytes of padded standard base64 in its canonical spelling, None for any other text."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if base64.b64encode(decoded).decode() == text else None
