"""Certificates, revocation lists and public links, made (docs/reference/protocol.md#certificates).

Pure: the caller passes the clock (seconds) and a nonce of 16 random bytes. What a server would refuse for
its form is refused here already, with CertificateError.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pysync._core import canonicalize
from pysync.auth.certificates import (
    CERTIFICATE_TAG,
    REVOCATION_TAG,
    Certificate,
    CertificateError,
    RevocationList,
    check_delegation,
    parse,
    parse_revocation_list,
    signing_input,
    user_id,
)
from pysync.auth.signing import Signer

DEFAULT_LIFETIME_S: Final = 30 * 24 * 3600
DROPPED_AFTER_S: Final = 24 * 3600
"""Seconds after its `exp` at which an entry of a revocation list is dropped."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Operations, and path globs with `!` for a deny (docs/reference/protocol.md#path-scopes)."""

    ops: tuple[str, ...]
    paths: tuple[str, ...]


FULL_ACCESS: Final = Grant(("read", "list", "write"), ("**",))


def reader_grant(collection: str) -> Grant:
    """Read and list the collection, but for its member list."""
    return Grant(("read", "list"), (f"{collection}/**", f"!{collection}/_members"))


def writer_grant(collection: str) -> Grant:
    """Read, list and write the collection, but for its keyring and member list."""
    return Grant(
        ("read", "list", "write"), (f"{collection}/**", f"!{collection}/_keyring", f"!{collection}/_members")
    )


def admin_grant(collection: str) -> Grant:
    """Everything in the collection. Only a device certificate may carry it."""
    return Grant(("read", "list", "write"), (f"{collection}/**",))


def issue_device_certificate(
    issuer: Signer,
    sub: str,
    sub_kem: str,
    *,
    now_s: int,
    nonce: bytes,
    expires_at_s: int | None = None,
    grant: Grant = FULL_ACCESS,
    collections: tuple[str, ...] = ("*",),
) -> Certificate:
    """A certificate for the holder of key `sub` to act as its issuer. A root's first device is itself."""
    subject = {"sub": sub, "subKem": sub_kem}
    return _issue(issuer, "device", subject, grant, collections, now_s, nonce, expires_at_s)


def issue_member_certificate(
    issuer: Signer,
    sub: str,
    sub_kem: str,
    collection: str,
    *,
    now_s: int,
    nonce: bytes,
    expires_at_s: int | None = None,
    grant: Grant | None = None,
) -> Certificate:
    """A certificate for another person, with key `sub`, in one collection; `grant` is `reader_grant` by
    default."""
    subject = {"sub": sub, "subKem": sub_kem, "subUserId": user_id(sub)}
    return _issue(
        issuer,
        "member",
        subject,
        grant or reader_grant(collection),
        (collection,),
        now_s,
        nonce,
        expires_at_s,
    )


def issue_audience_certificate(
    issuer: Signer,
    collection: str,
    *,
    now_s: int,
    nonce: bytes,
    expires_at_s: int | None = None,
    grant: Grant | None = None,
    aud: tuple[str, ...] | None = None,
) -> Certificate:
    """A certificate for whoever presents it, or for the keys of `aud`, in one collection; `grant` is
    `reader_grant` by default."""
    if aud == ():
        raise CertificateError("audience-empty")
    subject = {} if aud is None else {"aud": aud}
    return _issue(
        issuer,
        "audience",
        subject,
        grant or reader_grant(collection),
        (collection,),
        now_s,
        nonce,
        expires_at_s,
    )


def public_link(certificate: Certificate) -> str:
    """The URL fragment that hands an audience certificate on. Raises ValueError for another kind."""
    if certificate.kind != "audience":
        raise ValueError("only an audience certificate can be handed on in a link")
    text = b'{"cap":' + certificate.text + b',"v":1}'
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def issue_revocation_list(
    issuer: Signer,
    generation: int,
    *,
    certificates: Iterable[Certificate] = (),
    subjects: Iterable[tuple[str, int]] = (),
    earlier: RevocationList | None = None,
    now_s: int = 0,
) -> RevocationList:
    """Sign the list that revokes these certificates, and everything that `subjects` hold: pairs of key and
    the second after which the entry may be dropped. It replaces lists of a lower `generation`.

    What is in an `earlier` list stays, but for entries that expired more than a day before `now_s`. An `exp`
    of 0 or less tells nothing: that entry stays as well."""
    known = {} if earlier is None else orjson.loads(earlier.text)
    own = [{"sub": cert.sub, "nonce": cert.nonce, "exp": cert.exp} for cert in certificates]
    members: dict[str, Any] = {
        **{name: value for name, value in known.items() if name != "sig"},
        "v": 1,
        "iss": issuer.ed_pub,
        "issUserId": user_id(issuer.ed_pub),
        "generation": generation,
        "revoked": _merge_entries(known.get("revoked", []), own, ("sub", "nonce"), now_s),
    }
    held = [{"sub": sub, "exp": exp} for sub, exp in subjects]
    if dropped := _merge_entries(known.get("revokedSubjects", []), held, ("sub",), now_s):
        members["revokedSubjects"] = dropped
    return parse_revocation_list(_sign(issuer, REVOCATION_TAG, members))


def _merge_entries(
    earlier: list[dict[str, Any]], own: list[dict[str, Any]], names: tuple[str, ...], now_s: int
) -> list[dict[str, Any]]:
    """The entries of both, each once by the members `names`, without those that expired long ago."""
    entries = {
        tuple(entry[name] for name in names): entry
        for entry in earlier
        if entry["exp"] <= 0 or entry["exp"] + DROPPED_AFTER_S > now_s
    }
    for entry in own:
        known = entries.setdefault(tuple(entry[name] for name in names), entry)
        if 0 < known["exp"] < entry["exp"]:
            known["exp"] = entry["exp"]
    return list(entries.values())


def _issue(
    issuer: Signer,
    kind: str,
    subject: dict[str, Any],
    grant: Grant,
    collections: tuple[str, ...],
    now_s: int,
    nonce: bytes,
    expires_at_s: int | None,
) -> Certificate:
    exp = now_s + DEFAULT_LIFETIME_S if expires_at_s is None else expires_at_s
    if exp <= now_s:
        raise CertificateError("expiresAt-not-after-nbf")
    members = {
        "v": 1,
        "kind": kind,
        "iss": issuer.ed_pub,
        "issUserId": user_id(issuer.ed_pub),
        **subject,
        "scope": {"ops": grant.ops, "paths": grant.paths, "collections": collections},
        "nbf": now_s,
        "exp": exp,
        "nonce": base64.b64encode(nonce).decode(),
    }
    certificate = parse(_sign(issuer, CERTIFICATE_TAG, members))
    check_delegation(certificate)
    return certificate


def _sign(issuer: Signer, tag: bytes, members: dict[str, Any]) -> bytes:
    sig = issuer.sign(signing_input(tag, members))
    return canonicalize(orjson.dumps({**members, "sig": sig}))
