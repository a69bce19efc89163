"""`pysync gc`: deletes what crashes and interrupted requests left in a store."""

import argparse
import dataclasses
import sys
from functools import partial

from pysync.cli.io import print_lines
from pysync.cli.parser import Parser, add_config
from pysync.cli.stores import check_store, load_config
from pysync.clock import SteadyClock
from pysync.concurrency import closing
from pysync.config import Config
from pysync.config.collection import wire_name
from pysync.migrate import MIN_GRACE_MS, GarbageCollector
from pysync.store import open_store


def add_gc(parser: Parser) -> None:
    """Add the arguments of `pysync gc`."""
    parser.describe(
        collect,
        description="Deletes segments that no log leads to, chunks of logs that pysync took over from "
        "Starfish, files in the folder that the store does not know, temporary files, interrupted uploads "
        "and merges; without --store, also earlier versions of documents whose collection keeps none any "
        "more. Prints a line of JSON for each, then the "
        "number of each kind, and the bytes as far as they are known. Do not run it while a copy or a "
        "restore writes to the store. The exit status is 1 if a damaged object, which may lead to segments, "
        "kept it from deleting any.",
        example="pysync gc --store file:./data --dry-run",
    )
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    parser.add_flag("--dry-run", "print what would be deleted, and delete nothing")
    parser.add_value(
        "--older-than",
        "SECONDS",
        "keep what is younger (default: 3600; minimum: 1800)",
        type=int,
        default=3600,
    )


async def collect(options: argparse.Namespace) -> int:
    """Run `pysync gc`: print what is deleted, then the counts. Return 1 if damage kept it from deleting."""
    settings = load_config(options, "store")
    check_store(settings, "there is no garbage")
    grace_ms = options.older_than * 1000
    if grace_ms < MIN_GRACE_MS:
        raise ValueError(
            f"--older-than must be at least {MIN_GRACE_MS // 1000}: younger objects may be in use"
        )
    # A configuration says nothing about the collections of another store.
    knows_collections = options.config is not None and options.store is None
    async with closing(open_store(settings.store)) as store:
        collector = GarbageCollector(
            store,
            SteadyClock(),
            lambda kind, key: print_lines({"kind": wire_name(kind), "key": key}),
            has_history=partial(_has_history, settings) if knows_collections else None,
            grace_ms=grace_ms,
            dry_run=options.dry_run,
        )
        try:
            await collector.run()
        finally:
            report = dataclasses.asdict(collector.report)
            unclear = report.pop("unclear")
            print_lines({wire_name(name): count for name, count in report.items()})
    for key in sorted(unclear):
        print(f"pysync: {key} is damaged, and may lead to segments: all are kept", file=sys.stderr)
    return 1 if unclear else 0


def _has_history(settings: Config, key: str) -> bool:
    """Return True if a collection that may have this key keeps earlier versions."""
    return any(
        collection.history is not None and collection.key_template.matches(key)
        for _, _, collection in settings.each_collection()
    )
