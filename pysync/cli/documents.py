"""`pysync pull` and `pysync push`."""

import argparse
import asyncio
import os
from typing import Any

from pysync.auth.certificates import Certificate
from pysync.auth.signing import Keys
from pysync.cli.files import print_json, read_certificate, read_keys, read_object
from pysync.client import Client, PullResult, PushResult, SyncDocument


def pull(options: argparse.Namespace) -> int:
    if options.out is not None:
        from pysync.cli import blobs

        return blobs.pull(options)
    if options.open is not None:
        raise ValueError("--open needs --out: only files are opened")
    pulled = asyncio.run(_pull(options))
    answer = {"data": pulled.data, "hash": pulled.hash, "timestamp": pulled.timestamp_ms}
    print_json(pulled.data if options.data else answer)
    return 0


def push(options: argparse.Namespace) -> int:
    if options.type is not None or options.seal is not None:
        from pysync.cli import blobs

        return blobs.push(options)
    try:
        data = read_object(options.file)
    except ValueError as error:
        raise ValueError(f"{error}; --type TYPE stores a file as it is") from None
    pushed = asyncio.run(_push(options, data))
    batch = {} if pushed.batch_id is None else {"batchId": pushed.batch_id}
    print_json({"hash": pushed.hash, "timestamp": pushed.timestamp_ms, **batch})
    return 0


async def _pull(options: argparse.Namespace) -> PullResult:
    async with client_of(options) as client:
        return await client.pull(options.document)


async def _push(options: argparse.Namespace, data: dict[str, Any]) -> PushResult:
    async with client_of(options) as client:
        if options.force:
            return await SyncDocument(client, options.document).update(lambda _: data)
        return await client.push(options.document, data, options.base)


def client_of(options: argparse.Namespace) -> Client:
    """Who speaks: the key, under its certificate or for itself; else the admin token; else nobody."""
    keys, certificate, token = credentials_of(options)
    return Client(
        options.server, keys=keys, certificate=certificate, admin_token=token, namespace=options.namespace
    )


def credentials_of(options: argparse.Namespace) -> tuple[Keys | None, Certificate | None, str | None]:
    """Return the key, the certificate given for it, and the admin token."""
    if options.key is None:
        if options.cap is not None:
            raise ValueError("--cap needs --key")
        return None, None, options.admin_token or os.environ.get("PYSYNC_ADMIN_TOKEN")
    keys = read_keys(options.key)
    certificate = None if options.cap is None else read_certificate(options.cap)
    return keys, certificate, options.admin_token
