"""`pysync keyring`: who can read sealed data."""

import argparse
import asyncio

from pysync.cli.io import print_json, read_public_keys
from pysync.cli.session import make_client, make_keyring
from pysync.client.sealed import RemoteKeyring, SealedError
from pysync.errors import Conflict


def new_keyring(options: argparse.Namespace) -> int:
    """Run `pysync keyring new`."""
    return asyncio.run(_new_keyring(options))


def add_recipient(options: argparse.Namespace) -> int:
    """Run `pysync keyring add`."""
    return asyncio.run(_add_recipient(options))


def remove_recipient(options: argparse.Namespace) -> int:
    """Run `pysync keyring remove`."""
    return asyncio.run(_remove_recipient(options))


def show_keyring(options: argparse.Namespace) -> int:
    """Run `pysync keyring show`."""
    return asyncio.run(_show_keyring(options))


async def _new_keyring(options: argparse.Namespace) -> int:
    async with make_client(options) as client:
        keyring = make_keyring(options, client, options.name)
        recipients = [read_public_keys(name)[1] for name in options.recipient]
        try:
            await keyring.create(recipients)
        except Conflict:
            message = f"something is at {keyring.key} already; `pysync keyring add` lets others in"
            raise ValueError(message) from None
        return await _print_keyring(keyring)


async def _add_recipient(options: argparse.Namespace) -> int:
    async with make_client(options) as client:
        keyring = make_keyring(options, client, options.name)
        await keyring.add(read_public_keys(options.recipient)[1])
        return await _print_keyring(keyring)


async def _remove_recipient(options: argparse.Namespace) -> int:
    async with make_client(options) as client:
        keyring = make_keyring(options, client, options.name)
        await keyring.remove(read_public_keys(options.recipient)[1])
        return await _print_keyring(keyring)


async def _show_keyring(options: argparse.Namespace) -> int:
    async with make_client(options) as client:
        return await _print_keyring(make_keyring(options, client, options.name))


async def _print_keyring(keyring: RemoteKeyring) -> int:
    """Print the keyring, and return the exit status: 1 if it cannot be opened."""
    read = await keyring.read()
    try:
        await keyring.open()
        verdict = "ok"
    except SealedError as error:
        verdict = str(error)
    shown = {"keyring": keyring.key, "verdict": verdict, "epoch": read.epoch, "recipients": read.recipients}
    print_json(shown)
    return 0 if verdict == "ok" else 1
