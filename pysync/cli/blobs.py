"""`pysync push --type` and `pysync pull --out`: files, as they are or sealed."""

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from pysync.cli.documents import client_of
from pysync.cli.files import print_json, read_bytes
from pysync.client import Client, FileHead, PushResult
from pysync.client.files import CHUNK_BYTES, Source
from pysync.protocol import JSON_TYPE, OPAQUE_TYPE


def push(options: argparse.Namespace) -> int:
    if options.base is not None or options.force:
        raise ValueError("--base and --force are about documents: a file replaces what is there")
    if options.seal and options.type not in (None, OPAQUE_TYPE):
        raise ValueError(f"--seal: a sealed file is {OPAQUE_TYPE}, whatever is in it")
    pushed = asyncio.run(_push(options))
    print_json({"hash": pushed.hash, "timestamp": pushed.timestamp_ms})
    return 0


def pull(options: argparse.Namespace) -> int:
    if options.data:
        raise ValueError("--data is about documents, --out about files")
    if options.out != "-" and os.path.lexists(options.out):  # a link to nothing is there, too
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), options.out)
    told = asyncio.run(_pull(options))
    if told is None:
        raise ValueError(f"no file is stored at {options.document}")
    if options.out != "-":
        print_json(told)
    return 0


async def _push(options: argparse.Namespace) -> PushResult:
    async with client_of(options) as client:
        if options.seal:
            from pysync.cli.keyrings import keyring_of
            from pysync.client.sealed import seal_and_push_blob

            keyring = await keyring_of(options, client, options.seal).open()
            return await seal_and_push_blob(client, keyring, options.document, read_bytes(options.file))
        return await client.push_blob(options.document, _source(options), options.type)


def _source(options: argparse.Namespace) -> Source:
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


async def _pull(options: argparse.Namespace) -> dict[str, Any] | None:
    """What is told of the file, which is where it was asked for; None where there is none."""
    async with client_of(options) as client:
        if options.open:
            return await _pull_sealed(options, client)
        if options.out == "-":
            head = await _pull_to_output(options, client)
        else:
            head = await client.pull_blob_to(options.document, Path(options.out))
    return None if head is None else {"hash": head.hash, "type": head.content_type, "size": head.size}


async def _pull_to_output(options: argparse.Namespace, client: Client) -> FileHead | None:
    async with client.open_blob(options.document) as stream:
        if stream is None:
            return None
        async for chunk in stream.chunks:
            sys.stdout.buffer.write(chunk)
    return stream.head


async def _pull_sealed(options: argparse.Namespace, client: Client) -> dict[str, Any] | None:
    from pysync.cli.keyrings import keyring_of
    from pysync.client.sealed import pull_and_open_blob

    keyring = await keyring_of(options, client, options.open).open()
    plaintext = await pull_and_open_blob(client, keyring, options.document)
    if plaintext is None:
        return None
    if options.out == "-":
        sys.stdout.buffer.write(plaintext)
    else:
        with Path(options.out).open("xb") as file:  # noqa: ASYNC230 - nobody else waits
            file.write(plaintext)
    return {"size": len(plaintext)}
