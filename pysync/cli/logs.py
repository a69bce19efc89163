"""The commands that append to logs, and follow logs and changes."""

import argparse
from collections.abc import Coroutine
from typing import Any

from pysync.cli.credentials import make_client
from pysync.cli.documents import print_pushed
from pysync.cli.io import (
    parse_object,
    print_lines,
    read_object,
    run_until_reader_closes,
    warn_disconnected,
)
from pysync.cli.parser import Parser, add_client
from pysync.client import ChangeEvent, LogCursor, LogElement, Reset
from pysync.errors import Conflict


def add_append(parser: Parser) -> None:
    """Add the arguments of `pysync append`."""
    parser.describe(append, example='pysync append chat/room1 \'{"text": "hello"}\' --key me.json')
    parser.add_value("log", "KEY", "path after /push/")
    parser.add_value("element", "DATA", "a JSON object (default: -, standard input)", nargs="?", default="-")
    parser.add_value("--ts", "MS", "its timestamp in ms (default: the server's)", type=int)
    add_client(parser)


def add_tail(parser: Parser) -> None:
    """Add the arguments of `pysync tail`."""
    parser.describe(tail, example="pysync tail chat/room1 -n 20\npysync tail -f chat/room1 --key me.json")
    parser.add_value("log", "KEY", "path after /pull/")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new elements")
    parser.add_value("--collection", "NAME", "with -f: the log's collection, to subscribe to it alone")
    parser.add_value("-n", "N", "number of elements (default: 10; with --since: all)", type=int)
    parser.add_value("--since", "MS", "print only elements after this timestamp", type=int)
    parser.add_value("--field", "NAME", "name of the array that holds the log's elements", default="items")
    add_client(parser)


def add_watch(parser: Parser) -> None:
    """Add the arguments of `pysync watch`."""
    parser.describe(
        watch,
        description="Runs until it is interrupted, and reconnects when the server restarts. A line "
        '{"reset": true, "id": ID} says that changes are left out: `pysync changes --since` the last id '
        "before it prints them.",
        example='pysync watch --collections notes --params \'{"notes": {"id": "n1"}}\'',
    )
    _add_selection(parser)
    parser.add_value("--after", "ID", "resume after the change with this id")
    add_client(parser)


def add_changes(parser: Parser) -> None:
    """Add the arguments of `pysync changes`."""
    parser.describe(
        changes,
        description='The last line is {"cursor": CURSOR}, for --since of the next time. With "reset": true '
        "it says that the server cannot tell what changed: pull everything again.",
        example="pysync changes --collections notes --since 01795371850296000-5f0c27d1",
    )
    _add_selection(parser)
    parser.add_value(
        "--since", "CURSOR", "print what changed after it (default: everything; now: only CURSOR)"
    )
    add_client(parser)


def _add_selection(parser: Parser) -> None:
    parser.add_value("--collections", "NAME[,NAME..]", "collections (default: all that you may read)")
    parser.add_value("--params", "JSON", 'only documents with: {"NAME": {"PARAM": "VALUE", ...}, ...}')


def append(options: argparse.Namespace) -> Coroutine[None, None, None]:
    """Run `pysync append`. Standard input is read outside of the event loop, as by `push`."""
    data = read_object("-") if options.element == "-" else parse_object(options.element, "DATA")
    return _append(options, data)


async def _append(options: argparse.Namespace, data: dict[str, Any]) -> None:
    async with make_client(options) as client:
        try:
            pushed = await client.append(options.log, data, ts_ms=options.ts)
        except Conflict:
            raise ValueError(f"{options.log} is a document, not a log") from None
    print_pushed(pushed)


async def tail(options: argparse.Namespace) -> None:
    """Run `pysync tail`."""
    for name, value in (("-n", options.n), ("--since", options.since)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be 0 or more")
    await run_until_reader_closes(_tail(options))


async def _tail(options: argparse.Namespace) -> None:
    count = 10 if options.n is None and options.since is None else options.n
    async with make_client(options) as client:
        cursor = LogCursor(client, options.log, field=options.field, first=count, since=options.since)
        if options.follow:
            async for elements in cursor.follow(
                collection=options.collection, on_disconnect=warn_disconnected
            ):
                print_lines(*map(_element_json, elements))
        else:
            has_more = True
            while has_more:
                print_lines(*map(_element_json, await cursor.pull()))
                has_more = count is None and cursor.has_more  # a server may return only some at once


def _element_json(element: LogElement) -> dict[str, Any]:
    proof = {"authorPubkey": element.author_pubkey, "authorSignature": element.author_signature}
    members = {"ts": element.ts_ms, "data": element.data}
    return members | {name: value for name, value in proof.items() if value is not None}


async def changes(options: argparse.Namespace) -> None:
    """Run `pysync changes`."""
    await run_until_reader_closes(_changes(options, *_selection(options)))


async def _changes(options: argparse.Namespace, *selection: Any) -> None:
    async with make_client(options) as client:
        async for page in client.change_pages(options.since, *selection):
            print_lines(*map(_change_json, page.changes))
    restored = {} if page.restored_ms is None else {"restored": page.restored_ms}
    print_lines({**({"reset": True} if page.is_reset else {}), "cursor": page.cursor, **restored})


async def watch(options: argparse.Namespace) -> None:
    """Run `pysync watch`."""
    await run_until_reader_closes(_watch(options, *_selection(options)))


async def _watch(options: argparse.Namespace, *selection: Any) -> None:
    async with (
        make_client(options) as client,
        client.watch(*selection, after=options.after, on_disconnect=warn_disconnected) as changes,
    ):
        async for change in changes:
            print_lines(_change_json(change))


def _selection(options: argparse.Namespace) -> tuple[list[str] | None, dict[str, Any] | None]:
    """Return the collections and parameters that the options name."""
    params = None if options.params is None else parse_object(options.params, "--params")
    return None if options.collections is None else options.collections.split(","), params


def _change_json(change: ChangeEvent | Reset) -> dict[str, Any]:
    if isinstance(change, Reset):
        return {"reset": True, "id": change.id}
    members = {
        "collection": change.collection,
        "params": change.params,
        "hash": change.hash,
        "timestamp": change.timestamp_ms,
        "namespace": change.namespace,
        "id": change.id or None,
        "removed": change.removed or None,
    }
    return {name: value for name, value in members.items() if value is not None}
