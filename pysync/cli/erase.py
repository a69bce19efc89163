"""`pysync erase`: erases what belongs to a key, a prefix or an identity, in a store that it opens itself."""

import argparse
import sys
from typing import Final

from pysync.cli.io import print_json
from pysync.cli.stores import check_store, load_config, open_services
from pysync.erase import Eraser, EraseRequest
from pysync.plugins import loader
from pysync.plugins.hooks import Hooks
from pysync.plugins.projection import projections_in, projections_of

_MEMORY_COORDINATOR_WARNING: Final = (
    "the memory: coordinator belongs to one process: a running server does not announce what is erased; use "
    "POST /admin/erase there"
)


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
