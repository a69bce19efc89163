"""`pysync cap revoke`: certificates and keys, taken back."""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Final

from pysync.auth import issuing
from pysync.auth.certificates import Certificate, RevocationList
from pysync.auth.signing import Keys
from pysync.cli.files import read_certificate, read_keys, read_public_keys
from pysync.errors import StaleGeneration

SUBJECT_S: Final = 10 * 365 * 86_400
"""Seconds for which a key stays in the list. Nobody knows how long its certificates are valid."""
ATTEMPTS: Final = 8

Make = Callable[[int, RevocationList | None], RevocationList]
"""The list of a generation, which keeps what is in an earlier one."""


def revoke(options: argparse.Namespace) -> int:
    if options.generation is not None and options.generation < 0:
        raise ValueError("--generation must be 0 or more")
    if options.replace and not options.publish:
        raise ValueError("--replace needs --publish")
    issuer = read_keys(options.key)
    certificates = [_issued_by(issuer, name) for name in options.file]
    now_s = int(time.time())
    subjects = [(read_public_keys(name)[0], now_s + SUBJECT_S) for name in options.subject]
    if not certificates and not subjects and not options.replace:
        raise ValueError("nothing to revoke: pass certificates, or a key with --subject")

    def make(generation: int, earlier: RevocationList | None) -> RevocationList:
        return issuing.revocation_list(
            issuer, generation, certificates=certificates, subjects=subjects, earlier=earlier, now_s=now_s
        )

    if options.publish:
        revocations = asyncio.run(_publish(options, issuer, make))
    elif options.generation is None:
        raise ValueError("pass --generation, or --publish to take the next one from the server")
    else:
        revocations = make(options.generation, None)
    print(revocations.text.decode())
    return 0


def _issued_by(issuer: Keys, name: str) -> Certificate:
    certificate = read_certificate(name)
    if certificate.iss != issuer.ed_pub:
        raise ValueError(f"{name}: issued by another key: only its issuer can take it back")
    return certificate


async def _publish(options: argparse.Namespace, issuer: Keys, make: Make) -> RevocationList:
    """Publish a list of the next generation, or of the one that the options name, and return it. It keeps
    what is in the published one, unless that is to be replaced. Raises StaleGeneration where the named one
    is not larger."""
    from pysync.client import Client  # heavy, and not needed to print a list

    async with Client(options.server) as client:
        for attempt in range(ATTEMPTS):
            earlier = await client.revocations(issuer.user_id)
            if earlier is not None and earlier.iss != issuer.ed_pub:
                raise ValueError("the server answers with the revocation list of another issuer")
            generation = options.generation
            if generation is None:
                generation = 1 if earlier is None else earlier.generation + 1
            revocations = make(generation, None if options.replace else earlier)
            try:
                await client.revoke(revocations)
            except StaleGeneration:
                # Somebody else has published meanwhile.
                if options.generation is not None or attempt == ATTEMPTS - 1:
                    raise
                continue
            return revocations
    raise AssertionError("the last attempt returns or raises")
