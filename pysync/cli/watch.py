"""`pysync watch`."""

import argparse
import asyncio
from typing import Any

from pysync.cli.documents import client_of
from pysync.cli.files import parse_object, print_lines
from pysync.cli.following import tell_lost, while_read
from pysync.client import Change, Reset


def watch(options: argparse.Namespace) -> int:
    params = None if options.params is None else parse_object(options.params, "--params")
    collections = None if options.collections is None else options.collections.split(",")
    asyncio.run(while_read(_watch(options, collections, params)))
    return 0


async def _watch(
    options: argparse.Namespace, collections: list[str] | None, params: dict[str, Any] | None
) -> None:
    async with (
        client_of(options) as client,
        client.watch(collections, params, after=options.after, lost=tell_lost) as changes,
    ):
        async for told in changes:
            print_lines(_told(told))


def _told(told: Change | Reset) -> dict[str, Any]:
    if isinstance(told, Reset):
        return {"reset": True, "id": told.id}
    members = {
        "collection": told.collection,
        "params": told.params,
        "hash": told.hash,
        "timestamp": told.timestamp_ms,
        "namespace": told.namespace,
        "id": told.id,
    }
    return {name: value for name, value in members.items() if value is not None}
