"""`pysync project rebuild`: lists made anew from their sources, in the store of a configuration."""

import argparse
import asyncio
import logging
import os
import sys

from pysync import config
from pysync.changelog import Retention
from pysync.cli.files import print_lines
from pysync.clock import wall_clock_ms
from pysync.config import Config, effective_coordinator
from pysync.coordinator import open_coordinator
from pysync.engine.append_log import Logs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.migrate.locations import check_exists
from pysync.plugins import Services, loader
from pysync.plugins.projection import Projection, projections_in, projections_of
from pysync.plugins.projection.lists import Lists, Outcome
from pysync.plugins.projection.rebuild import catch_up, rebuild
from pysync.store import open_store

_UNSEEN = (
    "memory: is the coordinator of one process: stop the server first, or what it writes meanwhile may be "
    "missing from the lists"
)


def rebuild_lists(options: argparse.Namespace) -> int:
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    flags = {"store": options.store, "coordinator": options.coordinator}
    settings = config.load(options.config, os.environ, flags)
    loader.beside(options.config)
    plugins = loader.loaded(settings, projections_of(settings))
    projections = projections_in(plugins)
    chosen = [one for one in projections if one.name == options.name]
    if not chosen:
        names = ", ".join(one.name for one in projections) or "none"
        raise ValueError(f"there is no projection {options.name}; there are: {names}")
    return asyncio.run(_rebuild(settings, projections, chosen))


async def _rebuild(settings: Config, projections: list[Projection], chosen: list[Projection]) -> int:
    """Rebuild, print what became of each list, and return the exit status."""
    url = settings.store.url
    if url == "memory:":
        raise ValueError("memory: is the store of one process: there is nothing to rebuild")
    check_exists(url)
    if not url.startswith("file:") and effective_coordinator(settings) == "memory:":
        print(f"pysync: {_UNSEEN}", file=sys.stderr)
    retention = Retention(settings.changes.max_count, settings.changes.max_age_ms)
    store = await open_store(settings.store, shared=True, retention=retention)
    try:
        folder = url.removeprefix("file:") if url.startswith("file:") else None
        coordinator = await open_coordinator(
            effective_coordinator(settings), folder, wall_clock_ms, retention
        )
        try:
            failures: list[str] = []
            outbox = Outbox(store, coordinator)
            services = Services(
                config=settings,
                store=store,
                coordinator=coordinator,
                outbox=outbox,
                files=Files(store, wall_clock_ms, outbox),
                documents=Documents(store, coordinator, wall_clock_ms),
                logs=Logs(store, coordinator, wall_clock_ms),
                now_ms=wall_clock_ms,
                sweeps=False,
                count=lambda metric, *labels, by=1: failures.append(metric) if _is_bad(metric) else None,
            )
            outcomes = await _run(services, projections, chosen)
        finally:
            await coordinator.close()
    finally:
        await store.close()
    for key, outcome in sorted(outcomes.items()):
        if outcome.entries or outcome.changed:
            print_lines({"list": key, "entries": outcome.entries, "changed": outcome.changed})
    return 1 if failures else 0


async def _run(
    services: Services, projections: list[Projection], chosen: list[Projection]
) -> dict[str, Outcome]:
    lists, changes = Lists(projections, services), services.outbox.log
    begun, outcomes = await rebuild(lists, chosen, changes)
    if not await catch_up(lists, changes, begun):
        raise ValueError("more was written meanwhile than the change log keeps: run it again")
    return outcomes


def _is_bad(metric: str) -> bool:
    return metric.endswith(("_failures", "_drops"))
