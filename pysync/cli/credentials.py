"""Keys, certificates and revocation lists, and the client that the options of a command name."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import orjson

from pysync.auth import certificates, issuing
from pysync.auth.certificates import Certificate, RevocationList
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.issuing import Grant
from pysync.cli.io import print_json, read_certificate, read_keys, read_public_keys, warn_retry, warn_silence
from pysync.cli.parser import Parser, add_issuer, add_server, server_url
from pysync.concurrency import ATTEMPTS
from pysync.errors import StaleGeneration

if TYPE_CHECKING:
    from pysync.client import Client


def add_keys(parser: Parser) -> None:
    """Add the commands of `keys`."""
    new = parser.add_command(
        "new",
        "create keys, at random or from a passphrase",
        new_key,
        example="pysync keys new --out me.json",
    )
    new.add_flag("--passphrase-stdin", "read a passphrase from standard input")
    new.add_value("--out", "FILE", "write the keys to this file, readable by you alone (default: print)")
    show = parser.add_command(
        "show",
        "print the public keys, which you may give to others",
        show_key,
        example="pysync keys show me.json > me.pub",
    )
    show.add_value("file", "FILE", "a key file")
    show.add_flag("--user-id", "print the user id alone, for scripts")


def add_cap(parser: Parser) -> None:
    """Add the commands of `cap`."""
    device_command = parser.add_command(
        "device",
        "issue a certificate for another device of yours; without --to: for the key itself",
        device,
        example="pysync cap device --key me.json --to laptop.pub --out laptop.cap",
    )
    device_command.add_value("--to", "FILE", "the device's keys, as `keys show` prints them")
    device_command.add_value("--collection", "NAME", "grant cap:OP:NAME roles (default: *)", action="append")

    member_command = parser.add_command(
        "member",
        "issue a certificate for another person, for one collection",
        member,
        example="pysync cap member notes --key me.json --to bob.pub --write --out bob.cap",
    )
    member_command.add_value("collection", "COLLECTION", "name of the collection")
    member_command.add_value("--to", "FILE", "their keys, as `keys show` prints them", required=True)

    audience_command = parser.add_command(
        "audience",
        "issue a certificate for anyone who presents it, for one collection",
        audience,
        example="pysync cap audience notes --key me.json --link",
    )
    audience_command.add_value("collection", "COLLECTION", "name of the collection")
    audience_command.add_value("--aud", "KEY", "only for this key (64 hex digits)", action="append")
    audience_command.add_flag("--link", "print the fragment of a public link")

    for command in (member_command, audience_command):
        command.add_flag("--write", "also allow writes (default: read, list)")
    for command in (device_command, member_command, audience_command):
        add_issuer(command)
        command.add_argument("--days", type=int, default=30, help="days until it expires (default: 30)")
        command.add_argument(
            "--op", action="append", choices=("read", "list", "write"), help="allowed operation; repeatable"
        )
        command.add_value("--path", "GLOB", "allowed paths; !GLOB denies; repeatable", action="append")
        command.add_value("--out", "FILE", "write the certificate here (default: print)")

    show = parser.add_command(
        "show",
        "print a certificate and whether it is valid",
        show_certificate,
        example="pysync cap show bob.cap --server https://sync.example.com",
    )
    show.add_value("file", "FILE", "JSON or an Authorization header; - is standard input")
    show.add_value("--server", "URL", "ask this server whether the certificate is revoked", type=server_url)

    revoke_command = parser.add_command(
        "revoke",
        "revoke certificates and keys: print the signed revocation list; --publish sends it",
        revoke,
        description="Signs a revocation list and prints it. With --publish the list keeps the entries of "
        "the one that the server has, and replaces it.",
        example="pysync cap revoke bob.cap --key me.json --publish",
    )
    revoke_command.add_value("file", "FILE", "certificates to revoke", nargs="*")
    revoke_command.add_value(
        "--subject",
        "FILE",
        "revoke all certificates that the issuer gave to the key in FILE (as of `keys show`)",
        action="append",
        default=[],
    )
    add_issuer(revoke_command)
    revoke_command.add_value(
        "--generation",
        "N",
        "number of the list, larger than that of the one it replaces (with --publish: the next)",
        type=int,
    )
    revoke_command.add_flag(
        "--replace", "with --publish: drop the entries of the published list, so that they are valid again"
    )
    revoke_command.add_flag("--publish", "also send the list to the server")
    add_server(revoke_command)


def new_key(options: argparse.Namespace) -> None:
    """Run `pysync keys new`. Private keys are printed only without `--out`."""
    if options.passphrase_stdin:
        keys = IdentityKeys.from_passphrase(sys.stdin.read().removesuffix("\n"))
    else:
        keys = IdentityKeys.generate()
    if options.out is None:
        print(keys.to_json().decode(), end="")
    else:
        keys.save(Path(options.out))
        print_json(_public_keys(keys))


def show_key(options: argparse.Namespace) -> None:
    """Run `pysync keys show`."""
    keys = read_keys(options.file)
    if options.user_id:
        print(keys.user_id)
    else:
        print_json(_public_keys(keys))


def _public_keys(keys: IdentityKeys) -> dict[str, str]:
    return {"edPub": keys.ed_pub, "kemPub": keys.kem_pub, "userId": keys.user_id}


REASONS: Final = {
    "expiresAt-not-after-nbf": "--days must be 1 or more",
    "member-self": "--to holds the issuer's own key: `pysync cap device` is for devices of your own",
    "audience-aud-bad-entry": "--aud must be a public key: 64 hex digits, in lower case",
    "audience-aud-dup": "--aud names one key twice",
    "audience-aud-too-large": "--aud may name 64 keys at most",
} | {
    f"{kind}-{fault}": reason
    for kind in ("member", "audience")
    for fault, reason in (
        ("wildcard-collections", "name one collection: * is for devices of your own alone"),
        ("private-path", "--path must not lead into users/ and your own user id: that is yours alone"),
        ("members-not-denied", "--path must not reach the member list: add --path '!COLLECTION/_members'"),
        ("keyring-not-denied", "--path must not reach the keyring: add --path '!COLLECTION/_keyring'"),
    )
}
"""Why a certificate is not made: the code of `CertificateError` -> what to change on the command line."""


def device(options: argparse.Namespace) -> None:
    """Run `pysync cap device`."""
    issuer = read_keys(options.key)
    certificate = issuing.issue_device_certificate(
        issuer,
        *(read_public_keys(options.to) if options.to else (issuer.ed_pub, issuer.kem_pub)),
        **_lifetime(options),
        grant=_grant(options, issuing.FULL_ACCESS),
        collections=tuple(options.collection or ("*",)),
    )
    _print_certificate(certificate, options)


def member(options: argparse.Namespace) -> None:
    """Run `pysync cap member`."""
    certificate = issuing.issue_member_certificate(
        read_keys(options.key),
        *read_public_keys(options.to),
        options.collection,
        **_lifetime(options),
        grant=_preset(options),
    )
    _print_certificate(certificate, options)


def audience(options: argparse.Namespace) -> None:
    """Run `pysync cap audience`."""
    certificate = issuing.issue_audience_certificate(
        read_keys(options.key),
        options.collection,
        **_lifetime(options),
        grant=_preset(options),
        aud=tuple(options.aud) if options.aud else None,
    )
    if options.link:
        print(issuing.public_link(certificate))
    else:
        _print_certificate(certificate, options)


def show_certificate(options: argparse.Namespace) -> int:
    """Run `pysync cap show`. The exit status is 1 if a server would refuse the certificate."""
    certificate = read_certificate(options.file)
    verdict = _verdict(certificate)
    if verdict == "ok" and options.server is not None:
        verdict = "revoked" if asyncio.run(_is_revoked(options.server, certificate)) else verdict
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
        certificates.check_delegation(certificate)
    except certificates.CertificateError as error:
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
    preset = issuing.writer_grant if options.write else issuing.reader_grant
    return _grant(options, preset(options.collection))


def _grant(options: argparse.Namespace, default: Grant) -> Grant:
    return Grant(tuple(options.op or default.ops), tuple(options.path or default.paths))


def _print_certificate(certificate: Certificate, options: argparse.Namespace) -> None:
    if options.out is None:
        print(certificate.text.decode())
    else:
        Path(options.out).write_bytes(certificate.text + b"\n")


def _date(seconds: int) -> str | None:
    """ISO 8601, None beyond the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None


