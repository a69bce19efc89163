"""`pysync append` and `pysync tail`."""

import argparse
import asyncio
import json
import select
import sys
from typing import Any

from pysync.cli.documents import client_of
from pysync.cli.files import parse_object, print_json, read_object
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
    asyncio.run(_tail(options))
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
        cursor = LogCursor(
            client, options.log, field=options.field, first=count, since=options.since, sleep=_wait
        )
        if options.follow:
            async for elements in cursor.follow(lost=_lost):
                _print(elements)
        elif count is not None:
            _print(await cursor.pull())
        else:
            while elements := await cursor.pull():  # a server may give only some at once
                _print(elements)


def _print(elements: list[LogElement]) -> None:
    for element in elements:
        proof = {"authorPubkey": element.author_pubkey, "authorSignature": element.author_signature}
        told = {"ts": element.ts_ms, "data": element.data}
        told |= {name: value for name, value in proof.items() if value is not None}
        print(json.dumps(told, ensure_ascii=False))
    sys.stdout.flush()


def _lost(error: Exception) -> None:
    print(f"pysync: {error}; trying again", file=sys.stderr)


async def _wait(seconds: float) -> None:
    """Sleep, and raise BrokenPipeError when nobody reads our output any more: a log may be quiet for hours
    before the next line would tell."""
    await asyncio.sleep(seconds)
    reader = select.poll()
    reader.register(sys.stdout, 0)  # asks for nothing but errors, among them that the other end is closed
    if reader.poll(0):
        raise BrokenPipeError
