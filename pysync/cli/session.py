"""The client and the keyring that the options of a command name."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from pysync.auth.certificates import Certificate
from pysync.auth.signing import IdentityKeys
from pysync.cli.io import read_certificate, read_keys, read_public_keys, warn_retry
from pysync.client import Client

if TYPE_CHECKING:
    from pysync.client.sealed import RemoteKeyring


def make_client(options: argparse.Namespace) -> Client:
    """Return a client that signs with the key, or sends the admin token, or is anonymous without either. On a
    terminal it reports each repeated request."""
    keys, certificate, token = load_credentials(options)
    return Client(
        options.server,
        keys=keys,
        certificate=certificate,
        admin_token=token,
        namespace=options.namespace,
        on_retry=warn_retry,
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


def make_keyring(options: argparse.Namespace, client: Client, name: str) -> RemoteKeyring:
    """Return the keyring `name` for the holder of the key, who trusts their own key and `--trust`. Raises
    ValueError."""
    from pysync.client.sealed import RemoteKeyring  # heavy, and not needed without a keyring

    key_file = _key_file(options)
    if key_file is None:
        raise ValueError("a keyring needs --key, or $PYSYNC_KEY")
    keys = read_keys(key_file)
    trusted = [keys.ed_pub, *(read_public_keys(trusted)[0] for trusted in options.trust)]
    return RemoteKeyring(client, name, keys, trusted, min_epoch=options.min_epoch)