SUBJECT_LIFETIME_S: Final = 10 * 365 * 86_400
"""Seconds for which a key stays in the list. Nobody knows how long its certificates are valid."""

Make = Callable[[int, RevocationList | None], RevocationList]
"""The list of a generation, which keeps what is in an earlier one."""


def revoke(options: argparse.Namespace) -> None:
    """Run `pysync cap revoke`."""
    if options.generation is not None and options.generation < 0:
        raise ValueError("--generation must be 0 or more")
    if options.replace and not options.publish:
        raise ValueError("--replace needs --publish")
    issuer = read_keys(options.key)
    certificates = [_issued_by(issuer, name) for name in options.file]
    now_s = int(time.time())
    subjects = [(read_public_keys(name)[0], now_s + SUBJECT_LIFETIME_S) for name in options.subject]
    if not certificates and not subjects and not options.replace:
        raise ValueError("nothing to revoke: pass certificates, or a key with --subject")

    def make(generation: int, earlier: RevocationList | None) -> RevocationList:
        return issuing.issue_revocation_list(
            issuer, generation, certificates=certificates, subjects=subjects, earlier=earlier, now_s=now_s
        )

    if options.publish:
        revocations = asyncio.run(_publish(options, issuer, make))
    elif options.generation is None:
        raise ValueError("pass --generation, or --publish to take the next one from the server")
    else:
        revocations = make(options.generation, None)
    print(revocations.text.decode())


