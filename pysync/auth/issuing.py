"""Issuing of certificates, revocation lists and public links (docs/reference/protocol.md#certificates).

All functions are pure; the clock (seconds) and a nonce of 16 random bytes are arguments. They raise
CertificateError for a certificate whose form a server would reject.
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
"""Seconds after its `exp` at which an entry of a revocation list is dropped, and the list after its last one.
A clock that is wrong for a moment does not drop a list that still applies."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Operations and path globs; `!` before a path denies (docs/reference/protocol.md#path-scopes)."""

    ops: tuple[str, ...]
    paths: tuple[str, ...]


FULL_ACCESS: Final = Grant(("read", "list", "write"), ("**",))


def reader_grant(collection: str) -> Grant:
    """Return a grant to read and list the collection, except its member list."""
    return Grant(("read", "list"), (f"{collection}/**", f"!{collection}/_members"))


def writer_grant(collection: str) -> Grant:
    """Return a grant to read, list and write the collection, except its keyring and member list."""
    return Grant(
        ("read", "list", "write"), (f"{collection}/**", f"!{collection}/_keyring", f"!{collection}/_members")
    )


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
    """Return a certificate that lets the holder of the key `sub` act as its issuer. The first device of a
    root is the root itself."""
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
    """Return a certificate for another person with key `sub`. `grant` defaults to `reader_grant`."""
    subject = {"sub": sub, "subKem": sub_kem, "subUserId": user_id(sub)}
    granted = grant or reader_grant(collection)
    return _issue(issuer, "member", subject, granted, (collection,), now_s, nonce, expires_at_s)


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
    """Return a certificate in one collection for the keys of `aud`, or for any presenter if `aud` is None.
    `grant` defaults to `reader_grant`."""
    if aud == ():
        raise CertificateError("audience-empty")
    subject = {} if aud is None else {"aud": aud}
    granted = grant or reader_grant(collection)
    return _issue(issuer, "audience", subject, granted, (collection,), now_s, nonce, expires_at_s)


def public_link(certificate: Certificate) -> str:
    """Return the URL fragment that shares an audience certificate. Raises ValueError for another kind."""
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
    """Return a signed list that revokes these certificates, and everything issued to `subjects`: pairs of a
    key and the second after which the entry may be dropped. It replaces lists of a lower `generation`.

    Entries of an `earlier` list are kept, except those that expired more than a day before `now_s`. An entry
    whose `exp` is 0 or less never expires.
    """
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
    own_subjects = [{"sub": sub, "exp": exp} for sub, exp in subjects]
    if revoked_subjects := _merge_entries(known.get("revokedSubjects", []), own_subjects, ("sub",), now_s):
        members["revokedSubjects"] = revoked_subjects
    return parse_revocation_list(_sign(issuer, REVOCATION_TAG, members))


def _merge_entries(
    earlier: list[dict[str, Any]], own: list[dict[str, Any]], names: tuple[str, ...], now_s: int
) -> list[dict[str, Any]]:
    """Return the entries of both, unique by the members `names`, without those that expired long ago."""
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
