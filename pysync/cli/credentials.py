"""Keys, certificates, revocation lists and keyrings, and the client that the options of a command name."""

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
from pysync.errors import Conflict, StaleGeneration

if TYPE_CHECKING:
    from pysync.client import Client
    from pysync.client.sealed import RemoteKeyring


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
    print_json(_public_keys(read_keys(options.file)))


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
MAX_ATTEMPTS: Final = 8

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

    attempts = MAX_ATTEMPTS if options.generation is None else 1
    async with Client(options.server) as client:
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
    key_file = _key_file(options)
    if key_file is None:
        if options.cap is not None:
            raise ValueError("--cap needs --key, or $PYSYNC_KEY")
        return None, None, options.admin_token or os.environ.get("PYSYNC_ADMIN_TOKEN")
    keys = read_keys(key_file)
    certificate = None if options.cap is None else read_certificate(options.cap)
    return keys, certificate, options.admin_token


def _key_file(options: argparse.Namespace) -> str | None:
    """Return `--key`, else `$PYSYNC_KEY` unless there is an `--admin-token`."""
    key: str | None = options.key
    return key or (None if options.admin_token else os.environ.get("PYSYNC_KEY") or None)


def make_keyring(options: argparse.Namespace, client: "Client", name: str) -> "RemoteKeyring":
    """Return the keyring `name` for the holder of the key. Raises ValueError without a key."""
    from pysync.client.sealed import RemoteKeyring  # heavy, and not needed without a keyring

    key_file = _key_file(options)
    if key_file is None:
        raise ValueError("a keyring needs --key, or $PYSYNC_KEY")
    keys = read_keys(key_file)
    trusted = [keys.ed_pub, *(read_public_keys(trusted)[0] for trusted in options.trust)]
    return RemoteKeyring(client, name, keys, trusted, min_epoch=options.min_epoch)


async def keyring(options: argparse.Namespace) -> int:
    """Run `pysync keyring new`, `add`, `remove` or `show`. Return 1 if the keyring cannot be opened."""
    from pysync.client.sealed import SealedError

    async with make_client(options) as client:
        keyring = make_keyring(options, client, options.name)
        recipients = [read_public_keys(name)[1] for name in options.recipient]
        match options.action:
            case "new":
                try:
                    await keyring.create(recipients)
                except Conflict:
                    message = f"something is at {keyring.key} already; `pysync keyring add` lets others in"
                    raise ValueError(message) from None
            case "add":
                await keyring.add(*recipients)
            case "remove":
                await keyring.remove(*recipients)
        stored = await keyring.read()
        try:
            await keyring.open()
            verdict = "ok"
        except SealedError as error:
            verdict = str(error)
    print_json(
        {"keyring": keyring.key, "verdict": verdict, "epoch": stored.epoch, "recipients": stored.recipients}
    )
    return 0 if verdict == "ok" else 1
