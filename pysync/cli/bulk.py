"""`pysync list` and `pysync batch`."""

import argparse
import asyncio
from typing import Any

from pysync.cli.documents import client_of
from pysync.cli.files import parse_object, print_json
from pysync.client import BatchEntry
from pysync.errors import PysyncError


def list_names(options: argparse.Namespace) -> int:
    asyncio.run(_list(options))
    return 0


def batch(options: argparse.Namespace) -> int:
    params = {} if options.params is None else parse_object(options.params, "--params")
    entries = asyncio.run(_batch(options, params))
    print_json({name: list(map(_told, found)) for name, found in entries.items()})
    return 0


async def _list(options: argparse.Namespace) -> None:
    async with client_of(options) as client:
        async for name in client.list(options.prefix, after=options.after):
            print(name)


async def _batch(options: argparse.Namespace, params: dict[str, Any]) -> dict[str, list[BatchEntry]]:
    async with client_of(options) as client:
        return await client.batch_pull(options.names.split(","), params)


def _told(entry: BatchEntry) -> dict[str, Any]:
    if isinstance(entry, PysyncError):
        return {"error": entry.message}
    return {"data": entry.data, "hash": entry.hash, "timestamp": entry.timestamp_ms}
