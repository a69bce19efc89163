"""What commands talk to a server with: the client and the keyring that the options name."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from pysync.auth.certificates import Certificate
from pysync.auth.signing import IdentityKeys
from pysync.cli.io import read_certificate, read_keys, read_public_keys
from pysync.client import Client

if TYPE_CHECKING:
    from pysync.client.sealed import RemoteKeyring


def make_client(options: argparse.Namespace) -> Client:
    """Who speaks: the key, under its certificate or for itself; else the admin token; else nobody."""
    keys, certificate, token = load_credentials(options)
    return Client(
        options.server, keys=keys, certificate=certificate, admin_token=token, namespace=options.namespace
    )


def load_credentials(
    options: argparse.Namespace,
) -> tuple[IdentityKeys | None, Certificate | None, str | None]:
    """Return the key, the certificate given for it, and the admin token."""
    if options.key is None:
        if options.cap is not None:
            raise ValueError("--cap needs --key")
        return None, None, options.admin_token or os.environ.get("PYSYNC_ADMIN_TOKEN")
    keys = read_keys(options.key)
    certificate = None if options.cap is None else read_certificate(options.cap)
    return keys, certificate, options.admin_token


def make_keyring(options: argparse.Namespace, client: Client, name: str) -> RemoteKeyring:
    """The keyring `name`, as the holder of `--key` uses it, who trusts themselves and `--trust`. Raises
    ValueError."""
    from pysync.client.sealed import RemoteKeyring  # heavy, and not needed without a keyring

    if options.key is None:
        raise ValueError("a keyring needs --key")
    keys = read_keys(options.key)
    trusted = [keys.ed_pub, *(read_public_keys(trusted)[0] for trusted in options.trust)]
    return RemoteKeyring(client, name, keys, trusted, min_epoch=options.min_epoch)
