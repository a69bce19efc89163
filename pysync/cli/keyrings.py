"""The commands of keyrings, and the keyring that the options of a command name."""

import argparse

from pysync.cli.credentials import key_file_of, make_client
from pysync.cli.io import print_json, read_keys, read_public_keys
from pysync.cli.parser import Parser, add_client, add_trust
from pysync.client import Client
from pysync.client.sealed import RemoteKeyring, SealedError
from pysync.errors import Conflict


def add_keyring(parser: Parser) -> None:
    """Add the commands of `keyring`."""
    for action, help_text, recipients, example in (
        ("new", "create a keyring for your key and others", "*", "teams/t1 bob.pub"),
        ("add", "let someone read sealed data, also what was sealed before", 1, "teams/t1 carol.pub"),
        ("remove", "remove someone: later data is sealed under a new key", 1, "teams/t1 bob.pub"),
        ("show", "print the recipients of a keyring, and whether you can open it", None, "teams/t1"),
    ):
        command = parser.add_command(
            action,
            help_text,
            keyring,
            example=f"pysync keyring {action} {example} --key me.json",
        )
        command.set_defaults(action=action, recipient=[])
        command.add_value("name", "NAME", "path before /_keyring")
        if recipients is not None:
            command.add_value("recipient", "FILE", "their keys, as `keys show` prints them", nargs=recipients)
        add_trust(command)
        add_client(command)


def make_keyring(options: argparse.Namespace, client: Client, name: str) -> RemoteKeyring:
    """Return the keyring `name` for the holder of the key. Raises ValueError without a key."""
    key_file = key_file_of(options)
    if key_file is None:
        raise ValueError("a keyring needs --key, or $PYSYNC_KEY")
    keys = read_keys(key_file)
    trusted = [keys.ed_pub, *(read_public_keys(trusted)[0] for trusted in options.trust)]
    return RemoteKeyring(client, name, keys, trusted, min_epoch=options.min_epoch)


async def keyring(options: argparse.Namespace) -> int:
    """Run `pysync keyring new`, `add`, `remove` or `show`. Return 1 if the keyring cannot be opened."""
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
