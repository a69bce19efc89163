"""`pysync cap revoke`: certificates, taken back."""

import argparse
import asyncio

from pysync import minting
from pysync.caps import Certificate, RevocationList
from pysync.cli.files import read_certificate, read_keys
from pysync.keys import Keys


def revoke(options: argparse.Namespace) -> int:
    if options.generation < 0:
        raise ValueError("--generation must be 0 or more")
    issuer = read_keys(options.key)
    certificates = [_issued_by(issuer, name) for name in options.file]
    revocations = minting.revocation_list(issuer, options.generation, certificates=certificates)
    if options.publish:
        asyncio.run(_publish(options.server, revocations))
    print(revocations.text.decode())
    return 0


def _issued_by(issuer: Keys, name: str) -> Certificate:
    certificate = read_certificate(name)
    if certificate.iss != issuer.ed_pub:
        raise ValueError(f"{name}: issued by another key: only its issuer can take it back")
    return certificate


async def _publish(server: str, revocations: RevocationList) -> None:
    from pysync.client import Client  # heavy, and not needed to print a list

    async with Client(server) as client:
        await client.revoke(revocations)