def _issued_by(issuer: IdentityKeys, name: str) -> Certificate:
    certificate = read_certificate(name)
    if certificate.iss != issuer.ed_pub:
        raise ValueError(f"{name}: issued by another key: only its issuer can take it back")
    return certificate


async def _publish(options: argparse.Namespace, issuer: IdentityKeys, make: Make) -> RevocationList:
    """Publish a list of the named generation, or of the next one, and return it. It keeps the entries of the
    published one, unless `--replace` is set. Raises StaleGeneration if the named one is not larger."""
    from pysync.client import Client  # heavy, and not needed to print a list

    attempts = ATTEMPTS if options.generation is None else 1
    async with Client(options.server, timeout_s=options.timeout, on_retry=warn_retry) as client:
        while True:
            earlier = await client.revocations(issuer.user_id)
            if earlier is not None and earlier.iss != issuer.ed_pub:
                raise ValueError("the server answers with the revocation list of another issuer")
            generation = options.generation
            if generation is None:
                generation = 1 if earlier is None else earlier.generation + 1
            revocations = make(generation, None if options.replace else earlier)
            try:
                await client.revoke(revocations)
                return revocations
            except StaleGeneration:  # somebody else has published meanwhile
                attempts -= 1
                if attempts == 0:
                    raise


def make_client(options: argparse.Namespace) -> "Client":
    """Return a client that signs with the key, or sends the admin token, or is anonymous without either. On a
    terminal it reports each request that is repeated, or waits for its answer."""
    from pysync.client import Client  # heavy, and not needed to create keys and certificates

    keys, certificate, token = load_credentials(options)
    return Client(
        options.server,
        timeout_s=options.timeout,
        keys=keys,
        certificate=certificate,
        admin_token=token,
        namespace=options.namespace,
        on_retry=warn_retry,
        on_silence=warn_silence,
    )


def load_credentials(
    options: argparse.Namespace,
) -> tuple[IdentityKeys | None, Certificate | None, str | None]:
    """Return the key, the certificate given for it, and the admin token. Options win over the environment."""
    key_file = key_file_of(options)
    if key_file is None:
        if options.cap is not None:
            raise ValueError("--cap needs --key, or $PYSYNC_KEY")
        return None, None, options.admin_token or os.environ.get("PYSYNC_ADMIN_TOKEN")
    keys = read_keys(key_file)
    certificate = None if options.cap is None else read_certificate(options.cap)
    return keys, certificate, options.admin_token


def key_file_of(options: argparse.Namespace) -> str | None:
    """Return `--key`, else `$PYSYNC_KEY` unless there is an `--admin-token`."""
    key: str | None = options.key
    return key or (None if options.admin_token else os.environ.get("PYSYNC_KEY") or None)
