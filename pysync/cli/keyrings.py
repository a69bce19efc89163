"""`pysync keyring`, and the keyrings that `push --seal` and `pull --open` name."""

import argparse
import asyncio

from pysync.cli.documents import client_of
from pysync.cli.files import print_json, read_keys, read_public_keys
from pysync.client import Client
from pysync.client.sealed import SealedError, SharedKeyring
from pysync.errors import Conflict


def new(options: argparse.Namespace) -> int:
    return asyncio.run(_new(options))


def add(options: argparse.Namespace) -> int:
    return asyncio.run(_add(options))


def remove(options: argparse.Namespace) -> int:
    return asyncio.run(_remove(options))


def show(options: argparse.Namespace) -> int:
    return asyncio.run(_show(options))


async def _new(options: argparse.Namespace) -> int:
    async with client_of(options) as client:
        keyring = keyring_of(options, client, options.name)
        recipients = [read_public_keys(name)[1] for name in options.recipient]
        try:
            await keyring.create(recipients)
        except Conflict:
            told = f"something is at {keyring.key} already; `pysync keyring add` lets others in"
            raise ValueError(told) from None
        return await _tell(keyring)


async def _add(options: argparse.Namespace) -> int:
    async with client_of(options) as client:
        keyring = keyring_of(options, client, options.name)
        await keyring.add(read_public_keys(options.recipient)[1])
        return await _tell(keyring)


async def _remove(options: argparse.Namespace) -> int:
    async with client_of(options) as client:
        keyring = keyring_of(options, client, options.name)
        await keyring.remove(read_public_keys(options.recipient)[1])
        return await _tell(keyring)


async def _show(options: argparse.Namespace) -> int:
    async with client_of(options) as client:
        return await _tell(keyring_of(options, client, options.name))


async def _tell(keyring: SharedKeyring) -> int:
    """Print the keyring. The status says whether it opens."""
    read = await keyring.read()
    try:
        await keyring.open()
        verdict = "ok"
    except SealedError as error:
        verdict = str(error)
    told = {"keyring": keyring.key, "verdict": verdict, "epoch": read.epoch, "recipients": read.recipients}
    print_json(told)
    return 0 if verdict == "ok" else 1


def keyring_of(options: argparse.Namespace, client: Client, name: str) -> SharedKeyring:
    """The keyring `name`, as the holder of `--key` uses it, who trusts themselves and `--trust`. Raises
    ValueError."""
    if options.key is None:
        raise ValueError("a keyring needs --key")
    keys = read_keys(options.key)
    trusted = [keys.ed_pub, *(read_public_keys(trusted)[0] for trusted in options.trust)]
    return SharedKeyring(client, name, keys, trusted, min_epoch=options.min_epoch)
