"""The commands that read and write documents, files and logs."""

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pysync.cli.io import (
    MissingDocument,
    parse_object,
    print_json,
    print_lines,
    read_bytes,
    read_object,
    run_until_reader_closes,
    show_progress,
    warn_disconnected,
)
from pysync.cli.session import make_client, make_keyring
from pysync.client import (
    BatchEntry,
    ChangeEvent,
    Client,
    FileInfo,
    LogCursor,
    LogElement,
    PullResult,
    PushResult,
    Reset,
    SyncDocument,
)
from pysync.client.files import CHUNK_BYTES, UploadSource
from pysync.errors import Conflict, PysyncError
from pysync.protocol import JSON_TYPE, OCTET_STREAM


def push_file(options: argparse.Namespace) -> int:
    """Run `pysync push --type` or `--seal`: upload a file."""
    if options.base is not None or options.force:
        raise ValueError("--base and --force are for documents: a file always replaces the stored one")
    if options.seal and options.type not in (None, OCTET_STREAM):
        raise ValueError(f"--seal: a sealed file is always {OCTET_STREAM}")
    pushed = asyncio.run(_push_file(options))
    print_json({"hash": pushed.hash, "timestamp": pushed.timestamp_ms})
    return 0


def pull_file(options: argparse.Namespace) -> int:
    """Run `pysync pull --out`: download a file."""
    if options.data:
        raise ValueError("--data is for documents, --out for files")
    if options.out != "-" and os.path.lexists(options.out):  # a link to nothing is there, too
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), options.out)
    summary = asyncio.run(_pull_file(options))
    if summary is None:
        _raise_missing(options)
    if options.out != "-":
        print_json(summary)
    return 0


async def _push_file(options: argparse.Namespace) -> PushResult:
    async with make_client(options) as client:
        if options.seal:
            from pysync.client.sealed import seal_and_push_blob

            keyring = await make_keyring(options, client, options.seal).open()
            return await seal_and_push_blob(client, keyring, options.document, read_bytes(options.file))
        return await client.push_blob(
            options.document, _source(options), options.type, on_progress=show_progress
        )


def _source(options: argparse.Namespace) -> UploadSource:
    if options.type.partition(";")[0].strip().lower() == JSON_TYPE:
        return read_bytes(options.file)
    if options.file == "-":
        return _chunks(sys.stdin.buffer)
    path = Path(options.file)
    return path if path.is_file() else _chunks(path.open("rb"))  # a pipe: it can be had once


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


async def _pull_file(options: argparse.Namespace) -> dict[str, Any] | None:
    """Download the file and return what to print about it; None if there is none."""
    async with make_client(options) as client:
        if options.open:
            return await _pull_sealed(options, client)
        if options.out == "-":
            head = await _pull_to_output(options, client)
        else:
            head = await client.pull_blob_to(options.document, Path(options.out), show_progress)
    return None if head is None else {"hash": head.hash, "type": head.content_type, "size": head.size}


async def _pull_to_output(options: argparse.Namespace, client: Client) -> FileInfo | None:
    async with client.open_blob(options.document) as stream:
        if stream is None:
            return None
        async for chunk in stream.chunks:
            sys.stdout.buffer.write(chunk)
    return stream.head


async def _pull_sealed(options: argparse.Namespace, client: Client) -> dict[str, Any] | None:
    from pysync.client.sealed import pull_and_open_blob

    keyring = await make_keyring(options, client, options.open).open()
    plaintext = await pull_and_open_blob(client, keyring, options.document)
    if plaintext is None:
        return None
    if options.out == "-":
        sys.stdout.buffer.write(plaintext)
    else:
        with Path(options.out).open("xb") as file:  # noqa: ASYNC230 - nobody else waits
            file.write(plaintext)
    return {"size": len(plaintext)}


def list_names(options: argparse.Namespace) -> int:
    """Run `pysync list`."""
    asyncio.run(_list(options))
    return 0


def batch(options: argparse.Namespace) -> int:
    """Run `pysync batch`."""
    params = {} if options.params is None else parse_object(options.params, "--params")
    entries = asyncio.run(_batch(options, params))
    print_json({name: list(map(_entry_json, found)) for name, found in entries.items()})
    return 0


async def _list(options: argparse.Namespace) -> None:
    async with make_client(options) as client:
        async for name in client.list(options.prefix, after=options.after):
            print(name)


async def _batch(options: argparse.Namespace, params: dict[str, Any]) -> dict[str, list[BatchEntry]]:
    async with make_client(options) as client:
        return await client.batch_pull(options.names.split(","), params)


