"""`pysync erase`: erases what belongs to a key, a prefix or an identity, in a store that it opens itself."""

import argparse
import sys
from typing import Final

from pysync.cli.io import print_json
from pysync.cli.parser import Parser, add_config, add_storage_options
from pysync.cli.stores import check_store, load_config, open_services
from pysync.erase import Eraser, EraseRequest
from pysync.plugins import loader
from pysync.plugins.hooks import Hooks
from pysync.plugins.projection import projections_in, projections_of

_MEMORY_COORDINATOR_WARNING: Final = (
    "the memory: coordinator belongs to one process: a running server does not announce what is erased; use "
    "POST /admin/erase there"
)


def add_erase(parser: Parser) -> None:
    """Add the arguments of `pysync erase`."""
    parser.describe(
        erase,
        description="Prints a report: what was erased, by kind, and what was not touched. Killed at any "
        "point, it is finished when it is run again, or when a server starts.",
        example="pysync erase --identity 5d41402abc4b2a76b9719d911017c592 --dry-run\n"
        "pysync erase --key users/5d41402abc4b2a76b9719d911017c592/profile",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", help="the document, log or file at this key")
    what.add_argument("--prefix", metavar="PREFIX", help="everything at this key and below it")
    what.add_argument(
        "--identity", metavar="ID", help="everything whose key has this user id in place of {identity}"
    )
    parser.add_value(
        "--kem-key",
        "KEY",
        "X25519 public key of that person, whose entries leave the keyrings of others; repeatable",
        action="append",
        default=[],
    )
    parser.add_flag("--dry-run", "only report what would be erased")
    add_config(parser, required=True)
    add_storage_options(parser)


async def erase(options: argparse.Namespace) -> None:
    """Run `pysync erase`, and print the report."""
    members = {"key": options.key, "prefix": options.prefix, "identity": options.identity}
    request = EraseRequest.parse(members | {"kemKeys": options.kem_key})
    settings = load_config(options, "store", "coordinator")
    check_store(settings, "use POST /admin/erase there")
    if not settings.store.url.startswith("file:") and settings.effective_coordinator == "memory:":
        print(f"pysync: {_MEMORY_COORDINATOR_WARNING}", file=sys.stderr)
    plugins = loader.load_plugins(settings, projections_of(settings))
    async with open_services(settings) as services:
        eraser = Eraser(services, projections_in(plugins), Hooks(plugins).stored_files)
        report = await (eraser.dry_run(request) if options.dry_run else eraser.run(request))
    print_json(report.describe(request, is_dry_run=options.dry_run))
    if not report.is_found:
        kind, value = request.kind, request.value
        print(
            f"pysync: nothing that belongs to the {kind} {value} was found: check its spelling",
            file=sys.stderr,
        )
