"""The commands that read and write documents, files and keyrings."""

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pysync.cli.credentials import key_file_of, make_client
from pysync.cli.io import (
    MissingDocument,
    parse_object,
    print_json,
    print_lines,
    read_bytes,
    read_keys,
    read_object,
    read_public_keys,
    show_progress,
)
from pysync.cli.parser import Parser, add_client, add_trust
from pysync.client import (
    BatchEntry,
    Client,
    PushResult,
    QuotaUsage,
    SyncDocument,
)
from pysync.client.files import UploadSource
from pysync.client.sealed import (
    RemoteKeyring,
    SealedError,
    pull_and_open_blob,
    seal_and_push_blob,
)
from pysync.errors import Conflict, MethodNotAllowed, NotFound, PysyncError, VersionNotFound
from pysync.protocol import CHUNK_BYTES, HASH_DIGITS, JSON_TYPE, OCTET_STREAM


def add_pull(parser: Parser) -> None:
    """Add the arguments of `pysync pull`."""
    parser.describe(pull, example="pysync pull notes/n1 --data\npysync pull photos/p1 --out p1.png")
    parser.add_value("document", "KEY", "path after /pull/")
    parser.add_flag("--data", "print only the document's data")
    parser.add_value("--version", "HASH", "print this version, which the history of the document has")
    parser.add_flag("--fail", "exit with status 6 if there is no such document or version")
    parser.add_value("--out", "FILE", "download the file at KEY to this path (- for standard output)")
    parser.add_value("--open", "NAME", "with --out: decrypt the file with this keyring")
    add_trust(parser)
    add_client(parser)


def add_push(parser: Parser) -> None:
    """Add the arguments of `pysync push`."""
    parser.describe(
        push,
        description="Creates a document, unless --base or --force says that it replaces one.",
        example='echo \'{"title": "Milk"}\' | pysync push notes/n1\n'
        "pysync push photos/p1 p1.png --type image/png",
    )
    parser.add_value("document", "KEY", "path after /push/")
    parser.add_value(
        "file", "FILE", "a JSON object, or any file (default: -, standard input)", nargs="?", default="-"
    )
    parser.add_value(
        "--type", "TYPE", "store FILE as a binary file of this media type, for example image/png"
    )
    parser.add_value("--seal", "NAME", "store FILE encrypted for the recipients of this keyring")
    add_trust(parser)
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", metavar="HASH", help="replace the document that has this hash")
    base.add_argument("--force", action="store_true", help="replace whatever is stored")
    add_client(parser)


def add_history(parser: Parser) -> None:
    """Add the arguments of `pysync history`."""
    parser.describe(history, example="pysync history notes/n1")
    parser.add_value("document", "KEY", "path after /history/")
    add_client(parser)


def add_delete(parser: Parser) -> None:
    """Add the arguments of `pysync delete`."""
    parser.describe(
        delete,
        description='The collection must have `"deletable": true`.',
        example="pysync delete notes/n1 --force",
    )
    parser.add_value("document", "KEY", "path after /push/")
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", metavar="HASH", help="delete it if it has this hash")
    base.add_argument("--force", action="store_true", help="delete whatever is stored")
    add_client(parser)


def add_list(parser: Parser) -> None:
    """Add the arguments of `pysync list`."""
    parser.describe(list_names, example="pysync list notes")
    parser.add_value("prefix", "KEY-PREFIX", "path after /list/ (default: empty)", nargs="?", default="")
    parser.add_value("--after", "NAME", "print only names greater than this one")
    parser.add_flag("--hashes", "print the first 16 digits of the hash before each name")
    add_client(parser)


def add_batch(parser: Parser) -> None:
    """Add the arguments of `pysync batch`."""
    parser.describe(
        batch, example='pysync batch notes,tasks --params \'{"notes": [{"id": "n1"}, {"id": "n2"}]}\''
    )
    parser.add_value("names", "NAME[,NAME..]", "the collections")
    parser.add_value("--params", "JSON", 'path parameters: {"NAME": [{"PARAM": "VALUE"}, ...], ...}')
    add_client(parser)


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


