"""`pysync cap`: certificates, minted and looked at."""

import argparse
import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypedDict

import orjson

from pysync.auth import certificates, issuing
from pysync.auth.certificates import Certificate
from pysync.auth.issuing import Grant
from pysync.cli.files import print_json, read_certificate, read_keys, read_public_keys

REFUSALS: Final = {
    "expiresAt-not-after-nbf": "--days must be 1 or more",
    "member-self": "--to holds the issuer's own key: `pysync cap device` is for devices of your own",
    "audience-aud-bad-entry": "--aud must be a public key: 64 hex digits, in lower case",
    "audience-aud-dup": "--aud names one key twice",
    "audience-aud-too-large": "--aud may name 64 keys at most",
} | {
    f"{kind}-{fault}": told
    for kind in ("member", "audience")
    for fault, told in (
        ("wildcard-collections", "name one collection: * is for devices of your own alone"),
        ("private-path", "--path must not lead into users/ and your own user id: that is yours alone"),
        ("members-not-denied", "--path must not reach the member list: add --path '!COLLECTION/_members'"),
        ("keyring-not-denied", "--path must not reach the keyring: add --path '!COLLECTION/_keyring'"),
    )
}
"""Why a certificate is not made: the code of `CapError` -> what to change on the command line."""


def device(options: argparse.Namespace) -> int:
    issuer = read_keys(options.key)
    certificate = issuing.device(
        issuer,
        *(read_public_keys(options.to) if options.to else (issuer.ed_pub, issuer.kem_pub)),
        **_lifetime(options),
        grant=_grant(options, issuing.EVERYTHING),
        collections=tuple(options.collection or ("*",)),
    )
    return _hand_out(certificate, options)


def member(options: argparse.Namespace) -> int:
    certificate = issuing.member(
        read_keys(options.key),
        *read_public_keys(options.to),
        options.collection,
        **_lifetime(options),
        grant=_grant(options, _preset(options)),
    )
    return _hand_out(certificate, options)


def audience(options: argparse.Namespace) -> int:
    certificate = issuing.audience(
        read_keys(options.key),
        options.collection,
        **_lifetime(options),
        grant=_grant(options, _preset(options)),
        aud=tuple(options.aud) if options.aud else None,
    )
    if options.link:
        print(issuing.public_link(certificate))
        return 0
    return _hand_out(certificate, options)


def show(options: argparse.Namespace) -> int:
    certificate = read_certificate(options.file)
    verdict = _verdict(certificate)
    if (
        verdict == "ok"
        and options.server is not None
        and asyncio.run(_is_revoked(options.server, certificate))
    ):
        verdict = "revoked"
    print_json(
        {
            "verdict": verdict,
            "from": _date(certificate.nbf),
            "until": _date(certificate.exp),
            "subject": certificates.user_id(certificate.sub) if certificate.sub else None,
            "rootDevice": certificate.is_root_device,
            "certificate": orjson.loads(certificate.text),
        }
    )
    return 0 if verdict == "ok" else 1


def _verdict(certificate: Certificate) -> str:
    """`ok`, or the reason for which a server refuses the certificate now."""
    try:
        certificates.verify(certificate, time.time())
        certificates.check_sharing(certificate)
    except certificates.CapError as error:
        return error.reason
    return "ok"


async def _is_revoked(server: str, certificate: Certificate) -> bool:
    """Return True if the issuer's list on that server revokes the certificate."""
    from pysync.client import Client  # heavy, and not needed without a server

    async with Client(server) as client:
        listed = await client.revocations(certificate.iss_user_id)
    return listed is not None and listed.revokes(certificate)


class _Lifetime(TypedDict):
    now_s: int
    nonce: bytes
    expires_at_s: int


def _lifetime(options: argparse.Namespace) -> _Lifetime:
    now_s = int(time.time())
    return {"now_s": now_s, "nonce": os.urandom(16), "expires_at_s": now_s + options.days * 86_400}


def _preset(options: argparse.Namespace) -> Grant:
    return issuing.writer(options.collection) if options.write else issuing.reader(options.collection)


def _grant(options: argparse.Namespace, default: Grant) -> Grant:
    return Grant(tuple(options.op or default.ops), tuple(options.path or default.paths))


def _hand_out(certificate: Certificate, options: argparse.Namespace) -> int:
    if options.out is None:
        print(certificate.text.decode())
    else:
        Path(options.out).write_bytes(certificate.text + b"\n")
    return 0


def _date(seconds: int) -> str | None:
    """ISO 8601, None beyond the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None