def _entry_json(entry: BatchEntry) -> dict[str, Any]:
    if isinstance(entry, PysyncError):
        return {"error": entry.message}
    return {"data": entry.data, "hash": entry.hash, "timestamp": entry.timestamp_ms}


def pull(options: argparse.Namespace) -> int:
    """Run `pysync pull`."""
    if options.out is not None:
        return pull_file(options)
    if options.open is not None:
        raise ValueError("--open needs --out: only files can be decrypted")
    pulled = asyncio.run(_pull(options))
    if options.fail and not pulled.hash:
        _raise_missing(options)
    document = {"data": pulled.data, "hash": pulled.hash, "timestamp": pulled.timestamp_ms}
    print_json(pulled.data if options.data else document)
    return 0


def _raise_missing(options: argparse.Namespace) -> NoReturn:
    kind = "document" if options.out is None else "file"
    message = f"no {kind} is stored at {options.document}"
    raise (MissingDocument if options.fail else ValueError)(message)


def push(options: argparse.Namespace) -> int:
    """Run `pysync push`."""
    if options.type is not None or options.seal is not None:
        return push_file(options)
    try:
        data = read_object(options.file)
    except ValueError as error:
        raise ValueError(f"{error}; --type TYPE stores a file as it is") from None
    pushed = asyncio.run(_push(options, data))
    batch = {} if pushed.batch_id is None else {"batchId": pushed.batch_id}
    print_json({"hash": pushed.hash, "timestamp": pushed.timestamp_ms, **batch})
    return 0


async def _pull(options: argparse.Namespace) -> PullResult:
    async with make_client(options) as client:
        return await client.pull(options.document)


async def _push(options: argparse.Namespace, data: dict[str, Any]) -> PushResult:
    async with make_client(options) as client:
        if options.force:
            return await SyncDocument(client, options.document).update(lambda _: data)
        return await client.push(options.document, data, options.base)


DEFAULT_COUNT = 10


def append(options: argparse.Namespace) -> int:
    """Run `pysync append`."""
    data = read_object("-") if options.element == "-" else parse_object(options.element, "DATA")
    appended = asyncio.run(_append(options, data))
    print_json({"hash": appended.hash, "timestamp": appended.timestamp_ms})
    return 0


def tail(options: argparse.Namespace) -> int:
    """Run `pysync tail`."""
    for name, value in (("-n", options.n), ("--since", options.since)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be 0 or more")
    asyncio.run(run_until_reader_closes(_tail(options)))
    return 0


async def _append(options: argparse.Namespace, data: dict[str, Any]) -> PushResult:
    async with make_client(options) as client:
        try:
            return await client.append(options.log, data, ts_ms=options.ts)
        except Conflict:
            raise ValueError(f"{options.log} is a document, not a log") from None


async def _tail(options: argparse.Namespace) -> None:
    count = DEFAULT_COUNT if options.n is None and options.since is None else options.n
    async with make_client(options) as client:
        cursor = LogCursor(client, options.log, field=options.field, first=count, since=options.since)
        if options.follow:
            async for elements in cursor.follow(
                collection=options.collection, on_disconnect=warn_disconnected
            ):
                print_lines(*map(_element_json, elements))
        elif count is not None:
            print_lines(*map(_element_json, await cursor.pull()))
        else:
            has_more = True
            while has_more:  # a server may give only some at once
                print_lines(*map(_element_json, await cursor.pull()))
                has_more = cursor.has_more


def _element_json(element: LogElement) -> dict[str, Any]:
    proof = {"authorPubkey": element.author_pubkey, "authorSignature": element.author_signature}
    members = {"ts": element.ts_ms, "data": element.data}
    return members | {name: value for name, value in proof.items() if value is not None}


def watch(options: argparse.Namespace) -> int:
    """Run `pysync watch`."""
    params = None if options.params is None else parse_object(options.params, "--params")
    collections = None if options.collections is None else options.collections.split(",")
    asyncio.run(run_until_reader_closes(_watch(options, collections, params)))
    return 0


async def _watch(
    options: argparse.Namespace, collections: list[str] | None, params: dict[str, Any] | None
) -> None:
    async with (
        make_client(options) as client,
        client.watch(collections, params, after=options.after, on_disconnect=warn_disconnected) as changes,
    ):
        async for change in changes:
            print_lines(_change_json(change))


def _change_json(change: ChangeEvent | Reset) -> dict[str, Any]:
    if isinstance(change, Reset):
        return {"reset": True, "id": change.id}
    members = {
        "collection": change.collection,
        "params": change.params,
        "hash": change.hash,
        "timestamp": change.timestamp_ms,
        "namespace": change.namespace,
        "id": change.id,
    }
    return {name: value for name, value in members.items() if value is not None}
