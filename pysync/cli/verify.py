"""`pysync verify`: everything that a store holds, compared with its hashes."""

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from pathlib import Path

from pysync import config
from pysync.cli.files import print_lines
from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.migrate import Verified, Verifier
from pysync.migrate.locations import check_exists
from pysync.sqlite.database_file import quick_check
from pysync.store import open_store


def verify(options: argparse.Namespace) -> int:
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    flags = {"store": options.store}
    if options.config is None:
        settings = config.parse({}, os.environ, flags)
    else:
        settings = config.load(options.config, os.environ, flags)
    if settings.store.url == "memory:":
        raise ValueError("a memory: store exists only inside its server: there is nothing to verify")
    check_exists(settings.store.url)
    return asyncio.run(_verify(settings.store))


async def _verify(place: StoreConfig) -> int:
    """Print what is damaged, then the counts, and return the exit status."""
    verified = Verified()
    kind, _, folder = place.url.partition(":")
    if kind == "file" and (found := quick_check(Path(folder) / "pysync.db", with_indexes=True)):
        verified.damaged += 1
        print_lines({"key": "pysync.db", "kind": "database", "why": found})
    try:
        await _verify_objects(place, verified)
    except StoreUnavailable as error:
        if not verified.damaged:
            raise
        print(f"pysync: {error}", file=sys.stderr)
    finally:
        print_lines(dataclasses.asdict(verified))
    return 1 if verified.damaged else 0


async def _verify_objects(place: StoreConfig, verified: Verified) -> None:
    """Verify every object and count it. Raises StoreUnavailable."""
    store = await open_store(place)
    try:
        await Verifier(store, lambda damage: print_lines(damage._asdict()), verified=verified).run()
    finally:
        await store.close()