def add_usage(parser: Parser) -> None:
    """Add the arguments of `pysync usage`."""
    parser.describe(usage, example="pysync usage --key me.json --space club")
    parser.add_argument(
        "--space",
        metavar="NAME",
        action="append",
        default=[],
        help="also what this space uses, to which you belong; repeatable",
    )
    add_client(parser)


def pull(options: argparse.Namespace) -> Coroutine[None, None, None]:
    """Run `pysync pull`."""
    if options.out is None:
        if options.open is not None:
            raise ValueError("--open needs --out: only files can be decrypted")
        return _pull(options)
    if options.data or options.version is not None:
        raise ValueError("--data and --version are for documents, --out for files")
    if options.out != "-" and os.path.lexists(options.out):  # also true for a dangling link
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), options.out)
    return _pull_file(options)


async def _pull(options: argparse.Namespace) -> None:
    async with make_client(options) as client:
        try:
            pulled = await client.pull(options.document, version=options.version)
        except VersionNotFound:
            if not options.fail:
                raise
            _raise_missing(options)
    if options.fail and not pulled.hash:
        _raise_missing(options)
    document = {"data": pulled.data, "hash": pulled.hash, "timestamp": pulled.timestamp_ms}
    print_json(pulled.data if options.data else document)


def push(options: argparse.Namespace) -> Coroutine[None, None, None]:
    """Run `pysync push`. Standard input is read outside of the event loop, so that Ctrl-C interrupts it."""
    if options.type is not None or options.seal is not None:
        return _push_file(options)
    try:
        data = read_object(options.file)
    except ValueError as error:
        raise ValueError(f"{error}; --type TYPE stores a file as it is") from None
    return _push(options, data)


async def _push(options: argparse.Namespace, data: dict[str, Any]) -> None:
    async with make_client(options) as client:
        if options.force:
            pushed = await SyncDocument(client, options.document).update(lambda _: data)
        else:
            pushed = await client.push(options.document, data, options.base)
    print_pushed(pushed)


async def history(options: argparse.Namespace) -> None:
    """Run `pysync history`."""
    async with make_client(options) as client:
        try:
            versions = await client.history(options.document)
        except NotFound:
            raise ValueError(f"{options.document}: its collection keeps no history") from None
        for version in versions:
            members = {
                "hash": version.hash,
                "timestamp": version.timestamp_ms,
                "size": version.size,
                "replaced": version.replaced_ms,
                "identity": version.identity,
                "authorPubkey": version.author_pubkey,
            }
            print_lines({name: value for name, value in members.items() if value is not None})


async def delete(options: argparse.Namespace) -> None:
    """Run `pysync delete`."""
    base = options.base or ""
    async with make_client(options) as client:
        while True:
            try:
                removed = await client.delete(options.document, base)
                break
            except Conflict as error:
                if not options.force or error.current_hash == base:
                    raise
                base = error.current_hash
            except MethodNotAllowed:
                raise ValueError(f"{options.document}: its collection is not deletable") from None
    print_pushed(removed)


def print_pushed(pushed: PushResult) -> None:
    """Print the hash and the time of what was pushed."""
    batch = {} if pushed.batch_id is None else {"batchId": pushed.batch_id}
    print_json({"hash": pushed.hash, "timestamp": pushed.timestamp_ms, **batch})


def _raise_missing(options: argparse.Namespace) -> NoReturn:
    kind = "document" if options.out is None else "file"
    message = f"no {kind} is stored at {options.document}"
    raise (MissingDocument if options.fail else ValueError)(message)


