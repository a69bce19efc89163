"""`pysync append` and `pysync tail`."""

import argparse
import asyncio
from typing import Any

from pysync.cli.documents import client_of
from pysync.cli.files import parse_object, print_json, print_lines, read_object
from pysync.cli.following import tell_lost, while_read
from pysync.client import LogCursor, LogElement, PushResult
from pysync.errors import Conflict

DEFAULT_COUNT = 10


def append(options: argparse.Namespace) -> int:
    data = read_object("-") if options.element == "-" else parse_object(options.element, "DATA")
    appended = asyncio.run(_append(options, data))
    print_json({"hash": appended.hash, "timestamp": appended.timestamp_ms})
    return 0


def tail(options: argparse.Namespace) -> int:
    for name, value in (("-n", options.n), ("--since", options.since)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be 0 or more")
    asyncio.run(while_read(_tail(options)))
    return 0


async def _append(options: argparse.Namespace, data: dict[str, Any]) -> PushResult:
    async with client_of(options) as client:
        try:
            return await client.append(options.log, data, ts_ms=options.ts)
        except Conflict:
            raise ValueError(f"{options.log} is a document, not a log") from None


async def _tail(options: argparse.Namespace) -> None:
    count = DEFAULT_COUNT if options.n is None and options.since is None else options.n
    async with client_of(options) as client:
        cursor = LogCursor(client, options.log, field=options.field, first=count, since=options.since)
        if options.follow:
            async for elements in cursor.follow(collection=options.collection, lost=tell_lost):
                print_lines(*map(_told, elements))
        elif count is not None:
            print_lines(*map(_told, await cursor.pull()))
        else:
            has_more = True
            while has_more:  # a server may give only some at once
                print_lines(*map(_told, await cursor.pull()))
                has_more = cursor.has_more


def _told(element: LogElement) -> dict[str, Any]:
    proof = {"authorPubkey": element.author_pubkey, "authorSignature": element.author_signature}
    told = {"ts": element.ts_ms, "data": element.data}
    return told | {name: value for name, value in proof.items() if value is not None}
