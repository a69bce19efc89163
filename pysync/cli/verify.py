"""`pysync verify`: everything that a store holds, compared with its hashes."""

import argparse
import asyncio
import dataclasses
import logging
import os

from pysync import config
from pysync.cli.files import print_lines
from pysync.config import StoreConfig
from pysync.copy import Damage, Verifier
from pysync.copy.places import check_exists
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
    store = await open_store(place)
    try:
        verifier = Verifier(store, _print)
        try:
            await verifier.run()
        finally:
            print_lines(dataclasses.asdict(verifier.verified))
    finally:
        await store.close()
    return 1 if verifier.verified.damaged else 0


def _print(damage: Damage) -> None:
    print_lines(damage._asdict())