async def _push_file(options: argparse.Namespace) -> None:
    """Run `pysync push --type` or `--seal`."""
    if options.base is not None or options.force:
        raise ValueError("--base and --force are for documents: a file always replaces the stored one")
    if options.seal and options.type not in (None, OCTET_STREAM):
        raise ValueError(f"--seal: a sealed file is always {OCTET_STREAM}")
    async with make_client(options) as client:
        if options.seal:
            keyring = await _make_keyring(options, client, options.seal).open()
            pushed = await seal_and_push_blob(client, keyring, options.document, read_bytes(options.file))
        else:
            source = _upload_source(options)
            pushed = await client.push_blob(options.document, source, options.type, on_progress=show_progress)
    print_pushed(pushed)


def _upload_source(options: argparse.Namespace) -> UploadSource:
    if options.type.partition(";")[0].strip().lower() == JSON_TYPE:
        return read_bytes(options.file)
    if options.file == "-":
        return _chunks(sys.stdin.buffer)
    path = Path(options.file)
    return path if path.is_file() else _chunks(path.open("rb"))  # a pipe can be read only once


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


async def _pull_file(options: argparse.Namespace) -> None:
    async with make_client(options) as client:
        if options.open:
            summary = await _pull_sealed(options, client)
        else:
            summary = await _download(options, client)
    if summary is None:
        _raise_missing(options)
    if options.out != "-":
        print_json(summary)


async def _download(options: argparse.Namespace, client: Client) -> dict[str, Any] | None:
    """Download the file and return what to print about it; None if there is none."""
    if options.out != "-":
        head = await client.pull_blob_to(options.document, Path(options.out), show_progress)
    else:
        async with client.open_blob(options.document) as stream:
            head = None if stream is None else stream.head
            if stream is not None:
                async for chunk in stream.chunks:
                    sys.stdout.buffer.write(chunk)
    return None if head is None else {"hash": head.hash, "type": head.content_type, "size": head.size}


async def _pull_sealed(options: argparse.Namespace, client: Client) -> dict[str, Any] | None:
    keyring = await _make_keyring(options, client, options.open).open()
    plaintext = await pull_and_open_blob(client, keyring, options.document)
    if plaintext is None:
        return None
    if options.out == "-":
        sys.stdout.buffer.write(plaintext)
    else:
        with Path(options.out).open("xb") as file:  # noqa: ASYNC230 - nobody else waits
            file.write(plaintext)
    return {"size": len(plaintext)}


async def list_names(options: argparse.Namespace) -> None:
    """Run `pysync list`."""
    async with make_client(options) as client:
        try:
            if options.hashes:
                async for name, digits in client.list_hashes(options.prefix, after=options.after):
                    print(f"{digits or '-':{HASH_DIGITS}}  {name}")
                return
            async for name in client.list(options.prefix, after=options.after):
                print(name)
        except NotFound:
            raise ValueError(f"no collection has a list of {options.prefix!r}: see `listable`") from None


async def batch(options: argparse.Namespace) -> None:
    """Run `pysync batch`."""
    params = {} if options.params is None else parse_object(options.params, "--params")
    async with make_client(options) as client:
        entries = await client.batch_pull(options.names.split(","), params)
    print_json({name: list(map(_entry_json, found)) for name, found in entries.items()})


def _entry_json(entry: BatchEntry) -> dict[str, Any]:
    if isinstance(entry, PysyncError):
        return {"error": entry.message}
    return {"data": entry.data, "hash": entry.hash, "timestamp": entry.timestamp_ms}


async def usage(options: argparse.Namespace) -> None:
    """Run `pysync usage`."""
    async with make_client(options) as client:
        try:
            report = await client.usage(options.space)
        except NotFound:
            raise ValueError("the server has no quotas") from None
    spaces = {name: _quota_json(found) for name, found in report.spaces.items()}
    own = {"identity": report.identity, **_quota_json(report.own)}
    print_json({**own, **({"spaces": spaces} if spaces else {}), "complete": report.is_complete})


def _quota_json(found: QuotaUsage) -> dict[str, Any]:
    return {"used": found.used.as_json(), "allowed": found.allowed}


def _make_keyring(options: argparse.Namespace, client: Client, name: str) -> RemoteKeyring:
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
        keyring = _make_keyring(options, client, options.name)
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
